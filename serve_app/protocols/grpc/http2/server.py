"""A gRPC server on this process's event loop: calls over HTTP/2 streams, and the methods that serve them.

It accepts the method handlers of gRPC's generated code, with coroutines as their behaviour.
Wire format: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import quote

import grpc
from grpc.aio import AbortError

from serve_app.protocols.grpc.http2.connection import Http2Connection
from serve_app.protocols.grpc.http2.hpack_headers import RequestHead, encode_headers
from serve_app.protocols.grpc.http2.message_framing import ENCODINGS, InvalidMessage, MessageReader
from serve_app.protocols.grpc.http2.stream import Http2Stream

_MAX_METADATA = 16_384  # bytes of a call's head
_MAX_BUFFERED = 1 << 20  # bytes of messages that wait for the method, before their sender waits
_MAX_DETAILS = 4_096  # bytes of a status's details, percent-encoded: clients accept 8 KiB of trailers
_CLOSE_TIMEOUT = 1.0  # seconds for the delivery of the data written last
_UNESCAPED = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
_PREFIX = struct.Struct(">BI")

_CONTENT_TYPE = encode_headers(
    [("content-type", "application/grpc"), ("grpc-accept-encoding", ",".join(ENCODINGS))]
)
_INITIAL_HEADERS = b"\x88" + _CONTENT_TYPE  # :status 200
_STATUS = {code: encode_headers([("grpc-status", str(code.value[0]))]) for code in grpc.StatusCode}
_Code = grpc.StatusCode

log = logging.getLogger("torchrelay.protocols")


@dataclass(frozen=True)
class Http2Limits:
    """The limits of a server: sizes in bytes, ages and intervals in seconds. 0: unlimited."""

    max_message_size: int = 4 << 20
    max_response_size: int = 0
    max_concurrent_calls: int = 10_000
    max_connection_age: float = 0.0
    connection_age_grace: float = 0.0
    keepalive_interval: float = 30.0


class GrpcMethod(NamedTuple):
    """A method's behaviour, its (de)serializers, and which of its sides are streams."""

    behaviour: Callable[[Any, RpcContext], Any]
    parse: Callable[[bytes], Any] | None
    serialize: Callable[[Any], bytes] | None
    request_streaming: bool
    response_streaming: bool

    @classmethod
    def from_handler(cls, handler: grpc.RpcMethodHandler) -> GrpcMethod:
        request_streaming, response_streaming = (
            bool(handler.request_streaming),
            bool(handler.response_streaming),
        )
        behaviours = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
        return cls(
            behaviours[2 * request_streaming + response_streaming],
            handler.request_deserializer,
            handler.response_serializer,
            request_streaming,
            response_streaming,
        )


