"""The whole schema: registry, experiments and rollouts, their metrics, shadows, async predictions."""

import sqlalchemy as sa
from alembic import op

revision = "schema_1"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "torchrelay_models",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("default_version", sa.Text, nullable=False),
        sa.Column("policy", sa.JSON, nullable=False),
        sa.Column("declared", sa.JSON(none_as_null=True), nullable=True),
    )
    op.create_table(
        "torchrelay_versions",
        sa.Column(
            "model", sa.Text, sa.ForeignKey("torchrelay_models.name", ondelete="CASCADE"), primary_key=True
        ),
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
    generation = op.create_table(
        "torchrelay_generation",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("generation", sa.BigInteger, nullable=False),
    )
    op.bulk_insert(generation, [{"id": 1, "generation": 0}])
    for name, key in (("torchrelay_experiments", "id"), ("torchrelay_rollouts", "model")):
        op.create_table(
            name,
            sa.Column(key, sa.Text, primary_key=True),
            sa.Column("document", sa.JSON, nullable=False),
        )
    op.create_table(
        "torchrelay_experiment_metrics",
        sa.Column("trial", sa.Text, primary_key=True),
        sa.Column("arm", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("value", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "torchrelay_exposures",
        sa.Column("trial", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("part", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("arms", sa.JSON, nullable=False),
        sa.Column("value", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "torchrelay_metric_sources",
        sa.Column("source", sa.Text, primary_key=True),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("time", sa.Float, nullable=False),
    )
    op.create_table(
        "torchrelay_shadow_stats",
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("version", sa.Text, primary_key=True),
        sa.Column("document", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "torchrelay_shadow_mismatches",
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("version", sa.Text, primary_key=True),
        sa.Column("input", sa.Text, primary_key=True),
        sa.Column("distance", sa.Float, nullable=False),
        sa.Column("document", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "torchrelay_async_predictions",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("document", sa.JSON, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=True),
    )


def downgrade() -> None:
    for name in (
        "async_predictions",
        "shadow_mismatches",
        "shadow_stats",
        "metric_sources",
        "exposures",
        "experiment_metrics",
        "rollouts",
        "experiments",
        "generation",
        "archives",
        "versions",
        "models",
    ):
        op.drop_table(f"torchrelay_{name}")
