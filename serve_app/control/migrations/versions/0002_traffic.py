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


def downgrade() -> None:
    op.drop_table("torchrelay_rollouts")
    op.drop_table("torchrelay_experiments")
    with op.batch_alter_table("torchrelay_models") as models:
        models.drop_column("declared")
