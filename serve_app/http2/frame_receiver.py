"""The socket's side of an HTTP/2 connection: received bytes in turns, and limits while the peer is slow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from serve_app.http2.buffer_budget import BufferBudget, BufferShare, WaitingQueues
from serve_app.http2.frame_rate import FrameRate
from serve_app.http2.frame_writer import FrameWriter
from serve_app.http2.frames import ENHANCE_YOUR_CALM, PING, Http2ProtocolError, encode_frame
from serve_app.http2.hpack_headers import RequestHead
from serve_app.http2.limits import Http2Limits
from serve_app.http2.stream import Http2Stream

if TYPE_CHECKING:
    from serve_app.http2.connection import Http2Connection

_MIN_COUNTED_BUFFER = 4_096  # bytes of an unfinished frame that count in the budget
_MAX_DEFERRED = 1 << 17  # bytes that wait for the next turn, before the connection is not read
_RECEIVE_BUFFER = 1 << 17  # bytes
_DATA_TYPE = b"\0"
_PING_DATA = b"are you?"  # eight bytes


class PortState:
    """What the connections of a port share; ``receive_buffer`` is used by one at a time."""

    def __init__(self, limits: Http2Limits) -> None:
        self.limits = limits
        self.queues = WaitingQueues(limits)
        self.budget = BufferBudget(limits.max_buffered_bytes, self.queues)
        # One message at a time that is too large for the budget; a share is half of this one, too.
        self.large_messages = BufferBudget(2 * limits.max_message_size, self.queues)
        self.receive_buffer = memoryview(bytearray(_RECEIVE_BUFFER))


class ConnectionOwner(Protocol):
    """A receiver of a connection's events."""

    def on_connected(self, connection: Http2Connection) -> None:
        """Register the connection."""

    def on_request(self, connection: Http2Connection, stream: Http2Stream, head: RequestHead) -> None:
        """Set the receiver of ``stream``, or end it."""

    def on_disconnected(self, connection: Http2Connection) -> None:
        """Unregister the connection."""


