"""A row at its two ends: what a handler sees of a request, and the bytes of what it returns.

Both follow TorchServe to the byte, because handlers and clients were written against it.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from typing import Any

import orjson

from handlers.context import Row
from serve_app.errors import UnsupportedOutput
from serve_app.runtime import answer_json
from serve_app.types import Call, Input

_INJECTED = {
    "predict": {"explain": "False"},
    "tensors": {"explain": "False"},
    "explain": {"explain": "True"},
    "describe": {"describe": "True"},
}


def decode(part: Input) -> Any:
    """A part's value: an object for JSON, ``str`` for text, else (and where it is not what it says) ``bytearray``."""
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
    """The object that JSON says, as Python's json reads it, and faster. Raises ValueError and RecursionError."""
    try:
        return orjson.loads(value)
    except ValueError:  # NaN, Infinity and lone surrogates are JSON to the standard library
        return json.loads(value.decode())


def row(call: Call, decoded: bool = True) -> dict[str, Any]:
    """One element of a handler's ``data``: the call's inputs by name."""
    if decoded:
        return {part.name: decode(part) for part in call.inputs}
    return {part.name: bytearray(part.value) for part in call.inputs}


def prepared(
    call: Call,
    read: Callable[[Call], dict[str, Any]],
    prepare: Callable[[Row], Any] | None,
    length: Callable[[Row], int] | None = None,
) -> Row:
    """The row that ``read`` finds in a call, with what ``prepare`` makes of it, and then its ``length``.

    An exception of the one is kept for the batch to meet; where the other raises, the row has no length.
    """
    made = Row(read(call))
    if prepare is not None:
        try:
            made.prepared = prepare(made)
        except Exception as error:
            made.prepared = error
    if length is not None:
        with contextlib.suppress(Exception):  # the row is bad, which its batch will tell
            made.length = int(length(made))
    return made


def headers(call: Call) -> dict[str, str]:
    """The request's headers with the one that tells a handler which kind of call it is."""
    return {**call.headers, **_INJECTED[call.kind]}


def parameters(call: Call) -> dict[str, dict[str, str]]:
    """Each input's content type, as the context shows it; "" where the wire had none."""
    return {part.name: {"content-type": part.content_type or ""} for part in call.inputs}


def encode(value: Any) -> bytes:
    """The bytes of one returned value. Raises UnsupportedOutput.

    Bytes as they are, text as UTF-8, a tensor as ``torch.save`` writes it, anything else exactly as
    ``json.dumps(value, indent=2)`` does, and arrays as their lists.
    """
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    try:
        return value.encode() if isinstance(value, str) else _dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedOutput(f"a handler's {type(value).__name__} cannot be sent: {error}") from None


def _dumps(value: Any) -> bytes:
    torch = sys.modules.get("torch")  # whoever made a tensor has imported it
    if torch is None or not isinstance(value, torch.Tensor):
        return answer_json.dumps(value)
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
