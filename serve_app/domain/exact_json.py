"""JSON with integers of any size, at orjson's speed: orjson reads those beyond 64 bits as floats."""

from __future__ import annotations

import json
from typing import Any

import orjson

_DIGITS_AS_ZERO = bytes(ord("0") if 48 <= byte < 58 else byte for byte in range(256))
_LONG_NUMBER = b"0" * 19  # digits of the shortest integer beyond 64 bits: -9223372036854775809


def loads(text: bytes | bytearray | memoryview) -> Any:
    """Return the object of a JSON text; NaN and infinities are errors, as for orjson.

    Raises orjson.JSONDecodeError, also for more digits or levels than Python's ``json`` reads.
    """
    data = bytes(text)
    if _LONG_NUMBER not in data.translate(_DIGITS_AS_ZERO):
        return orjson.loads(data)
    try:
        return json.loads(data, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise orjson.JSONDecodeError(str(error), "", 0) from None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def dumps(value: Any) -> bytes:
    """Return the JSON text of what ``loads`` returns. Raises TypeError for other values."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
