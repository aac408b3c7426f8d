"""JSON as Gson reads it in TorchServe's configuration: single quotes, names without quotes, comments."""

from __future__ import annotations

import json
import math
import re
from typing import Any

_TOKEN = re.compile(
    r"""\s*(?:(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    |(?P<comment>//[^\n]*|\#[^\n]*|/\*.*?\*/)
    |(?P<colon>:|=>?)|(?P<comma>[,;])|(?P<bracket>[{}\[\]])
    |(?P<bare>[^\s"'{}\[\]:=,;\#]+))""",
    re.VERBOSE | re.DOTALL,
)


def loads(text: str) -> Any:
    """Return the object of a text. Raises ValueError and RecursionError, with the place in strict JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        strict = _to_json(text)
        if strict is None:
            raise
        try:
            return json.loads(strict)
        except json.JSONDecodeError:
            raise error from None


def _to_json(text: str) -> str | None:
    """Return lenient JSON as strict JSON; None where it has a character that no token begins with."""
    parts: list[str] = []
    place, text = 0, text.strip()
    while place < len(text):
        token = _TOKEN.match(text, place)
        if token is None:
            return None
        place = token.end()
        if token["string"]:
            body = token["string"]
            parts.append(body if body[0] == '"' else json.dumps(body[1:-1].replace("\\'", "'")))
        elif token["bare"]:
            follows = _TOKEN.match(text, place)
            is_name = follows is not None and follows["colon"] is not None
            is_literal = not is_name and _is_literal(token["bare"])
            parts.append(token["bare"] if is_literal else json.dumps(token["bare"]))
        elif token["colon"]:
            parts.append(":")
        elif token["comma"]:
            parts.append(",")
        elif token["bracket"]:
            parts.append(token["bracket"])
    return "".join(parts)


def _is_literal(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def to_int(value: Any) -> int | None:
    """Return the number of a value as Gson's ``getAsInt``: ``"4"`` and ``10.0`` have one; None for others."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        return int(value) if re.fullmatch(r"[+-]?[0-9]{1,10}", value) else None
    return int(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def to_bool(value: Any) -> bool | None:
    """Return the value of ``getAsBoolean``: any text but ``true`` is false; None for lists and objects."""
    if isinstance(value, bool):
        return value
    return str(value).lower() == "true" if isinstance(value, (str, int, float)) else None
