"""The audit log of management changes."""

import sqlalchemy as sa
from alembic import op

revision = "audit_log_3"
down_revision = "metric_rows_2"


def upgrade() -> None:
    op.create_table(
        "torchrelay_audit_log",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("time", sa.Float, nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("address", sa.Text, nullable=False),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("subject", sa.Text, nullable=False),
        sa.Column("result", sa.Text, nullable=False),
        sa.Column("before", sa.JSON, nullable=True),
        sa.Column("after", sa.JSON, nullable=True),
    )
