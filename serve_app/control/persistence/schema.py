"""The tables of the database. Migrations (see migrations/) change those of earlier versions."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

SCHEMA = sa.MetaData()
VERSION_TABLE = "torchrelay_schema"  # a database may hold the tables of others, and their alembic

MODELS = sa.Table(
    "torchrelay_models",
    SCHEMA,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("default_version", sa.Text, nullable=False),
    sa.Column("policy", sa.JSON, nullable=False),
    sa.Column("declared", sa.JSON(none_as_null=True), nullable=True),
)

VERSIONS = sa.Table(
    "torchrelay_versions",
    SCHEMA,
    sa.Column(
        "model", sa.Text, sa.ForeignKey("torchrelay_models.name", ondelete="CASCADE"), primary_key=True
    ),
    sa.Column("version", sa.Text, primary_key=True),
    sa.Column("spec", sa.JSON, nullable=False),
    # YAML, as the author wrote it: JSON would turn its numeric keys into text and has no dates.
    sa.Column("config", sa.Text, nullable=False),
)

# The digest that each version had last, removed ones too: start-up does not bring back what was removed.
ARCHIVES = sa.Table(
    "torchrelay_archives",
    SCHEMA,
    sa.Column("model", sa.Text, primary_key=True),
    sa.Column("version", sa.Text, primary_key=True),
    sa.Column("digest", sa.Text, nullable=False),
)

# Frozen values as documents in one column, because no query needs parts of them.
EXPERIMENTS = sa.Table(
    "torchrelay_experiments",
    SCHEMA,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("document", sa.JSON, nullable=False),
)

ROLLOUTS = sa.Table(
    "torchrelay_rollouts",
    SCHEMA,
    sa.Column("model", sa.Text, primary_key=True),
    sa.Column("document", sa.JSON, nullable=False),
)

# Experiments and rollouts (see metric_store.py): the statistics of each split's arms, as JSON.
EXPERIMENT_STATS = sa.Table(
    "torchrelay_experiment_stats",
    SCHEMA,
    sa.Column("trial", sa.Text, primary_key=True),
    sa.Column("document", sa.Text, nullable=False),
)


def _hash_table(name: str, *columns: sa.Column[Any]) -> sa.Table:
    """Return a table of hashes by split; the oldest have the lowest numbers."""
    return sa.Table(
        name,
        SCHEMA,
        sa.Column("trial", sa.Text, primary_key=True),
        sa.Column("hash", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        *columns,
        sa.UniqueConstraint("trial", "number"),
        sqlite_with_rowid=False,  # a third fewer bytes
    )


# The arm of each unit, as JSON: PostgreSQL's text cannot hold the NUL that a name may have.
EXPOSED_UNITS = _hash_table(
    "torchrelay_exposed_units",
    sa.Column("arm", sa.JSON, nullable=False),
    sa.Column("bucket", sa.Integer, nullable=False),
)
COUNTED_EVENTS = _hash_table("torchrelay_counted_events")

# The number of the last report of each process.
METRIC_SOURCES = sa.Table(
    "torchrelay_metric_sources",
    SCHEMA,
    sa.Column("source", sa.Text, primary_key=True),
    sa.Column("number", sa.BigInteger, nullable=False),
    sa.Column("time", sa.Float, nullable=False),
)

# Shadow statistics, a row for each live version, and the inputs that are kept of it.
SHADOW_STATS = sa.Table(
    "torchrelay_shadow_stats",
    SCHEMA,
    sa.Column("model", sa.Text, primary_key=True),
    sa.Column("version", sa.Text, primary_key=True),
    sa.Column("document", sa.LargeBinary, nullable=False),
)

SHADOW_MISMATCHES = sa.Table(
    "torchrelay_shadow_mismatches",
    SCHEMA,
    sa.Column("model", sa.Text, primary_key=True),
    sa.Column("version", sa.Text, primary_key=True),
    sa.Column("input", sa.Text, primary_key=True),
    sa.Column("distance", sa.Float, nullable=False),
    sa.Column("document", sa.LargeBinary, nullable=False),
)

# Drift statistics of a version (see control/drift): its reference and its windows, as compressed JSON.
DRIFT_WINDOWS = sa.Table(
    "torchrelay_drift_windows",
    SCHEMA,
    sa.Column("model", sa.Text, primary_key=True),
    sa.Column("version", sa.Text, primary_key=True),
    sa.Column("document", sa.LargeBinary, nullable=False),
)

# Predictions that are answered later (see async_predictions): the request, then the answer; NULL where an
# object has it.
ASYNC_PREDICTIONS = sa.Table(
    "torchrelay_async_predictions",
    SCHEMA,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("document", sa.JSON, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=True),
    sa.Column("owner", sa.Text, nullable=True),  # the name of a key; NULL in rows of earlier versions
)

# The keys that were created through the API: digests, and the document without them.
API_KEYS = sa.Table(
    "torchrelay_api_keys",
    SCHEMA,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("digest", sa.LargeBinary, nullable=False, unique=True),
    sa.Column("previous_digest", sa.LargeBinary, nullable=True),  # valid until the rotation's grace ends
    sa.Column("document", sa.JSON, nullable=False),
)

# Management changes and refused attempts (see control/audit.py), the newest with the highest id.
AUDIT_LOG = sa.Table(
    "torchrelay_audit_log",
    SCHEMA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("time", sa.Float, nullable=False),
    sa.Column("actor", sa.Text, nullable=False),
    sa.Column("address", sa.Text, nullable=False),
    sa.Column("action", sa.Text, nullable=False),
    sa.Column("subject", sa.Text, nullable=False),
    sa.Column("result", sa.Text, nullable=False),
    sa.Column("before", sa.JSON(none_as_null=True), nullable=True),
    sa.Column("after", sa.JSON(none_as_null=True), nullable=True),
)

# Points of results over time (see control/result_history.py), as JSON.
RESULT_HISTORY = sa.Table(
    "torchrelay_result_history",
    SCHEMA,
    sa.Column("kind", sa.Text, primary_key=True),
    sa.Column("subject", sa.Text, primary_key=True),  # an experiment's id, or a model and a live version
    sa.Column("time", sa.Float, primary_key=True),  # seconds since the epoch
    sa.Column("document", sa.Text, nullable=False),
)

GENERATION = sa.Table(
    "torchrelay_generation",
    SCHEMA,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("generation", sa.BigInteger, nullable=False),
)
