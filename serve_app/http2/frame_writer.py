"""The sending side of an HTTP/2 connection: coalesced writes and flow control (RFC 9113 §5.2)."""

from __future__ import annotations

import asyncio

from serve_app.http2.frame_rate import FrameRate
from serve_app.http2.frames import (
    DATA,
    DEFAULT_WINDOW,
    FRAME_HEADER,
    FRAME_SIZE_LIMIT,
    MAX_WINDOW,
)
from serve_app.http2.stream import Http2Stream

_COALESCED_SIZE = 1 << 16  # bytes that are collected before they are written
_HIGH_WATER = 1 << 17  # bytes that the socket has not accepted, above which streams wait
_MIN_FRAGMENT = 256  # bytes; smaller parts of a message are the peer's doing
_DEFAULT_FRAME_SIZE = 16_384  # bytes, until the peer's SETTINGS change it (§6.5.2)


class FrameWriter:
    """A writer of frames that respects the peer's windows and the socket's buffer.

    Frames of one turn of the event loop are written at once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, rate: FrameRate) -> None:
        self._loop = loop
        self._rate = rate
        self._transport: asyncio.Transport
        self._frames: list[bytes | memoryview] = []
        self._collected = 0
        self.window = DEFAULT_WINDOW
        self._max_frame_size = _DEFAULT_FRAME_SIZE
        self._blocked: dict[int, Http2Stream] = {}
        self.paused = False

    def connect(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(high=_HIGH_WATER)

    def write(self, data: bytes | memoryview) -> None:
        """Write ``data`` together with all other frames of this turn of the event loop."""
        if not self._frames:
            self._loop.call_soon(self.flush)
        self._frames.append(data)
        self._collected += len(data)
        if self._collected > _COALESCED_SIZE:
            self.flush()

    def flush(self) -> None:
        if self._frames:
            frames, self._frames, self._collected = self._frames, [], 0
            if not self._transport.is_closing():
                self._transport.write(b"".join(frames))

    def send_unsent(self, stream: Http2Stream) -> None:
        """Send the stream's data as far as the windows and the socket allow; the rest stays blocked."""
        unsent, sent = stream.unsent, False
        while unsent:
            size_limit = min(stream.send_window, self.window, self._max_frame_size)
            if size_limit <= 0 or self.paused:
                if stream.send_window > 0:  # the others continue with a WINDOW_UPDATE of their own
                    self._blocked[stream.id] = stream
                if sent:
                    stream.on_progress()
                return
            data, sent = unsent[0], True
            if len(data) <= size_limit:
                unsent.popleft()
                if self._rate.level:
                    self._rate.add_credit()
            else:
                view = memoryview(data)
                data, unsent[0] = view[:size_limit], view[size_limit:]
                if size_limit < _MIN_FRAGMENT:
                    self._rate.level += 1
                else:
                    self._rate.add_credit()
            size = len(data)
            stream.send_window -= size
            self.window -= size
            self.write(FRAME_HEADER.pack(size << 8 | DATA, 0, stream.id))
            self.write(data)
        self._blocked.pop(stream.id, None)
        stream.on_drained()

    def send_blocked(self) -> None:
        """Continue the blocked streams in turn, as far as the windows and the socket allow."""
        for stream in list(self._blocked.values()):
            if self.paused or self.window <= 0:
                return
            del self._blocked[stream.id]  # a stream that blocks again goes to the end
            self.send_unsent(stream)

    def widen_window(self, increment: int) -> bool:
        """Widen the connection's window; return False if it exceeds the protocol's limit."""
        self.window += increment
        return self.window <= MAX_WINDOW

    def limit_frame_size(self, size: int) -> None:
        """Apply the peer's SETTINGS_MAX_FRAME_SIZE, in bytes."""
        self._max_frame_size = min(size, FRAME_SIZE_LIMIT)

    def remove(self, stream: Http2Stream) -> None:
        self._blocked.pop(stream.id, None)

    def clear(self) -> None:
        """Discard everything unsent after the connection was lost."""
        self._frames.clear()
        self._blocked.clear()
