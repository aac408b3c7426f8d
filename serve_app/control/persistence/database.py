"""The SQL database of the registry, with the number of the last change.

It is SQLite in a file of the head node by default, and PostgreSQL by URL. There is one writer; the generation
number detects a second one. Alembic manages the schema (see migrations/).
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import sqlite3
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import yaml
from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy.engine import URL, Connection, make_url

from serve_app.control.registry import ModelRecord, Registry
from serve_app.domain import autoscaling, validation
from serve_app.domain.autoscaling import Autoscaling
from serve_app.domain.experiment import Experiment
from serve_app.domain.model import ModelRef, ModelSpec
from serve_app.domain.rollout import Rollout
from serve_app.domain.traffic_policy import TrafficPolicy
from serve_app.domain.workflow_graph import WorkflowGraph
from serve_app.errors import ConfigurationError, Unavailable

SCHEMA = sa.MetaData()

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

# What was measured (see measurements.py): an arm's figures by name; in parts, who was given which arm and
# which rewards were counted (see roll.py); the number of the last payload of each process.
ARM_STATS = sa.Table(
    "torchrelay_experiment_metrics",
    SCHEMA,
    sa.Column("trial", sa.Text, primary_key=True),
    sa.Column("arm", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("value", sa.LargeBinary, nullable=False),
)

EXPOSURES = sa.Table(
    "torchrelay_exposures",
    SCHEMA,
    sa.Column("trial", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("part", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("arms", sa.JSON, nullable=False),
    sa.Column("value", sa.LargeBinary, nullable=False),
)

METRIC_SOURCES = sa.Table(
    "torchrelay_metric_sources",
    SCHEMA,
    sa.Column("source", sa.Text, primary_key=True),
    sa.Column("number", sa.BigInteger, nullable=False),
    sa.Column("time", sa.Float, nullable=False),
)

# What shadows came to (see comparisons.py), of each live version a row, and the inputs that are kept of it.
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

# Predictions that are answered later (see async_predictions): the request, then the answer; NULL where an
# object has it.
ASYNC_PREDICTIONS = sa.Table(
    "torchrelay_async_predictions",
    SCHEMA,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("document", sa.JSON, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=True),
)

GENERATION = sa.Table(
    "torchrelay_generation",
    SCHEMA,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("generation", sa.BigInteger, nullable=False),
)

_SETTING = "control.database_url"
_LOCK_TIMEOUT = 10  # seconds to reach a server, or to wait for SQLite's lock
_LOCK_RETRY_S = 0.01  # seconds between two looks at a lock that SQLite does not wait for
_MIGRATION = 60  # seconds to wait for another process that brings SQLite's schema up to date
_LOCK = 0x746F726368  # PostgreSQL's advisory lock of the process that upgrades the schema


class Database:
    """The stored registry. Blocking: call it from a thread.

    Opening it brings the schema up to date, and raises ConfigurationError where that cannot be.
    """

    def __init__(self, url: str) -> None:
        self._url = _parse_url(url)
        self._generation = 0
        try:
            self._engine = _open(self._url)
        except (sa.exc.DBAPIError, CommandError, OSError, ImportError) as error:
            raise ConfigurationError(_SETTING, self._explain(error)) from None

    def close(self) -> None:
        self._engine.dispose()

    @property
    def generation(self) -> int:
        """The number of the last change that was saved or loaded here; every save raises it by one."""
        return self._generation

    def load(self) -> Registry:
        """Return the registry as it was last saved by any process. Raises Unavailable."""
        with self.transaction() as connection:
            # Taking the row keeps a writer out until every table is read.
            generation = connection.execute(sa.select(GENERATION.c.generation).with_for_update()).scalar_one()
            versions: dict[str, dict[str, ModelSpec]] = {}
            for row in connection.execute(sa.select(VERSIONS).order_by(VERSIONS.c.model, VERSIONS.c.version)):
                versions.setdefault(row.model, {})[row.version] = _decode_spec(row)
            models = {
                row.name: ModelRecord(
                    row.default_version,
                    versions[row.name],
                    validation.read(TrafficPolicy, row.policy),
                    row.declared,
                )
                for row in connection.execute(sa.select(MODELS).order_by(MODELS.c.name))
            }
            archives = {
                ModelRef(row.model, row.version): row.digest
                for row in connection.execute(sa.select(ARCHIVES))
            }
            experiments = {
                row.id: validation.read(Experiment, row.document)
                for row in connection.execute(sa.select(EXPERIMENTS))
            }
            rollouts = {
                row.model: validation.read(Rollout, row.document)
                for row in connection.execute(sa.select(ROLLOUTS))
            }
        self._generation = generation
        return Registry(models, archives, experiments, rollouts)

    def save(self, before: Registry, after: Registry) -> None:
        """Store the changes from ``before``, which was last loaded or saved here, to ``after``.

        Either all of them are stored or none, and they survive a power failure. Saving the same registry
        again only raises the generation. Raises Unavailable where another writer saved in between or the
        database is unreachable; ``load`` then returns the stored registry.
        """
        with self.transaction() as connection:
            known = GENERATION.c.generation == self._generation
            raised = connection.execute(
                sa.update(GENERATION).where(known).values(generation=self._generation + 1)
            )
            if raised.rowcount != 1:
                raise Unavailable("Another writer has changed the registry. Nothing was stored; try again.")
            for name in before.models.keys() - after.models.keys():
                connection.execute(sa.delete(MODELS).where(MODELS.c.name == name))
            for name, record in after.models.items():
                if record != before.models.get(name):
                    _save(connection, name, before.models.get(name), record)
            _save_archives(connection, before.archives, after.archives)
            _save_documents(connection, EXPERIMENTS.c.id, before.experiments, after.experiments)
            _save_documents(connection, ROLLOUTS.c.model, before.rollouts, after.rollouts)
        self._generation += 1

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Open a transaction that excludes all other writers. Raises Unavailable."""
        try:
            with self._engine.begin() as connection:
                yield connection
        except sa.exc.DBAPIError as error:
            raise Unavailable(f"The registry's database cannot be used now: {self._explain(error)}") from None

    def _recreate(self) -> str:
        """Return the instruction that recreates the database, without its password."""
        if self._url.get_backend_name() == "sqlite":
            command = f"rm {shlex.quote(str(self._url.database))}*"
        else:
            database = shlex.quote(str(self._url.database))
            command = f"dropdb --host {self._url.host or 'localhost'} {database} && createdb {database}"
        return f"Start that version, or recreate the database: {command}; then register the models again."

    def _explain(self, error: Exception) -> str:
        """Describe an error and its cure, without the passwords of URL and driver."""
        where = self._url.set(query={}).render_as_string(hide_password=True)
        if isinstance(error, CommandError):
            return f"{where} has the schema of another version of Torchrelay. {self._recreate()}"
        if isinstance(error, ImportError):
            return f"{where}: {error}. Install its driver with: pip install 'torchrelay[postgres]'"
        message = str(error.orig) if isinstance(error, sa.exc.DBAPIError) else str(error)
        secrets = [self._url.password, *(value for key, value in self._url.query.items() if "pass" in key)]
        for secret in filter(None, secrets):
            message = message.replace(str(secret), "***")
        cure = (
            "Check that the file is a database of Torchrelay's and can be written, with its directory."
            if self._url.get_backend_name() == "sqlite"
            else "Check that the server runs there, and the user, the password and the database's "
            "name in the URL."
        )
        return f"{where}: {' '.join(message.split()).rstrip('.?')}. {cure}"


