"""JSON documents and settings into frozen dataclasses: what is wrong is said with its place, and the nearest key."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from functools import cache
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import pydantic
import yaml

STRICT = pydantic.ConfigDict(extra="forbid")  # as ``__pydantic_config__`` of each dataclass that is read

T = TypeVar("T")

_NODES = 100_000  # values in a YAML text once its aliases are written out


class Misread(ValueError):
    """A document that is not what it should be; the message names key, problem and cure."""


@cache
def _adapter(kind: type[T]) -> pydantic.TypeAdapter[T]:
    return pydantic.TypeAdapter(kind)


def read(kind: type[T], document: Any, secret: tuple[tuple[str, ...], ...] = ()) -> T:
    """``document`` as the dataclass ``kind``. Values under the paths ``secret`` are never shown. Raises Misread."""
    try:
        return _adapter(kind).validate_python(document)
    except pydantic.ValidationError as error:
        raise Misread("; ".join(_explain(kind, problem, secret) for problem in error.errors())) from None


def write(value: Any) -> Any:
    """A dataclass as plain data that JSON can hold, and ``read`` takes again."""
    return _adapter(type(value)).dump_python(value, mode="json")


def from_yaml(text: str | bytes) -> dict[Any, Any]:
    """The mapping that a YAML text holds, empty for an empty one. Raises Misread, with the line."""
    try:
        raw = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        raise Misread(f"{line}{error.problem or error.context}; mend the YAML") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date that is none, bytes that are no text
        raise Misread(f"is not YAML ({error})") from None
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise Misread(f"line 1: holds a {type(raw).__name__} and must be a mapping of keys to values")
    if _size(raw, _NODES) < 0:
        raise Misread(f"holds more than {_NODES} values once its aliases are written out; use fewer")
    return raw


def _size(value: Any, left: int) -> int:
    """What is left of ``left`` after counting ``value``; below 0 also for one that contains itself."""
    pending = [value]
    while pending and left >= 0:
        left -= 1
        value = pending.pop()
        pending.extend(value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
    return left


def near_miss(key: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known key that ``key`` was probably meant to be."""
    folded = {_fold(k): k for k in known}
    match = difflib.get_close_matches(_fold(key), list(folded), n=1, cutoff=cutoff)
    return folded[match[0]] if match else None


def _fold(key: str) -> str:
    return key.replace("_", "").replace("-", "").lower()


def _explain(kind: type, problem: Mapping[str, Any], secret: tuple[tuple[str, ...], ...]) -> str:
    where = tuple(problem["loc"])
    path = ".".join(str(part) for part in where if part != "[key]")
    if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        known = _fields_at(kind, where[:-1])
        near = near_miss(str(where[-1]), known)
        cure = f"did you mean {near!r}?" if near else f"known here: {', '.join(known)}"
        return f"unknown key {path!r}; {cure}"
    hidden = any(where[: len(start)] == start for start in secret) or problem["type"] == "missing"
    got = "" if hidden else f" (got {problem['input']!r})"
    unquoted = problem["type"] == "string_type" and isinstance(problem["input"], int | float)
    cure = "; put it in quotes" if unquoted else ""
    return f"{path or 'it'}: {problem['msg'].removeprefix('Value error, ')}{cure}{got}"


def _fields_at(kind: type, path: tuple[Any, ...]) -> list[str]:
    here: Any = kind
    for part in path:
        if dataclasses.is_dataclass(here):
            here = get_type_hints(here)[str(part)]
        else:  # an item of a list or a mapping
            here = [inner for inner in get_args(here) if inner is not Ellipsis][-1]
        if get_origin(here) in (Union, UnionType):  # what may be left out
            here = next(inner for inner in get_args(here) if inner is not type(None))
    return [f.name for f in dataclasses.fields(here)]
