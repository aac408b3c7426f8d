"""Owners of asynchronous predictions, and keys that were created through the API."""

import sqlalchemy as sa
from alembic import op

revision = "tenants_4"
down_revision = "audit_log_3"


def upgrade() -> None:
    op.add_column("torchrelay_async_predictions", sa.Column("owner", sa.Text, nullable=True))
    op.create_table(
        "torchrelay_api_keys",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("digest", sa.LargeBinary, nullable=False, unique=True),
        sa.Column("previous_digest", sa.LargeBinary, nullable=True),
        sa.Column("document", sa.JSON, nullable=False),
    )
