"""Server-sent events from a stream's chunks, with comments that keep idle connections open."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable

from serve_app.domain.request import ResponseStream
from serve_app.errors import OutputTooLarge, RelayError

EVENT_STREAM = "text/event-stream"
HEARTBEAT_INTERVAL_S = 15.0  # seconds without data after which a comment is sent, so that no proxy times out
KEEP_ALIVE_COMMENT = b": keep-alive\n\n"


async def read_all(stream: ResponseStream, limit: int) -> bytes:
    """Return the whole stream as one body of at most ``limit`` bytes (0: no limit).

    Raises OutputTooLarge.
    """
    chunks, size = [], 0
    try:
        async for chunk in stream:
            chunks.append(chunk)
            size += len(chunk)
            if 0 < limit < size:
                raise OutputTooLarge(size, limit)
    finally:
        await stream.aclose()
    return b"".join(chunks)


class KeepAlive(AsyncIterator[bytes]):
    """The chunks of a stream, and a comment after every ``interval`` seconds without one."""

    def __init__(self, stream: ResponseStream, interval: float = HEARTBEAT_INTERVAL_S) -> None:
        self._stream = stream
        self._chunks = stream.__aiter__()
        self._interval = interval
        self._next: asyncio.Future[bytes] | None = None  # kept while comments are sent

    async def __anext__(self) -> bytes:
        if self._next is None:
            self._next = asyncio.ensure_future(self._chunks.__anext__())
        if not (await asyncio.wait((self._next,), timeout=self._interval))[0]:
            return KEEP_ALIVE_COMMENT
        chunk, self._next = self._next, None
        return chunk.result()

    async def aclose(self) -> None:
        if self._next is not None:
            self._next.cancel()
            await asyncio.wait((self._next,))
        await self._stream.aclose()


class SSEStream(AsyncIterator[bytes]):
    """The chunks of a stream as events, followed by an event ``end`` or, after a failure, ``error``.

    ``end_data`` is the data of the event ``end``, ``encode_error`` makes that of ``error``; both are JSON.
    """

    def __init__(
        self, stream: ResponseStream, end_data: bytes, encode_error: Callable[[RelayError], bytes]
    ) -> None:
        self._chunks = KeepAlive(stream)
        self._end_data = end_data
        self._encode_error = encode_error
        self._ended = False

    async def __anext__(self) -> bytes:
        while not self._ended:
            try:
                chunk = await self._chunks.__anext__()
            except StopAsyncIteration:
                self._ended = True
                return b"event: end\ndata: %b\n\n" % self._end_data
            except RelayError as error:
                self._ended = True
                return b"event: error\ndata: %b\n\n" % self._encode_error(error)
            if chunk:
                return chunk if chunk is KEEP_ALIVE_COMMENT else encode_event(chunk)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        await self._chunks.aclose()


def encode_event(chunk: bytes) -> bytes:
    """Return a chunk as one event: lines of text, or Base64 in an event named ``base64``.

    A client that decodes the event gets the chunk back unchanged.
    """
    try:
        chunk.decode()
        # Event-stream parsers treat \r as the end of a line and replace \0.
        is_plain_text = b"\r" not in chunk and b"\0" not in chunk
    except UnicodeDecodeError:
        is_plain_text = False
    if is_plain_text:
        return b"data: %b\n\n" % chunk.replace(b"\n", b"\ndata: ")
    return b"event: base64\ndata: %b\n\n" % base64.b64encode(chunk)
