"""Models, their versions, the archives they had, and the number of the last change."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "torchrelay_models",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("default_version", sa.Text, nullable=False),
        sa.Column("policy", sa.JSON, nullable=False),
    )
    op.create_table(
        "torchrelay_versions",
        sa.Column("model", sa.Text, sa.ForeignKey("torchrelay_models.name", ondelete="CASCADE"), primary_key=True),
        sa.Column("version", sa.Text, primary_key=True),
        sa.Column("spec", sa.JSON, nullable=False),
        sa.Column("config", sa.Text, nullable=False),
    )
    op.create_table(
        "torchrelay_archives",
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("version", sa.Text, primary_key=True),
        sa.Column("digest", sa.Text, nullable=False),
    )
    changes = op.create_table(
        "torchrelay_changes",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("generation", sa.BigInteger, nullable=False),
    )
    op.bulk_insert(changes, [{"id": 1, "generation": 0}])


def downgrade() -> None:
    op.drop_table("torchrelay_changes")
    op.drop_table("torchrelay_archives")
    op.drop_table("torchrelay_versions")
    op.drop_table("torchrelay_models")
