"""Predictions without an ASGI task: a request is answered by the callback that receives its response.

An ASGI task and its futures cost 60 µs for each request, several times the work of a small model. This path
has no rule of its own. A request is recognised by its head; what the path does not support is passed to the
ASGI application from its start.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol
from urllib.parse import unquote

from serve_app.dataplane.data_plane import DataPlane
from serve_app.domain.request import Cancel, InferenceRequest, InferenceResponse, Outcome, ResponseStream
from serve_app.errors import RelayError
from serve_app.protocols.http.exchange import (
    BODYLESS_STATUSES,
    Headers,
    HttpExchange,
    ParsedHead,
    Receive,
    Scope,
    Send,
)
from serve_app.protocols.http.large_body import LARGE_BODY_BYTES
from serve_app.protocols.http.sse import EVENT_STREAM

Rendered = tuple[int, Headers, bytes]  # status, headers without the framing, body


class CallbackRoute(Protocol):
    """A route of predictions, in steps that do not wait."""

    def authorize(self, exchange: HttpExchange) -> bool:
        """Check the key and the model of a request by its head; return False where it needs a task.

        Raises AccessDenied.
        """

    def parse(self, exchange: HttpExchange, body: bytes) -> InferenceRequest | None:
        """Return the request; None where it needs a task. Raises RelayError."""

    def render(self, exchange: HttpExchange, response: InferenceResponse) -> Rendered | None:
        """Return the response to send; None where that needs a task. Raises RelayError."""

    def render_error(self, exchange: HttpExchange, error: Exception) -> Rendered:
        """Return the error response to send."""

    async def send(self, exchange: HttpExchange, response: InferenceResponse | ResponseStream) -> None:
        """Send a stream, or a response that needs a task."""


class Connection(Protocol):
    """The connection of a request, as its callback sees it."""

    def send_response(self, status: int, headers: bytes, body: bytes) -> None:
        """Send the whole response; ``headers`` are its lines."""

    def run_task(self, scope: Scope, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        """Answer the request in an ASGI task instead."""


class Finish(Protocol):
    """The end of a request in the application of the port: it is counted and logged."""

    def __call__(self, exchange: HttpExchange, started_at: float) -> None: ...


class CallbackApp:
    """The routes of one port that need no task, by the first segment of their paths.

    ``max_body_size`` is the limit in bytes; tasks parse bodies of more than a MiB, in a thread.
    ``accept`` returns the exchange of a request, and raises RelayError where the port's rules refuse it.
    ``finish`` ends an exchange; ``run`` does so around a task.
    """

    def __init__(
        self,
        plane: DataPlane,
        max_body_size: int,
        routes: Mapping[str, CallbackRoute],
        accept: Callable[[Scope, ParsedHead], HttpExchange],
        finish: Finish,
        run: Callable[[HttpExchange, float, Awaitable[None]], Awaitable[None]],
    ) -> None:
        self.prefixes = tuple(f"/{segment}".encode() for segment in routes)
        self.plane = plane
        self.max_body_size = min(max_body_size, LARGE_BODY_BYTES)
        self.finish = finish
        self.run = run
        self._routes = routes
        self._accept = accept

    def begin(self, scope: Scope, head: ParsedHead, connection: Connection) -> CallbackRequest | None:
        """Return the request of a POST whose head is complete; None where it needs a task."""
        started_at = time.perf_counter()
        try:
            exchange = self._accept(scope, head)
            headers, length = exchange.headers, head.content_length
            if length is None or length > self.max_body_size:
                return None
            if "prefer" in headers or EVENT_STREAM in headers.get("accept", ""):
                return None
            route = self._routes.get(exchange.segments[0])
            if route is None or not route.authorize(exchange):
                return None
        except RelayError:  # the task's response has the error
            return None
        return CallbackRequest(self, route, exchange, connection, started_at)


class CallbackRequest:
    """A request of a connection, from its head to its response."""

    __slots__ = ("_app", "_cancel", "_connection", "_exchange", "_route", "_started_at")

    def __init__(
        self,
        app: CallbackApp,
        route: CallbackRoute,
        exchange: HttpExchange,
        connection: Connection,
        started_at: float,
    ) -> None:
        self._app = app
        self._route = route
        self._exchange = exchange
        self._connection = connection
        self._started_at = started_at
        self._cancel: Cancel | None = None

    def submit(self, body: bytes) -> bool:
        """Run the request; return False where it needs a task."""
        exchange = self._exchange
        try:
            request = self._route.parse(exchange, body)
            if request is None:
                return False
            cancel = self._app.plane.submit(request, self._complete, exchange.grant)
        except RelayError as error:
            self._send_error(error)
        else:
            if not exchange.status:
                self._cancel = cancel
        return True

    def cancel(self) -> None:
        """Withdraw the request of a client that disconnected."""
        cancel, self._cancel = self._cancel, None
        if cancel is not None:
            cancel()
        self._app.finish(self._exchange, self._started_at)

    def _complete(self, outcome: Outcome) -> None:
        self._cancel = None
        try:
            if isinstance(outcome, InferenceResponse):
                self._exchange.version = outcome.version
                rendered = self._route.render(self._exchange, outcome)
                if rendered is not None:
                    self._send(rendered)
                    return
            if isinstance(outcome, Exception):
                self._send_error(outcome)
            else:
                self._send_in_task(outcome)
        except Exception as error:  # it must not reach the batcher and the other requests of the batch
            self._send_error(error)

    def _send_error(self, error: Exception) -> None:
        exchange = self._exchange
        if isinstance(error, RelayError):
            exchange.version = error.selected_version or exchange.version
        else:
            exchange.log_fault(error)
        self._send(self._route.render_error(exchange, error))

    def _send(self, rendered: Rendered) -> None:
        status, headers, body = rendered
        exchange = self._exchange
        body = b"" if status in BODYLESS_STATUSES else body
        self._connection.send_response(status, exchange.encode_headers(status, headers, body), body)
        exchange.status = status
        self._app.finish(exchange, self._started_at)

    def _send_in_task(self, response: InferenceResponse | ResponseStream) -> None:
        async def send(scope: Scope, receive: Receive, send: Send) -> None:
            self._exchange.attach(receive, send)
            await self._app.run(self._exchange, self._started_at, self._route.send(self._exchange, response))

        self._connection.run_task(self._exchange.scope, send)


def create_scope(scope: dict[str, Any], root_path: str, url: bytes) -> dict[str, Any]:
    """Complete the ASGI scope of a POST, as uvicorn does."""
    path, _, query = url.partition(b"?")
    scope["method"] = "POST"
    text = path.decode("ascii")
    scope["path"] = root_path + (unquote(text) if "%" in text else text)
    scope["raw_path"] = root_path.encode("ascii") + path
    scope["query_string"] = query
    return scope
