"""The SQL database of the registry, with the number of the last change.

It is SQLite in a file of the head node by default, and PostgreSQL by URL. The generation number detects the
changes of a second server, which shares the database during an upgrade. Alembic manages the schema (see
migrations/).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import shlex
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import yaml
from alembic.util import CommandError
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, Connection, make_url

from serve_app.control.persistence import schema_upgrade
from serve_app.control.persistence.schema import (
    ARCHIVES,
    EXPERIMENTS,
    GENERATION,
    MODELS,
    ROLLOUTS,
    VERSIONS,
)
from serve_app.control.registry import ModelRecord, Registry, changed_models
from serve_app.domain import autoscaling, validation
from serve_app.domain.adapter import AdapterSpec
from serve_app.domain.autoscaling import Autoscaling
from serve_app.domain.experiment import Experiment
from serve_app.domain.model import ModelRef, ModelSpec
from serve_app.domain.rollout import Rollout
from serve_app.domain.traffic_policy import TrafficPolicy
from serve_app.domain.workflow_graph import WorkflowGraph
from serve_app.errors import ConfigurationError, Unavailable

log = logging.getLogger(__name__)

_SETTING = "control.database_url"
_LOCK_TIMEOUT = 10  # seconds to reach a server, or to wait for SQLite's lock
_LOCK_RETRY_S = 0.01  # seconds between two looks at a lock that SQLite does not wait for
_READ_ONLY = "torchrelay_read_only"  # an option of a connection: its transactions take no lock of SQLite
_MIGRATION = 60  # seconds to wait for another process that brings SQLite's schema up to date


@dataclass(frozen=True)
class RowChange:
    """A row that differs between two registries; None stands for a row that is not there."""

    table: str  # without the prefix of our tables
    key: tuple[Any, ...]
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None


class Database:
    """The stored registry. Blocking: call it from a thread.

    Opening it brings the schema up to date, and raises ConfigurationError where that cannot be.
    """

    def __init__(self, url: str) -> None:
        self._url = _parse_url(url)
        self._generation = 0
        self.skipped: frozenset[ModelRef] = frozenset()  # versions that ``load`` could not read
        self.is_uncertain = False  # a save has failed, and may have been stored, or another one may have
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

    def has_changed(self) -> bool:
        """Return whether another process has changed the database since the last load. Raises Unavailable.

        This is a read of one row, which waits for no writer.
        """
        with self._explained(), self._engine.connect() as connection:
            connection.execution_options(**{_READ_ONLY: True})
            stored: int = connection.execute(sa.select(GENERATION.c.generation)).scalar_one()
        return stored != self._generation

    def load(self) -> Registry:
        """Return the registry as it was last saved by any process. Raises Unavailable.

        A row that cannot be read is logged and left out, as is a model whose default version is; the others
        are served. The rows stay in the database.
        """
        unreadable: set[str] = set()
        skipped: set[ModelRef] = set()
        damaged: list[ModelRef] = []  # their digest is in another table
        with self.transaction() as connection:
            # Taking the row keeps a writer out until every table is read.
            generation = connection.execute(sa.select(GENERATION.c.generation).with_for_update()).scalar_one()
            versions: dict[str, dict[str, ModelSpec]] = {}
            for row in connection.execute(sa.select(VERSIONS).order_by(VERSIONS.c.model, VERSIONS.c.version)):
                with _skip_unreadable(f"model {row.model} version {row.version}"):
                    if isinstance(row.spec, _Damaged):
                        damaged.append(ModelRef(row.model, row.version))
                        raise ValueError("the column spec of its row is no JSON")
                    unreadable.add(_digest(row))
                    versions.setdefault(row.model, {})[row.version] = _decode_spec(row)
                    unreadable.discard(_digest(row))
                if row.version not in versions.get(row.model, {}):
                    skipped.add(ModelRef(row.model, row.version))
            models = {}
            for row in connection.execute(sa.select(MODELS).order_by(MODELS.c.name)):
                with _skip_unreadable(f"model {row.name}"):
                    kept = versions.get(row.name, {})
                    if row.default_version not in kept:
                        raise ValueError(f"its default version {row.default_version} cannot be read")
                    policy = validation.read(TrafficPolicy, row.policy)
                    models[row.name] = ModelRecord(row.default_version, kept, policy, row.declared)
                if row.name not in models:  # its archives stay
                    lost = versions.get(row.name, {}).values()
                    unreadable.update(spec.digest for spec in lost)
                    skipped.update(spec.ref for spec in lost)
            archives = {
                ModelRef(row.model, row.version): row.digest
                for row in connection.execute(sa.select(ARCHIVES))
            }
            unreadable.update(archives[ref] for ref in damaged if ref in archives)
            experiments = {}
            for row in connection.execute(sa.select(EXPERIMENTS)):
                with _skip_unreadable(f"experiment {row.id}"):
                    experiments[row.id] = validation.read(Experiment, row.document)
            rollouts = {}
            for row in connection.execute(sa.select(ROLLOUTS)):
                with _skip_unreadable(f"the rollout of model {row.model}"):
                    rollouts[row.model] = validation.read(Rollout, row.document)
        self._generation, self.skipped = generation, frozenset(skipped)
        return Registry(models, archives, experiments, rollouts, frozenset(unreadable - {""}))

    def save(
        self,
        before: Registry,
        after: Registry,
        on_changes: Callable[[Connection, list[RowChange]], None] = lambda connection, changes: None,
    ) -> None:
        """Store the changes from ``before``, which was last loaded or saved here, to ``after``.

        ``on_changes`` may store more in the same transaction.

        Either all of them are stored or none, and they survive a power failure. Saving the same registry
        again only raises the generation. Raises Unavailable where another writer saved in between or the
        database is unreachable. Where ``is_uncertain``, ``load`` then returns the stored registry; a database
        that is locked or unreachable from the start has stored nothing.
        """
        self.is_uncertain = False
        with self.transaction() as connection:
            self.is_uncertain = True
            known = GENERATION.c.generation == self._generation
            raised = connection.execute(
                sa.update(GENERATION).where(known).values(generation=self._generation + 1)
            )
            if raised.rowcount != 1:
                raise Unavailable("Another writer has changed the registry. Nothing was stored; try again.")
            names = changed_models(before, after)
            tables = zip(_list_tables(before, names), _list_tables(after, names))
            diffs = [_TableDiff.of(*rows) for rows in tables]
            for diff in diffs:
                diff.save(connection)
            on_changes(connection, [change for diff in diffs for change in diff.list_changes()])
        self._generation += 1
        self.is_uncertain = False

    @contextlib.contextmanager
    def change(self) -> Iterator[Connection]:
        """Open a transaction that raises the generation, so that other processes load its changes."""
        with self.transaction() as connection:
            connection.execute(sa.update(GENERATION).values(generation=GENERATION.c.generation + 1))
            yield connection
        self._generation += 1

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Open a transaction that excludes all other writers. Raises Unavailable."""
        with self._explained(), self._engine.begin() as connection:
            yield connection

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise Unavailable for the errors of the database."""
        try:
            yield
        except sa.exc.DBAPIError as error:
            raise Unavailable(f"The registry's database cannot be used now: {self._explain(error)}") from None

    def _recreate(self) -> str:
        """Return what to do about the schema of another version, without the password."""
        if self._url.get_backend_name() == "sqlite":
            command = f"rm {shlex.quote(str(self._url.database))}*"
        else:
            database = shlex.quote(str(self._url.database))
            command = f"dropdb --host {self._url.host or 'localhost'} {database} && createdb {database}"
        return (
            "Install that version, or restore the backup of the database that this version has written. "
            f"To begin with an empty registry instead: {command}"
        )

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
        return f"{where}: {' '.join(message.split()).rstrip('.?')}. {self._find_remedy(message)}"

    def _find_remedy(self, message: str) -> str:
        if self._url.get_backend_name() != "sqlite":
            return (
                "Check that the server runs there, and the user, the password and the database's name in "
                "the URL."
            )
        file = shlex.quote(str(self._url.database))
        remedies = {
            "disk is full": "Free space in its directory; the server continues by itself.",
            "readonly": "Let this user write the file and its directory; the server continues by itself.",
            "malformed": "Check that the setting names the registry. If it does, the file is damaged: stop "
            f"the server, remove {file}-wal and {file}-shm, and restore a backup with `mv BACKUP {file}`, or "
            f"save what is readable with `sqlite3 {file} .recover | sqlite3 NEW`. Without the file, the "
            "registry begins empty.",
        }
        remedies["not a database"] = remedies["malformed"]
        found = (remedy for words, remedy in remedies.items() if words in message)
        return next(
            found, "Check that the file is a database of Torchrelay's and can be written, with its directory."
        )


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


_ADAPTER_FIELDS = {field.name for field in dataclasses.fields(AdapterSpec)}
_EXAMPLES = (
    "Write sqlite:////path/to/registry.db, or postgresql+psycopg://user:password@host/database, "
    "or nothing for SQLite in control.state_dir."
)


def upsert(connection: Connection, table: sa.Table, rows: list[dict[str, Any]]) -> None:
    """Insert rows, or update those with the same primary key."""
    if not rows:
        return
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    insert = dialect.insert(table)
    changes = {c.name: insert.excluded[c.name] for c in table.columns if not c.primary_key}
    connection.execute(insert.on_conflict_do_update(index_elements=table.primary_key, set_=changes), rows)


def _open(url: URL) -> sa.Engine:
    upgrading = _engine(url, _MIGRATION)
    try:
        with upgrading.begin() as connection:
            schema_upgrade.upgrade(connection)
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
    engine = sa.create_engine(url, connect_args={"timeout": lock_timeout}, json_deserializer=_read_json)
    sa.event.listen(engine, "connect", partial(_configure_connection, lock_timeout))
    sa.event.listen(engine, "begin", _begin)
    return engine


class _Damaged:
    """A value that is no JSON: its row is skipped, and does not end the loop over the others."""

    def __repr__(self) -> str:
        return "no JSON"


def _read_json(text: str) -> Any:
    """Return the value of a JSON column of SQLite, which stores any text."""
    try:
        return json.loads(text)
    except ValueError:
        return _Damaged()


def _configure_connection(lock_timeout: float, connection: Any, _record: Any) -> None:
    try:
        _set_wal_mode(connection, lock_timeout)
        for pragma in ("synchronous = FULL", "foreign_keys = ON"):
            connection.execute(f"PRAGMA {pragma}").close()
    except BaseException:
        connection.close()  # the pool forgets a connection whose event fails
        raise


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
    is_reader = connection.get_execution_options().get(_READ_ONLY)
    connection.exec_driver_sql("BEGIN" if is_reader else "BEGIN IMMEDIATE")


# Rows


@dataclass
class _TableRows:
    """The rows of one table: values by primary key, and the encoding of a value as the other columns."""

    table: sa.Table
    values: Mapping[Any, Any]
    encode: Callable[[Any], dict[str, Any]]


def _list_tables(registry: Registry, names: Collection[str]) -> list[_TableRows]:
    """Return a registry as rows, of the models ``names`` only.

    A model's row is stored before those of its versions, which refer to it.
    """
    records = {name: registry.models[name] for name in names if name in registry.models}
    models = {(name,): (r.default, r.policy, r.declared) for name, r in records.items()}
    versions = {(s.name, s.version): s for record in records.values() for s in record.versions.values()}
    archives = {(ref.name, ref.version): digest for ref, digest in registry.archives.items()}
    experiments = {(id,): experiment for id, experiment in registry.experiments.items()}
    rollouts = {(model,): rollout for model, rollout in registry.rollouts.items()}
    return [
        _TableRows(MODELS, models, _encode_model),
        _TableRows(VERSIONS, versions, _encode_spec),
        _TableRows(ARCHIVES, archives, lambda digest: {"digest": digest}),
        _TableRows(EXPERIMENTS, experiments, lambda value: {"document": validation.write(value)}),
        _TableRows(ROLLOUTS, rollouts, lambda value: {"document": validation.write(value)}),
    ]


@dataclass
class _TableDiff:
    """The rows of one table that differ between two states."""

    before: _TableRows
    after: _TableRows
    removed: list[Any]
    changed: list[Any]  # primary keys, of new rows too

    @classmethod
    def of(cls, before: _TableRows, after: _TableRows) -> _TableDiff:
        """Compare two states. Most rows are the same objects, whose comparison by value would be slow."""
        old = before.values
        changed = [
            key
            for key, value in after.values.items()
            if key not in old or (old[key] is not value and old[key] != value)
        ]
        return cls(before, after, list(old.keys() - after.values.keys()), changed)

    def save(self, connection: Connection) -> None:
        """Store the difference."""
        table = self.after.table
        keys = list(table.primary_key)
        for gone in self.removed:
            connection.execute(sa.delete(table).where(*(column == part for column, part in zip(keys, gone))))
        names = [column.name for column in keys]
        rows = [
            {**dict(zip(names, key)), **self.after.encode(self.after.values[key])} for key in self.changed
        ]
        upsert(connection, table, rows)

    def list_changes(self) -> list[RowChange]:
        """Return the rows before and after; digests of archives are in their versions too."""
        table, old, new = self.after.table, self.before.values, self.after.values
        if table is ARCHIVES:
            return []
        name, encode = table.name.removeprefix("torchrelay_"), self.after.encode
        return [
            RowChange(
                name,
                key,
                encode(old[key]) if key in old else None,
                encode(new[key]) if key in new else None,
            )
            for key in sorted([*self.removed, *self.changed])
        ]


def _encode_model(model: tuple[str, TrafficPolicy, Mapping[str, Any] | None]) -> dict[str, Any]:
    default, policy, declared = model
    return {
        "default_version": default,
        "policy": validation.write(policy),
        "declared": None if declared is None else dict(declared),
    }


def _encode_spec(spec: ModelSpec) -> dict[str, Any]:
    apart = ("name", "version", "config")
    fields = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec) if f.name not in apart}
    fields["graph"] = validation.write(spec.graph) if spec.graph is not None else None
    fields["autoscaling"] = dataclasses.asdict(spec.autoscaling) if spec.autoscaling is not None else None
    fields["adapters"] = [dataclasses.asdict(adapter) for adapter in spec.adapters]
    return {"spec": fields, "config": yaml.safe_dump(dict(spec.config), sort_keys=False)}


@contextlib.contextmanager
def _skip_unreadable(entry: str) -> Iterator[None]:
    """Log an error of a stored entry instead of raising it; those of the database are raised."""
    try:
        yield
    except sa.exc.SQLAlchemyError:
        raise
    except Exception:
        log.exception("%s of the registry cannot be read, and is not served; register it again", entry)


def _digest(row: Any) -> str:
    return str(row.spec.get("digest", "")) if isinstance(row.spec, dict) else ""


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
    fields["adapters"] = tuple(
        AdapterSpec(**{key: value for key, value in stored.items() if key in _ADAPTER_FIELDS})
        for stored in fields.get("adapters", ())
    )
    if (stored := fields.get("graph")) is not None:
        fields["graph"] = validation.read(WorkflowGraph, stored)
    spec = ModelSpec(name=row.model, version=row.version, config=yaml.safe_load(row.config), **fields)
    _ = spec.signature  # raises where the stored document is invalid, rather than in each routing table
    return spec
