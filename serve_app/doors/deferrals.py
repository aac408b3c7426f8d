"""Asynchronous predictions over HTTP: ``Prefer: respond-async`` puts a request aside, ``/async/{id}`` tells of it.

The request is kept as it came, and the same door answers it later, so that its answer is the very one that it would
have had. The preference is RFC 7240's; the header Idempotency-Key makes a repeated request the same one.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import orjson

from serve_app.controlplane import ControlPlane
from serve_app.dataplane import DataPlane
from serve_app.deferral import Answer, Request
from serve_app.doors import auth
from serve_app.doors.exchange import JSON, TIMEOUT, Exchange, Headers, Receive, Send, deadline, priority
from serve_app.doors.torchserve import errors
from serve_app.errors import BadRequest, MethodNotAllowed, OfStep, RelayError, ResultTooLarge, Unavailable
from serve_app.settings import Settings

if TYPE_CHECKING:
    from serve_app.doors.app import Door

log = logging.getLogger("torchrelay.doors")

WEBHOOK = "x-torchrelay-webhook"
KEY = "idempotency-key"
_STATE = b"x-torchrelay-state"
_LONGEST_KEY = 255
_ID = re.compile(r"[0-9a-f]{32}")
_ASYNC = re.compile(r"(?:^|[,;])\s*respond-async\s*(?:[,;=]|$)", re.IGNORECASE)
# What is not kept of a request: who sent it, and what was for the taking in, or for its own answer, alone.
_NOT_KEPT = {"authorization", "proxy-authorization", "prefer", KEY, WEBHOOK, "content-length", "transfer-encoding"}
_NOT_KEPT |= {"accept-encoding"}
# What the answer that brings it has of its own.
_NOT_SAID = {b"x-request-id", b"content-length"}


class Aside:
    """Puts aside what prefers it; without a control plane, or where it is switched off, nothing."""

    def __init__(self, plane: DataPlane, control: ControlPlane | None, settings: Settings) -> None:
        self._plane = plane
        self._control = control if settings.asynchronous.enabled else None
        self._limit = settings.inference.max_request_size

    async def take(self, exchange: Exchange, model: str, version: str | None) -> bool:
        """Whether a request that shows a preference is put aside, and answered with where to ask for it: 202."""
        headers = exchange.headers
        if self._control is None or not _ASYNC.search(headers["prefer"]):
            return False
        priority(headers)  # or it is refused now
        until = deadline(headers)
        self._plane.find(model, version)
        key = headers.get(KEY, "")
        if len(key) > _LONGEST_KEY:
            raise BadRequest(f"Header Idempotency-Key has {len(key)} characters; it may have {_LONGEST_KEY}.")
        scope, body = exchange.scope, await exchange.body(self._limit)
        query = scope.get("query_string", b"").decode("latin-1")
        came = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        what = "\n".join((exchange.method, exchange.path, query, headers.get("content-type", ""), ""))
        request = Request(
            model,
            version,
            exchange.method,
            exchange.path,
            query,
            tuple(header for header in came if header[0] not in _NOT_KEPT),
            body,
            exchange.request_id,
            tuple(scope["client"]) if scope.get("client") else None,
            until,
            key,
            sha256(what.encode("utf-8", "surrogatepass") + body).hexdigest() if key else "",
            headers.get(WEBHOOK, ""),
        )
        said = await self._control.defer(request)
        sent = [(b"location", said["self"].encode()), (b"preference-applied", b"respond-async")]
        await _say(exchange, said, 202, sent)
        return True


class DeferralDoor:
    """``/async/{id}`` and ``/async/{id}/result``, with the keys that may ask the model."""

    def __init__(self, plane: DataPlane, control: ControlPlane) -> None:
        self._plane = plane
        self._control = control

    def knows(self, exchange: Exchange) -> bool:
        match exchange.segments:
            case ["async", id] | ["async", id, "result"]:
                return _ID.fullmatch(id) is not None
        return False

    async def refuse(self, exchange: Exchange, error: Exception) -> None:
        await errors.refuse(exchange, error)

    async def answer(self, exchange: Exchange) -> None:
        auth.admit(self._plane.access, exchange, "infer")
        _, id, *rest = exchange.segments
        within = auth.within(exchange)
        match [exchange.method, *rest]:
            case ["GET" | "HEAD"]:
                await _say(exchange, await self._control.deferral(id, within))
            case ["GET" | "HEAD", "result"]:
                await self._result(exchange, *await self._control.deferred_answer(id, within))
            case ["DELETE"]:
                said = await self._control.cancel_deferral(id, within)
                await (exchange.reply(204, [], b"") if said is None else _say(exchange, said))
            case _:
                raise MethodNotAllowed()

    async def _result(self, exchange: Exchange, said: dict[str, Any], answer: Answer | None) -> None:
        exchange.model, exchange.version = said["model"], said["version"] or ""
        if answer is None:
            return await _say(exchange, said, 202, [(b"retry-after", b"1")])
        sent = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers]
        exchange.yield_to(sent)
        sent.append((_STATE, said["state"].encode()))
        await exchange.reply(answer.status, sent, answer.body)


async def _say(exchange: Exchange, said: dict[str, Any], status: int = 200, headers: Headers | None = None) -> None:
    exchange.model, exchange.version = said["model"], said["version"] or ""
    sent = [JSON, (_STATE, said["state"].encode()), *(headers or ())]
    await exchange.reply(status, sent, orjson.dumps(said))


class Replay:
    """A door without a client before it: what was put aside goes in, what the door says comes out."""

    def __init__(self, door: Door, limit: int) -> None:
        self._door = door
        self._limit = limit  # bytes of an answer

    async def __call__(self, request: Request) -> Answer:
        """Cancelling it cancels the call."""
        said = _Said(self._limit)
        try:
            await self._door.answer(_exchange(request, said.receive(request.body), said.send))
            return said.answer(None)
        except Exception as error:
            if not isinstance(error, RelayError):
                log.error("%s failed: a fault of this server", request.request_id, exc_info=error)
            said = _Said(0)
            await self._door.refuse(_exchange(request, said.receive(b""), said.send), error)
            wait = error.retry_after if isinstance(error, Unavailable) and not isinstance(error, OfStep) else None
            return said.answer(wait)


class _Said:
    """An answer as it is said; one that is larger than ``limit`` bytes raises ResultTooLarge (0: no limit)."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._status = 0
        self._headers: Headers = []
        self._body = bytearray()

    def receive(self, body: bytes) -> Receive:
        pieces = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if not pieces:
                await asyncio.Event().wait()  # nobody leaves
            return pieces.pop()

        return receive

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], list(message["headers"])
            return
        self._body += message.get("body", b"")
        if 0 < self._limit < len(self._body):
            raise ResultTooLarge(self._limit)

    def answer(self, retry_after: int | None) -> Answer:
        kept = ((name.decode("latin-1"), v.decode("latin-1")) for name, v in self._headers if name not in _NOT_SAID)
        return Answer(self._status, tuple(kept), bytes(self._body), retry_after)


def _exchange(request: Request, receive: Receive, send: Send) -> Exchange:
    headers = dict(request.headers)
    headers.setdefault("x-request-priority", "low")
    if request.deadline is not None:
        headers[TIMEOUT] = str(max(request.deadline - time.time(), 0.001))
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": request.method,
        "path": request.path,
        "query_string": request.query.encode("latin-1"),
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()],
        "client": request.client,
    }
    exchange = Exchange(scope, receive, send)
    exchange.request_id = request.request_id
    return exchange