# The URL and the engine


def _parse_url(text: str) -> URL:
    try:
        url = make_url(text)
    except (sa.exc.ArgumentError, ValueError):
        raise ConfigurationError(_SETTING, f"not a database URL. {_EXAMPLES}") from None
    if "@" in (url.host or ""):
        raise ConfigurationError(_SETTING, "not a database URL. Write @ and % in a password as %40 and %25.")
    kind = url.drivername
    if kind in ("postgres", "postgresql"):
        return url.set(drivername="postgresql+psycopg")
    if kind not in ("sqlite", "postgresql+psycopg"):
        raise ConfigurationError(_SETTING, f"a registry cannot be kept in {kind!r}. {_EXAMPLES}")
    if kind == "sqlite" and url.database in (None, "", ":memory:"):
        raise ConfigurationError(_SETTING, f"SQLite without a file forgets everything. {_EXAMPLES}")
    return url


_EXAMPLES = (
    "Write sqlite:////path/to/registry.db, or postgresql+psycopg://user:password@host/database, "
    "or nothing for SQLite in control.state_dir."
)


def _open(url: URL) -> sa.Engine:
    upgrading = _engine(url, _MIGRATION)
    try:
        with upgrading.begin() as connection:
            _upgrade(connection)
    finally:
        upgrading.dispose()
    return _engine(url)


