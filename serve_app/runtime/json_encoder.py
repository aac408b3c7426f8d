"""JSON encoder with the bytes of ``json.dumps(value, indent=2)``, which TorchServe sends, written by orjson.

The two differ in text that is not printable ASCII (which json escapes), in NaN and infinity (orjson: null),
in floats below 1e-4 and in exponents (1e-07, 1e-7). Such floats, which half of all embeddings have, are
rewritten.
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import numpy as np
import orjson

# What json.dumps refuses must not be written either: those types go to orjson's default.
_INDENTED = orjson.OPT_INDENT_2 | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
_ARRAY = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY
_PLAIN, _EXPONENTIAL = 1e-4, 1e16  # the sizes of floats that Python writes without an exponent
_EXPONENT = re.compile(rb"e[-+0-9]")
_SMALL = re.compile(rb"0\.0000|e[-+0-9]")


def dumps(value: Any) -> bytes:
    """Return the JSON of any value that has one; a numpy array is its list.

    Raises TypeError, ValueError, RecursionError.
    """
    try:
        fast = orjson.dumps(value, _to_python, _INDENTED)
    except TypeError:  # orjson raises it for whatever it cannot write
        return _dumps_stdlib(value)
    # One byte is looked for at the speed of memory, and few answers of numbers have an n or an e.
    if fast.isascii() and b"\x7f" not in fast and not (b"n" in fast and b"null" in fast):
        places = _find_small_floats(fast)
        if not places:
            return fast
        with contextlib.suppress(ValueError):
            return _rewrite_floats(fast, places)
    return _dumps_stdlib(value)  # for a false alarm, too, which is only slow


def dumps_rows(array: np.ndarray) -> list[bytes] | None:
    """Return each row of an array as ``dumps`` writes its list, in half the time: no number becomes an
    object.

    Return None for arrays that must become lists first: rows of one number, NaN, numbers from 1e16 on, and
    other types.

    A few calls handle the whole array instead of one for each row: after a model, which empties the
    processor's caches, a call takes several times as long as in a loop of its own.
    """
    if array.ndim > 1 and array.size and array.dtype.kind in "biuf" and array.dtype.itemsize <= 8:
        with contextlib.suppress(ValueError):
            return _float_rows(array) if array.dtype.kind == "f" else _integer_rows(array)
    return None


def _integer_rows(array: np.ndarray) -> list[bytes]:
    """Return rows of integers or truth values."""
    return [
        orjson.dumps(row, option=_ARRAY) for row in array.astype(array.dtype.newbyteorder("="), order="C")
    ]


def _float_rows(array: np.ndarray) -> list[bytes]:
    """Return rows of floats. Raises ValueError where a number has no exact position in orjson's text."""
    wide = array.astype(np.float64, order="C")  # a list would have Python's floats
    sizes = np.abs(wide)
    if not np.maximum.reduce(sizes, None) < _EXPONENTIAL:
        raise ValueError("NaN, infinity, or a large number with an exponent")
    texts = [orjson.dumps(row, option=_ARRAY) for row in wide]
    small = ((sizes < _PLAIN) & (sizes > 0.0)).nonzero()
    found: dict[int, list[float]] = {}
    for row, number in zip(small[0].tolist(), wide[small].tolist()):
        found.setdefault(row, []).append(number)
    for row, numbers in found.items():
        texts[row] = _replace_floats(numbers, texts[row])
    return texts


def _replace_floats(numbers: list[float], text: bytes) -> bytes:
    """Return indented JSON of numbers in which ``numbers``, in this order, are written as Python does.

    Raises ValueError where one of them is not in the text as orjson writes it.
    """
    parts: list[bytes] = []
    end_of_last = 0
    for number in numbers:
        orjson_text = orjson.dumps(number)
        position = text.index(b" " + orjson_text, end_of_last) + 1
        while text[position + len(orjson_text)] not in b",\n":  # the beginning of another number
            position = text.index(b" " + orjson_text, position) + 1
        parts += text[end_of_last:position], repr(number).encode()
        end_of_last = position + len(orjson_text)
    return b"".join((*parts, text[end_of_last:]))


def _dumps_stdlib(value: Any) -> bytes:
    return json.dumps(value, indent=2, default=_to_python).encode()


def _to_python(value: Any) -> Any:
    """Return arrays and numbers of numpy as Python's."""
    if isinstance(value, (np.ndarray, np.generic)) and (plain := value.tolist()) is not value:
        return plain
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _find_small_floats(text: bytes) -> list[int]:
    """Return the positions in JSON where a float below 1e-4 or with an exponent may stand, in order."""
    places, position = [], text.find(b"0.0000")
    while position >= 0:
        places.append(position)
        position = text.find(b"0.0000", position + 1)
    if b"e" in text:
        places = sorted(places + [found.start() for found in _EXPONENT.finditer(text)])
    return places


def _rewrite_floats(text: bytes, places: list[int]) -> bytes:
    """Return indented JSON with the floats at ``places`` as Python writes them.

    Raises ValueError where one of them may be text.
    """
    parts, end_of_last = [], 0
    for place in places:
        if place < end_of_last:
            continue
        start = max(end_of_last, text.rfind(b"\n", end_of_last, place) + 1)
        end = text.find(b"\n", start)
        line = text[start : end if end >= 0 else len(text)]
        number = line.rpartition(b'": ')[2].strip(
            b" ,"
        )  # behind its key, where it has one; text ends with a quote
        parts.append(text[end_of_last:start])
        if _SMALL.search(number):
            head, _, tail = line.rpartition(number)
            parts += head, repr(float(number)).encode(), tail
        else:  # only its key looks like one
            parts.append(line)
        end_of_last = start + len(line)
    return b"".join((*parts, text[end_of_last:]))
