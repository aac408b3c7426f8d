"""The worst mismatches, with the inputs and both responses: bounded, and redacted.

Redacted values never leave the process that received them: the documents are built there.
"""

from __future__ import annotations

import base64
import codecs
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson

from serve_app.dataplane.shadow.comparison import ResponseComparison
from serve_app.domain import json_path
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart

MAX_STORED_BYTES = 4096  # bytes that are kept of each input and of each output
_MAX_PARSED = 1 << 20  # bytes of JSON that are read to find what is to be redacted
_REDACTED = "[redacted]"
_utf8 = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True)
class Mismatch:
    """A stored mismatch; ``key`` identifies the input, so that the same input is stored once; ``document``
    is JSON.
    """

    key: str
    distance: float
    document: dict[str, Any]


class WorstMismatches:
    """The worst ``limit`` of the added mismatches; of equal ones the first."""

    def __init__(self, limit: int, mismatches: Iterable[Mismatch] = ()) -> None:
        self._limit = limit
        self._kept: dict[str, Mismatch] = {}
        for disagreement in mismatches:
            self.add(disagreement)

    def __iter__(self) -> Iterator[Mismatch]:
        """Iterate from the worst mismatch."""
        return iter(sorted(self._kept.values(), key=lambda kept: -kept.distance))

    def __len__(self) -> int:
        return len(self._kept)

    def accepts(self, distance: float) -> bool:
        """Return whether a mismatch of this distance could be stored."""
        return len(self._kept) < self._limit or any(
            kept.distance < distance for kept in tuple(self._kept.values())
        )

    def add(self, disagreement: Mismatch) -> None:
        known = self._kept.get(disagreement.key)
        if known is not None:
            if known.distance < disagreement.distance:
                self._kept[disagreement.key] = disagreement
            return
        if not self.accepts(disagreement.distance):
            return
        self._kept[disagreement.key] = disagreement
        if len(self._kept) > self._limit:
            # The last one of the least: who came first stays.
            del self._kept[min(reversed(self._kept.values()), key=lambda kept: kept.distance).key]


def build_mismatch(
    call: InferenceRequest,
    live: InferenceResponse,
    other: InferenceResponse,
    found: ResponseComparison,
    redact: tuple[str, ...],
) -> Mismatch:
    """Return the stored form of two different responses, without their headers."""
    inputs = [{"name": part.name, **_of_input(part, redact)} for part in call.inputs]
    stored = {
        "request_id": call.request_id,
        "time": round(time.time(), 3),
        "reason": found.why,
        "distance": found.distance,
        **found.measures,
        "inputs": inputs,
        "live": _of_reply(live, redact),
        "shadow": _of_reply(other, redact),
    }
    hidden = any("redacted" in part for part in inputs)  # whether it is the same input cannot be told then
    key = blake2b(
        orjson.dumps([call.kind, call.request_id if hidden else inputs]), digest_size=16
    ).hexdigest()
    return Mismatch(key, found.distance, stored)


def _of_reply(reply: InferenceResponse, redact: tuple[str, ...]) -> dict[str, Any]:
    return {"status": reply.status, **_shown(reply.body, reply.content_type, redact)}


def _of_input(part: InputPart, redact: tuple[str, ...]) -> dict[str, Any]:
    """Return an input, redacted both as a document of its own and as a field of the document of all
    inputs.
    """
    inner = list(redact)
    for path in redact:
        first, *rest = json_path.parse(path) or (None,)
        if first == part.name:
            if not rest:
                return {"bytes": len(part.value), "redacted": True}
            inner.append("".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in rest))
    return _shown(part.value, part.content_type, tuple(inner))


def _shown(value: bytes, content_type: str | None, redact: tuple[str, ...]) -> dict[str, Any]:
    """Return JSON as it is, text as text, and other data in base64; long values are cut.

    With paths to redact, data that is not JSON is not stored, since its content is unknown.
    """
    stored: dict[str, Any] = {"content_type": content_type} if content_type else {}
    document = (
        _parsed(value) if len(value) <= (_MAX_PARSED if redact else MAX_STORED_BYTES) else json_path.NO_JSON
    )
    if redact:
        if document is json_path.NO_JSON:
            return {**stored, "bytes": len(value), "redacted": True}
        for path in redact:
            document = _without(document, json_path.parse(path))
        value = json.dumps(document, ensure_ascii=False).encode()
    if document is not json_path.NO_JSON and len(value) <= MAX_STORED_BYTES:
        return {**stored, "json": document}
    if len(value) > MAX_STORED_BYTES:
        stored |= {"bytes": len(value), "cut": True}
    try:
        # Half a character at the cut does not make a text binary.
        return {
            **stored,
            "text": _utf8().decode(value[:MAX_STORED_BYTES], final=len(value) <= MAX_STORED_BYTES),
        }
    except UnicodeDecodeError:
        return {**stored, "base64": base64.b64encode(value[:MAX_STORED_BYTES]).decode(), "bytes": len(value)}


def _parsed(value: bytes) -> Any:
    try:
        return orjson.loads(value)  # only what can be written again: neither NaN nor lone surrogates
    except ValueError:
        return json_path.NO_JSON


def _without(document: Any, steps: tuple[str | int, ...]) -> Any:
    """Return the document with the value at that place redacted; a key applies to each element of a list."""
    if not steps:
        return _REDACTED
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