def _engine(url: URL, lock_timeout: float = _LOCK_TIMEOUT) -> sa.Engine:
    """``lock_timeout``: seconds to wait for SQLite's lock."""
    if url.get_backend_name() == "postgresql":
        connecting = {} if "connect_timeout" in url.query else {"connect_timeout": _LOCK_TIMEOUT}
        # Checked before use: an idle connection is replaced after a restart of the server.
        return sa.create_engine(url, pool_pre_ping=True, connect_args=connecting)
    Path(str(url.database)).parent.mkdir(parents=True, exist_ok=True)
    engine = sa.create_engine(url, connect_args={"timeout": lock_timeout})
    sa.event.listen(engine, "connect", partial(_configure_connection, lock_timeout))
    sa.event.listen(engine, "begin", _begin)
    return engine


def _configure_connection(lock_timeout: float, connection: Any, _record: Any) -> None:
    _set_wal_mode(connection, lock_timeout)
    for pragma in ("synchronous = FULL", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {pragma}").close()


def _set_wal_mode(connection: Any, lock_timeout: float) -> None:
    """Set the journal mode of a new file.

    SQLite does not wait here for another process that does the same, so this function retries.
    """
    until = time.monotonic() + lock_timeout
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL").close()
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > until:
                raise
        time.sleep(_LOCK_RETRY_S)


def _begin(connection: Connection) -> None:
    # The only writer from the start: a transaction that starts to write later may be refused midway.
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _upgrade(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
    config = Config()
    config.set_main_option("script_location", "serve_app.control.persistence:migrations")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


# Rows


def _save(connection: Connection, name: str, before: ModelRecord | None, after: ModelRecord) -> None:
    declared = None if after.declared is None else dict(after.declared)
    model = {"default_version": after.default, "policy": validation.write(after.policy), "declared": declared}
    if before is None:
        connection.execute(sa.insert(MODELS).values(name=name, **model))
    elif before != replace(after, versions=before.versions):
        connection.execute(sa.update(MODELS).where(MODELS.c.name == name).values(**model))
    old: Mapping[str, ModelSpec] = before.versions if before else {}
    for version in old.keys() - after.versions.keys():
        connection.execute(sa.delete(VERSIONS).where(*_is(VERSIONS, name, version)))
    for version, spec in after.versions.items():
        if version not in old:
            connection.execute(sa.insert(VERSIONS).values(model=name, version=version, **_encode_spec(spec)))
        elif spec != old[version]:
            connection.execute(
                sa.update(VERSIONS).where(*_is(VERSIONS, name, version)).values(**_encode_spec(spec))
            )


def _save_archives(
    connection: Connection, before: Mapping[ModelRef, str], after: Mapping[ModelRef, str]
) -> None:
    changed = {ref for ref in before.keys() | after.keys() if before.get(ref) != after.get(ref)}
    for ref in changed & before.keys():
        connection.execute(sa.delete(ARCHIVES).where(*_is(ARCHIVES, ref.name, ref.version)))
    for ref in changed & after.keys():
        connection.execute(sa.insert(ARCHIVES).values(model=ref.name, version=ref.version, digest=after[ref]))


def _save_documents(
    connection: Connection, key: sa.Column[str], before: Mapping[str, Any], after: Mapping[str, Any]
) -> None:
    for gone in before.keys() - after.keys():
        connection.execute(sa.delete(key.table).where(key == gone))
    for name, value in after.items():
        if name not in before:
            document = validation.write(value)
            connection.execute(sa.insert(key.table).values({key.name: name, "document": document}))
        elif value is not before[name] and value != before[name]:
            connection.execute(
                sa.update(key.table).where(key == name).values(document=validation.write(value))
            )


def _is(table: sa.Table, name: str, version: str) -> tuple[sa.ColumnElement[bool], ...]:
    return table.c.model == name, table.c.version == version


def _encode_spec(spec: ModelSpec) -> dict[str, Any]:
    apart = ("name", "version", "config")
    fields = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec) if f.name not in apart}
    fields["graph"] = validation.write(spec.graph) if spec.graph is not None else None
    fields["autoscaling"] = dataclasses.asdict(spec.autoscaling) if spec.autoscaling is not None else None
    return {"spec": fields, "config": yaml.safe_dump(dict(spec.config), sort_keys=False)}


def _decode_spec(row: Any) -> ModelSpec:
    """Return a stored spec.

    Unknown keys of a newer version are ignored, and missing keys of an older version get their default.
    """
    known = {f.name for f in dataclasses.fields(ModelSpec)}
    fields: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in row.spec.items()
        if key in known
    }
    if (stored := fields.get("autoscaling")) is not None:
        fields["autoscaling"] = Autoscaling(**{key: stored[key] for key in autoscaling.KEYS if key in stored})
    if (stored := fields.get("graph")) is not None:
        fields["graph"] = validation.read(WorkflowGraph, stored)
    return ModelSpec(name=row.model, version=row.version, config=yaml.safe_load(row.config), **fields)
