"""Compression of HTTP bodies with ``gzip`` and ``deflate``, as Triton's clients send and read them.

Source: RFC 9110, 8.4 and 12.5.3. Large bodies are processed in a thread, so that they block no other request.
"""

from __future__ import annotations

import asyncio
import zlib
from functools import lru_cache

from serve_app.domain.signature import abbreviate
from serve_app.errors import InvalidBody, RequestTooLarge

_WINDOW_BITS = {"gzip": 31, "deflate": 15}  # zlib's parameter for each coding
_INLINE_SIZE = 1 << 15  # bytes; smaller bodies cost less than a switch to a thread
_MIN_SIZE = 512  # bytes; smaller responses do not become shorter
_MAX_ACCEPT_ENCODING = 256  # characters; a longer header names more than one coding
_LEVEL = 1  # zlib's default 6 makes 1 MiB of numbers as JSON 9 % smaller, and takes seven times as long


async def decompress(body: bytes, coding: str, max_size: int) -> bytes:
    """Return ``body`` without its content coding.

    Raises InvalidBody for an unknown coding or a malformed body, and RequestTooLarge as soon as the result
    exceeds ``max_size`` bytes.
    """
    window_bits = _WINDOW_BITS.get(coding.strip().lower())
    if window_bits is None:
        raise InvalidBody(
            f"Content-Encoding {abbreviate(coding)} is not served; there are gzip and deflate, or none."
        )
    stream = zlib.decompressobj(window_bits)
    data = _decompress(stream, body, min(_INLINE_SIZE, max_size) + 1)
    if not stream.eof and len(data) <= max_size:
        rest_size = max_size + 1 - len(data)
        data += await asyncio.to_thread(_decompress, stream, stream.unconsumed_tail, rest_size)
    if len(data) > max_size:
        raise RequestTooLarge(max_size)
    if not stream.eof or stream.unused_data:
        problem = "something follows its end" if stream.eof else "it ends too early"
        raise InvalidBody(f"The body does not match its Content-Encoding: {problem}.")
    return data


async def compress(body: bytes, coding: str) -> bytes:
    """Return ``body`` in the coding that ``select_coding`` returned."""
    if len(body) < _INLINE_SIZE:
        return _compress(body, coding)
    return await asyncio.to_thread(_compress, body, coding)


def select_coding(accept_encoding: str, size: int) -> str | None:
    """Return the coding of a response of ``size`` bytes, or None for no compression.

    A response is compressed if Accept-Encoding names exactly one coding, as Triton's clients do. Libraries
    that can read several name them all without a preference.
    """
    if size < _MIN_SIZE or len(accept_encoding) > _MAX_ACCEPT_ENCODING:
        return None
    return _parse_accept_encoding(accept_encoding)


@lru_cache(maxsize=256)
def _parse_accept_encoding(accept_encoding: str) -> str | None:
    items = [item.partition(";") for item in accept_encoding.lower().replace(" ", "").split(",")]
    codings = {item for item, _, quality in items if item != "identity" and quality.rstrip("0.") != "q="}
    return codings.pop() if len(codings) == 1 and codings <= _WINDOW_BITS.keys() else None


def _decompress(stream: zlib._Decompress, data: bytes, max_size: int) -> bytes:
    try:
        return stream.decompress(data, max_size)
    except zlib.error as error:
        raise InvalidBody(f"The body does not match its Content-Encoding: {error}.") from None


def _compress(body: bytes, coding: str) -> bytes:
    stream = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW_BITS[coding])
    return stream.compress(body) + stream.flush()
