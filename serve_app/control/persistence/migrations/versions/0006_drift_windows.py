"""Drift statistics of versions."""

import sqlalchemy as sa
from alembic import op

revision = "drift_windows_6"
down_revision = "result_history_5"


def upgrade() -> None:
    op.create_table(
        "torchrelay_drift_windows",
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("version", sa.Text, primary_key=True),
        sa.Column("document", sa.LargeBinary, nullable=False),
    )
