"""The uvicorn protocol of our ports. Predictions go to a CallbackApp, every other request to an ASGI task.

It writes a whole response with one system call, and limits slow and large clients.

uvicorn writes the head of a response and its body separately, and uvloop writes at once. That makes two
system calls per response, each of which wakes the reader: HAProxy, on every request.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import resource
from collections.abc import Awaitable, Callable, Collection
from http import HTTPStatus
from typing import Any
from weakref import WeakSet

import orjson
import uvicorn.config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from serve_app.protocols.http.exchange import ParsedHead, Receive, Scope, Send
from serve_app.protocols.http.server.callback_app import CallbackApp, CallbackRequest, create_scope
from serve_app.protocols.http.server.unix_listener import LOCAL_PEER, is_stopping

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


class _DefaultLines:
    """The lines of a port's default headers, which uvicorn replaces once a second, with the date."""

    def __init__(self) -> None:
        self._headers: list[tuple[bytes, bytes]] = []
        self._lines = b""

    def get(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        if headers is not self._headers:
            self._lines = b"".join([b"%s: %s\r\n" % header for header in headers])
            self._headers = headers
        return self._lines


_default_lines = _DefaultLines()


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

    client: tuple[str, int] | None
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
        """Close the connection after the response to the request in progress, also where its body arrives."""
        self._is_stopping = True
        if self._stream is not None:
            self._stream.keep_alive = False
        elif self._state is CallbackState.IDLE:
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
            self._begin_task()
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
            not (url.startswith(app.prefixes) or b"%" in url)
            or parser.get_method() != b"POST"
            or parser.get_http_version() != "1.1"
            or not parser.should_keep_alive()
            or parser.should_upgrade()
            or self.expect_100_continue
            or b"#" in url
            or not url.isascii()
            or not self._is_ready
        ):
            return None
        scope = create_scope(self.scope, self.root_path, url)
        path: str = scope["path"][len(self.root_path) :]  # whose escapes are decoded
        if not path.encode().startswith(app.prefixes):
            return None
        return app.begin(scope, ParsedHead(scope), self)

    def _begin_task(self) -> None:
        """Pass the request whose head is complete to the ASGI application."""
        super().on_headers_complete()
        if self._is_stopping and self.cycle is not None:
            self.cycle.keep_alive = False

    def _continue_in_task(self) -> None:
        """Pass the request, with what is here of its body, to the ASGI application."""
        body = b"".join(self._chunks)
        self._state, self._request = CallbackState.IDLE, None
        self._chunks.clear()
        self._size = 0
        self._begin_task()
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
        start = _default_lines.get(self.server_state.default_headers)
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


_MAX_BUFFERED_BYTES = 1 << 16  # larger writes are sent at once, and not copied


class CoalescingTransport:
    """A transport that buffers writes until ``flush``, or until the event loop has run what is ready."""

    __slots__ = (
        "_chunks",
        "_flush_handle",
        "_loop",
        "_size",
        "_transport",
        "get_extra_info",
        "is_closing",
        "written",
    )

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._chunks: list[bytes] = []
        self._size = 0
        self.written = 0  # bytes that were passed to the transport
        self._flush_handle: asyncio.Handle | None = None
        self.get_extra_info = transport.get_extra_info
        self.is_closing = transport.is_closing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._flush_handle is None:
            # The head of a stream is sent although its first chunk may take long.
            self._flush_handle = self._loop.call_soon(self.flush)
        self._chunks.append(data)
        self._size += len(data)
        if self._size > _MAX_BUFFERED_BYTES:
            self.flush()

    def write_response(self, head: bytes, body: bytes) -> None:
        """Write a whole response at once."""
        self.flush()
        size = len(head) + len(body)
        self.written += size
        if size > _MAX_BUFFERED_BYTES:
            self._transport.writelines((head, body))
        else:
            self._transport.write(head + body)

    def flush(self) -> None:
        """Write the buffered data."""
        if self._flush_handle is None:
            return
        self._flush_handle.cancel()
        chunks, self._chunks, self._flush_handle = self._chunks, [], None
        if self.is_closing():  # the peer has disconnected meanwhile
            pass
        elif self._size > _MAX_BUFFERED_BYTES:
            self._transport.writelines(chunks)
        else:
            self._transport.write(b"".join(chunks))
        self.written += self._size
        self._size = 0

    def close(self) -> None:
        """Write the buffered data, then close the connection."""
        self.flush()
        self._transport.close()

    def unwrap(self) -> asyncio.Transport:
        """Write the buffered data and return the transport itself, for users that write whole messages."""
        self.flush()
        return self._transport


