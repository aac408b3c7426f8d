"""The server side of an HTTP/2 stream (RFC 9113)."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Protocol

from serve_app.http2.frames import (
    CANCEL,
    END_HEADERS,
    ENHANCE_YOUR_CALM,
    HEADERS,
    STREAM_WINDOW,
    encode_frame,
    encode_window_update,
)

if TYPE_CHECKING:
    from serve_app.http2.buffer_budget import BufferShare
    from serve_app.http2.connection import Http2Connection
    from serve_app.http2.frame_writer import FrameWriter


class StreamReceiver(Protocol):
    """A receiver of a stream's events."""

    def on_data(self, data: bytes, ended: bool) -> None:
        """Process ``data`` of any size; ``ended`` marks the last."""

    def on_waiting(self) -> None:
        """Start the timeout of a message that is not complete when its turn of the event loop ends."""

    def on_response_sent(self) -> None:
        """Release the call after its response was written."""

    def on_reset(self) -> None:
        """Cancel the call: the peer reset the stream or closed the connection."""


class Http2Stream:
    """A stream whose unsent data waits for the peer's flow-control windows and for the socket.

    Waiting data counts in ``share``.
    """

    __slots__ = (
        "_closed",
        "_connection",
        "_drained",
        "_reserved",
        "_trailers",
        "_writer",
        "accepted",
        "content_length",
        "half_closed",
        "head_cost",
        "id",
        "receive_window",
        "receiver",
        "send_window",
        "unsent",
    )

    def __init__(
        self, connection: Http2Connection, writer: FrameWriter, number: int, send_window: int
    ) -> None:
        self._connection = connection
        self._writer = writer
        self.id = number
        self.send_window = send_window  # bytes
        self.receive_window = STREAM_WINDOW  # bytes
        self.content_length: int | None = None  # bytes that the peer announced and has not sent
        self.accepted = False  # its head has started a call
        self.head_cost = 0  # of RequestHead
        self.half_closed = False  # the peer has ended its side
        self.receiver: StreamReceiver | None = None
        self.unsent: deque[memoryview | bytes] = deque()
        self._reserved = 0  # bytes of ``share``
        self._trailers: bytes | None = None
        self._closed = False
        self._drained: asyncio.Future[None] | None = None

    @property
    def share(self) -> BufferShare:
        """The connection's share of the port's budget of buffered bytes."""
        return self._connection.share

    def send_headers(self, block: bytes) -> None:
        """Start the response with a header block."""
        if not self._closed:
            self._writer.write(encode_frame(HEADERS, END_HEADERS, self.id, block))

    def send_data(self, data: bytes) -> bool:
        """Send ``data``, which is not empty, as soon as the windows allow it.

        Return False, and send nothing, if it would wait and the budget of buffered bytes is exhausted.
        """
        if self._closed:
            return True
        size, writer = len(data), self._writer
        if self.unsent or size > self.send_window or size > writer.window or writer.paused:
            if not self.share.reserve_response(size):
                return False
            self._reserved += size
            self._connection.queues.undelivered.touch(self)
        self.unsent.append(data)
        if len(self.unsent) == 1:
            writer.send_unsent(self)
        return True

    def send_trailers(self, block: bytes) -> None:
        """End the response with a header block after all data is sent."""
        if not self._closed and self._trailers is None:
            self._trailers = block
            if not self.unsent:
                self.on_drained()

    async def drain(self) -> None:
        """Wait until all data is sent. Raises ConnectionResetError if the stream is closed before."""
        while self.unsent:
            if self._drained is None:
                self._drained = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._drained)
        if self._closed:
            raise ConnectionResetError("The caller has left.")

    def extend_window(self, size: int) -> None:
        """Let the peer send ``size`` more bytes."""
        self.receive_window += size
        self._writer.write(encode_window_update(self.id, size))

    def reset(self, code: int) -> None:
        """Send RST_STREAM and close the stream."""
        self._connection.reset_stream(self, code)

    def on_progress(self) -> None:
        """Record that a part of the data was sent, and the rest waits."""
        if not self._reserved:  # it fitted the windows, but not the socket's buffer
            self._reserved = sum(map(len, self.unsent))
            self.share.add(self._reserved)
        self._connection.queues.undelivered.touch(self)

    def expire(self) -> None:
        """Reset the stream, because the peer does not read its response."""
        self.reset(CANCEL)

    def evict(self) -> None:
        """Reset the stream, because others need the room of its response."""
        self.reset(ENHANCE_YOUR_CALM)

    def on_drained(self) -> None:
        """Wake the waiting writer, and write the trailers if there are any."""
        self._release()
        self._wake_writer()
        if self._trailers is not None:
            self._closed = True
            self._connection.finish_stream(self, self._trailers)
            if self.receiver is not None:
                self.receiver.on_response_sent()
                self.receiver = None  # which refers to the stream: both are freed without a collection

    def on_closed(self) -> None:
        """Discard unsent data, wake the waiting writer and cancel the call."""
        self._closed = True
        self.unsent.clear()
        self._release()
        self._wake_writer()
        if self.receiver is not None:
            self.receiver.on_reset()
            self.receiver = None

    def _release(self) -> None:
        if self._reserved:
            self.share.release(self._reserved)
            self._reserved = 0
            self._connection.queues.undelivered.discard(self)

    def _wake_writer(self) -> None:
        if self._drained is not None:
            self._drained.set_result(None)
            self._drained = None
