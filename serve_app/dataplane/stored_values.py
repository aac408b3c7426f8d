"""Inputs and responses as JSON data that is stored: redacted, and cut to a number of bytes."""

from __future__ import annotations

import base64
import codecs
import json
from typing import Any

import orjson

from serve_app.domain import json_path
from serve_app.domain.request import InferenceResponse, InputPart

REDACTED = "[redacted]"
_MAX_PARSED = 1 << 20  # bytes of JSON that are read to find what is to be redacted
_utf8 = codecs.getincrementaldecoder("utf-8")


def to_stored_response(response: InferenceResponse, redact: tuple[str, ...], limit: int) -> dict[str, Any]:
    """Return a response as JSON data, with at most ``limit`` bytes of its body."""
    return {"status": response.status, **_to_stored(response.body, response.content_type, redact, limit)}


def to_stored_input(part: InputPart, redact: tuple[str, ...], limit: int) -> dict[str, Any]:
    """Return an input, redacted both as a document of its own and as a field of the document of all
    inputs.
    """
    paths = find_paths(part.name, redact)
    if paths is None:
        return {"bytes": len(part.value), "redacted": True}
    return _to_stored(part.value, part.content_type, paths, limit)


def find_paths(name: str, redact: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the paths to redact in the input ``name``; None where it is redacted as a whole."""
    inner = list(redact)
    for path in redact:
        first, *rest = json_path.parse(path) or (None,)
        if first == name:
            if not rest:
                return None
            inner.append("".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in rest))
    return tuple(inner)


def _to_stored(value: bytes, content_type: str | None, redact: tuple[str, ...], limit: int) -> dict[str, Any]:
    """Return JSON as it is, text as text, and other data in base64; long values are cut.

    With paths to redact, data that is not JSON is not stored, since its content is unknown.
    """
    stored: dict[str, Any] = {"content_type": content_type} if content_type else {}
    document = (
        _parsed(value) if len(value) <= (max(_MAX_PARSED, limit) if redact else limit) else json_path.NO_JSON
    )
    if redact:
        if document is json_path.NO_JSON:
            return {**stored, "bytes": len(value), "redacted": True}
        document = without_paths(document, redact)
        value = json.dumps(document, ensure_ascii=False).encode()
    if document is not json_path.NO_JSON and len(value) <= limit:
        return {**stored, "json": document}
    if len(value) > limit:
        stored |= {"bytes": len(value), "cut": True}
    try:
        # Half a character at the cut does not make a text binary.
        return {
            **stored,
            "text": _utf8().decode(value[:limit], final=len(value) <= limit),
        }
    except UnicodeDecodeError:
        return {**stored, "base64": base64.b64encode(value[:limit]).decode(), "bytes": len(value)}


def _parsed(value: bytes) -> Any:
    try:
        return orjson.loads(value)  # only what can be written again: neither NaN nor lone surrogates
    except ValueError:
        return json_path.NO_JSON


def without_paths(document: Any, redact: tuple[str, ...]) -> Any:
    """Return the document with the values at these paths redacted."""
    for path in redact:
        document = _without(document, json_path.parse(path))
    return document


def _without(document: Any, steps: tuple[str | int, ...]) -> Any:
    """Return the document with the value at that place redacted; a key applies to each element of a list."""
    if not steps:
        return REDACTED
    step, rest = steps[0], steps[1:]
    if isinstance(document, dict) and isinstance(step, str) and step in document:
        return {**document, step: _without(document[step], rest)}
    if isinstance(document, list):
        if isinstance(step, str):
            return [_without(value, steps) for value in document]
        if -len(document) <= step < len(document):
            document = list(document)
            document[step] = _without(document[step], rest)
    return document
