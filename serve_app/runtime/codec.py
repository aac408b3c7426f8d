"""Codec of rows: from a request to a handler's row, and from its return value to bytes.

Both follow TorchServe, because handlers and clients were written against it. JSON has the layout of
``json.dumps(value, indent=2)``, which TorchServe sends, written by orjson. The numbers are the same, and
their spelling may differ: 1e-7 for 1e-07. The standard library writes what orjson writes in another way: text
that is not printable ASCII. JSON has neither NaN nor infinity (RFC 8259, section 6), so null replaces them.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson

from handlers.context import Row
from serve_app.domain import exact_json
from serve_app.domain.request import InferenceRequest, InputPart
from serve_app.errors import UnsupportedOutput

_KIND_HEADERS = {
    "predict": {"explain": "False"},
    "tensors": {"explain": "False"},
    "explain": {"explain": "True"},
    "describe": {"describe": "True"},
}


def decode(part: InputPart) -> Any:
    """Return a part's value: JSON's object, ``str`` for text, else ``bytearray``, also for a wrong type."""
    media_type = part.content_type
    if media_type:
        if media_type != "application/json":
            media_type = media_type.partition(";")[0].strip().lower()
        try:
            if media_type == "application/json":
                return loads(part.value)
            if media_type.startswith("text"):
                return part.value.decode()
        except (ValueError, RecursionError):
            pass
    return bytearray(part.value)


def loads(value: bytes) -> Any:
    """Return the object of a JSON text, as Python's json reads it, but faster.

    Raises ValueError and RecursionError.
    """
    try:
        return exact_json.loads(value)
    except ValueError:  # NaN, Infinity and lone surrogates are JSON to the standard library
        return json.loads(value.decode())


def read_row(request: InferenceRequest, decoded: bool = True) -> dict[str, Any]:
    """Return one element of a handler's ``data``: the request's inputs by name."""
    if decoded:
        return {part.name: decode(part) for part in request.inputs}
    return {part.name: bytearray(part.value) for part in request.inputs}


def prepare_row(
    request: InferenceRequest,
    read: Callable[[InferenceRequest], dict[str, Any]],
    prepare: Callable[[Row], Any] | None,
    length: Callable[[Row], int] | None = None,
) -> Row:
    """Return the row of a request, with the results of the handler's ``prepare`` and ``length``.

    An exception of ``prepare`` is kept for the batch; where ``length`` raises, the row has no length.
    """
    made = Row(read(request))
    if prepare is not None:
        try:
            made.prepared = prepare(made)
        except Exception as error:
            made.prepared = error
    if length is not None:
        with contextlib.suppress(Exception):  # the row is bad, which its batch will tell
            made.length = int(length(made))
    return made


def headers(request: InferenceRequest) -> dict[str, str]:
    """Return the request's headers, with the header that tells the kind of request to a handler."""
    return {**request.headers, **_KIND_HEADERS[request.kind]}


def parameters(request: InferenceRequest) -> dict[str, dict[str, str]]:
    """Return each input's content type for the context; "" where the request had none."""
    return {part.name: {"content-type": part.content_type or ""} for part in request.inputs}


def encode(value: Any) -> bytes:
    """Return the bytes of one returned value. Raises UnsupportedOutput.

    Bytes stay as they are, text becomes UTF-8, a tensor is written by ``torch.save``. Anything else is
    written as ``json.dumps(value, indent=2)`` does but for the spelling of floats, and arrays as their lists.
    """
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    try:
        return value.encode() if isinstance(value, str) else _dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedOutput(f"a handler's {type(value).__name__} cannot be sent: {error}") from None


def _dumps(value: Any) -> bytes:
    torch = sys.modules.get("torch")  # a tensor exists only where it is imported
    if torch is None or not isinstance(value, torch.Tensor):
        return dumps(value)
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


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