MAX_HEAD_BYTES = 1 << 16
MAX_HEADERS = 100
HEAD_TIMEOUT_S = 10.0  # also from the connection's start to its first request
BODY_TIMEOUT_S = 20.0  # in which at least MIN_BODY_BYTES must arrive
MIN_BODY_BYTES = 4096
WRITE_TIMEOUT_S = 60.0  # in which the client must read something of a response
_CHECK_PERIOD_S = 1.0
# For which a stopping port reads idle connections. A request may be in the kernel's buffer, and HAProxy does
# not repeat it when the connection is closed.
_IDLE_CLOSE_DELAY_S = 0.2
_LINGER_S = 1.0  # for which the rest of a refused message is read and dropped
_MAX_OVERHEAD = MAX_HEAD_BYTES + (1 << 18)  # of framing; a read of the event loop has up to 256 KiB
_OVERHEAD_FACTOR = 16  # chunks of one byte have five bytes of framing each


def install() -> None:
    """Make servers that this process starts from now on use this protocol."""
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{HttpProtocol.__name__}"


class _Refused(Exception):
    """A head beyond the limits, raised inside a callback of the parser."""


class ReceiveState(enum.Enum):
    """The part of a message that a connection receives."""

    NEW = enum.auto()  # nothing yet
    HEAD = enum.auto()
    BODY = enum.auto()
    BETWEEN = enum.auto()  # every message that began is complete


