"""Length-prefixed gRPC messages, parsed incrementally from the bytes of one stream."""

from __future__ import annotations

import zlib

from grpc import StatusCode

ENCODINGS = {
    "identity": 0,
    "deflate": zlib.MAX_WBITS,
    "gzip": zlib.MAX_WBITS | 16,
}  # the wbits parameter of zlib for each

_PREFIX_SIZE = 5  # bytes: a flag for compression and the length


class InvalidMessage(Exception):
    """A malformed or oversized message.

    ``reason`` is the machine-readable reason, or empty.
    """

    def __init__(self, code: StatusCode, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason


class MessageReader:
    """An incremental parser of messages.

    ``encoding`` is one of ENCODINGS; ``max_size`` limits a message in bytes, before and after inflation.
    A compressed message is inflated as its bytes arrive, so that a large one does not delay other calls.
    """

    def __init__(self, encoding: str, max_size: int) -> None:
        self._encoding = encoding
        self._max_size = max_size
        self._parts: list[bytes] = []
        self._buffered = 0
        self._needed = _PREFIX_SIZE
        self._inflating: _PendingInflate | None = None

    @property
    def partial(self) -> bool:
        """Return whether an incomplete message is buffered."""
        return self._buffered > 0 or self._inflating is not None

    @property
    def buffered(self) -> int:
        """Return the bytes of the incomplete message that are in memory, inflated ones included."""
        return self._buffered + (self._inflating.size if self._inflating is not None else 0)

    @property
    def missing(self) -> int:
        """Return the bytes that complete the message, or its prefix; 0 between messages."""
        if self._inflating is not None:
            return self._inflating.missing
        return self._needed - self._buffered if self._buffered else 0

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that ``data`` completes, in order. Raises InvalidMessage."""
        if not self.partial and len(data) >= _PREFIX_SIZE and self._frame_size(data, 0) == len(data):
            return [self._decode(data[0], data[_PREFIX_SIZE:])]  # nearly always
        messages: list[bytes] = []
        if self._inflating is not None:
            part, data = data[: self._inflating.missing], data[self._inflating.missing :]
            self._inflating.feed(part)
            if self._inflating.missing:
                return messages
            messages.append(self._inflating.finish())
            self._inflating = None
            if not data:
                return messages
        self._parts.append(data)
        self._buffered += len(data)
        if self._buffered < self._needed:
            return messages
        data, position = b"".join(self._parts), 0
        while len(data) - position >= _PREFIX_SIZE:
            end = position + self._frame_size(data, position)
            if end > len(data):
                break
            messages.append(self._decode(data[position], data[position + _PREFIX_SIZE : end]))
            position = end
        self._keep(data[position:] if position else data)
        return messages

    def _keep(self, rest: bytes) -> None:
        """Buffer the beginning of a message, or start to inflate it."""
        if len(rest) >= _PREFIX_SIZE and rest[0]:
            self._inflating = self._start_inflating(rest[0], self._frame_size(rest, 0) - _PREFIX_SIZE)
            self._inflating.feed(rest[_PREFIX_SIZE:])
            rest = b""
        self._parts = [rest] if rest else []
        self._buffered = len(rest)
        self._needed = self._frame_size(rest, 0) if len(rest) >= _PREFIX_SIZE else _PREFIX_SIZE

    def _frame_size(self, data: bytes, position: int) -> int:
        """Return the size of the message at ``position``, including its prefix."""
        size = int.from_bytes(data[position + 1 : position + _PREFIX_SIZE], "big")
        if size > self._max_size:
            raise _too_large(size, self._max_size)
        return size + _PREFIX_SIZE

    def _decode(self, flag: int, data: bytes) -> bytes:
        if not flag:
            return data
        inflating = self._start_inflating(flag, len(data))
        inflating.feed(data)
        return inflating.finish()

    def _start_inflating(self, flag: int, size: int) -> _PendingInflate:
        if flag != 1 or self._encoding == "identity":
            raise InvalidMessage(
                StatusCode.INTERNAL, "The message is marked as compressed, and its call names no encoding."
            )
        return _PendingInflate(self._encoding, size, self._max_size)


class _PendingInflate:
    """A compressed message of which ``missing`` bytes have not arrived, and ``size`` are inflated."""

    def __init__(self, encoding: str, missing: int, max_size: int) -> None:
        self.missing = missing
        self._encoding = encoding
        self._max_size = max_size
        self._inflater = zlib.decompressobj(ENCODINGS[encoding])
        self._parts: list[bytes] = []
        self.size = 0

    def feed(self, data: bytes) -> None:
        """Inflate ``data``. Raises InvalidMessage."""
        self.missing -= len(data)
        try:
            part = self._inflater.decompress(data, self._max_size + 1 - self.size)
        except zlib.error:
            raise InvalidMessage(StatusCode.INTERNAL, f"The message is not {self._encoding}.") from None
        self._parts.append(part)
        self.size += len(part)
        if self.size > self._max_size:
            raise _too_large(None, self._max_size)

    def finish(self) -> bytes:
        """Return the complete message once nothing is missing. Raises InvalidMessage."""
        if not self._inflater.eof:
            raise InvalidMessage(StatusCode.INTERNAL, f"The message's {self._encoding} ends too soon.")
        return b"".join(self._parts)


def _too_large(size: int | None, max_size: int) -> InvalidMessage:
    subject = f"of {size} bytes" if size is not None else "is inflated and"
    message = f"The message {subject} is larger than inference.max_request_size, {max_size} bytes."
    return InvalidMessage(StatusCode.RESOURCE_EXHAUSTED, message, "request_too_large")
