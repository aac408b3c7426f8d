"""A gRPC call over an HTTP/2 stream, and its method.

Wire format: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
from grpc.aio import AbortError

from serve_app.domain.access import KeyGrant
from serve_app.http2.buffer_budget import BufferShare, StalledPeer
from serve_app.http2.call_status import (
    INITIAL_HEADERS,
    QUOTA_FIELDS,
    encode_reason,
    encode_status,
)
from serve_app.http2.frames import STREAM_WINDOW
from serve_app.http2.hpack_headers import RequestHead, encode_headers
from serve_app.http2.message_framing import InvalidMessage, MessageReader
from serve_app.http2.stream import Http2Stream
from serve_app.http2.timeout_queue import TimeoutQueue

if TYPE_CHECKING:
    from serve_app.http2.server import Http2Server

_MAX_BUFFERED = 1 << 17  # bytes of messages that wait for the method, before their sender waits
_MESSAGE_OVERHEAD = 64  # bytes of an object, so that empty messages count, too
_PREFIX = struct.Struct(">BI")
_Code = grpc.StatusCode

log = logging.getLogger(__name__)


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
    """A call as its method sees it.

    ``headers`` is the call's metadata, which must not be changed. ``grant`` holds the permissions of the
    caller's key, once ``authorized`` is true.
    """

    __slots__ = (
        "_deadline",
        "_ended",
        "_headers_sent",
        "_loop",
        "_message",
        "_messages",
        "_method",
        "_requests",
        "_reserved",
        "_server",
        "_stream",
        "_task",
        "_timer",
        "_trailers",
        "_waiting",
        "authorized",
        "grant",
        "headers",
        "peer",
        "share",
    )

    def __init__(
        self, server: Http2Server, stream: Http2Stream, head: RequestHead, method: GrpcMethod, peer: str
    ) -> None:
        self._server = server
        self._stream = stream
        self._method = method
        self._loop = asyncio.get_running_loop()
        self.share = stream.share  # of the budget of buffered bytes
        self._reserved = 0  # bytes of ``share``
        self.authorized = False
        self.grant: KeyGrant | None = None
        self.headers: Mapping[str, str] = head.headers
        self.peer = peer
        self._messages = MessageReader(head.encoding, server.limits.max_message_size)
        self._message: bytes | None = None
        self._trailers: Sequence[tuple[str, str]] = ()
        self._headers_sent = self._ended = False
        self._task: asyncio.Task[None] | None = None
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting = False  # for the peer's message, or in memory with its bytes
        if head.timeout is not None:
            self._deadline = self._loop.time() + head.timeout
            self._timer = self._loop.call_at(self._deadline, self._on_deadline)
        self._requests: _RequestStream | None = None

    def start(self) -> None:
        """Start the method of a stream of requests; others start with their message."""
        self._waiting = True
        self._requests = _RequestStream(self, self._method.parse)
        self._task = self._loop.create_task(self._run(self._requests))

    @property
    def ended(self) -> bool:
        """Return whether the call has its status, or was reset."""
        return self._ended

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
            self._stream.send_headers(INITIAL_HEADERS)

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
        self._end()
        fields = encode_status(code, details)
        if self._trailers:
            fields += encode_headers(self._trailers)
        if reason:
            fields += QUOTA_FIELDS if reason == "quota_exceeded" else encode_reason(reason)
        self._stream.send_trailers(fields if self._headers_sent else INITIAL_HEADERS + fields)

    def _end(self) -> None:
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        if self._waiting:
            self._stop_waiting()

    # Events of the stream

    def on_data(self, data: bytes, ended: bool) -> None:
        if self._ended:
            return
        try:
            messages = self._messages.feed(data) if data else ()
            if ended and self._messages.partial:
                raise InvalidMessage(_Code.INTERNAL, "The stream ended in the middle of a message.")
            if self._requests is not None:
                self._requests.add(messages, ended)
            elif self._is_complete(messages, ended):
                if self._waiting:
                    self._stop_waiting()
                self._task = self._loop.create_task(self._run(self._message))
                return
            self._await_data()
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
        self._end()
        self._cancel_task()
        self._server.remove_call(self)

    def on_response_sent(self) -> None:
        self._server.remove_call(self)

    # The peer's messages: timeouts, buffered bytes and the flow-control window

    def _await_data(self) -> None:
        """Count the buffered bytes, and await the rest of the message. Raises InvalidMessage."""
        queues = self._server.queues
        self._waiting = True
        if self._stream.half_closed or (self._requests is not None and not self._messages.partial):
            queues.unfinished.discard(self)
        elif self not in queues.suspended:
            queues.unfinished.touch(self)
        needed = self._buffered + max(0, self._stream.receive_window - STREAM_WINDOW)
        if self._messages.partial:  # the room of its rest stays reserved
            needed = max(needed, self._reserved)
        if not self._reserve(needed):
            raise InvalidMessage(_Code.RESOURCE_EXHAUSTED, self._describe_full_buffers(), "quota_exceeded")
        self.extend_window()

    def on_waiting(self) -> None:
        if self._requests is None and not self._ended and not self._waiting:
            self._waiting = True
            self._server.queues.unfinished.touch(self)

    def extend_window(self) -> None:
        """Let the peer send the rest of a message, if the budget suffices; the call waits otherwise."""
        stream, requests, queues = self._stream, self._requests, self._server.queues
        window, missing = stream.receive_window, self._messages.missing
        if self._ended or stream.half_closed:
            return
        if missing <= window if requests is None else requests.buffered > _MAX_BUFFERED:
            return
        target = max(STREAM_WINDOW, missing)
        if window >= target // 2:
            return
        if not self._reserve_ahead(self._buffered + missing - self._reserved):
            if self not in queues.suspended:
                queues.unfinished.discard(self)
                queues.suspended.touch(self)
        else:
            if self in queues.suspended:
                queues.suspended.discard(self)
                queues.unfinished.touch(self)
            stream.extend_window(target - window)

    @property
    def _buffered(self) -> int:
        """The bytes of the peer's messages that no method has taken."""
        if self._requests is not None:
            return self._messages.buffered + self._requests.buffered
        return self._messages.buffered + len(self._message or b"")

    def _reserve(self, size: int) -> bool:
        """Change the reserved part of the budget to ``size`` bytes; return False if there is no room."""
        missing = size - self._reserved
        if missing > 0 and not self.share.reserve(missing):
            return False
        if missing < 0:
            self.share.release(-missing)
        self._reserved = size
        if not size:
            self.share = self._stream.share
        if self._ended:  # others' room was reclaimed from this call
            self._stop_waiting()
        return True

    def _reserve_ahead(self, size: int) -> bool:
        """Reserve room for the rest of a message; return False if there is none so far."""
        if size <= 0:
            return True
        if self.share.reserve_ahead(size):
            self._reserved += size
            return True
        large, total = self._server.large_messages, self._reserved + size
        if large.used or total <= self._server.budget.limit // 3:
            return False
        self.share.release(self._reserved)
        self.share = BufferShare(large)
        self.share.add(total)
        self._reserved = total
        return True

    def on_message_taken(self) -> None:
        """Return the room of a message that the method has taken."""
        if not self._messages.partial:
            needed = self._buffered + max(0, self._stream.receive_window - STREAM_WINDOW)
            self._reserve(min(self._reserved, needed))
        self.extend_window()

    @property
    def idle_streams(self) -> TimeoutQueue[StalledPeer]:
        return self._server.queues.idle_streams

    def _stop_waiting(self) -> None:
        self._waiting = False
        queues = self._server.queues
        queues.unfinished.discard(self)
        queues.suspended.discard(self)
        queues.idle_streams.discard(self)
        if self._reserved:
            self.share.release(self._reserved)
            self._reserved = 0

    def expire(self) -> None:
        """End the call, because its peer sends no message."""
        limits = self._server.limits
        name, timeout = "message_timeout", limits.message_timeout
        if self._requests is not None and not self._messages.partial:
            name, timeout = "stream_idle_timeout", limits.stream_idle_timeout
        details = f"No message has come in grpc.{name}, {timeout:g} seconds."
        self._terminate(_Code.DEADLINE_EXCEEDED, details, "deadline")

    def evict(self) -> None:
        """End the call, because others need its room."""
        details = (
            "The call waited for its message, and others needed its room: "
            "grpc.max_buffered_bytes and grpc.max_concurrent_calls are the port's limits."
        )
        self._terminate(_Code.RESOURCE_EXHAUSTED, details, "quota_exceeded")

    def _describe_full_buffers(self) -> str:
        limit = self._server.budget.limit
        return f"The port's buffers are full: grpc.max_buffered_bytes, {limit} bytes. Repeat the call later."

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
        finally:
            self._task = None

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
        if not self._stream.send_data(_PREFIX.pack(0, len(data)) + data):
            self._trailers = self._trailers[:1]
            raise InvalidMessage(_Code.RESOURCE_EXHAUSTED, self._describe_full_buffers(), "quota_exceeded")

    def _on_deadline(self) -> None:
        self._terminate(_Code.DEADLINE_EXCEEDED, "The call's deadline is over.", "deadline")

    def _terminate(self, code: grpc.StatusCode, details: str, reason: str = "") -> None:
        self.send_status(code, details, reason)
        self._cancel_task()

    def _cancel_task(self) -> None:
        """Cancel the method; the traceback of its error refers to this call, which must not refer back."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    def shut_down(self) -> None:
        """End the call because the server ends."""
        self._terminate(_Code.UNAVAILABLE, "This server is ending.")


class _RequestStream:
    """An iterator over the messages of a request stream, whose sender waits while too many are buffered."""

    def __init__(self, call: RpcContext, parse: Callable[[bytes], Any] | None) -> None:
        self._call = call
        self._parse = parse
        self._messages: deque[bytes] = deque()
        self.buffered = 0  # bytes
        self._ended = False
        self._changed = asyncio.Event()

    def add(self, messages: Iterable[bytes], ended: bool) -> None:
        """Buffer ``messages``."""
        for message in messages:
            self._messages.append(message)
            self.buffered += len(message) + _MESSAGE_OVERHEAD
        self._ended = ended
        self._changed.set()

    def __aiter__(self) -> _RequestStream:
        return self

    async def __anext__(self) -> Any:
        while not self._messages:
            if self._ended:
                raise StopAsyncIteration
            self._changed.clear()
            self._call.idle_streams.touch(self._call)
            await self._changed.wait()
            self._call.idle_streams.discard(self._call)
        message = self._messages.popleft()
        self.buffered -= len(message) + _MESSAGE_OVERHEAD
        self._call.on_message_taken()
        return self._parse(message) if self._parse is not None else message
