"""The history of the results of experiments and shadows."""

import sqlalchemy as sa
from alembic import op

revision = "result_history_5"
down_revision = "tenants_4"


def upgrade() -> None:
    op.create_table(
        "torchrelay_result_history",
        sa.Column("kind", sa.Text, primary_key=True),
        sa.Column("subject", sa.Text, primary_key=True),
        sa.Column("time", sa.Float, primary_key=True),
        sa.Column("document", sa.Text, nullable=False),
    )
