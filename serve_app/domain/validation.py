"""Validation of JSON documents and settings against frozen dataclasses; errors name the place and the
nearest key.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import pydantic

from handlers import untrusted_files
from serve_app.errors import BadRequest

STRICT = pydantic.ConfigDict(extra="forbid")  # as ``__pydantic_config__`` of each dataclass that is read

T = TypeVar("T")


def documented(description: str = "", **keywords: Any) -> Any:
    """Return the metadata of an annotation: a description and JSON Schema keywords.

    They appear in the OpenAPI documents and validate nothing, since our errors have messages of their own.
    """
    return pydantic.Field(description=description or None, json_schema_extra=keywords or None)


_ADAPTERS: dict[type, pydantic.TypeAdapter[Any]] = {}  # building one takes milliseconds


class DocumentError(ValueError):
    """An invalid document; the message names the key, the problem and the remedy.

    ``path`` leads to the first problem.
    """

    def __init__(self, message: str, path: tuple[Any, ...] = ()) -> None:
        super().__init__(message)
        self.path = path


PendingStatus = Annotated[str, documented("Present while some replicas have not applied the change.")]


def _adapter(kind: type) -> pydantic.TypeAdapter[Any]:
    adapter = _ADAPTERS.get(kind)
    if adapter is None:
        adapter = _ADAPTERS[kind] = pydantic.TypeAdapter(kind)
    return adapter


def read(kind: type[T], document: Any, secret_paths: tuple[tuple[str, ...], ...] = ()) -> T:
    """Return ``document`` as the dataclass ``kind``.

    Values under ``secret_paths`` are never shown. Raises DocumentError.
    """
    try:
        value: T = _adapter(kind).validate_python(document)
    except pydantic.ValidationError as error:
        problems = error.errors()
        message = "; ".join(_explain(kind, problem, secret_paths) for problem in problems)
        raise DocumentError(message, tuple(problems[0]["loc"])) from None
    return value


def read_request(
    kind: type[T], document: Any, name: str, find_error: Callable[[T], str] = lambda value: ""
) -> T:
    """Return a caller's ``document`` as the dataclass ``kind``, in which ``find_error`` finds no error.

    Raises BadRequest, which begins with ``name``.
    """
    try:
        value = read(kind, document)
    except DocumentError as error:
        raise BadRequest(f"{name}: {error}") from None
    if problem := find_error(value):
        raise BadRequest(f"{name}: {problem}")
    return value


def write(value: Any) -> Any:
    """Return a dataclass as plain JSON data that ``read`` accepts."""
    return _adapter(type(value)).dump_python(value, mode="json")


def parse_yaml(text: str | bytes) -> dict[Any, Any]:
    """Return the mapping of a YAML text, empty for an empty text. Raises DocumentError, with the line.

    A text of the permitted size takes seconds: call this from a thread.
    """
    try:
        return untrusted_files.load_yaml_mapping(text)
    except untrusted_files.YamlError as error:
        raise DocumentError(str(error)) from None


def did_you_mean(key: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known key that is most similar to ``key``."""
    folded = {_fold(k): k for k in known}
    match = difflib.get_close_matches(_fold(key), list(folded), n=1, cutoff=cutoff)
    return folded[match[0]] if match else None


def _fold(key: str) -> str:
    return key.replace("_", "").replace("-", "").lower()


def _explain(kind: type, problem: Mapping[str, Any], secret_paths: tuple[tuple[str, ...], ...]) -> str:
    location = tuple(problem["loc"])
    path = ".".join(str(part) for part in location if part != "[key]")
    if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        known = _field_names_at(kind, location[:-1])
        suggestion = did_you_mean(str(location[-1]), known)
        cure = f"did you mean {suggestion!r}?" if suggestion else f"known here: {', '.join(known)}"
        return f"unknown key {path!r}; {cure}"
    hidden = any(location[: len(prefix)] == prefix for prefix in secret_paths) or problem["type"] == "missing"
    got = "" if hidden else f" (got {problem['input']!r})"
    unquoted = problem["type"] == "string_type" and isinstance(problem["input"], int | float)
    cure = "; put it in quotes" if unquoted else ""
    return f"{path or 'it'}: {problem['msg'].removeprefix('Value error, ')}{cure}{got}"


def _field_names_at(kind: type, path: tuple[Any, ...]) -> list[str]:
    annotation: Any = kind
    for part in path:
        if dataclasses.is_dataclass(annotation):
            annotation = get_type_hints(annotation)[str(part)]
        else:  # an item of a list or a mapping
            annotation = [inner for inner in get_args(annotation) if inner is not Ellipsis][-1]
        if get_origin(annotation) in (Union, UnionType):  # what may be left out
            annotation = next(inner for inner in get_args(annotation) if inner is not type(None))
    return [f.name for f in dataclasses.fields(annotation)]
