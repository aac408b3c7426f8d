"""The audit trail: records in the database and in the audit log, refused attempts, retention and queries."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.control.cancellation import run_to_end
from serve_app.control.persistence.database import Database, RowChange
from serve_app.control.persistence.schema import AUDIT_LOG
from serve_app.domain.access import matches
from serve_app.domain.audit import MAX_PAGE_SIZE, AuditDocument, AuditQuery, AuditRecord
from serve_app.domain.urls import redact_url
from serve_app.errors import InProgress, RelayError, Unavailable, get_reason
from serve_app.settings import Settings, TelemetrySettings
from serve_app.telemetry import audit_log
from serve_app.telemetry.audit_log import AuditLog

log = logging.getLogger(__name__)

# Methods of ControlAPI that change nothing, or only what inference requests create.
_UNRECORDED = ("get_", "list_", "describe", "poll_", "render", "record_", "submit_", "cancel_prediction")
_FLUSH_PERIOD_S = 1.0
_PRUNE_PERIOD_S = 60.0
_MAX_REFUSALS = 100  # stored in a period; the others are counted
_REFUSED_SHARE = 0.1  # of all records may be refusals, so that they cannot replace records of changes
_NO_ID = 2**31 - 1  # above every id
_MAX_FIELD = 1000  # characters of a field in ``before`` and ``after``


class AuditTrail:
    """The records of one server."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings: TelemetrySettings = settings.telemetry
        self._file = AuditLog(settings)
        self._refusals: list[AuditRecord] = []
        self._omitted = 0  # refusals beyond the limit of this period

    # Changes

    def open_record(self) -> AuditRecord:
        """Return the record of the current operation, to be stored in the transaction of its change."""
        return audit_log.create_record(audit_log.current_operation())

    def add(self, record: AuditRecord, connection: Connection, changes: list[RowChange]) -> AuditRecord:
        """Insert a record with the changes of its transaction; return it. Blocking."""
        before, after = _describe(changes)
        subject = record.subject or ", ".join(sorted({str(change.key[0]) for change in changes}))
        complete = audit_log.sanitize(
            AuditRecord(
                **{**asdict(record), "subject": subject, "before": before or None, "after": after or None}
            )
        )
        connection.execute(sa.insert(AUDIT_LOG).values(asdict(complete)))
        return complete

    def confirm(self, record: AuditRecord) -> None:
        """Write a stored record to the audit log."""
        audit_log.current_operation().is_recorded = True
        self._file.write(record)

    def record_calls(self, name: str, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """Return a method of ControlAPI whose calls are recorded, if it changes anything.

        A commit of the call stores its record itself, and this method those of other calls and of failures.
        """
        if name.startswith(_UNRECORDED):
            return method

        @functools.wraps(method)
        async def recorded(*args: Any, **kwargs: Any) -> Any:
            operation = audit_log.start_operation(name, _find_subject(args, kwargs))
            try:
                result = await method(*args, **kwargs)
            except asyncio.CancelledError:
                if not operation.is_recorded:  # it may be in force
                    await self._store([audit_log.create_record(operation, "cancelled")])
                raise
            except RelayError as error:
                if not isinstance(error, InProgress):  # that change is stored
                    await self._store([audit_log.create_record(operation, f"failed: {get_reason(error)}")])
                raise
            if not operation.is_recorded:
                await self._store([audit_log.create_record(operation)])
            return result

        return recorded

    async def record_refusal(self, action: str, subject: str, reason: str) -> None:
        """Record an attempt that a protocol refused; it is stored within a second."""
        record = audit_log.create_record(audit_log.AuditedOperation(action, subject), f"refused: {reason}")
        if len(self._refusals) < _MAX_REFUSALS:
            self._refusals.append(record)
        else:
            self._omitted += 1

    async def _store(self, records: list[AuditRecord]) -> None:
        records = [audit_log.sanitize(record) for record in records]

        def insert() -> None:
            with self._database.transaction() as connection:
                connection.execute(sa.insert(AUDIT_LOG), [asdict(record) for record in records])

        async def store() -> None:
            try:
                await asyncio.to_thread(insert)
            except Unavailable as error:
                log.error("records of the audit log are only in its file: %s", error)
            for record in records:
                self._file.write(record)

        await run_to_end(store())

    # Refusals and retention

    async def run(self) -> None:
        """Store refusals and delete old records, until cancelled."""
        next_prune = 0.0
        while True:
            if time.monotonic() >= next_prune:
                next_prune = time.monotonic() + _PRUNE_PERIOD_S
                await self.prune()
            await asyncio.sleep(_FLUSH_PERIOD_S)
            await self.flush()

    async def flush(self) -> None:
        """Store the refusals of this period."""
        records, self._refusals = self._refusals, []
        if self._omitted:
            records.append(AuditRecord("refusals", "", f"refused: {self._omitted} more in this second"))
            self._omitted = 0
        if records:
            await self._store(records)

    async def prune(self) -> None:
        """Delete records that are too old or too many, refusals first."""
        try:
            await asyncio.to_thread(self._prune)
        except Unavailable as error:
            log.warning("old records of the audit log are deleted later: %s", error)

    def _prune(self) -> None:
        table, limit = AUDIT_LOG, self._settings.audit_records
        is_refusal = table.c.result.startswith("refused")
        with self._database.transaction() as connection:
            oldest = time.time() - self._settings.audit_days * 86_400
            connection.execute(sa.delete(table).where(table.c.time < oldest))
            for condition, count in ((is_refusal, int(limit * _REFUSED_SHARE)), (sa.true(), limit)):
                ids = sa.select(table.c.id).where(condition).order_by(table.c.id.desc())
                last = connection.execute(ids.offset(count).limit(1)).scalar()
                if last is not None:
                    connection.execute(sa.delete(table).where(condition, table.c.id <= last))

    # Queries

    async def list_audit_records(
        self, query: AuditQuery, allowed_models: tuple[str, ...]
    ) -> list[AuditDocument]:
        """Return the records that match, the newest first.

        With ``allowed_models`` other than all, only those of these models. Raises Unavailable.
        """
        return await asyncio.to_thread(self._list, query, allowed_models)

    def _list(self, query: AuditQuery, allowed_models: tuple[str, ...]) -> list[AuditDocument]:
        columns = AUDIT_LOG.c
        conditions: list[sa.ColumnElement[bool]] = [
            columns[name] == value
            for name, value in (("actor", query.actor), ("action", query.action), ("subject", query.subject))
            if value
        ]
        if query.result:
            conditions.append(columns.result.startswith(query.result, autoescape=True))
        if query.since:
            conditions.append(columns.time >= query.since)
        select = sa.select(AUDIT_LOG).where(*conditions).order_by(columns.id.desc()).limit(MAX_PAGE_SIZE)
        found: list[Any] = []
        before_id = query.before_id or _NO_ID
        while len(found) < query.limit:
            with self._database.transaction() as connection:
                rows = connection.execute(select.where(columns.id < before_id)).mappings().all()
            # The names that SQLAlchemy quotes are of a subclass of str, which orjson refuses as a key.
            found += [
                {name: row[name] for name in AuditDocument.__annotations__}
                for row in rows
                if matches(row["subject"], allowed_models)
            ]
            if len(rows) < MAX_PAGE_SIZE:
                break
            before_id = rows[-1]["id"]
        return found[: query.limit]

    async def close(self) -> None:
        """Store the remaining refusals and write the last lines."""
        await self.flush()
        await asyncio.to_thread(self._file.close)


def _find_subject(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return the name of the model, experiment or key that a call is for."""
    value = next(iter((*args, *kwargs.values())), "")
    for name in ("model_name", "model", "url", "name"):
        if text := getattr(value, name, None):
            return redact_url(text) if name == "url" else str(text)
    return value if isinstance(value, str) else ""


def _describe(changes: list[RowChange]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields that differ before and after the changes, by table and key."""
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    for change in changes:
        name = "/".join((change.table, *map(str, change.key)))
        old, new = _flatten(change.before), _flatten(change.after)
        differing = [key for key in {**old, **new} if old.get(key) != new.get(key)]
        if change.before is not None:
            before[name] = {key: _shorten(key, old[key]) for key in differing if key in old}
        if change.after is not None:
            after[name] = {key: _shorten(key, new[key]) for key in differing if key in new}
    return before, after


def _flatten(row: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the columns of a row; a column with a document as the fields of that."""
    fields: dict[str, Any] = {}
    for name, value in (row or {}).items():
        fields.update(value if name in ("spec", "document") and isinstance(value, dict) else {name: value})
    return {name: value for name, value in fields.items() if value is not None}


def _shorten(name: str, value: Any) -> Any:
    value = _redact(name, value)
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return value if len(text) <= _MAX_FIELD else f"{text[:_MAX_FIELD]}…"


def _redact(name: str, value: Any) -> Any:
    """Redact a URL, and those in a document, such as those of a version's adapters."""
    if isinstance(value, Mapping):
        return {key: _redact(key, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_redact(name, item) for item in value]
    return redact_url(value) if name == "url" and isinstance(value, str) else value
