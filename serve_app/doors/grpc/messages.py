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
    """``encoding`` is one of ENCODINGS; ``most`` bytes may a message have, also when it is inflated."""

    def __init__(self, encoding: str, most: int) -> None:
        self._encoding = encoding
        self._most = most
        self._parts: list[bytes] = []
        self._have = 0
        self._need = 5

    @property
    def partial(self) -> bool:
        """A message has begun and is not whole."""
        return self._have > 0

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are whole with ``data``, in their order. Raises Refused."""
        if not self._have and len(data) >= 5 and self._size(data, 0) == len(data):  # nearly always
            return [self._message(data[0], data[5:])]
        self._parts.append(data)
        self._have += len(data)
        if self._have < self._need:
            return []
        data, place, whole = b"".join(self._parts), 0, []
        while len(data) - place >= 5:
            end = place + self._size(data, place)
            if end > len(data):
                break
            whole.append(self._message(data[place], data[place + 5 : end]))
            place = end
        rest = data[place:] if place else data
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
        if flag != 1 or self._encoding == "identity":
            raise Refused(StatusCode.INTERNAL, "The message is marked as compressed, and its call names no encoding.")
        inflater = zlib.decompressobj(ENCODINGS[self._encoding])
        try:
            message = inflater.decompress(data, self._most + 1)
        except zlib.error:
            raise Refused(StatusCode.INTERNAL, f"The message is not {self._encoding}.") from None
        if len(message) > self._most:
            raise _too_large(None, self._most)
        if not inflater.eof:
            raise Refused(StatusCode.INTERNAL, f"The message's {self._encoding} ends too soon.")
        return message


def _too_large(size: int | None, most: int) -> Refused:
    inflated = f"of {size} bytes" if size is not None else "is inflated and"
    words = f"The message {inflated} is larger than inference.max_request_size, {most} bytes."
    return Refused(StatusCode.RESOURCE_EXHAUSTED, words, "too_large")
