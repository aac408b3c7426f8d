"""Builders for parts of an OpenAPI document. Source: OpenAPI Specification 3.1.0."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class DocumentPart:
    """A protocol's part of a document.

    ``schemas`` are those that ``paths`` refer to; ``description`` is that of the tag.
    """

    tag: str
    description: str
    paths: Json
    schemas: Json = field(default_factory=dict)


# Schemas


def string(description: str = "", **keywords: Any) -> Json:
    return _typed_schema("string", description, keywords)


def integer(description: str = "", **keywords: Any) -> Json:
    return _typed_schema("integer", description, keywords)


def number(description: str = "", **keywords: Any) -> Json:
    return _typed_schema("number", description, keywords)


def boolean(description: str = "", **keywords: Any) -> Json:
    return _typed_schema("boolean", description, keywords)


def array(items: Json, description: str = "", **keywords: Any) -> Json:
    return _typed_schema("array", description, {"items": items, **keywords})


def mapping(values: Json, description: str = "") -> Json:
    return _typed_schema("object", description, {"additionalProperties": values})


def any_value(description: str) -> Json:
    return {"description": description}


def object_schema(
    required: tuple[str, ...] = (), description: str = "", closed: bool = False, **properties: Json
) -> Json:
    """Return the schema of an object; a ``closed`` one allows no other properties."""
    keywords: Json = {"properties": properties}
    if required:
        keywords["required"] = list(required)
    if closed:
        keywords["additionalProperties"] = False
    return _typed_schema("object", description, keywords)


def nullable(schema: Json) -> Json:
    return {**schema, "type": [schema["type"], "null"]}


def _typed_schema(kind: str, description: str, keywords: Json) -> Json:
    return {"type": kind, **({"description": description} if description else {}), **keywords}


def schema_ref(name: str) -> Json:
    """Return a reference to one of the document's schemas."""
    return {"$ref": f"#/components/schemas/{name}"}


# Parameters

_NAME = {"type": "string", "pattern": "^[A-Za-z0-9_][A-Za-z0-9_.-]*$"}


def path_parameter(name: str, description: str, schema: Json = _NAME) -> Json:
    return {"in": "path", "name": name, "description": description, "required": True, "schema": schema}


def query_parameter(name: str, description: str, schema: Json | None = None, required: bool = False) -> Json:
    return {
        "in": "query",
        "name": name,
        "description": description,
        "required": required,
        "schema": schema or string(),
    }


def header_parameter(name: str, description: str, schema: Json) -> Json:
    return {"in": "header", "name": name, "description": description, "required": False, "schema": schema}


MODEL = path_parameter("model_name", "The model.")
# Excludes the segments that have another meaning in a path.
_VERSION = {
    "type": "string",
    "pattern": "^(?!(events|experiments|invoke|predict|rollout|shadow|traffic)$)[A-Za-z0-9_][A-Za-z0-9_.-]*$",
}
VERSION = path_parameter("model_version", "The version, or a label of the model's traffic policy.", _VERSION)
# Of every inference request.
REQUEST_HEADERS = (
    header_parameter(
        "x-request-timeout-seconds",
        "The caller's timeout, 0 for none. Later responses are rejected or dropped (504).",
        number(minimum=0, maximum=86400),
    ),
    header_parameter(
        "x-request-priority", "The priority in the queue.", string(enum=["high", "normal", "low"])
    ),
)

# Responses

_ID = {
    "x-request-id": {
        "description": "The id of the request in the server's log.",
        "schema": {"type": "string", "format": "uuid"},
    }
}
_MODEL_VERSION = {
    "x-model-version": {"description": "The version that answered.", "schema": {"type": "string"}}
}
_ERROR_REASON = {
    "x-torchrelay-reason": {
        "description": "The machine-readable reason of the error.",
        "schema": {"type": "string"},
    }
}
_RETRY_AFTER = {
    "retry-after": {
        "description": "Seconds after which a retry makes sense.",
        "schema": {"type": "integer", "minimum": 1},
    }
}
_RETRYABLE = (429, 503, 504)

STATUS_DESCRIPTIONS = {
    400: "The request is invalid.",
    401: "The key is missing or lacks the permission.",
    403: "The request is forbidden.",
    404: "The resource does not exist.",
    405: "The method is not allowed, or the model API is disabled.",
    409: "It exists already, or it conflicts with an active policy, experiment, rollout or workflow.",
    410: "The state of the sequence, or the response, is lost.",
    413: "The body is larger than inference.max_request_size.",
    422: "The body is not a valid document of this type.",
    424: "The model's handler failed.",
    429: "The model's limit of concurrent requests is reached.",
    500: "A worker or the server failed.",
    501: "This part of the protocol is not supported.",
    503: "No replica is available, or the handler failed.",
    504: "The deadline has passed.",
    507: "Out of memory.",
}


def response(
    description: str, schema: Json | None = None, media: str = "application/json", from_model: bool = False
) -> Json:
    """Return a response; with ``from_model`` it has the header of the version that answered."""
    headers = {**_ID, **(_MODEL_VERSION if from_model else {})}
    document: Json = {"description": description, "headers": headers}
    if schema is not None:
        document["content"] = {media: {"schema": schema}}
    return document


@dataclass(frozen=True)
class ErrorFormat:
    """The error responses of a protocol.

    ``error`` is the name of their schema; responses with a status in ``without_body`` have no body.
    """

    error: str
    without_body: tuple[int, ...] = ()

    def responses_for(self, *statuses: int) -> Json:
        """Return references to the responses with these statuses."""
        return {str(status): {"$ref": f"#/components/responses/{self.error}{status}"} for status in statuses}

    @property
    def responses(self) -> Json:
        """The responses of all statuses, by the names that ``responses_for`` refers to."""
        return {f"{self.error}{status}": self._error_response(status) for status in STATUS_DESCRIPTIONS}

    def _error_response(self, status: int) -> Json:
        body = None if status in self.without_body else schema_ref(self.error)
        document = response(STATUS_DESCRIPTIONS[status], body)
        document["headers"] |= _ERROR_REASON | (_RETRY_AFTER if status in _RETRYABLE else {})
        return document


# Operations

ANY_BODY: Json = {"*/*": {"schema": {}}}


def request_body(schema: Json, *media: str, required: bool = True) -> Json:
    return {
        "content": {item: {"schema": schema} for item in media or ("application/json",)},
        "required": required,
    }


def operation(
    operation_id: str,
    summary: str,
    responses: Json,
    *parameters: Json,
    body: Json | None = None,
    deprecated: bool = False,
) -> Json:
    """Return an operation; ``operation_id`` is unique in a document."""
    document: Json = {"operationId": operation_id, "summary": summary, "parameters": list(parameters)}
    if body is not None:
        document["requestBody"] = body
    if deprecated:
        document["deprecated"] = True
    document["responses"] = responses
    return document
