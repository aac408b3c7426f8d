"""Predictions over a WebSocket: each message is a request, and each chunk of its response a message back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from serve_app.dataplane.data_plane import DataPlane
from serve_app.domain import exact_json
from serve_app.domain.access import KeyGrant
from serve_app.domain.request import InferenceRequest, InputPart, ResponseStream
from serve_app.errors import (
    MissingParameter,
    ModelNotAllowed,
    RelayError,
    RequestTooLarge,
    ResourceNotFound,
    get_reason,
)
from serve_app.protocols.http import auth, form_data, json_errors
from serve_app.protocols.http.exchange import (
    HttpExchange,
    Receive,
    Scope,
    Send,
    clamp_status,
    parse_deadline,
    parse_priority,
    uuid4,
)
from serve_app.protocols.http.port_rules import PortRules
from serve_app.protocols.http.server.websocket_protocol import ON_STOP
from serve_app.settings import Settings
from serve_app.telemetry import tracing
from serve_app.telemetry.access_log import AccessLog

_log = logging.getLogger(__name__)

_MAX_QUEUED_MESSAGES = 16  # of one connection, behind the request that is processed
_MESSAGE_TOO_BIG, _POLICY_VIOLATION, _SERVICE_RESTART = 1009, 1008, 1012  # RFC 6455, 7.4.1
_CLIENT_CLOSED_REQUEST = 499
_INVOCATIONS = "invocations-bidirectional-stream"  # of SageMaker


class WebSocketRoutes:
    """The WebSocket ``/predictions/{model}[/{version}]``, whose requests are processed one after the other.

    SageMaker's ``/invocations-bidirectional-stream`` is the same for the model that its query names, or for
    the only one of the start-up.

    A text message that starts as a JSON object or list is JSON, any other text message is text, and a binary
    message is bytes; the handshake's Content-Type overrides all three. The response is a message for each
    chunk, text where the chunk is UTF-8, and then ``{"end": {"status", "request_id", "version", "chunks"}}``,
    with an ``error`` after a failure. Closing the connection cancels the request that is processed. A server
    that stops closes it with code 1012 after the requests that it has received.
    Each request is counted by ``count_response`` and logged in ``access_log``, as an HTTP request is.
    """

    def __init__(
        self,
        plane: DataPlane,
        settings: Settings,
        count_response: Callable[[int], None],
        access_log: AccessLog | None,
        rules: PortRules,
    ) -> None:
        self._plane = plane
        self._rules = rules
        self._max_message_size = settings.inference.max_request_size
        self._handler_errors = settings.inference.handler_errors
        self._count_response = count_response
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_http_response(message: Any) -> None:
            await send({**message, "type": f"websocket.{message['type']}"})

        handshake = {**scope, "method": "WEBSOCKET"}
        exchange = HttpExchange(handshake, receive, send_http_response, proxies=self._rules.proxies)
        await receive()  # websocket.connect
        try:
            authorization = exchange.headers.get("authorization")
            self._check(exchange)
        except RelayError as error:
            if "websocket.http.response" in scope.get("extensions", ()):
                return await json_errors.send_error(exchange, error, self._handler_errors)
            return await send({"type": "websocket.close", "code": 1008, "reason": str(error)[:100]})
        await send({"type": "websocket.accept", "headers": []})
        session = _WebSocketSession(self, exchange, authorization, send)
        if (set_on_stop := scope.get("extensions", {}).get(ON_STOP)) is not None:
            set_on_stop(session.stop)
        try:
            await session.receive_messages(receive, self._max_message_size)
        finally:
            await session.close()

    def _check(self, exchange: HttpExchange) -> None:
        """Check the handshake as an HTTP request without its body. Raises RelayError."""
        self._rules.cross_site.check(exchange.method, exchange.path, exchange.headers)
        auth.authorize(self._plane.access, exchange, "infer")
        segments = exchange.segments
        if segments == [_INVOCATIONS]:
            exchange.model = self._select_invoked_model(exchange)
        elif len(segments) > 1 and segments[0] == "predictions":
            exchange.model, exchange.version = segments[1], segments[2] if len(segments) > 2 else ""
        else:
            raise ResourceNotFound()
        exchange.headers |= {"url_path": "/".join(segments[3:]), "explain": "False"}
        auth.require_model(exchange, exchange.model)
        parse_deadline(exchange.headers), parse_priority(exchange.headers)
        self._plane.find_version(exchange.model, exchange.version or None)

    def _select_invoked_model(self, exchange: HttpExchange) -> str:
        """Return the model that the query names, else the only one that was loaded at startup."""
        query = form_data.parse_query(exchange.scope.get("query_string", b""))
        names = [part.value.decode("utf-8", "replace") for part in query if part.name == "model_name"]
        model = names[0] if names else self._plane.startup_model
        if not model:
            raise MissingParameter("model_name")
        return model

    async def infer(self, session: _WebSocketSession, request_id: str, part: InputPart) -> None:
        """Run one request and send its response. Raises RelayError."""
        exchange = session.exchange
        access = self._plane.access
        grant = None
        # The key may have expired or been revoked since the last message.
        if access is not None:
            grant = auth.resolve_grant(access, session.authorization, "infer")
            if not grant.covers(exchange.model):
                raise ModelNotAllowed(exchange.model)
        headers = dict(exchange.headers)
        span = tracing.begin_request("WebSocket", "/predictions", headers, request_id)
        with tracing.ended(span):
            await self._infer(session, request_id, part, headers, grant)

    async def _infer(
        self,
        session: _WebSocketSession,
        request_id: str,
        part: InputPart,
        headers: dict[str, str],
        grant: KeyGrant | None,
    ) -> None:
        exchange = session.exchange
        deadline, priority = parse_deadline(headers), parse_priority(headers)
        version = exchange.version or None
        request = InferenceRequest(
            exchange.model, version, (part,), headers, "predict", request_id, deadline, priority
        )
        response = await self._plane.infer(request, grant)
        if isinstance(response, ResponseStream):
            head = response.head
            session.start_response(head.version, clamp_status(head.status), head.arm)
            try:
                async for chunk in response:
                    await session.send_chunk(chunk)
            finally:
                await response.aclose()
        else:
            session.start_response(response.version, clamp_status(response.status), response.arm)
            await session.send_chunk(response.body)

    def describe_error(self, error: Exception, request_id: str) -> tuple[int, dict[str, Any]]:
        """Return the status of an error and its fields in the end message."""
        fields: dict[str, Any] = {"reason": get_reason(error)}
        if isinstance(error, RelayError):
            if error.retry_after is not None:
                fields["retry_after"] = error.retry_after
        else:
            _log.error("%s failed: a fault of this server", request_id, exc_info=error)
        document = json_errors.to_document(error, request_id, self._handler_errors)
        fields["error"] = document or {"message": str(error)}
        return json_errors.look_up(error)[0], fields

    def record(
        self, exchange: HttpExchange, status: int, seconds: float, request_id: str, version: str
    ) -> None:
        """Count a request and log it."""
        self._count_response(status)
        if self._access_log is not None:
            self._access_log.write(
                exchange.client,
                exchange.method,
                exchange.path,
                exchange.scope.get("http_version", "1.1"),
                status,
                seconds * 1000,
                request_id,
                exchange.model,
                version,
                None,
                "" if exchange.grant is None else exchange.grant.name,
            )


class _WebSocketSession:
    """One connection, with a queue of messages; one request is processed at a time."""

    def __init__(
        self, routes: WebSocketRoutes, exchange: HttpExchange, authorization: str | None, send: Send
    ) -> None:
        self.exchange = exchange
        self.authorization = authorization
        self._routes = routes
        self._send = send
        self._queue: asyncio.Queue[InputPart | None] = asyncio.Queue()  # None: the server stops
        self._is_stopping = False
        self._queued_bytes = 0
        self._chunks_sent = 0  # of the current response
        self._head: dict[str, Any] = {}
        self._worker = asyncio.ensure_future(self._process_queue())

    async def receive_messages(self, receive: Receive, max_size: int) -> None:
        """Queue messages until the client disconnects or exceeds a limit."""
        while True:
            message = await receive()
            if message["type"] == "websocket.disconnect":
                return
            if self._is_stopping:
                continue
            part = self._to_part(message)
            if len(part.value) > max_size:
                return await self._close_with(_MESSAGE_TOO_BIG, f"{RequestTooLarge(max_size)}")
            self._queued_bytes += len(part.value)
            if self._queue.qsize() >= _MAX_QUEUED_MESSAGES or self._queued_bytes > 2 * max_size:
                explanation = (
                    f"More than {_MAX_QUEUED_MESSAGES} requests, or {2 * max_size} bytes of them, wait: "
                    "wait for their ends."
                )
                return await self._close_with(_POLICY_VIOLATION, explanation)
            self._queue.put_nowait(part)

    def stop(self) -> None:
        """Close the connection after the requests that have been received."""
        if not self._is_stopping:
            self._is_stopping = True
            self._queue.put_nowait(None)

    async def close(self) -> None:
        self._worker.cancel()
        await asyncio.wait((self._worker,))

    def start_response(self, version: str, status: int, arm: str) -> None:
        """Store the fields of the end message that are known when the response starts."""
        self._head = {"version": version, "status": status}
        if arm:
            self._head["arm"] = arm

    async def send_chunk(self, chunk: bytes) -> None:
        """Send one chunk; this waits for a client that reads slowly."""
        if chunk:
            self._chunks_sent += 1
            try:
                await self._send({"type": "websocket.send", "text": chunk.decode()})
            except UnicodeDecodeError:
                await self._send({"type": "websocket.send", "bytes": chunk})

    def _to_part(self, message: Any) -> InputPart:
        text = message.get("text")
        content_type = self.exchange.headers.get("content-type")
        if text is None:
            return InputPart("body", message["bytes"], content_type)
        is_json = text.lstrip()[:1] in ("{", "[")
        content_type = content_type or ("application/json" if is_json else "text/plain")
        return InputPart("body", text.encode("utf-8", "replace"), content_type)

    async def _process_queue(self) -> None:
        while True:
            part = await self._queue.get()
            if part is None:
                with contextlib.suppress(OSError):
                    await self._close_with(_SERVICE_RESTART, "The server stops. Connect again.")
                return
            request_id, started_at = uuid4(), time.perf_counter()
            self._chunks_sent, self._head = 0, {"version": self.exchange.version, "status": 200}
            status = _CLIENT_CLOSED_REQUEST
            error_fields: dict[str, Any] = {}
            try:
                try:
                    await self._routes.infer(self, request_id, part)
                    status = self._head["status"]
                except OSError:  # the client has disconnected
                    return
                except Exception as error:
                    status, error_fields = self._routes.describe_error(error, request_id)
                    self._head["version"] = getattr(error, "selected_version", "") or self._head["version"]
                finally:
                    self._queued_bytes -= len(part.value)
                    seconds = time.perf_counter() - started_at
                    self._routes.record(self.exchange, status, seconds, request_id, self._head["version"])
                end = {
                    **self._head,
                    "status": status,
                    "request_id": request_id,
                    "chunks": self._chunks_sent,
                    **error_fields,
                }
                await self._send({"type": "websocket.send", "text": exact_json.dumps({"end": end}).decode()})
            except OSError:
                return

    async def _close_with(self, code: int, reason: str) -> None:
        await self._send({"type": "websocket.close", "code": code, "reason": reason[:120]})
