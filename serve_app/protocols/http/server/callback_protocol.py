"""The uvicorn protocol that passes predictions to a CallbackApp, and every other request to an ASGI task."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from serve_app.protocols.http.exchange import ParsedHead, Receive, Scope, Send
from serve_app.protocols.http.server.callback_app import CallbackApp, CallbackRequest, create_scope

_MAX_HEADS = 512
_MAX_BYTES = 2048  # of one head


class HeadCache:
    """The heads of recent requests, by their bytes and without the connection's own values.

    Clients send the same head many times, up to its last byte. A request that arrives in one piece, with a
    head that is known, needs no parser: it saves 8 µs of 20. Heads of one client differ where it sends an id
    with each request; they are parsed, and push older ones out.
    """

    def __init__(self) -> None:
        self._heads: dict[bytes, tuple[ParsedHead, int]] = {}

    def find(self, data: bytes) -> tuple[ParsedHead, bytes] | None:
        """Return the head and the body of the whole message in ``data``; None where its head is unknown."""
        end = data.find(b"\r\n\r\n", 0, _MAX_BYTES)
        found = self._heads.get(data[:end]) if end > 0 else None
        if found is None or len(data) != end + 4 + found[1]:
            return None
        return found[0], data[end + 4 :]

    def add(self, data: bytes, scope: Scope, body: bytes) -> None:
        """Store the head of ``data``, if that is one whole message with ``body`` and has its length."""
        end = len(data) - len(body) - 4
        if not 0 < end <= _MAX_BYTES or data[end : end + 4] != b"\r\n\r\n" or not data.endswith(body):
            return
        headers = scope["headers"]
        lengths = [value for name, value in headers if name == b"content-length"]
        if lengths != [b"%d" % len(body)] or any(name == b"transfer-encoding" for name, _ in headers):
            return
        if len(self._heads) >= _MAX_HEADS:
            del self._heads[next(iter(self._heads))]
        self._heads[data[:end]] = ParsedHead({**scope, "client": None, "state": {}}), len(body)


_callback_app: CallbackApp | None = None
_heads = HeadCache()


def set_callback_app(app: CallbackApp | None) -> None:
    """Answer predictions at this process's HTTP ports with ``app``; None: with ASGI tasks."""
    global _callback_app
    _callback_app = app


class CallbackState(enum.Enum):
    """The state of a connection's request that needs no ASGI task, or a task for its stream only."""

    IDLE = enum.auto()  # there is none
    RECEIVING = enum.auto()  # its body is being received
    RUNNING = enum.auto()  # it waits for its response
    STREAMING = enum.auto()  # a task sends its response


class _PipelineFlow(FlowControl):
    """A flow control that reads nothing while pipelined requests wait.

    uvicorn reads on after each response, and one read can contain thousands of requests.
    """

    def __init__(self, transport: asyncio.Transport, pipeline: Collection[object]) -> None:
        super().__init__(transport)
        self._pipeline = pipeline

    def resume_reading(self) -> None:
        if not self._pipeline:
            super().resume_reading()


