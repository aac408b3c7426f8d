"""Predictions that are answered later."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "torchrelay_deferrals",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("document", sa.JSON, nullable=False),
        sa.Column("parcel", sa.LargeBinary, nullable=True),
    )


def downgrade() -> None:
    op.drop_table("torchrelay_deferrals")
