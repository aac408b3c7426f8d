"""JSON encoder with the layout of ``json.dumps(value, indent=2)``, which TorchServe sends, written by orjson.

The numbers are the same, and their spelling may differ: 1e-7 for 1e-07. The standard library writes what
orjson writes in another way: text that is not printable ASCII. JSON has neither NaN nor infinity (RFC 8259,
section 6), so null replaces them.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import orjson

# What json.dumps refuses must not be written either: those types go to orjson's default.
_INDENTED = orjson.OPT_INDENT_2 | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
_ARRAY = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY


class NullifiedJSON(bytes):
    """JSON text in which null replaces NaN or an infinity."""


def dumps(value: Any) -> bytes:
    """Return the JSON of any value that has one; a numpy array is its list.

    The result is a NullifiedJSON where the value holds NaN or an infinity. Raises TypeError, ValueError,
    RecursionError.
    """
    try:
        text = orjson.dumps(value, _to_python, _INDENTED)
    except TypeError:  # orjson raises it for whatever it cannot write
        return _dumps_stdlib(value)
    # NaN may be behind a null. One byte is looked for at the speed of memory, and few answers of numbers
    # have an n.
    if text.isascii() and b"\x7f" not in text and not (b"n" in text and b"null" in text):
        return text
    return _dumps_stdlib(value)


def dumps_rows(array: np.ndarray) -> list[bytes] | None:
    """Return each row of an array as ``dumps`` writes its list, in half the time: no number becomes an
    object.

    Return None for arrays that must become lists first: rows of one number, NaN, and other types.
    """
    if array.ndim < 2 or not array.size or array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        return None
    if array.dtype.kind == "f":
        array = array.astype(np.float64, order="C")  # a list would have Python's floats
        if not np.isfinite(array).all():
            return None
    else:
        array = array.astype(array.dtype.newbyteorder("="), order="C")
    return [orjson.dumps(row, option=_ARRAY) for row in array]


def _dumps_stdlib(value: Any) -> bytes:
    try:
        return json.dumps(value, indent=2, default=_to_python, allow_nan=False).encode()
    except ValueError:  # NaN, an infinity, or a cycle, which the next line refuses again
        text = json.dumps(value, default=_to_python)
    return NullifiedJSON(json.dumps(json.loads(text, parse_constant=lambda _: None), indent=2).encode())


def _to_python(value: Any) -> Any:
    """Return arrays and numbers of numpy as Python's."""
    if isinstance(value, (np.ndarray, np.generic)) and (plain := value.tolist()) is not value:
        return plain
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
