"""HTTP/2 header blocks (HPACK, RFC 7541): decoding of request heads, encoding of response fields."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from hpack import Decoder
from hpack.exceptions import HPACKError, OversizedHeaderListError

_TIMEOUT = re.compile(r"(\d{1,8})([HMSmun])", re.ASCII)
_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_PSEUDO_FIELDS = {":method", ":scheme", ":path", ":authority"}
_OWN_FIELDS = {"te", "content-type", "content-length", "grpc-timeout", "grpc-encoding"} | {
    "grpc-accept-encoding",
    "host",
}
_CONNECTION_FIELDS = {"connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"}
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9a-z]+")
_INVALID_VALUE = re.compile(r"[\0\r\n]")
_MAX_CACHED_HEADS = 64  # per connection; a client's calls of one method share one head
_MAX_CACHED_BLOCK = 1_024  # bytes
_BYTES_PER_COST = 32  # of a larger block: 64 KB with Huffman's coding take 10 ms, as 2,000 frames do


class InvalidHeaders(Exception):
    """A header block that cannot be decoded, nor can any later block of its connection."""


class TooManyHeaders(InvalidHeaders):
    """A header block far over the limit."""


class RequestHead:
    """The decoded header block of a call.

    ``timeout`` is in seconds, or None. ``headers`` are the caller's own metadata without binary values; the
    last of repeated fields wins. ``size`` is counted as in RFC 9113 §6.5.2. ``malformed`` describes a
    violation of the form of requests (§8.2, §8.3) and is empty for a valid head. Trailers are valid without
    pseudo-header fields. ``cost`` is the time that its decoding takes, in frames of ``FrameRate``.
    """

    __slots__ = (
        "content_length",
        "content_type",
        "cost",
        "encoding",
        "has_pseudo_fields",
        "headers",
        "malformed",
        "method",
        "path",
        "size",
        "timeout",
    )

    def __init__(self, fields: Iterable[tuple[bytes, bytes]]) -> None:
        self.method = self.path = self.content_type = self.malformed = ""
        self.encoding = "identity"
        self.timeout: float | None = None
        self.content_length: int | None = None
        self.headers: dict[str, str] = {}
        self.size = self.cost = 0
        pseudo: dict[str, str] = {}
        for i, (raw_name, raw_value) in enumerate(fields):
            self.size += len(raw_name) + len(raw_value) + 32
            name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
            if not value.isprintable() and _INVALID_VALUE.search(value):
                self.malformed = f"a control character in {name[:50]!r}"
            if name[:1] == ":":
                if i != len(pseudo) or name not in _PSEUDO_FIELDS:  # repeated, or behind other fields
                    self.malformed = f"a field {name[:50]!r}"
                pseudo[name] = value
            elif name in _OWN_FIELDS:
                self._parse_field(name, value)
            elif not _NAME.fullmatch(name) or name in _CONNECTION_FIELDS:
                self.malformed = f"a field {name[:50]!r}"
            elif not name.endswith("-bin"):
                self.headers[name] = value
        self.has_pseudo_fields = bool(pseudo)
        self.method, self.path = pseudo.get(":method", ""), pseudo.get(":path", "")
        if not self.method or not self.path or not pseudo.get(":scheme"):
            self.malformed = "no :method, :scheme or :path"

    def _parse_field(self, name: str, value: str) -> None:
        """Parse a field of the protocol, which is no metadata."""
        if name == "content-type":
            self.content_type = value
        elif name == "grpc-encoding":
            self.encoding = value
        elif name == "grpc-timeout":
            self._parse_timeout(value)
        elif name == "te" and value != "trailers":
            self.malformed = f"te: {value[:20]!r}"
        elif name == "content-length":
            if value.isdecimal() and len(value) < 20 and self.content_length in (None, int(value)):
                self.content_length = int(value)
            else:
                self.malformed = f"content-length: {value[:20]!r}"

    def _parse_timeout(self, value: str) -> None:
        match = _TIMEOUT.fullmatch(value)
        if match:
            self.timeout = int(match[1]) * _UNITS[match[2]]
        else:
            self.malformed = f"grpc-timeout: {value[:20]!r}"


class HeaderDecoder:
    """A decoder for the header blocks of one connection, which share one HPACK table.

    A block that leaves the table unchanged keeps its meaning until another block changes the table. Nearly
    all blocks of a client are of this kind, so their decoded heads are cached.
    """

    def __init__(self, max_size: int) -> None:
        self._decoder = Decoder(max_header_list_size=max_size)
        self._cache: dict[bytes, RequestHead] = {}

    def decode(self, block: bytes) -> RequestHead:
        """Return the head. Raises InvalidHeaders and TooManyHeaders."""
        head = self._cache.get(block)
        if head is not None:
            return head
        table = self._decoder.header_table
        size, count, first = (
            table.maxsize,
            len(table.dynamic_entries),
            next(iter(table.dynamic_entries), None),
        )
        try:
            head = RequestHead(self._decoder.decode(block, raw=True))
        except OversizedHeaderListError as error:
            raise TooManyHeaders(str(error)) from None
        except (HPACKError, IndexError) as error:
            raise InvalidHeaders(str(error)) from None
        if len(block) > _MAX_CACHED_BLOCK:
            head.cost = len(block) // _BYTES_PER_COST
        entries = table.dynamic_entries
        # An added entry is a new object in first place.
        if table.maxsize != size or len(entries) != count or (entries and entries[0] is not first):
            self._cache.clear()
        elif len(block) <= _MAX_CACHED_BLOCK and len(self._cache) < _MAX_CACHED_HEADS:
            self._cache[block] = head
        return head


def encode_headers(fields: Iterable[tuple[str, str]]) -> bytes:
    """Encode ``fields`` as literals without indexing, so that each block is independent of the others."""
    return b"".join([_encode_name(name) + _encode_string(value.encode("latin-1")) for name, value in fields])


@lru_cache(maxsize=256)
def _encode_name(name: str) -> bytes:
    return b"\x00" + _encode_string(name.encode("latin-1"))


def _encode_string(text: bytes) -> bytes:
    """Encode a string without Huffman coding (RFC 7541 §5.2)."""
    size = len(text)
    if size < 127:
        return bytes((size,)) + text
    prefix = bytearray((127,))
    size -= 127
    while size > 127:
        prefix.append(size & 0x7F | 0x80)
        size >>= 7
    prefix.append(size)
    return bytes(prefix) + text
