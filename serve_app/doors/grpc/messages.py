"""The messages of one stream: gRPC's frames of five bytes and a message, taken apart as they come."""

from __future__ import annotations

import zlib

from grpc import StatusCode

ENCODINGS = {"identity": 0, "deflate": zlib.MAX_WBITS, "gzip": zlib.MAX_WBITS | 16}  # and zlib's word for each


class Refused(Exception):
    """What came is no message, or too much of one. ``reason`` is its machine-readable word, where it has one."""

    def __init__(self, code: StatusCode, words: str, reason: str = "") -> None:
        super().__init__(words)
        self.code = code
        self.reason = reason


class Messages:
    """``encoding`` is one of ENCODINGS; ``most`` bytes may a message have, also when it is inflated.

    A compressed message is inflated as it comes: a large one holds up nobody else's call.
    """

    def __init__(self, encoding: str, most: int) -> None:
        self._encoding = encoding
        self._most = most
        self._parts: list[bytes] = []
        self._have = 0
        self._need = 5
        self._inflating: _Inflating | None = None

    @property
    def partial(self) -> bool:
        """A message has begun and is not whole."""
        return self._have > 0 or self._inflating is not None

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are whole with ``data``, in their order. Raises Refused."""
        if not self.partial and len(data) >= 5 and self._size(data, 0) == len(data):  # nearly always
            return [self._message(data[0], data[5:])]
        whole: list[bytes] = []
        if self._inflating is not None:
            mine, data = data[: self._inflating.left], data[self._inflating.left :]
            self._inflating.feed(mine)
            if self._inflating.left:
                return whole
            whole.append(self._inflating.message())
            self._inflating = None
            if not data:
                return whole
        self._parts.append(data)
        self._have += len(data)
        if self._have < self._need:
            return whole
        data, place = b"".join(self._parts), 0
        while len(data) - place >= 5:
            end = place + self._size(data, place)
            if end > len(data):
                break
            whole.append(self._message(data[place], data[place + 5 : end]))
            place = end
        rest = data[place:] if place else data
        if len(rest) >= 5 and rest[0]:
            self._inflating = self._inflater(rest[0], self._size(rest, 0) - 5)
            self._inflating.feed(rest[5:])
            rest = b""
        self._parts = [rest] if rest else []
        self._have = len(rest)
        self._need = self._size(rest, 0) if len(rest) >= 5 else 5
        return whole

    def _size(self, data: bytes, place: int) -> int:
        """Of the message that begins at ``place``, with its frame."""
        size = int.from_bytes(data[place + 1 : place + 5], "big")
        if size > self._most:
            raise _too_large(size, self._most)
        return size + 5

    def _message(self, flag: int, data: bytes) -> bytes:
        if not flag:
            return data
        inflating = self._inflater(flag, len(data))
        inflating.feed(data)
        return inflating.message()

    def _inflater(self, flag: int, size: int) -> _Inflating:
        if flag != 1 or self._encoding == "identity":
            raise Refused(StatusCode.INTERNAL, "The message is marked as compressed, and its call names no encoding.")
        return _Inflating(self._encoding, size, self._most)


class _Inflating:
    """A compressed message, of which ``left`` bytes have not come."""

    def __init__(self, encoding: str, left: int, most: int) -> None:
        self.left = left
        self._encoding = encoding
        self._most = most
        self._inflater = zlib.decompressobj(ENCODINGS[encoding])
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> None:
        """Raises Refused."""
        self.left -= len(data)
        try:
            part = self._inflater.decompress(data, self._most + 1 - self._size)
        except zlib.error:
            raise Refused(StatusCode.INTERNAL, f"The message is not {self._encoding}.") from None
        self._parts.append(part)
        self._size += len(part)
        if self._size > self._most:
            raise _too_large(None, self._most)

    def message(self) -> bytes:
        """The whole of it, when nothing is left. Raises Refused."""
        if not self._inflater.eof:
            raise Refused(StatusCode.INTERNAL, f"The message's {self._encoding} ends too soon.")
        return b"".join(self._parts)


def _too_large(size: int | None, most: int) -> Refused:
    inflated = f"of {size} bytes" if size is not None else "is inflated and"
    words = f"The message {inflated} is larger than inference.max_request_size, {most} bytes."
    return Refused(StatusCode.RESOURCE_EXHAUSTED, words, "too_large")
