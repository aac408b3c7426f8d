"""What a caller waits for: one reply, an error, or a stream of pieces. It belongs to the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from serve_app.errors import CallerTooSlow, RelayError
from serve_app.types import Call, Reply, ReplyStream, Timings

_UNREAD = 64 * 1024 * 1024  # bytes of one answer that are kept for a caller that reads slowly

Emit = Callable[[int, "bytes | Reply"], None]  # a row's place among those that run, and a piece of its answer


def _nobody() -> None:
    """Hears that a caller left."""


class Pieces(AsyncIterator[bytes]):
    """A streamed reply's pieces, each as it was emitted; ``on_leave`` is called when the caller leaves.

    One who falls behind by more than ``unread`` bytes is told CallerTooSlow, and taken for one who left.
    """

    __slots__ = ("_ended", "_error", "_held", "_on_leave", "_ready", "_unread", "_waiter")

    def __init__(self, on_leave: Callable[[], None] = _nobody, unread: int = _UNREAD) -> None:
        self._on_leave = on_leave
        self._unread = unread
        self._held = 0  # bytes that are ready
        self._ready: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self._error: RelayError | None = None

    def put(self, piece: bytes) -> None:
        if self._ended:
            return
        self._held += len(piece)
        if self._held > self._unread:
            self._ready.clear()
            self.end(CallerTooSlow(self._unread))
            self._on_leave()
        else:
            self._ready.append(piece)
            self._wake()

    def end(self, error: RelayError | None = None) -> None:
        if not self._ended:
            self._ended, self._error = True, error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def __anext__(self) -> bytes:
        while not self._ready:
            if self._ended:
                error, self._error = self._error, None
                raise error or StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        piece = self._ready.popleft()
        self._held -= len(piece)
        return piece

    async def aclose(self) -> None:
        """The caller left: nothing more is kept for it."""
        self.end()
        self._ready.clear()
        self._on_leave()


class Answer:
    """``future`` is what the caller of ``call`` awaits; ``pieces`` goes on after it where the reply streams.

    ``expiry`` is the timer that ends its time, where that is bounded.
    """

    __slots__ = ("arrived", "call", "expiry", "future", "pieces")

    def __init__(self, call: Call, future: asyncio.Future[Reply | ReplyStream], arrived: float) -> None:
        self.call = call
        self.future = future
        self.arrived = arrived
        self.pieces: Pieces | None = None
        self.expiry: asyncio.TimerHandle | None = None

    def piece(self, piece: bytes | Reply, on_leave: Callable[[], None] = _nobody) -> None:
        """An intermediate value: the first is a Reply, which has the stream's status and headers."""
        if isinstance(piece, Reply):
            if self.future.done():
                return
            head, piece = piece, piece.body
            self.pieces = Pieces(on_leave)
            self.future.set_result(ReplyStream(_headed(head), self.pieces))
        if self.pieces is not None:
            self.pieces.put(piece)

    def settle(self, answer: Reply | RelayError) -> None:
        """The last of it. An error becomes this caller's own: one that several tasks raise gathers their tracebacks."""
        if self.pieces is not None:
            if isinstance(answer, Reply):
                self.pieces.put(answer.body)
                self.pieces.end()
            else:
                self.pieces.end(_own(answer))
        elif not self.future.done():
            if isinstance(answer, Reply):
                self.future.set_result(answer)
            else:
                self.future.set_exception(_own(answer))


def timed(reply: Reply, timings: Timings) -> Reply:
    # Not dataclasses.replace: that takes twice as long, and this is done for every row.
    return Reply(reply.body, reply.content_type, reply.status, reply.phrase, reply.headers, reply.version, timings)


def _headed(first: Reply) -> Reply:
    """The head of a stream whose first piece is ``first.body``."""
    return Reply(b"", first.content_type, first.status, first.phrase, first.headers, first.version, first.timings)


def _own(error: RelayError) -> RelayError:
    own = type(error)(*error.args)
    own.__dict__.update(error.__dict__)
    return own
