"""The audit log of management changes as JSON lines, and the actor and operation of the current task.

The database has the same records (control/audit.py). A protocol sets the actor of its request, and the
control plane the operation; a commit that happens within them is recorded under both.
"""

from __future__ import annotations

from collections.abc import Coroutine
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from typing import Any

from serve_app.domain.audit import Actor, AuditRecord
from serve_app.settings import Settings
from serve_app.telemetry.access_log import TimestampFormatter, encode_json_line
from serve_app.telemetry.log_writer import AsyncWriter, FileSink

_SERVER = "torchrelay"


@dataclass
class AuditedOperation:
    """The running operation of an actor; ``is_recorded`` is set by a commit that has stored its record."""

    action: str
    subject: str = ""
    is_recorded: bool = False


_ACTOR: ContextVar[Actor | None] = ContextVar("actor", default=None)
_OPERATION: ContextVar[AuditedOperation | None] = ContextVar("operation", default=None)


def set_actor(actor: Actor) -> None:
    """Set the actor of the current task's request."""
    _ACTOR.set(actor)


def get_actor() -> Actor:
    return _ACTOR.get() or Actor()


def start_operation(action: str, subject: str) -> AuditedOperation:
    """Set the current task's operation, which further commits of it belong to."""
    operation = AuditedOperation(action, subject)
    _OPERATION.set(operation)
    return operation


def current_operation() -> AuditedOperation:
    """Return the current task's operation; a change without one is the server's own."""
    return _OPERATION.get() or AuditedOperation("change")


def create_record(operation: AuditedOperation, result: str = "ok") -> AuditRecord:
    """Return the record of an operation of the current actor."""
    actor = get_actor()
    return AuditRecord(operation.action, operation.subject, result, actor.name, actor.address)


async def run_as_server(action: str, job: Coroutine[Any, Any, None]) -> None:
    """Await a loop of the server, whose changes are recorded as ``action`` of the server."""
    _ACTOR.set(Actor(_SERVER))
    _OPERATION.set(AuditedOperation(action))
    await job


def sanitize(record: AuditRecord) -> AuditRecord:
    """Return a record whose texts every database and encoder accepts: without NUL and unpaired surrogates."""
    texts = {
        name: getattr(record, name).replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()[:1000]
        for name in ("action", "subject", "result", "actor", "address")
    }
    return replace(record, **texts)


class AuditLog:
    """A writer of one JSON object per record to ``audit_log.log``; without a path it writes nothing."""

    def __init__(self, settings: Settings) -> None:
        self._timestamp = TimestampFormatter()
        self._writer: AsyncWriter | None = None
        if settings.audit_log is not None:
            limit = settings.telemetry.access_log_bytes
            self._writer = AsyncWriter(
                FileSink(settings.audit_log, limit, settings.log_file_mode), "audit log", period=0.0
            )

    def write(self, record: AuditRecord) -> None:
        if self._writer is not None:
            document = asdict(record)
            line = {"time": self._timestamp(document.pop("time")), **document}
            self._writer.put(encode_json_line({k: v for k, v in line.items() if v is not None}))

    def close(self) -> None:
        """Write the remaining lines."""
        if self._writer is not None:
            self._writer.close()
