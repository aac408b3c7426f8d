"""Any stream's pieces as server-sent events, with what keeps their line open through silence; or all as one."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable

from serve_app.errors import OutputTooLarge, RelayError
from serve_app.types import ReplyStream

EVENT_STREAM = "text/event-stream"
HEARTBEAT = 15.0  # seconds of silence after which a comment goes out, so that nobody takes the line for dead
COMMENT = b": still here\n\n"


async def whole(stream: ReplyStream, limit: int) -> bytes:
    """All of a stream, for a caller who asked for one answer; ``limit`` in bytes, 0: none. Raises OutputTooLarge."""
    pieces, size = [], 0
    try:
        async for piece in stream:
            pieces.append(piece)
            size += len(piece)
            if 0 < limit < size:
                raise OutputTooLarge(size, limit)
    finally:
        await stream.aclose()
    return b"".join(pieces)


class Alive(AsyncIterator[bytes]):
    """A stream's pieces, and a comment after every ``seconds`` in which none came."""

    def __init__(self, stream: ReplyStream, seconds: float = HEARTBEAT) -> None:
        self._stream = stream
        self._pieces = stream.__aiter__()
        self._seconds = seconds
        self._next: asyncio.Future[bytes] | None = None  # waited for, through comments too

    async def __anext__(self) -> bytes:
        if self._next is None:
            self._next = asyncio.ensure_future(self._pieces.__anext__())
        if not (await asyncio.wait((self._next,), timeout=self._seconds))[0]:
            return COMMENT
        piece, self._next = self._next, None
        return piece.result()

    async def aclose(self) -> None:
        if self._next is not None:
            self._next.cancel()
            await asyncio.wait((self._next,))
        await self._stream.aclose()


class Events(AsyncIterator[bytes]):
    """A stream's pieces as events, through silence, up to an event ``end`` or, where it fails, ``error``.

    ``end`` is the data of the one, ``failed`` makes that of the other; both are JSON.
    """

    def __init__(self, stream: ReplyStream, end: bytes, failed: Callable[[RelayError], bytes]) -> None:
        self._pieces = Alive(stream)
        self._end = end
        self._failed = failed
        self._over = False

    async def __anext__(self) -> bytes:
        while not self._over:
            try:
                piece = await self._pieces.__anext__()
            except StopAsyncIteration:
                self._over = True
                return b"event: end\ndata: %b\n\n" % self._end
            except RelayError as error:
                self._over = True
                return b"event: error\ndata: %b\n\n" % self._failed(error)
            if piece:
                return piece if piece is COMMENT else event(piece)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        await self._pieces.aclose()


def event(piece: bytes) -> bytes:
    """A piece as one event, which gives it back unchanged: lines of text, or base64 in an event of that name."""
    try:
        piece.decode()
        plain = b"\r" not in piece and b"\0" not in piece  # readers of events take the one for the end of a line
    except UnicodeDecodeError:
        plain = False
    if plain:
        return b"data: %b\n\n" % piece.replace(b"\n", b"\ndata: ")
    return b"event: base64\ndata: %b\n\n" % base64.b64encode(piece)
