"""Policies, experiments and rollouts, and what was measured of them."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    with op.batch_alter_table("torchrelay_models") as models:
        models.add_column(sa.Column("declared", sa.JSON(none_as_null=True), nullable=True))
    for name, key in (("torchrelay_experiments", "id"), ("torchrelay_rollouts", "model")):
        op.create_table(
            name,
            sa.Column(key, sa.Text, primary_key=True),
            sa.Column("document", sa.JSON, nullable=False),
        )
    op.create_table(
        "torchrelay_figures",
        sa.Column("trial", sa.Text, primary_key=True),
        sa.Column("arm", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("value", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "torchrelay_rolls",
        sa.Column("trial", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("part", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("arms", sa.JSON, nullable=False),
        sa.Column("value", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "torchrelay_sources",
        sa.Column("source", sa.Text, primary_key=True),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("time", sa.Float, nullable=False),
    )
    op.create_table(
        "torchrelay_comparisons",
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("version", sa.Text, primary_key=True),
        sa.Column("document", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "torchrelay_disagreements",
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("version", sa.Text, primary_key=True),
        sa.Column("input", sa.Text, primary_key=True),
        sa.Column("distance", sa.Float, nullable=False),
        sa.Column("document", sa.LargeBinary, nullable=False),
    )


def downgrade() -> None:
    for name in ("disagreements", "comparisons", "sources", "rolls", "figures", "rollouts", "experiments"):
        op.drop_table(f"torchrelay_{name}")
    with op.batch_alter_table("torchrelay_models") as models:
        models.drop_column("declared")