class FrameReceiver(asyncio.BufferedProtocol):
    """A receiver of a connection's bytes.

    The connection takes turns with others on the event loop, and is not read while its peer does not read.
    An unfinished frame counts in the port's budget, an unfinished header block has ``header_timeout``.
    """

    def __init__(self, port: PortState) -> None:
        self._port = port
        self.queues = port.queues
        self.share = BufferShare(port.budget)
        self._reserved = 0  # bytes of ``share``
        self._loop = asyncio.get_running_loop()
        self._rate = FrameRate(self._loop.time)
        self._writer = FrameWriter(self._loop, self._rate)
        self._keepalive = Keepalive(port.limits.keepalive_interval, self._writer, self._check_idle)
        self._transport: Any = None
        self._receive_buffer = port.receive_buffer
        self._buffer: bytes = b""
        self._opened: list[Http2Stream] = []  # in the current turn
        self._awaits_rest = True  # of the handshake, a header block or a frame
        self._read_paused = False
        self._deferred = False  # the rest of the buffer waits for the next turn of the event loop
        self._pause_timer: asyncio.TimerHandle | None = None

    # Implemented by the connection

    def _process_bytes(self, buffer: bytes) -> int:
        """Process complete frames; return the number of consumed bytes. Raises Http2ProtocolError.

        ``_deferred`` is set where frames are left for the next turn.
        """
        raise NotImplementedError

    def _count_unfinished_headers(self) -> int | None:
        """Return the bytes of an unfinished header block or handshake; None if there is none."""
        raise NotImplementedError

    def _check_idle(self) -> None:
        """Shut down a connection without calls."""
        raise NotImplementedError

    def _fail(self, code: int, message: str) -> None:
        """Close the connection with an error."""
        raise NotImplementedError

    # Events of asyncio

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._writer.connect(transport)
        self._keepalive.start(transport)
        self.queues.connections.touch(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer of the port: what is received is parsed or copied before the next read."""
        return self._receive_buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._receive_buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        self._keepalive.data_received = True
        self._buffer = self._buffer + data if self._buffer else data
        if not self._deferred:
            self._process_buffer()
        elif len(self._buffer) > _MAX_DEFERRED and not self._read_paused:
            self._read_paused = True
            self._transport.pause_reading()

    def _process_buffer(self) -> None:
        """Process the received frames, at most so many that other connections have their turn soon."""
        buffer = self._buffer
        self._deferred = False
        try:
            consumed = self._process_bytes(buffer)
        except Http2ProtocolError as error:
            self._buffer = b""  # up to 256 KiB; the connection is closed only up to a second later
            self._fail(error.code, str(error))
            return
        self._buffer = b"" if consumed == len(buffer) else buffer[consumed:]
        if self._deferred:
            self._loop.call_soon(self._continue)
        elif self._buffer or self._awaits_rest:
            self._await_rest()
        if self._opened:
            opened, self._opened = self._opened, []
            for stream in opened:
                if not stream.half_closed and stream.receiver is not None:
                    stream.receiver.on_waiting()

    def _continue(self) -> None:
        if self._deferred and not self._writer.paused and not self._transport.is_closing():
            self._process_buffer()
            if self._read_paused and not self._deferred and not self._writer.paused:
                self._read_paused = False
                self._transport.resume_reading()

    def _await_rest(self) -> None:
        """Count an unfinished frame or header block in the budget, and limit its time."""
        unfinished = self._count_unfinished_headers()
        size = len(self._buffer) + (unfinished or 0)
        if size < _MIN_COUNTED_BUFFER:
            size = 0
        if size < self._reserved:
            self.share.release(self._reserved - size)
        elif size > self._reserved and not self.share.reserve_frame(size - self._reserved):
            self.evict()
            return
        self._reserved = size
        # The timeout of DATA is that of its message.
        is_head = unfinished is not None or (bool(self._buffer) and self._buffer[3:4] != _DATA_TYPE)
        self._awaits_rest = is_head or size > 0
        if not is_head:
            self.queues.connections.discard(self)
        elif self not in self.queues.connections:
            self.queues.connections.touch(self)

    def pause_writing(self) -> None:
        """Stop reading while the peer does not read, so that no responses pile up."""
        self._writer.paused = True
        if not self._transport.is_closing():
            self._transport.pause_reading()
            timeout = self._port.limits.send_timeout
            if timeout and self._pause_timer is None:
                self._pause_timer = self._loop.call_later(timeout, self.abort)

    def resume_writing(self) -> None:
        self._writer.paused = False
        if self._pause_timer is not None:
            self._pause_timer.cancel()
            self._pause_timer = None
        if not self._transport.is_closing():
            self._transport.resume_reading()
            self._writer.send_blocked()
            if self._deferred:
                self._loop.call_soon(self._continue)

    def connection_lost(self, error: Exception | None) -> None:
        self._keepalive.stop()
        if self._pause_timer is not None:
            self._pause_timer.cancel()
        self._writer.clear()
        self._buffer = b""
        self._opened.clear()
        self.queues.connections.discard(self)
        self.share.release(self._reserved)
        self._reserved = 0

    def expire(self) -> None:
        """Close the connection, because its handshake or a header block is not finished in time."""
        timeout = self._port.limits.header_timeout
        self._fail(ENHANCE_YOUR_CALM, f"no complete headers in grpc.header_timeout, {timeout:g} seconds")

    def evict(self) -> None:
        """Close the connection, because others need its room."""
        self._fail(ENHANCE_YOUR_CALM, "the port's buffers are full: grpc.max_buffered_bytes")

    def abort(self) -> None:
        """Close at once and cancel the calls in progress."""
        self._transport.abort()


class Keepalive:
    """A timer that pings a silent peer after ``interval`` seconds and aborts after as many more.

    ``handshake_complete``: silence before the peer's SETTINGS aborts the connection without a ping.
    ``data_received`` is set by the connection when the peer sends something. ``on_interval`` is called each
    time that the connection stays. Source: RFC 9113 §6.7.
    """

    def __init__(self, interval: float, writer: FrameWriter, on_interval: Callable[[], None]) -> None:
        self._interval = interval
        self._writer = writer
        self._on_interval = on_interval
        self.handshake_complete = False
        self.data_received = False
        self._pinged = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._timer = asyncio.get_running_loop().call_later(self._interval, self._check)

    def stop(self) -> None:
        """Cancel the timer and drop the callback, which would keep the connection until a collection."""
        if self._timer is not None:
            self._timer.cancel()
        del self._on_interval

    def _check(self) -> None:
        # A peer that does not read is not read either, so its silence means nothing.
        silent = not self.data_received and not self._writer.paused
        expired = self._pinged or not self.handshake_complete
        if self._transport.is_closing() or (silent and expired):
            self._transport.abort()
            return
        self._pinged = silent
        if silent:
            self._writer.write(encode_frame(PING, 0, 0, _PING_DATA))
        self.data_received = False
        self._on_interval()
        self.start(self._transport)
