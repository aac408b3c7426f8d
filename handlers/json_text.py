"""JSON and texts of requests, within the limits of what the server and its libraries can write again."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from handlers.errors import PredictionException

MAX_LEVELS = 250  # orjson writes 254, and Python's repr fewer than 1,000
_OTHERS = bytes(set(range(256)) - set(b'[]{}"'))
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1


def loads(text: str | bytes | bytearray) -> Any:
    """Return the value of a JSON text. Raises ValueError, also for more than ``MAX_LEVELS`` levels."""
    if not isinstance(text, str):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if text.count("[") + text.count("{") > MAX_LEVELS:
        check_levels(text.encode("utf-8", "surrogatepass"))
    return value


_TOO_DEEP = f"its depth is more than {MAX_LEVELS} levels; flatten it"


def check_levels(text: bytes | bytearray) -> None:
    """Raise ValueError where a valid JSON text in UTF-8 has more than ``MAX_LEVELS`` levels.

    Its brackets are counted, which takes up to 3 ms for 1 MB.
    """
    if text.count(b"[") + text.count(b"{") > MAX_LEVELS and _count_levels(text) > MAX_LEVELS:
        raise ValueError(_TOO_DEEP)


def check_text(text: str) -> str:
    """Return a text for a tokenizer. Raises PredictionException (400) for half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PredictionException(f"The text is no Unicode: {error}", 400) from None
    return text


def _count_levels(text: bytes | bytearray) -> int:
    """Return the maximum number of brackets that are open at one place, without those within quotes."""
    if b"\\" in text:  # an escaped quote ends no text; after an escaped backslash a quote is not escaped
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = np.frombuffer(text.translate(None, _OTHERS), np.uint8)
    is_quoted = np.cumsum(marks == ord('"'), dtype=np.uint8) & 1
    return int(np.cumsum(np.where(is_quoted, np.int8(0), _STEPS[marks]), dtype=np.int32).max())
