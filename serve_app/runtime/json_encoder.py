"""An answer as JSON: the bytes of ``json.dumps(value, indent=2)``, which TorchServe sends, written by orjson.

The two differ in text that is not printable ASCII (which json escapes), in NaN and infinity (orjson: null), in floats
below 1e-4 and in exponents (1e-07, 1e-7). Such floats, which half of all embeddings have, are written anew.
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
    """Any value that JSON has a form for; a numpy array is its list. Raises TypeError, ValueError, RecursionError."""
    try:
        fast = orjson.dumps(value, _listed, _INDENTED)
    except TypeError:  # orjson raises it for whatever it cannot write
        return _slow(value)
    # One byte is looked for at the speed of memory, and few answers of numbers have an n or an e.
    if fast.isascii() and b"\x7f" not in fast and not (b"n" in fast and b"null" in fast):
        places = _small_floats(fast)
        if not places:
            return fast
        with contextlib.suppress(ValueError):
            return _rewritten(fast, places)
    return _slow(value)  # for a false alarm, too, which is only slow


def dumps_rows(array: np.ndarray) -> list[bytes] | None:
    """Each row of an array as ``dumps`` writes its list, in half the time: no number becomes an object.

    None for what has to become a list first: rows of one number, NaN, numbers from 1e16 on, and what are no numbers.

    Few calls for the whole of it, not for each row: behind a model, which leaves nothing of them in the processor's
    caches, a call takes several times as long as in a loop of its own.
    """
    if array.ndim > 1 and array.size and array.dtype.kind in "biuf" and array.dtype.itemsize <= 8:
        with contextlib.suppress(ValueError):
            return _floats(array) if array.dtype.kind == "f" else _whole(array)
    return None


def _whole(array: np.ndarray) -> list[bytes]:
    """Rows of integers or truth values."""
    return [orjson.dumps(row, option=_ARRAY) for row in array.astype(array.dtype.newbyteorder("="), order="C")]


def _floats(array: np.ndarray) -> list[bytes]:
    """Rows of floats. Raises ValueError where a number has no exact place in what orjson writes."""
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
        texts[row] = _with(numbers, texts[row])
    return texts


def _with(numbers: list[float], text: bytes) -> bytes:
    """Indented JSON of numbers alone in which ``numbers``, in their order there, are as Python writes them.

    Raises ValueError where one is not there as orjson writes it by itself.
    """
    parts, done = [], 0
    for number in numbers:
        was = orjson.dumps(number)
        at = text.index(b" " + was, done) + 1
        while text[at + len(was)] not in b",\n":  # the beginning of another number
            at = text.index(b" " + was, at) + 1
        parts += text[done:at], repr(number).encode()
        done = at + len(was)
    return b"".join((*parts, text[done:]))


def _slow(value: Any) -> bytes:
    return json.dumps(value, indent=2, default=_listed).encode()


def _listed(value: Any) -> Any:
    """What neither library knows: arrays and numbers of numpy as Python's."""
    if isinstance(value, (np.ndarray, np.generic)) and (plain := value.tolist()) is not value:
        return plain
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _small_floats(text: bytes) -> list[int]:
    """Where in JSON a float may stand that is below 1e-4 or has an exponent, in order."""
    places, at = [], text.find(b"0.0000")
    while at >= 0:
        places.append(at)
        at = text.find(b"0.0000", at + 1)
    if b"e" in text:
        places = sorted(places + [found.start() for found in _EXPONENT.finditer(text)])
    return places


def _rewritten(text: bytes, places: list[int]) -> bytes:
    """Indented JSON with its floats at ``places`` as Python writes them. ValueError where one of them may be text."""
    parts, done = [], 0
    for place in places:
        if place < done:
            continue
        start = max(done, text.rfind(b"\n", done, place) + 1)
        end = text.find(b"\n", start)
        line = text[start : end if end >= 0 else len(text)]
        number = line.rpartition(b'": ')[2].strip(b" ,")  # behind its key, where it has one; text ends with a quote
        parts.append(text[done:start])
        if _SMALL.search(number):
            head, _, tail = line.rpartition(number)
            parts += head, repr(float(number)).encode(), tail
        else:  # only its key looks like one
            parts.append(line)
        done = start + len(line)
    return b"".join((*parts, text[done:]))
