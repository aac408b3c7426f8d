"""Bodies of HTTP that are compressed on their way: ``gzip`` and ``deflate``, as Triton's clients send and read them.

Source: RFC 9110, 8.4 and 12.5.3. What is large is worked on in a thread, so that nobody else waits for it.
"""

from __future__ import annotations

import asyncio
import zlib
from functools import lru_cache

from serve_app.errors import InvalidBody, TooLarge
from serve_app.signature import short

_WINDOWS = {"gzip": 31, "deflate": 15}  # what zlib calls their framings
_SMALL = 1 << 15  # bytes that are not worth a change of threads
_WORTH = 512  # bytes of an answer from which it gets shorter
_LEVEL = 1  # of a MiB of numbers as JSON zlib's usual 6 leaves 9 % less, and takes seven times as long


async def inflated(body: bytes, coding: str, limit: int) -> bytes:
    """``body`` as it was before it was compressed.

    Raises InvalidBody for another coding and for what is none, and TooLarge as soon as it is over ``limit`` bytes.
    """
    window = _WINDOWS.get(coding.strip().lower())
    if window is None:
        raise InvalidBody(f"Content-Encoding {short(coding)} is not served; there are gzip and deflate, or none.")
    stream = zlib.decompressobj(window)
    made = _inflate(stream, body, min(_SMALL, limit) + 1)
    if not stream.eof and len(made) <= limit:
        made += await asyncio.to_thread(_inflate, stream, stream.unconsumed_tail, limit + 1 - len(made))
    if len(made) > limit:
        raise TooLarge(limit)
    if not stream.eof or stream.unused_data:
        where = "something follows its end" if stream.eof else "it ends too early"
        raise InvalidBody(f"The body is not what its Content-Encoding says: {where}.")
    return made


async def deflated(body: bytes, coding: str) -> bytes:
    """``body`` in the coding that ``asked`` has told."""
    if len(body) < _SMALL:
        return _deflate(body, coding)
    return await asyncio.to_thread(_deflate, body, coding)


def asked(accept: str, size: int) -> str | None:
    """How an answer of ``size`` bytes is compressed: by the one coding that Accept-Encoding names; None: not at all.

    Libraries name whatever they can read, all of it; who names one, as Triton's clients do, wants it.
    """
    return _asked(accept) if size >= _WORTH else None


@lru_cache(maxsize=256)
def _asked(accept: str) -> str | None:
    named = [word.partition(";") for word in accept.lower().replace(" ", "").split(",")]
    wanted = {word for word, _, quality in named if word != "identity" and quality.rstrip("0.") != "q="}
    return wanted.pop() if len(wanted) == 1 and wanted <= _WINDOWS.keys() else None


def _inflate(stream: zlib._Decompress, data: bytes, most: int) -> bytes:
    try:
        return stream.decompress(data, most)
    except zlib.error as error:
        raise InvalidBody(f"The body is not what its Content-Encoding says: {error}.") from None


def _deflate(body: bytes, coding: str) -> bytes:
    stream = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOWS[coding])
    return stream.compress(body) + stream.flush()
