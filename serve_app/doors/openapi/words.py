"""The words that a part of the OpenAPI document is written in. Source: OpenAPI Specification 3.1.0."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """What one door adds: its ``paths``, and the ``schemas`` that they refer to; ``about`` is said of its tag."""

    tag: str
    about: str
    paths: Json
    schemas: Json = field(default_factory=dict)


# Schemas


def text(about: str = "", **more: Any) -> Json:
    return _typed("string", about, more)


def integer(about: str = "", **more: Any) -> Json:
    return _typed("integer", about, more)


def number(about: str = "", **more: Any) -> Json:
    return _typed("number", about, more)


def flag(about: str = "", **more: Any) -> Json:
    return _typed("boolean", about, more)


def array(of: Json, about: str = "", **more: Any) -> Json:
    return _typed("array", about, {"items": of, **more})


def mapping(of: Json, about: str = "") -> Json:
    return _typed("object", about, {"additionalProperties": of})


def anything(about: str) -> Json:
    return {"description": about}


def document(required: tuple[str, ...] = (), about: str = "", closed: bool = False, **properties: Json) -> Json:
    """An object. ``closed``: it has no other properties."""
    more: Json = {"properties": properties}
    if required:
        more["required"] = list(required)
    if closed:
        more["additionalProperties"] = False
    return _typed("object", about, more)


def nullable(schema: Json) -> Json:
    return {**schema, "type": [schema["type"], "null"]}


def _typed(kind: str, about: str, more: Json) -> Json:
    return {"type": kind, **({"description": about} if about else {}), **more}


def schema(name: str) -> Json:
    """One of the document's schemas, by its name."""
    return {"$ref": f"#/components/schemas/{name}"}


# Parameters

_NAME = {"type": "string", "pattern": "^[A-Za-z0-9_][A-Za-z0-9_.-]*$"}


def in_path(name: str, about: str, of: Json = _NAME) -> Json:
    return {"in": "path", "name": name, "description": about, "required": True, "schema": of}


def in_query(name: str, about: str, of: Json | None = None, required: bool = False) -> Json:
    return {"in": "query", "name": name, "description": about, "required": required, "schema": of or text()}


def in_header(name: str, about: str, of: Json) -> Json:
    return {"in": "header", "name": name, "description": about, "required": False, "schema": of}


MODEL = in_path("model_name", "The model.")
# Not what stands for something else in a path.
_VERSION = {
    "type": "string",
    "pattern": "^(?!(events|experiments|invoke|predict|rollout|shadow|traffic)$)[A-Za-z0-9_][A-Za-z0-9_.-]*$",
}
VERSION = in_path("model_version", "The version, or a label that the model's policy gives one.", _VERSION)
# Of every call of a model.
CALL = (
    in_header(
        "x-request-timeout-seconds",
        "How long the caller waits, 0 for ever. What would come later is refused or dropped (504).",
        number(minimum=0, maximum=86400),
    ),
    in_header("x-request-priority", "How urgent it is, where calls wait.", text(enum=["high", "normal", "low"])),
)

# Answers

_ID = {
    "x-request-id": {
        "description": "How the server's log calls the request.",
        "schema": {"type": "string", "format": "uuid"},
    }
}
_ANSWERED = {"x-model-version": {"description": "The version that answered.", "schema": {"type": "string"}}}
_REASON = {"x-torchrelay-reason": {"description": "The error in one word.", "schema": {"type": "string"}}}
_AGAIN = {
    "retry-after": {"description": "Seconds after which to ask again.", "schema": {"type": "integer", "minimum": 1}}
}
_LATER = (429, 503, 504)

MEANING = {
    400: "The request is wrong.",
    401: "The key that was shown does not allow it, or none was.",
    403: "Understood, and refused.",
    404: "There is no such thing.",
    405: "There is no such method, or the model API is off.",
    409: "It is there already, or something else that is in force stands against it.",
    410: "The state of the sequence, or the answer, is gone.",
    413: "The body is larger than inference.max_request_size.",
    422: "The body is no document of this kind.",
    424: "The model's handler failed.",
    429: "As many calls are under way as the model allows.",
    500: "A worker or the server failed.",
    501: "A part of the protocol that is not served.",
    503: "Nobody can answer now, or the handler failed.",
    504: "The caller's time is over.",
    507: "Out of memory.",
}


def answer(about: str, of: Json | None = None, media: str = "application/json", called: bool = False) -> Json:
    """An answer; ``called``: that of a model."""
    said: Json = {"description": about, "headers": {**_ID, **(_ANSWERED if called else {})}}
    if of is not None:
        said["content"] = {media: {"schema": of}}
    return said


@dataclass(frozen=True)
class Dialect:
    """How a protocol says no: ``error`` is the schema's name. ``silent`` are statuses whose answers have no body."""

    error: str
    silent: tuple[int, ...] = ()

    def refusals(self, *statuses: int) -> Json:
        """The answers of these statuses, as references to ``responses``."""
        return {str(status): {"$ref": f"#/components/responses/{self.error}{status}"} for status in statuses}

    @property
    def responses(self) -> Json:
        """The answers of all statuses, by the names that ``refusals`` has for them."""
        return {f"{self.error}{status}": self._refusal(status) for status in MEANING}

    def _refusal(self, status: int) -> Json:
        said = answer(MEANING[status], None if status in self.silent else schema(self.error))
        said["headers"] |= _REASON | (_AGAIN if status in _LATER else {})
        return said


# Operations

ANY_BODY = {"*/*": {"schema": {}}}


def body(of: Json, *media: str, required: bool = True) -> Json:
    return {"content": {one: {"schema": of} for one in media or ("application/json",)}, "required": required}


def operation(
    name: str,
    about: str,
    answers: Json,
    *parameters: Json,
    body: Json | None = None,
    deprecated: bool = False,
) -> Json:
    """``name`` is the operationId, of which a document has each once."""
    said: Json = {"operationId": name, "summary": about, "parameters": list(parameters)}
    if body is not None:
        said["requestBody"] = body
    if deprecated:
        said["deprecated"] = True
    said["responses"] = answers
    return said
