"""Header blocks of HTTP/2 (HPACK, RFC 7541): what a call's head says, and how an answer's fields are written."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from hpack import Decoder
from hpack.exceptions import HPACKError, OversizedHeaderListError

_TIMEOUT = re.compile(r"(\d{1,8})([HMSmun])", re.ASCII)
_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_OF_THE_PROTOCOL = {"te", "content-type", "grpc-timeout", "grpc-encoding", "grpc-accept-encoding", "host"}
_REMEMBERED = 64  # heads of one connection; a client's calls of one method have one and the same
_LONGEST_REMEMBERED = 1_024  # bytes


class BadHeaders(Exception):
    """A header block that cannot be read; what comes after it on this connection cannot be read either."""


class TooManyHeaders(BadHeaders):
    """A header block far over the limit."""


class Head:
    """What a call's header block says.

    ``timeout`` is in seconds, None where there is none. ``headers`` are the caller's own metadata, without binary
    ones; of a repeated one the last. ``size`` is counted as RFC 9113 §6.5.2 has it. ``malformed`` says what no
    request may look like, and is empty where all is well.
    """

    __slots__ = ("content_type", "encoding", "headers", "malformed", "method", "path", "size", "timeout")

    def __init__(self, fields: Iterable[tuple[bytes, bytes]]) -> None:
        self.method = self.path = self.content_type = self.malformed = ""
        self.encoding = "identity"
        self.timeout: float | None = None
        self.headers: dict[str, str] = {}
        self.size = 0
        for raw_name, raw_value in fields:
            self.size += len(raw_name) + len(raw_value) + 32
            name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
            if name == ":path":
                self.path = value
            elif name == ":method":
                self.method = value
            elif name == "content-type":
                self.content_type = value
            elif name == "grpc-encoding":
                self.encoding = value
            elif name == "grpc-timeout":
                self._wait(value)
            elif name != name.lower() or name == "connection":
                self.malformed = f"a field {name!r}"
            elif name[:1] != ":" and name not in _OF_THE_PROTOCOL and not name.endswith("-bin"):
                self.headers[name] = value
        if not self.method or not self.path:
            self.malformed = "no :method or no :path"

    def _wait(self, said: str) -> None:
        found = _TIMEOUT.fullmatch(said)
        if found:
            self.timeout = int(found[1]) * _UNITS[found[2]]
        else:
            self.malformed = f"grpc-timeout: {said[:20]!r}"


class Reader:
    """Reads the header blocks of one connection, whose table they share.

    A block that leaves the table as it was means the same until another one changes it: such blocks, which are nearly
    all that a client sends, are read once.
    """

    def __init__(self, largest: int) -> None:
        self._decoder = Decoder(max_header_list_size=largest)
        self._known: dict[bytes, Head] = {}

    def read(self, block: bytes) -> Head:
        """Raises BadHeaders and TooManyHeaders."""
        head = self._known.get(block)
        if head is not None:
            return head
        table = self._decoder.header_table
        size, count, first = table.maxsize, len(table.dynamic_entries), next(iter(table.dynamic_entries), None)
        try:
            head = Head(self._decoder.decode(block, raw=True))
        except OversizedHeaderListError as error:
            raise TooManyHeaders(str(error)) from None
        except (HPACKError, IndexError) as error:
            raise BadHeaders(str(error)) from None
        entries = table.dynamic_entries
        # An entry that was added is a new object, and the first.
        if table.maxsize != size or len(entries) != count or (entries and entries[0] is not first):
            self._known.clear()
        elif len(block) <= _LONGEST_REMEMBERED and len(self._known) < _REMEMBERED:
            self._known[block] = head
        return head


def block(fields: Iterable[tuple[str, str]]) -> bytes:
    """``fields`` as literals that no table takes up, so that each block stands for itself."""
    return b"".join([_name(name) + _text(value.encode("latin-1")) for name, value in fields])


@lru_cache(maxsize=256)
def _name(name: str) -> bytes:
    return b"\x00" + _text(name.encode("latin-1"))


def _text(text: bytes) -> bytes:
    """A string without Huffman's code (RFC 7541 §5.2)."""
    size = len(text)
    if size < 127:
        return bytes((size,)) + text
    head = bytearray((127,))
    size -= 127
    while size > 127:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return bytes(head) + text
