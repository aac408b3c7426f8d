"""Asynchronous predictions over HTTP: ``Prefer: respond-async`` and the routes ``/async/{id}``.

The request is stored as it was received, and the same protocol answers it later, so that the response equals
the synchronous one. The preference is RFC 7240's. The header Idempotency-Key makes a repeated request return
the stored prediction.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import Any, get_args
from urllib.parse import parse_qsl

import orjson

from serve_app.control.api import ControlPlane
from serve_app.dataplane.data_plane import DataPlane
from serve_app.domain.access import CACHE_SALT
from serve_app.domain.async_prediction import (
    MAX_LISTED,
    AsyncPredictionDocument,
    State,
    StoredRequest,
    StoredResponse,
)
from serve_app.errors import (
    BadRequest,
    MethodNotAllowed,
    RelayError,
    ResultTooLarge,
    Unavailable,
    WorkflowStepError,
)
from serve_app.protocols.http import auth
from serve_app.protocols.http.exchange import (
    JSON,
    PRIORITY_HEADER,
    TIMEOUT_HEADER,
    Headers,
    HttpExchange,
    Receive,
    Send,
    parse_deadline,
    parse_limit,
    parse_priority,
)
from serve_app.protocols.http.router import ProtocolRouter
from serve_app.settings import Settings
from serve_app.telemetry.tracing import TRACEPARENT, TRACESTATE

_log = logging.getLogger(__name__)

WEBHOOK_HEADER = "x-torchrelay-webhook"
IDEMPOTENCY_KEY_HEADER = "idempotency-key"
_STATE_HEADER = b"x-torchrelay-state"
_MAX_KEY_LENGTH = 255
_ID = re.compile(r"[0-9a-f]{32}")
_RESPOND_ASYNC = re.compile(r"(?:^|[,;])\s*respond-async\s*(?:[,;=]|$)", re.IGNORECASE)
# Request headers that are not stored: credentials, and those of the transfer or of the 202 response.
_UNSTORED_REQUEST_HEADERS = {
    "authorization",
    "proxy-authorization",
    "prefer",
    IDEMPOTENCY_KEY_HEADER,
    WEBHOOK_HEADER,
    "content-length",
    "transfer-encoding",
    "accept-encoding",
}
# The response that delivers the result has its own values of these.
_UNSTORED_RESPONSE_HEADERS = {b"x-request-id", b"content-length"}


class AsyncInterceptor:
    """The check that turns a request with ``Prefer: respond-async`` into an async prediction.

    Without a control plane, or where async predictions are disabled, it intercepts nothing.
    """

    def __init__(self, plane: DataPlane, control: ControlPlane | None, settings: Settings) -> None:
        self._plane = plane
        self._control = control if settings.async_predictions.enabled else None
        self._max_body_size = settings.inference.max_request_size

    async def intercept(self, exchange: HttpExchange, model: str, version: str | None) -> bool:
        """Store a request that prefers an async response and answer 202 with its location.

        Returns False where the request is to be answered now.
        """
        headers = exchange.headers
        if self._control is None or not _RESPOND_ASYNC.search(headers["prefer"]):
            return False
        parse_priority(headers)  # raises before the request is stored
        deadline = parse_deadline(headers)
        self._plane.find_version(model, version)
        key = headers.get(IDEMPOTENCY_KEY_HEADER, "")
        if len(key) > _MAX_KEY_LENGTH:
            raise BadRequest(
                f"Header Idempotency-Key has {len(key)} characters; it may have {_MAX_KEY_LENGTH}."
            )
        scope, body = exchange.scope, await exchange.read_body(self._max_body_size)
        auth.check_again(self._plane.access, exchange)  # a revoked key owns nothing
        query = scope.get("query_string", b"").decode("latin-1")
        received = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        added = (CACHE_SALT,) if exchange.span is None else (CACHE_SALT, TRACEPARENT, TRACESTATE)
        received += [(name, headers[name]) for name in added if name in headers]
        fingerprint = "\n".join((exchange.method, exchange.path, query, headers.get("content-type", ""), ""))
        request = StoredRequest(
            model,
            version,
            exchange.method,
            exchange.path,
            query,
            tuple(header for header in received if header[0] not in _UNSTORED_REQUEST_HEADERS),
            body,
            exchange.request_id,
            tuple(scope["client"]) if scope.get("client") else None,
            deadline,
            key,
            sha256(fingerprint.encode("utf-8", "surrogatepass") + body).hexdigest() if key else "",
            headers.get(WEBHOOK_HEADER, ""),
            exchange.grant.name if exchange.grant is not None else "",
        )
        admission = self._plane.admit_key(exchange.grant)
        if admission is not None:  # its execution is limited by the queue of its owner
            admission.release()
        document = await self._control.api.submit_prediction(request)
        extra = [(b"location", document["self"].encode()), (b"preference-applied", b"respond-async")]
        await _send_document(exchange, document, 202, extra)
        return True


class AsyncRoutes:
    """The routes ``/async``, ``/async/{id}`` and ``/async/{id}/result``.

    A prediction is visible to its owner and to managers.
    """

    def __init__(
        self,
        plane: DataPlane,
        control: ControlPlane,
        send_error: Callable[[HttpExchange, Exception], Awaitable[None]],
    ) -> None:
        self._send_error = send_error
        self._plane = plane
        self._control = control

    def matches(self, exchange: HttpExchange) -> bool:
        match exchange.segments:
            case ["async"]:
                return True
            case ["async", id] | ["async", id, "result"]:
                return _ID.fullmatch(id) is not None
        return False

    async def send_error(self, exchange: HttpExchange, error: Exception) -> None:
        await self._send_error(exchange, error)

    async def handle(self, exchange: HttpExchange) -> None:
        auth.authorize(self._plane.access, exchange, "infer")
        if exchange.segments == ["async"]:
            return await self._list(exchange)
        _, id, *rest = exchange.segments
        grant = exchange.grant
        match [exchange.method, *rest]:
            case ["GET" | "HEAD"]:
                await _send_document(exchange, await self._control.api.get_prediction(id, grant))
            case ["GET" | "HEAD", "result"]:
                await self._send_result(exchange, *await self._control.api.get_prediction_result(id, grant))
            case ["DELETE"]:
                document = await self._control.api.cancel_prediction(id, grant)
                if document is None:
                    await exchange.send_response(204, [], b"")
                else:
                    await _send_document(exchange, document)
            case _:
                raise MethodNotAllowed()

    async def _list(self, exchange: HttpExchange) -> None:
        if exchange.method not in ("GET", "HEAD"):
            raise MethodNotAllowed()
        query = dict(parse_qsl(exchange.scope.get("query_string", b"").decode("latin-1")))
        limit, state = parse_limit(query.get("limit", "100"), MAX_LISTED), query.get("state", "")
        if state and state not in get_args(State):
            raise BadRequest(f"state is {state[:80]!r}; it must be one of {', '.join(get_args(State))}.")
        model = query.get("model", "")
        found = await self._control.api.list_predictions(exchange.grant, limit, model, state)
        await exchange.send_response(200, [JSON], orjson.dumps({"predictions": found}))

    async def _send_result(
        self, exchange: HttpExchange, document: AsyncPredictionDocument, response: StoredResponse | None
    ) -> None:
        exchange.model, exchange.version = document["model"], document["version"] or ""
        if response is None:
            return await _send_document(exchange, document, 202, [(b"retry-after", b"1")])
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response.headers]
        exchange.override_defaults(headers)
        headers.append((_STATE_HEADER, document["state"].encode()))
        await exchange.send_response(response.status, headers, response.body)


async def _send_document(
    exchange: HttpExchange,
    document: AsyncPredictionDocument,
    status: int = 200,
    headers: Headers | None = None,
) -> None:
    exchange.model, exchange.version = document["model"], document["version"] or ""
    all_headers = [JSON, (_STATE_HEADER, document["state"].encode()), *(headers or ())]
    await exchange.send_response(status, all_headers, orjson.dumps(document))


class RequestReplayer:
    """A caller of a router that passes a stored request in and returns the response to store.

    Cancelling the coroutine cancels the request. ``max_response_size`` is in bytes.
    """

    def __init__(self, router: ProtocolRouter, max_response_size: int) -> None:
        self._router = router
        self._max_response_size = max_response_size

    async def __call__(self, request: StoredRequest) -> StoredResponse:
        response = _RecordedResponse(self._max_response_size)
        try:
            await self._router.handle(_exchange(request, _receive(request.body), response.send))
            return response.to_stored(None)
        except Exception as error:
            if not isinstance(error, RelayError):
                _log.error(
                    "Async request %s failed: a fault of this server", request.request_id, exc_info=error
                )
            response = _RecordedResponse(0)
            await self._router.send_error(_exchange(request, _receive(b""), response.send), error)
            retry_after = (
                error.retry_after
                if isinstance(error, Unavailable) and not isinstance(error, WorkflowStepError)
                else None
            )
            return response.to_stored(retry_after)


def _receive(body: bytes) -> Receive:
    """Return an ASGI ``receive`` of one body, whose client never disconnects."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    return receive


class _RecordedResponse:
    """A response recorded from its ASGI messages.

    A body of more than ``max_size`` bytes (0: no limit) raises ResultTooLarge.
    """

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._status = 0
        self._headers: Headers = []
        self._body = bytearray()

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], list(message["headers"])
            return
        self._body += message.get("body", b"")
        if 0 < self._max_size < len(self._body):
            raise ResultTooLarge(self._max_size)

    def to_stored(self, retry_after: int | None) -> StoredResponse:
        headers = (
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in self._headers
            if name not in _UNSTORED_RESPONSE_HEADERS
        )
        return StoredResponse(self._status, tuple(headers), bytes(self._body), retry_after)


def _exchange(request: StoredRequest, receive: Receive, send: Send) -> HttpExchange:
    headers = dict(request.headers)
    headers.setdefault(PRIORITY_HEADER, "low")
    if request.deadline is not None:
        headers[TIMEOUT_HEADER] = str(max(request.deadline - time.time(), 0.001))
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": request.method,
        "path": request.path,
        "query_string": request.query.encode("latin-1"),
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()],
        "client": request.client,
    }
    exchange = HttpExchange(scope, receive, send)
    exchange.request_id = request.request_id
    return exchange
