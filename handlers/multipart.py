"""An encoding of several values as one body, used for lists of bytes between the steps of a workflow.

The body starts with the header's length in four bytes, little-endian. The header follows, a JSON list of
``[size, content type or null]``, and then the values.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable

PARTS_CONTENT_TYPE = "application/vnd.torchrelay.parts"

Part = tuple[bytes, "str | None"]  # a value, and its content type

_LENGTH = struct.Struct("<I")


def join_parts(parts: Iterable[Part]) -> bytes:
    """Encode ``parts`` as one body."""
    values = list(parts)
    header = json.dumps([[len(value), content_type] for value, content_type in values]).encode()
    return b"".join([_LENGTH.pack(len(header)), header, *(value for value, _ in values)])


def split_parts(body: bytes) -> list[Part]:
    """Return the parts that ``join_parts`` encoded.

    Raises ValueError for any other body.
    """
    if len(body) < _LENGTH.size:
        raise ValueError("a body of parts is shorter than its header")
    start = _LENGTH.size + _LENGTH.unpack_from(body)[0]
    try:
        header = json.loads(body[_LENGTH.size : start])
        parts: list[Part] = []
        for size, content_type in header:
            if type(size) is not int or size < 0 or not isinstance(content_type, str | None):
                raise ValueError
            parts.append((body[start : start + size], content_type))
            start += size
    except (ValueError, TypeError, RecursionError):
        raise ValueError("the header of a body of parts cannot be read") from None
    if start != len(body):
        raise ValueError("the length of a body of parts differs from its header")
    return parts