class HttpProtocol(CallbackProtocol):
    """uvicorn's protocol over a transport that buffers writes until a response is complete.

    It limits what a client may send and how slowly. A timer of the port looks at every connection once a
    second, so that a request costs no timer of its own.
    """

    transport: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._receives = ReceiveState.NEW
        self._events = 0  # beginnings and ends of heads and bodies
        self._chunk = self._received = self._body = 0  # bytes: just read, of this message, of its body
        self._is_refused = False
        # At the last check at which the client had made progress: the time, and how far it had come.
        self._progress_at = 0.0
        self._progress: tuple[int, int, int] = (-1, 0, 0)

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(CoalescingTransport(transport, self.loop))
        if self.client is None:
            self.client = LOCAL_PEER
        if len(self.connections) > max_connections():
            self._refuse(503, "The port has too many connections.")
        if is_stopping(self.server_state):  # it was in the queue of the listener
            self.shutdown()
        if self.server_state not in _checked_ports:
            _checked_ports.add(self.server_state)
            self.loop.call_later(_CHECK_PERIOD_S, _check_connections, self.server_state, self.loop)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._chunk = len(data)
        if self._receives in _BETWEEN_MESSAGES and self.accept_message(data):
            self._advance(ReceiveState.BETWEEN)
            return
        self._received += self._chunk
        super().data_received(data)
        if self._received > MAX_HEAD_BYTES:
            self._check_size()

    def shutdown(self) -> None:
        if self._is_idle and self._state is CallbackState.IDLE:
            self._is_stopping = True
            self.loop.call_later(_IDLE_CLOSE_DELAY_S, self._close_idle)
        else:
            super().shutdown()

    def _close_idle(self) -> None:
        if self._receives in _BETWEEN_MESSAGES:
            super().shutdown()

    def _advance(self, state: ReceiveState) -> None:
        self._receives = state
        self._events += 1

    def on_message_begin(self) -> None:
        self._advance(ReceiveState.HEAD)
        self._received = self._chunk  # at most so much of it belongs to the message before
        self._body = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if len(self.headers) > MAX_HEADERS or (
            self._received > MAX_HEAD_BYTES and self._head_bytes() > MAX_HEAD_BYTES
        ):
            raise _Refused()
        self._advance(ReceiveState.BODY)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._advance(ReceiveState.BETWEEN)
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse a message that the parser rejects; a head beyond the limits has status 431."""
        if self._receives is ReceiveState.HEAD and (
            len(self.headers) > MAX_HEADERS or self._head_bytes() > MAX_HEAD_BYTES
        ):
            self._refuse_head()
        else:
            super().send_400_response(msg)
            self._is_refused = True

    def on_response_complete(self) -> None:
        self.transport.flush()
        super().on_response_complete()

    def handle_websocket_upgrade(self) -> None:
        coalescing = self.transport
        self.transport = coalescing.unwrap()
        super().handle_websocket_upgrade()
        if self._is_stopping:  # the server's stop has seen this connection as an idle one
            self.transport.get_protocol().shutdown()
        self.transport = coalescing

    def check_progress(self, now: float) -> None:
        """Close the connection of a client that is too slow."""
        unsent = self.transport.get_write_buffer_size()
        progress = (self._events, self._received, self.transport.written - unsent)
        events, received, sent = self._progress
        state = self._receives
        is_reading = state is ReceiveState.BODY and not self.flow.read_paused
        if (
            progress[0] != events
            or progress[2] != sent
            or (state is ReceiveState.BODY and (not is_reading or progress[1] - received >= MIN_BODY_BYTES))
        ):
            self._progress_at, self._progress = now, progress
            return
        waited = now - self._progress_at
        if unsent:
            if waited > WRITE_TIMEOUT_S:
                self.transport.abort()
        elif self._is_refused:
            pass
        elif is_reading and waited > BODY_TIMEOUT_S:
            self._time_out(f"less than {MIN_BODY_BYTES} bytes of the body arrived in {BODY_TIMEOUT_S:.0f} s")
        elif self.flow.read_paused:  # earlier requests are being answered
            pass
        elif state in (ReceiveState.NEW, ReceiveState.HEAD) and waited > HEAD_TIMEOUT_S:
            self._time_out(f"the request's head took longer than {HEAD_TIMEOUT_S:.0f} s")
        elif state in _BETWEEN_MESSAGES and self._is_idle and waited > self.timeout_keep_alive:
            self.transport.close()

    @property
    def _is_idle(self) -> bool:
        """True when every message that was received has been answered."""
        return not self.awaits_callback and (self.cycle is None or self.cycle.response_complete)

    def _time_out(self, problem: str) -> None:
        in_body = self._receives is ReceiveState.BODY
        if in_body and self._state is not CallbackState.RECEIVING:
            is_answering = self.cycle is not None and self.cycle.response_started
        else:
            is_answering = not in_body and not self._is_idle
        if self._receives is ReceiveState.NEW or is_answering:
            self.transport.close()
        else:
            self._refuse(408, f"The client is too slow: {problem}.")

    def _check_size(self) -> None:
        """Refuse a head that is too large, and a body whose framing is far larger than itself."""
        if self._is_refused:
            return
        if self._receives is ReceiveState.HEAD:
            if self._received > _MAX_OVERHEAD or self._head_bytes() > MAX_HEAD_BYTES:
                self._refuse_head()
        elif (
            self._receives is ReceiveState.BODY
            and self._received - self._body > _MAX_OVERHEAD + _OVERHEAD_FACTOR * self._body
        ):
            self._refuse(400, "The chunk extensions or trailers of the body are too large.")

    def _head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _refuse_head(self) -> None:
        kib = MAX_HEAD_BYTES >> 10
        self._refuse(431, f"The request's head exceeds {kib} KiB or {MAX_HEADERS} headers.")

    def _refuse(self, status: int, message: str) -> None:
        """Send an error, and close the connection once the client has had time to read it.

        A connection that is closed while the client sends is reset, and the client may not see the error.
        """
        self._is_refused = True
        phrase = HTTPStatus(status).phrase
        error = {"code": status, "type": phrase.replace(" ", "") + "Exception", "message": message}
        body = orjson.dumps(error, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        head = (
            f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        )
        retry = "retry-after: 1\r\n" if status == 503 else ""
        self.transport.write(f"{head}{retry}connection: close\r\n\r\n".encode() + body)
        self.loop.call_later(_LINGER_S, self.transport.close)


_BETWEEN_MESSAGES = (ReceiveState.NEW, ReceiveState.BETWEEN)
_checked_ports: WeakSet[ServerState] = WeakSet()


def _check_connections(port: ServerState, loop: asyncio.AbstractEventLoop) -> None:
    """Check every connection of a port, and again in a second while there are any."""
    now = loop.time()
    for protocol in tuple(port.connections):
        if isinstance(protocol, HttpProtocol):
            protocol.check_progress(now)
    if port.connections:
        loop.call_later(_CHECK_PERIOD_S, _check_connections, port, loop)
    else:
        _checked_ports.discard(port)


@functools.cache
def max_connections() -> int:
    """Return the limit of connections of one port: a third of the process's file descriptors."""
    return max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 3)
