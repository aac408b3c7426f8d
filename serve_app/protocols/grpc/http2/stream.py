"""The server side of an HTTP/2 stream (RFC 9113)."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Protocol

from serve_app.protocols.grpc.http2.frames import (
    END_HEADERS,
    HEADERS,
    STREAM_WINDOW,
    encode_frame,
    encode_window_update,
)

if TYPE_CHECKING:
    from serve_app.protocols.grpc.http2.connection import Http2Connection
    from serve_app.protocols.grpc.http2.frame_writer import FrameWriter


class StreamReceiver(Protocol):
    """A receiver of a stream's events."""

    def on_data(self, data: bytes, ended: bool) -> None:
        """Process ``data`` of any size; ``ended`` marks the last."""

    def on_response_sent(self) -> None:
        """Release the call after its response was written."""

    def on_reset(self) -> None:
        """Cancel the call: the peer reset the stream or closed the connection."""


class Http2Stream:
    """A stream whose unsent data waits for the peer's flow-control windows and for the socket."""

    __slots__ = (
        "_closed",
        "_connection",
        "_drained",
        "_trailers",
        "_writer",
        "half_closed",
        "id",
        "receive_window",
        "receiver",
        "send_window",
        "unacknowledged",
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
        self.unacknowledged = 0  # bytes received without a WINDOW_UPDATE so far
        self.half_closed = False  # the peer has ended its side
        self.receiver: StreamReceiver | None = None
        self.unsent: deque[memoryview | bytes] = deque()
        self._trailers: bytes | None = None
        self._closed = False
        self._drained: asyncio.Future[None] | None = None

    def send_headers(self, block: bytes) -> None:
        """Start the response with a header block."""
        if not self._closed:
            self._writer.write(encode_frame(HEADERS, END_HEADERS, self.id, block))

    def send_data(self, data: bytes) -> None:
        """Send ``data``, which is not empty, as soon as the windows allow it."""
        if not self._closed:
            self.unsent.append(data)
            if len(self.unsent) == 1:
                self._writer.send_unsent(self)

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

    def acknowledge_data(self, size: int) -> None:
        """Return ``size`` consumed bytes to the peer's window, in updates of half a window or more."""
        self.unacknowledged += size
        if self.unacknowledged >= STREAM_WINDOW // 2 and not self.half_closed:
            self._writer.write(encode_window_update(self.id, self.unacknowledged))
            self.receive_window += self.unacknowledged
            self.unacknowledged = 0

    def reset(self, code: int) -> None:
        """Send RST_STREAM and close the stream."""
        self._connection.reset_stream(self, code)

    def on_drained(self) -> None:
        """Wake the waiting writer, and write the trailers if there are any."""
        self._wake_writer()
        if self._trailers is not None:
            self._closed = True
            self._connection.finish_stream(self, self._trailers)
            if self.receiver is not None:
                self.receiver.on_response_sent()

    def on_closed(self) -> None:
        """Discard unsent data, wake the waiting writer and cancel the call."""
        self._closed = True
        self.unsent.clear()
        self._wake_writer()
        if self.receiver is not None:
            self.receiver.on_reset()

    def _wake_writer(self) -> None:
        if self._drained is not None:
            self._drained.set_result(None)
            self._drained = None
