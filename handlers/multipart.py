"""Several values as one body: how lists of bytes travel between the steps of a workflow.

The length of a header in four bytes, little-endian; the header, a JSON list of ``[size, content type or null]``; then
the values.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable

PARTS = "application/vnd.torchrelay.parts"  # the content type of such a body

Part = tuple[bytes, "str | None"]  # a value, and its content type

_LENGTH = struct.Struct("<I")


def join(parts: Iterable[Part]) -> bytes:
    """One body that holds all of ``parts``."""
    values = list(parts)
    header = json.dumps([[len(value), content_type] for value, content_type in values]).encode()
    return b"".join([_LENGTH.pack(len(header)), header, *(value for value, _ in values)])


def split(body: bytes) -> list[Part]:
    """What ``join`` was given. Raises ValueError for any other body."""
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
        raise ValueError("a body of parts has not the length that its header says")
    return parts