class CallbackProtocol(HttpToolsProtocol):
    """uvicorn's protocol with one request at most that is answered by a callback.

    A request that arrives behind it on the same connection waits in uvicorn's pipeline, as behind a task.
    """

    transport: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._state = CallbackState.IDLE
        self._request: CallbackRequest | None = None  # while RECEIVING and RUNNING
        self._stream: RequestResponseCycle | None = None  # while STREAMING
        self._chunks: list[bytes] = []  # of the body
        self._data = b""  # of the present read
        self._size = 0
        self._is_stopping = False

    @property
    def awaits_callback(self) -> bool:
        """True while a request without a task, or the task of its stream, is not complete."""
        return self._state in (CallbackState.RUNNING, CallbackState.STREAMING)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow = _PipelineFlow(transport, self.pipeline)

    def connection_lost(self, exc: Exception | None) -> None:
        request, self._request = self._request, None
        if request is not None:
            self._state = CallbackState.IDLE
            request.cancel()
        if self._stream is not None:
            self._stream.disconnected = True
            self._stream.message_event.set()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        if self._stream is not None:
            self._stream.keep_alive = False
        elif self._state is CallbackState.RUNNING:
            self._is_stopping = True
        else:
            super().shutdown()

    def accept_message(self, data: bytes) -> bool:
        """Start the request in ``data``, which follows a whole message, if its head is known and it is whole.

        Return False where the data has to be parsed.
        """
        self._data = data
        app = _callback_app
        if app is None or not self._is_ready or (found := _heads.find(data)) is None:
            return False
        head, body = found
        request = app.begin({**head.scope, "client": self.client, "scheme": self.scheme}, head, self)
        if request is None or not self._submit(request, body):
            return False
        self._unset_keepalive_if_required()
        return True

    @property
    def _is_ready(self) -> bool:
        """True when nothing is in progress on this connection, so that a callback may answer next."""
        cycle = self.cycle
        return not (
            self._state is not CallbackState.IDLE
            or (cycle is not None and not cycle.response_complete)
            or self.pipeline
            or self.flow.write_paused  # a task waits until the client has read
            or self.limit_concurrency is not None
        )

    def _submit(self, request: CallbackRequest, body: bytes) -> bool:
        self._state, self._request = CallbackState.RUNNING, request  # the response may be there at once
        if request.submit(body):
            return True
        self._state, self._request = CallbackState.IDLE, None
        return False

    def on_headers_complete(self) -> None:
        request = None if _callback_app is None else self._begin(_callback_app)
        if request is None:
            super().on_headers_complete()
        else:
            self._state, self._request = CallbackState.RECEIVING, request

    def on_body(self, body: bytes) -> None:
        if self._state is not CallbackState.RECEIVING:
            super().on_body(body)
            return
        self._chunks.append(body)
        self._size += len(body)
        if _callback_app is None or self._size > _callback_app.max_body_size:
            self._continue_in_task()

    def on_message_complete(self) -> None:
        if self._state is CallbackState.RECEIVING:
            request = self._request
            assert request is not None
            body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
            if self._submit(request, body):
                _heads.add(self._data, self.scope, body)
                self._chunks.clear()
                self._size = 0
                return
            self._continue_in_task()
        super().on_message_complete()

    def _begin(self, app: CallbackApp) -> CallbackRequest | None:
        """Return the request whose head is complete, where it may be answered by a callback."""
        url, parser = self.url, self.parser
        if (
            not url.startswith(app.prefixes)
            or parser.get_method() != b"POST"
            or parser.get_http_version() != "1.1"
            or not parser.should_keep_alive()
            or parser.should_upgrade()
            or self.expect_100_continue
            or b"%" in url
            or b"#" in url
            or not url.isascii()
            or not self._is_ready
        ):
            return None
        scope = create_scope(self.scope, self.root_path, url)
        return app.begin(scope, ParsedHead(scope), self)

    def _continue_in_task(self) -> None:
        """Pass the request, with what is here of its body, to the ASGI application."""
        body = b"".join(self._chunks)
        self._state, self._request = CallbackState.IDLE, None
        self._chunks.clear()
        self._size = 0
        super().on_headers_complete()
        if body:
            super().on_body(body)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self.awaits_callback and cycle is not self._stream:
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, app))
        else:
            super()._start_asgi_task(cycle, app)

    # The connection of a CallbackRequest

    def send_response(self, status: int, headers: bytes, body: bytes) -> None:
        self._state, self._request = CallbackState.IDLE, None
        if self.transport.is_closing():
            return
        start = b"".join(b"%s: %s\r\n" % header for header in self.server_state.default_headers)
        end = b"connection: close\r\n\r\n" if self._is_stopping else b"\r\n"
        self.transport.write_response(STATUS_LINE[status] + start + headers + end, body)
        if self._is_stopping:
            self.transport.close()
        self._continue()

    def run_task(self, scope: Scope, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._state, self._request = CallbackState.STREAMING, None
        self._stream = RequestResponseCycle(
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=not self._is_stopping,
            on_response=self._on_stream_complete,
        )
        self._stream.more_body = False
        self._start_asgi_task(self._stream, app)

    def _on_stream_complete(self) -> None:
        self._state, self._stream = CallbackState.IDLE, None
        self.on_response_complete()

    def _continue(self) -> None:
        """Go on with the connection, as uvicorn does after a response.

        A timer of an idle connection would cost 2 µs for each request: a check of all connections closes it.
        """
        self.server_state.total_requests += 1
        if self.pipeline and not self.transport.is_closing():
            self.flow.resume_reading()
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)
