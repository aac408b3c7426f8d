"""``/audit``: the audit log of management changes, and the recording of refused ones."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

from typing_extensions import TypedDict

from serve_app.control.api import ControlPlane
from serve_app.domain.audit import MAX_PAGE_SIZE, Actor, AuditDocument, AuditQuery
from serve_app.domain.validation import documented
from serve_app.errors import AccessDenied, BadRequest, RelayError, get_reason
from serve_app.net.request_origin import CrossSiteRequest, HostNotAllowed
from serve_app.protocols.http import auth
from serve_app.protocols.http.endpoints import get
from serve_app.protocols.http.exchange import HttpExchange
from serve_app.protocols.management.request import ManagementRequest
from serve_app.telemetry.audit_log import set_actor

_READING_METHODS = ("GET", "HEAD", "OPTIONS")
_MAX_REFUSALS = 100  # a second, of one process; further ones are only in the access log


class AuditPage(TypedDict):
    """Records, the newest first."""

    records: list[AuditDocument]


class AuditParameters(TypedDict, total=False):
    limit: Annotated[int, documented("The number of records.", minimum=1, maximum=MAX_PAGE_SIZE)]
    actor: Annotated[str, documented("Only changes with the key of this name.")]
    action: Annotated[str, documented("Only this action, such as register.")]
    subject: Annotated[str, documented("Only changes of this model, workflow or experiment.")]
    result: Annotated[str, documented("Only results that begin so: ok, refused or failed.")]
    since: Annotated[float, documented("Only records from this Unix time on.", minimum=0)]
    before_id: Annotated[int, documented("Only records before the one with this id.", minimum=0)]


async def list_records(request: ManagementRequest) -> AuditPage:
    query = _parse(request.query)
    return {"records": await request.control.api.list_audit_records(query, request.allowed_models)}


ENDPOINTS = (
    get(
        "/audit",
        "audit",
        "List records of the audit log, newest first.",
        AuditPage,
        query=AuditParameters,
        call=list_records,
        rights=("manage",),
    ),
)


def _parse(parameters: dict[str, str]) -> AuditQuery:
    """Return the filter that query parameters describe. Raises BadRequest."""
    texts = {name: parameters.get(name, "") for name in ("actor", "action", "subject", "result")}
    try:
        limit = int(parameters.get("limit", 100))
        since, before_id = float(parameters.get("since", 0)), int(parameters.get("before_id", 0))
    except ValueError:
        raise BadRequest("limit and before_id are integers, and since is a number of seconds.") from None
    if not 1 <= limit <= MAX_PAGE_SIZE or not 0 <= since < float("inf") or not 0 <= before_id < 2**31:
        raise BadRequest(f"limit is from 1 to {MAX_PAGE_SIZE}; since and before_id are not negative.")
    return AuditQuery(limit=limit, since=since, before_id=before_id, **texts)


class RefusalRecorder:
    """A recorder of refused changes in the audit log, which no client waits for."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._second = 0
        self._count = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def record_http(self, exchange: HttpExchange, error: RelayError) -> None:
        """Record a request to a management route that was refused, unless it only reads."""
        if not isinstance(error, (AccessDenied, CrossSiteRequest, HostNotAllowed)):
            return
        if exchange.method in _READING_METHODS and exchange.segments != ["token"]:
            return
        actor = auth.create_actor(exchange.grant, exchange.client)
        self.record(actor, exchange.method, exchange.path, error)

    def record(self, actor: Actor, action: str, path: str, error: RelayError) -> None:
        """Record a refusal of ``action``, unless too many were refused in this second."""
        if self._second != (second := int(time.monotonic())):
            self._second, self._count = second, 0
        self._count += 1
        if self._count > _MAX_REFUSALS:
            return
        task = asyncio.get_running_loop().create_task(self._send(actor, action, path, get_reason(error)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, actor: Actor, action: str, path: str, reason: str) -> None:
        set_actor(actor)
        await self._control.record_refusal(action, path, reason)
