"""A row at its two ends: what a handler sees of a request, and the bytes of what it returns.

Both follow TorchServe to the byte, because handlers and clients were written against it.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable
from typing import Any

import orjson

from handlers.context import Row
from serve_app.errors import UnsupportedOutput
from serve_app.types import Call, Input

_INJECTED = {
    "predict": {"explain": "False"},
    "tensors": {"explain": "False"},
    "explain": {"explain": "True"},
    "describe": {"describe": "True"},
}

# What json.dumps refuses must not be written either: those types go to orjson's default, which is none.
_INDENTED = orjson.OPT_INDENT_2 | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
_EXPONENT = re.compile(rb"e[-+0-9]")
_SMALL = re.compile(rb"0\.0000|e[-+0-9]")


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
    ``json.dumps(value, indent=2)`` does.
    """
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    try:
        return value.encode() if isinstance(value, str) else _dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedOutput(f"a handler's {type(value).__name__} cannot be sent: {error}") from None


def _dumps(value: Any) -> bytes:
    """A tensor as ``torch.save`` writes it, else JSON: by orjson where it writes the bytes of json.dumps.

    The two differ in text that is not printable ASCII (which json escapes), in NaN and infinity
    (orjson: null), in floats below 1e-4 and in exponents (1e-07, 1e-7). Such floats, which half of all embeddings
    have, are written anew; for the rest a false alarm is only slow.
    """
    try:
        fast = orjson.dumps(value, option=_INDENTED)
    except TypeError:
        torch = sys.modules.get("torch")  # whoever made a tensor has imported it
        if torch is not None and isinstance(value, torch.Tensor):
            buffer = io.BytesIO()
            torch.save(value, buffer)
            return buffer.getvalue()
        return json.dumps(value, indent=2).encode()
    # One byte is looked for at the speed of memory, and few answers of numbers have an n or an e.
    if fast.isascii() and b"\x7f" not in fast and not (b"n" in fast and b"null" in fast):
        places = _small_floats(fast)
        if not places:
            return fast
        with contextlib.suppress(ValueError):
            return _rewritten(fast, places)
    return json.dumps(value, indent=2).encode()


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