class RpcContext:
    """A call as its method sees it. ``headers`` is the call's metadata, which must not be changed."""

    __slots__ = (
        "_deadline",
        "_ended",
        "_headers_sent",
        "_loop",
        "_message",
        "_messages",
        "_method",
        "_requests",
        "_server",
        "_stream",
        "_task",
        "_timer",
        "_trailers",
        "headers",
        "peer",
    )

    def __init__(
        self, server: Http2Server, stream: Http2Stream, head: RequestHead, method: GrpcMethod, peer: str
    ) -> None:
        self._server = server
        self._stream = stream
        self._method = method
        self._loop = loop = asyncio.get_running_loop()
        self.headers: Mapping[str, str] = head.headers
        self.peer = peer
        self._messages = MessageReader(head.encoding, server.limits.max_message_size)
        self._message: bytes | None = None
        self._trailers: Sequence[tuple[str, str]] = ()
        self._headers_sent = self._ended = False
        self._task: asyncio.Task[None] | None = None
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        if head.timeout is not None:
            self._deadline = loop.time() + head.timeout
            self._timer = loop.call_at(self._deadline, self._on_deadline)
        self._requests: _RequestStream | None = None
        if method.request_streaming:
            self._requests = _RequestStream(stream, method.parse)
            self._task = loop.create_task(self._run(self._requests))

    # Used by methods

    def time_remaining(self) -> float | None:
        """Return the seconds until the caller's deadline, or None if it set none."""
        return None if self._deadline is None else self._deadline - self._loop.time()

    def set_trailing_metadata(self, fields: Sequence[tuple[str, str]]) -> None:
        self._trailers = fields

    def send_initial_metadata(self) -> None:
        """Confirm to the caller that its call was accepted, before there is a response."""
        if not self._headers_sent and not self._ended:
            self._headers_sent = True
            self._stream.send_headers(_INITIAL_HEADERS)

    async def write(self, message: Any) -> None:
        """Send a message of a stream; wait while the client reads slowly."""
        self._send(message)
        await self._stream.drain()

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        """End the call with ``code``. Always raises AbortError."""
        self.send_status(code, details)
        raise AbortError

    def send_status(self, code: grpc.StatusCode, details: str = "", reason: str = "") -> None:
        """End the call; later messages and statuses are not sent.

        ``reason`` is added to the trailing metadata, where those of the method have none.
        """
        if self._ended:
            return
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        fields = _STATUS[code]
        if details:
            fields += encode_headers([("grpc-message", _percent_encode(details))])
        if self._trailers:
            fields += encode_headers(self._trailers)
        if reason:
            fields += _encode_reason(reason)
        self._stream.send_trailers(fields if self._headers_sent else _INITIAL_HEADERS + fields)

    # Events of the stream

    def on_data(self, data: bytes, ended: bool) -> None:
        if self._ended:
            return
        try:
            messages = self._messages.feed(data) if data else ()
            if ended and self._messages.partial:
                raise InvalidMessage(_Code.INTERNAL, "The stream ended in the middle of a message.")
            if self._requests is not None:
                self._requests.add(messages, len(data), ended)
            elif self._is_complete(messages, ended):
                self._task = self._loop.create_task(self._run(self._message))
            elif not ended:
                self._stream.acknowledge_data(len(data))
        except InvalidMessage as error:
            self._terminate(error.code, str(error), error.reason)

    def _is_complete(self, messages: Sequence[bytes], ended: bool) -> bool:
        """Keep the only message; return whether the stream has ended after it. Raises InvalidMessage."""
        for message in messages:
            if self._message is not None:
                raise InvalidMessage(_Code.UNIMPLEMENTED, "The method takes one message, and more have come.")
            self._message = message
        if ended and self._message is None:
            raise InvalidMessage(_Code.UNIMPLEMENTED, "The method takes one message, and none has come.")
        return ended

    def on_reset(self) -> None:
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
        self._server.remove_call(self)

    def on_response_sent(self) -> None:
        self._server.remove_call(self)

    # Execution

    async def _run(self, request: Any) -> None:
        method = self._method
        try:
            if method.parse is not None and not method.request_streaming:
                request = method.parse(request)
            result = method.behaviour(request, self)
            if not method.response_streaming:
                self._send(await result)
            elif hasattr(result, "__aiter__"):
                async for message in result:
                    await self.write(message)
            else:
                await result
            self.send_status(_Code.OK)
        except AbortError:
            pass
        except InvalidMessage as error:
            self.send_status(error.code, str(error), error.reason)
        except asyncio.CancelledError:
            self.send_status(_Code.CANCELLED)
            raise
        except ConnectionResetError:
            if not self._ended:
                raise
        except Exception:
            log.exception("A method of gRPC failed: a fault of this server")
            self.send_status(_Code.UNKNOWN, "A fault of this server.")

    def _send(self, message: Any) -> None:
        serialize = self._method.serialize
        data = serialize(message) if serialize is not None else message
        max_size = self._server.limits.max_response_size
        if max_size and len(data) > max_size:
            details = (
                f"The answer of {len(data)} bytes is larger than runtime.max_response_size, {max_size} bytes."
            )
            self._trailers = self._trailers[:1]  # the others describe a response that is not sent
            raise InvalidMessage(_Code.RESOURCE_EXHAUSTED, details, "response_too_large")
        if self._ended:
            return
        self.send_initial_metadata()
        self._stream.send_data(_PREFIX.pack(0, len(data)) + data)

    def _on_deadline(self) -> None:
        self._terminate(_Code.DEADLINE_EXCEEDED, "The call's deadline is over.", "deadline")

    def _terminate(self, code: grpc.StatusCode, details: str, reason: str = "") -> None:
        self.send_status(code, details, reason)
        if self._task is not None:
            self._task.cancel()

    def shut_down(self) -> None:
        """End the call because the server ends."""
        self._terminate(_Code.UNAVAILABLE, "This server is ending.")


class _RequestStream:
    """An iterator over the messages of a request stream, whose sender waits while too many are buffered."""

    def __init__(self, stream: Http2Stream, parse: Callable[[bytes], Any] | None) -> None:
        self._stream = stream
        self._parse = parse
        self._messages: deque[bytes] = deque()
        self._buffered = 0
        self._unacknowledged = 0
        self._ended = False
        self._changed = asyncio.Event()

    def add(self, messages: Iterable[bytes], size: int, ended: bool) -> None:
        """Buffer ``messages``, which arrived in ``size`` bytes."""
        for message in messages:
            self._messages.append(message)
            self._buffered += len(message) + _PREFIX.size
        self._ended = ended
        self._changed.set()
        self._unacknowledged += size
        self._acknowledge()

    def _acknowledge(self) -> None:
        if self._buffered <= _MAX_BUFFERED and self._unacknowledged:
            self._stream.acknowledge_data(self._unacknowledged)
            self._unacknowledged = 0

    def __aiter__(self) -> _RequestStream:
        return self

    async def __anext__(self) -> Any:
        while not self._messages:
            if self._ended:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        message = self._messages.popleft()
        self._buffered -= len(message) + _PREFIX.size
        self._acknowledge()
        return self._parse(message) if self._parse is not None else message


