"""JSON documents of unknown origin, and paths into them: ``$.user.id``, ``user.id``, ``items[0].score``."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from serve_app.domain import exact_json

NO_JSON = object()
_STEP = re.compile(r"\.([^.\[\]]+)|\[(-?[0-9]{1,9})\]")
_ROOT = re.compile(r"\$(?=[.\[]|$)")


@lru_cache(maxsize=1024)
def parse(path: str) -> tuple[str | int, ...]:
    """Return the path's keys and indices; none for ``$``, the whole document. Raises ValueError."""
    rest = path.strip()
    rest = rest[1:] if _ROOT.match(rest) else rest
    if rest and rest[0] not in ".[":
        rest = f".{rest}"
    found: list[str | int] = []
    while rest:
        match = _STEP.match(rest)
        if match is None:
            raise ValueError(f"{path!r} is no place in a JSON document; write it like $.user.id or scores[0]")
        key, index = match.groups()
        found.append(key if index is None else int(index))
        rest = rest[match.end() :]
    return tuple(found)


def parse_json(body: bytes) -> Any:
    """Return a JSON document, also in Python's notation with NaN and infinities; ``NO_JSON`` for others."""
    try:
        return exact_json.loads(body)
    except ValueError:
        pass
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return NO_JSON


def find(document: Any, path: str) -> Any:
    """Return the value at ``path``; None where there is none."""
    for step in parse(path):
        container: Any = document
        if not isinstance(document, dict if isinstance(step, str) else list):
            return None
        try:
            document = container[step]
        except (KeyError, IndexError):
            return None
    return document
