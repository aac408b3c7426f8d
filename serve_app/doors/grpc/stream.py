"""A stream of HTTP/2 (RFC 9113), from the side that answers."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Protocol

from serve_app.doors.grpc.frames import END_HEADERS, HEADERS, STREAM_WINDOW, WINDOW_UPDATE, frame

if TYPE_CHECKING:
    from serve_app.doors.grpc.connection import Connection


class Receiver(Protocol):
    """What a stream is for: it gets what comes."""

    def received(self, data: bytes, ended: bool) -> None:
        """``data`` has come, of any size; it was the last where it ``ended``."""

    def over(self) -> None:
        """The answer is sent."""

    def lost(self) -> None:
        """The peer has left, or the stream with it."""


class Stream:
    """One stream; what is sent waits, piece by piece, for the peer's windows and the socket."""

    __slots__ = (
        "_connection",
        "_drained",
        "_gone",
        "_last",
        "credit",
        "half_closed",
        "id",
        "owed",
        "receiver",
        "unsent",
        "window",
    )

    def __init__(self, connection: Connection, number: int, window: int) -> None:
        self._connection = connection
        self.id = number
        self.window = window  # bytes that may be sent
        self.credit = STREAM_WINDOW  # bytes that may come
        self.owed = 0  # bytes that came, for which the peer got no new credit yet
        self.half_closed = False  # the peer sends no more
        self.receiver: Receiver | None = None
        self.unsent: deque[memoryview | bytes] = deque()
        self._last: bytes | None = None
        self._gone = False
        self._drained: asyncio.Future[None] | None = None

    def head(self, block: bytes) -> None:
        """Begin the answer with a header block."""
        if not self._gone:
            self._connection.write(frame(HEADERS, END_HEADERS, self.id, block))

    def send(self, data: bytes) -> None:
        """Send ``data``, which is not empty, as soon as there is room."""
        if not self._gone:
            self.unsent.append(data)
            if len(self.unsent) == 1:
                self._connection.pump(self)

    def end(self, block: bytes) -> None:
        """End the answer with a header block, when everything before it is sent."""
        if not self._gone and self._last is None:
            self._last = block
            if not self.unsent:
                self.sent()

    async def drained(self) -> None:
        """Everything is sent; raises ConnectionResetError where it never will be."""
        while self.unsent:
            if self._drained is None:
                self._drained = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._drained)
        if self._gone:
            raise ConnectionResetError("The caller has left.")

    def grant(self, size: int) -> None:
        """Let the peer send ``size`` bytes more, for as many that were taken."""
        self.owed += size
        if self.owed >= STREAM_WINDOW // 2 and not self.half_closed:
            self._connection.write(frame(WINDOW_UPDATE, 0, self.id, self.owed.to_bytes(4, "big")))
            self.credit += self.owed
            self.owed = 0

    def reset(self, code: int) -> None:
        """Have done with it, from this side."""
        self._connection.reset(self, code)

    def sent(self) -> None:
        """Nothing waits any more."""
        self._wake()
        if self._last is not None:
            self._gone = True
            self._connection.ended(self, self._last)
            if self.receiver is not None:
                self.receiver.over()

    def dropped(self) -> None:
        """It is no longer there: who waits or answers is told."""
        self._gone = True
        self.unsent.clear()
        self._wake()
        if self.receiver is not None:
            self.receiver.lost()

    def _wake(self) -> None:
        if self._drained is not None:
            self._drained.set_result(None)
            self._drained = None
