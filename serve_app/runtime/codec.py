"""Codec of rows: from a request to a handler's row, and from its return value to bytes.

Both follow TorchServe, because handlers and clients were written against it.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from typing import Any

from handlers.context import Row
from serve_app.domain import exact_json
from serve_app.domain.request import InferenceRequest, InputPart
from serve_app.errors import UnsupportedOutput
from serve_app.runtime import json_encoder

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
        return json_encoder.dumps(value)
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
