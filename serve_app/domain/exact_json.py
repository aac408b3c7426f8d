"""JSON with integers of any size, at orjson's speed: orjson reads those beyond 64 bits as floats."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import orjson

from handlers import json_text

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_IS_DIGIT = bytes(byte in b"-0123456789" for byte in range(256))
_DIGITS = 20  # and signs, of the shortest integers beyond 64 bits
_STEPS = (1, 2, 4, 8, 4)  # their sum is 19
_SHORT = 2048  # bytes, up to which an integer's bits are faster than an array


def loads(text: bytes | bytearray | memoryview) -> Any:
    """Return the object of a JSON text; NaN and infinities are errors, as for orjson.

    Raises orjson.JSONDecodeError, also for more digits than Python's ``json`` reads, and for more than
    ``MAX_LEVELS`` levels.
    """
    data = bytes(text)
    document = _loads(data)
    try:
        json_text.check_levels(data)
    except ValueError as error:
        raise orjson.JSONDecodeError(str(error), "", 0) from None
    return document


def _loads(data: bytes) -> Any:
    if len(data) < _DIGITS or not _has_long_number(data):
        return orjson.loads(data)
    try:
        orjson.loads(data)
    except orjson.JSONDecodeError as error:
        if is_too_deep(error):
            raise
    try:
        document = json.loads(data.decode(), parse_constant=_refuse)  # in UTF-8 alone, as orjson
        check_texts(data, document)
    except (ValueError, RecursionError) as error:
        raise orjson.JSONDecodeError(str(error), "", 0) from None
    return document


def check_texts(data: bytes, document: Any) -> None:
    """Raise ValueError where json has read a text from ``data`` that is no UTF-8: half a surrogate pair."""
    if _SURROGATE.search(data):
        json.dumps(document, ensure_ascii=False).encode()


def is_too_deep(error: orjson.JSONDecodeError) -> bool:
    """Return whether a text has too many levels; Python's json has no limit from 3.12 on."""
    return "depth" in error.msg


def _has_long_number(data: bytes) -> bool:
    """Return whether 20 bytes in a row are digits or signs, as in the shortest integers beyond 64 bits.

    Each step leaves the places from which more bytes are such. A search for the digits takes 30 ms for 1 MB
    of floats, which have up to 17, and this 1 ms.
    """
    marks = data.translate(_IS_DIGIT)
    if len(marks) <= _SHORT:
        bits = int.from_bytes(marks, "little")
        for step in _STEPS:
            bits &= bits >> (8 * step)
        if not bits:
            return False
    places = np.frombuffer(marks, np.uint8)
    for step in _STEPS:
        places = places[step:] & places[:-step]
    if not places.any():
        return False
    # The digits of 0.00012345678901234567 are a fraction's: a period precedes them.
    return any(not place or data[place - 1] not in b".-0123456789" for place in np.flatnonzero(places))


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def dumps(value: Any) -> bytes:
    """Return the JSON text of what ``loads`` returns.

    Half a surrogate pair, as the error of a handler may have it, is written as its escape. Raises TypeError
    for other values.
    """
    try:
        return orjson.dumps(value)
    except TypeError:
        pass
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()
