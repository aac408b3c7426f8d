"""The worst disagreements, with what was asked and what both versions answered: bounded, and redacted.

What is to be redacted never leaves the process that saw it: the documents here are made there.
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

from serve_app import json_path
from serve_app.shadow.comparison import Comparison
from serve_app.types import Call, Input, Reply

CUT = 4096  # bytes that are kept of each input and of each output
_MAX_PARSED = 1 << 20  # bytes of JSON that are read to find what is to be redacted
_REDACTED = "[redacted]"
_utf8 = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True)
class Disagreement:
    """``key`` stands for what was asked, so that the same input is kept once; ``said`` is JSON."""

    key: str
    distance: float
    said: dict[str, Any]


class Worst:
    """The worst ``limit`` of the disagreements that it was given; of equal ones the first."""

    def __init__(self, limit: int, known: Iterable[Disagreement] = ()) -> None:
        self._limit = limit
        self._kept: dict[str, Disagreement] = {}
        for disagreement in known:
            self.put(disagreement)

    def __iter__(self) -> Iterator[Disagreement]:
        """From the worst on."""
        return iter(sorted(self._kept.values(), key=lambda kept: -kept.distance))

    def __len__(self) -> int:
        return len(self._kept)

    def takes(self, distance: float) -> bool:
        """Whether one of this distance could be among them."""
        return len(self._kept) < self._limit or any(kept.distance < distance for kept in tuple(self._kept.values()))

    def put(self, disagreement: Disagreement) -> None:
        known = self._kept.get(disagreement.key)
        if known is not None:
            if known.distance < disagreement.distance:
                self._kept[disagreement.key] = disagreement
            return
        if not self.takes(disagreement.distance):
            return
        self._kept[disagreement.key] = disagreement
        if len(self._kept) > self._limit:
            # The last one of the least: who came first stays.
            del self._kept[min(reversed(self._kept.values()), key=lambda kept: kept.distance).key]


def disagreement(call: Call, live: Reply, other: Reply, found: Comparison, redact: tuple[str, ...]) -> Disagreement:
    """What is kept of two answers that differ. Headers are not."""
    inputs = [{"name": part.name, **_of_input(part, redact)} for part in call.inputs]
    said = {
        "request_id": call.request_id,
        "time": round(time.time(), 3),
        "why": found.why,
        "distance": found.distance,
        **found.measures,
        "inputs": inputs,
        "live": _of_reply(live, redact),
        "shadow": _of_reply(other, redact),
    }
    hidden = any("redacted" in part for part in inputs)  # whether it is the same input cannot be told then
    key = blake2b(orjson.dumps([call.kind, call.request_id if hidden else inputs]), digest_size=16).hexdigest()
    return Disagreement(key, found.distance, said)


def _of_reply(reply: Reply, redact: tuple[str, ...]) -> dict[str, Any]:
    return {"status": reply.status, **_shown(reply.body, reply.content_type, redact)}


def _of_input(part: Input, redact: tuple[str, ...]) -> dict[str, Any]:
    """An input is a document of its own, and what stands at its name in the document of all of them."""
    inner = list(redact)
    for path in redact:
        first, *rest = json_path.steps(path) or (None,)
        if first == part.name:
            if not rest:
                return {"bytes": len(part.value), "redacted": True}
            inner.append("".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in rest))
    return _shown(part.value, part.content_type, tuple(inner))


def _shown(value: bytes, content_type: str | None, redact: tuple[str, ...]) -> dict[str, Any]:
    """JSON as it is, text as text, all else in base64; cut where it is long.

    With something to redact, what cannot be read as JSON is not kept: nobody could say what is in it.
    """
    said: dict[str, Any] = {"content_type": content_type} if content_type else {}
    document = _parsed(value) if len(value) <= (_MAX_PARSED if redact else CUT) else _Unread
    if redact:
        if document is _Unread:
            return {**said, "bytes": len(value), "redacted": True}
        for path in redact:
            document = _without(document, json_path.steps(path))
        value = json.dumps(document, ensure_ascii=False).encode()
    if document is not _Unread and len(value) <= CUT:
        return {**said, "json": document}
    if len(value) > CUT:
        said |= {"bytes": len(value), "cut": True}
    try:
        # Half a character at the cut does not make a text binary.
        return {**said, "text": _utf8().decode(value[:CUT], final=len(value) <= CUT)}
    except UnicodeDecodeError:
        return {**said, "base64": base64.b64encode(value[:CUT]).decode(), "bytes": len(value)}


class _Unread:
    """In place of a document: no JSON, or too much of it."""


def _parsed(value: bytes) -> Any:
    try:
        return orjson.loads(value)  # only what can be written again: neither NaN nor lone surrogates
    except ValueError:
        return _Unread


def _without(document: Any, steps: tuple[str | int, ...]) -> Any:
    """The document with whatever stands at that place covered; a key reaches into each element of a list."""
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