class Http2Server:
    """A gRPC server: add its methods, ``serve`` sockets, and ``stop`` it."""

    def __init__(self, limits: Http2Limits | None = None) -> None:
        self.limits = limits or Http2Limits()
        self._methods: dict[str, GrpcMethod] = {}
        self._listeners: list[asyncio.AbstractServer] = []
        self._connections: dict[Http2Connection, list[asyncio.TimerHandle]] = {}
        self._calls: set[RpcContext] = set()
        self._no_connections = asyncio.Event()

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler]
    ) -> None:
        """Add the methods of ``service``, by name."""
        for name, handler in handlers.items():
            self._methods[f"/{service}/{name}"] = GrpcMethod.from_handler(handler)

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Ignore ``handlers``: generated code adds its methods a second time this way, without names."""

    async def serve(self, sock: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Accept connections on ``sock``, which is bound."""
        if tls is not None:
            tls.set_alpn_protocols(["h2"])
        loop = asyncio.get_running_loop()
        self._listeners.append(
            await loop.create_server(self._create_connection, sock=sock, ssl=tls, backlog=1024)
        )

    async def stop(self, grace: float) -> None:
        """Accept no further calls; cancel those that have not ended after ``grace`` seconds."""
        for listener in self._listeners:
            listener.close()
        for connection in list(self._connections):
            connection.shut_down()
        await self._wait_for_disconnects(grace)
        for call in list(self._calls):
            call.shut_down()
        for connection in list(self._connections):
            connection.close()
        await self._wait_for_disconnects(_CLOSE_TIMEOUT)
        for connection in list(self._connections):
            connection.abort()

    async def _wait_for_disconnects(self, timeout: float) -> None:
        self._no_connections.clear()
        if self._connections and timeout > 0:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._no_connections.wait(), timeout)

    def remove_call(self, call: RpcContext) -> None:
        self._calls.discard(call)

    def _create_connection(self) -> Http2Connection:
        limits = self.limits
        return Http2Connection(
            self, max(100, limits.max_concurrent_calls), _MAX_METADATA, limits.keepalive_interval
        )

    def on_connected(self, connection: Http2Connection) -> None:
        timers = self._connections[connection] = []
        limits = self.limits
        if limits.max_connection_age:
            # ±10 % so that connections opened together do not close together
            age = limits.max_connection_age * random.uniform(0.9, 1.1)
            loop = asyncio.get_running_loop()
            timers.append(loop.call_later(age, connection.shut_down))
            if limits.connection_age_grace:
                timers.append(loop.call_later(age + limits.connection_age_grace, connection.abort))

    def on_disconnected(self, connection: Http2Connection) -> None:
        for timer in self._connections.pop(connection, ()):
            timer.cancel()
        if not self._connections:
            self._no_connections.set()

    def on_request(self, connection: Http2Connection, stream: Http2Stream, head: RequestHead) -> None:
        prefix, _, subtype = head.content_type.partition("application/grpc")
        if head.method != "POST":
            return stream.send_trailers(_encode_http_status(405))
        is_grpc = bool(subtype) or head.content_type == "application/grpc"
        if prefix or not is_grpc or subtype[:1] not in ("", "+", ";"):
            return stream.send_trailers(_encode_http_status(415))
        method = self._methods.get(head.path)
        if method is None:
            return _reject(stream, _Code.UNIMPLEMENTED, f"There is no method {head.path[:200]} here.")
        if head.size > _MAX_METADATA:
            details = f"The metadata have {head.size} bytes, and {_MAX_METADATA} are taken."
            return _reject(stream, _Code.RESOURCE_EXHAUSTED, details, _encode_reason("request_too_large"))
        if head.encoding not in ENCODINGS:
            details = f"Messages may be {', '.join(ENCODINGS)}, not {head.encoding[:50]}."
            return _reject(stream, _Code.UNIMPLEMENTED, details)
        max_calls = self.limits.max_concurrent_calls
        if len(self._calls) >= max_calls:
            details = f"{max_calls} calls are under way, as many as grpc.max_concurrent_calls allows."
            return _reject(stream, _Code.RESOURCE_EXHAUSTED, details, _QUOTA_FIELDS)
        call = RpcContext(self, stream, head, method, connection.peer)
        self._calls.add(call)
        stream.receiver = call
        return None


def _reject(stream: Http2Stream, code: grpc.StatusCode, details: str, fields: bytes = b"") -> None:
    message = encode_headers([("grpc-message", _percent_encode(details))])
    stream.send_trailers(_INITIAL_HEADERS + _STATUS[code] + message + fields)


def _encode_reason(reason: str) -> bytes:
    return encode_headers([("x-torchrelay-reason", reason)])


_QUOTA_FIELDS = _encode_reason("quota_exceeded") + encode_headers([("retry-after", "1")])


def _encode_http_status(status: int) -> bytes:
    """Return the header block of an HTTP error for a client that does not use gRPC."""
    return b"\x08\x03%d" % status + _CONTENT_TYPE


def _percent_encode(details: str) -> str:
    """Return ``details`` percent-encoded, cut to the size limit between characters."""
    encoded = quote(details, safe=_UNESCAPED)
    while len(encoded) > _MAX_DETAILS:
        details = details[: len(details) * _MAX_DETAILS // len(encoded)]
        encoded = quote(details, safe=_UNESCAPED)
    return encoded
