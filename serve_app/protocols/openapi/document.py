"""OpenAPI 3.1 documents of endpoints; pydantic generates their schemas from the annotated types."""

from __future__ import annotations

import inspect
import re
from functools import cache, cached_property
from http import HTTPStatus
from typing import Annotated, Any, Literal

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from typing_extensions import TypedDict

import serve_app
from serve_app.domain.validation import documented
from serve_app.protocols.http.endpoints import API, Content, Endpoint, EndpointTable, StatusCode

Json = dict[str, Any]
Mode = Literal["validation", "serialization"]

_DESCRIPTION = """Serves PyTorch models on Ray Serve with TorchServe's API, the Open Inference Protocol and OpenAI's API.

Errors have the format of the request's protocol. Each has the header `x-torchrelay-reason`, temporary ones also `retry-after`.
"""  # noqa: E501
_SECURITY_SCHEMES = {
    "key": {
        "type": "http",
        "scheme": "bearer",
        "description": "A key with the required permission, if the server requires keys.",
    }
}
_NAME = "^[A-Za-z0-9_][A-Za-z0-9_.-]*$"
# Excludes the segments that have another meaning in a path.
_VERSION = (
    "^(?!(adapters|events|experiments|invoke|predict|rollout|shadow|traffic)$)[A-Za-z0-9_][A-Za-z0-9_.-]*$"
)


class _PathParameters(TypedDict):
    model_name: Annotated[str, documented("The model.", pattern=_NAME)]
    model_version: Annotated[
        str, documented("The version, or a label of the model's traffic policy.", pattern=_VERSION)
    ]
    adapter_name: Annotated[str, documented("The LoRA adapter.", pattern=_NAME)]
    model_id: Annotated[str, documented("name, name:version or name:adapter", pattern=_NAME)]
    workflow_name: Annotated[str, documented("The workflow.", pattern=_NAME)]
    workflow_version: Annotated[str, documented("The version.", pattern=_NAME)]
    key_name: Annotated[str, documented("The key's name.", pattern="^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
    experiment_id: Annotated[str, documented("The experiment's id.", pattern="^[0-9a-f]+$")]
    id: Annotated[str, documented("The id of the prediction.", pattern="^[0-9a-f]{32}$")]
    url_path: Annotated[str, documented("Sent to the handler as the header url_path; may contain slashes.")]


_REQUEST_ID = {
    "description": "The id of the request in the server's log.",
    "schema": {"type": "string", "format": "uuid"},
}
_MODEL_VERSION = {"description": "The version that answered.", "schema": {"type": "string"}}
_ERROR_REASON = {"description": "The machine-readable reason of the error.", "schema": {"type": "string"}}
_RETRY_AFTER = {
    "description": "Seconds after which a retry makes sense.",
    "schema": {"type": "integer", "minimum": 1},
}
_RETRYABLE = (429, 503, 504)
# Descriptions that are more exact than HTTP's reason phrases.
_STATUS_DESCRIPTIONS: dict[StatusCode, str] = {
    "default": "The handler's own status and body.",
    202: "Accepted; some replicas have not applied the change yet.",
    401: "The key is missing or lacks the permission.",
    405: "The method is not allowed, or the model API is disabled.",
    409: "It exists already, or it conflicts with an active policy, experiment, rollout or workflow.",
    410: "The state of the sequence, or the response, is lost.",
    413: "The body is larger than inference.max_request_size.",
    422: "The body is not a valid document of this type.",
    424: "The model's handler failed.",
    429: "A limit of the model or of the key is reached.",
    500: "A worker or the server failed.",
    503: "No replica is available, or the handler failed.",
    504: "The deadline has passed.",
    507: "Out of memory.",
}


class Document:
    """The document of one port, which is built on first use because that takes a while."""

    def __init__(self, title: str, *apis: API) -> None:
        self._title = title
        self._apis = apis
        self.table = EndpointTable(apis)

    @cached_property
    def content(self) -> Json:
        schemas = _Schemas()
        paths: Json = {}
        responses: Json = {}
        for api in self._apis:
            for endpoint in api.endpoints:
                path_item = paths.setdefault(endpoint.path, {})
                path_item[endpoint.method.lower()] = _render_endpoint(endpoint, api, schemas)
                for status in api.errors.list_statuses(endpoint):
                    responses[f"{api.errors.kind.__name__}{status}"] = _render_error(status, api, schemas)
        tags = {api.tag: {"name": api.tag, "description": api.description} for api in self._apis}
        components = {
            "responses": dict(sorted(responses.items())),
            "schemas": dict(sorted(schemas.components.items())),
            "securitySchemes": _SECURITY_SCHEMES,
        }
        return {
            "openapi": "3.1.0",
            "info": {"title": self._title, "version": serve_app.__version__, "description": _DESCRIPTION},
            "servers": [{"url": "/"}],
            "tags": list(tags.values()),
            "security": [{}, {"key": []}],
            "paths": paths,
            "components": components,
        }


class _SchemaGenerator(GenerateJsonSchema):
    """pydantic's generator, without titles of fields and with the docstrings of dataclasses."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def dataclass_schema(self, schema: Any) -> Json:
        json_schema = super().dataclass_schema(schema)
        cls = schema["cls"]
        if not cls.__doc__.startswith(f"{cls.__name__}("):  # the signature, where there is no docstring
            json_schema["description"] = inspect.cleandoc(cls.__doc__)
        return json_schema


class _Schemas:
    """The schemas of types; those of classes are ``components``, which the others refer to."""

    def __init__(self) -> None:
        self.components: Json = {}

    def render_content(self, content: Content, mode: Mode) -> Json:
        """Return the content by media type."""
        return {media: {"schema": self._render(kind, mode)} for media, kind in content.types.items()}

    def _render(self, kind: Any, mode: Mode) -> Json:
        schema, definitions = _generate_schema(kind, mode)
        for name, definition in definitions.items():
            assert self.components.setdefault(name, definition) == definition, f"two schemas of {name}"
        return schema


@cache
def _generate_schema(kind: Any, mode: Mode) -> tuple[Json, Json]:
    """Return the schema of a type, and those of the classes that it refers to.

    It is generated for a list, because pydantic writes the class of an item as a reference.
    """
    adapter = TypeAdapter(list[kind])
    reference = "#/components/schemas/{model}"
    schema = adapter.json_schema(mode=mode, ref_template=reference, schema_generator=_SchemaGenerator)
    return schema["items"], schema.get("$defs", {})


@cache
def _render_parameters(kind: type, location: str) -> list[Json]:
    """Return the parameters that the fields of a TypedDict describe."""
    fields = TypeAdapter(kind).json_schema(schema_generator=_SchemaGenerator)["properties"]
    return [
        {
            "in": location,
            "name": name,
            "description": field.pop("description"),
            "required": location == "path",
            "schema": field,
        }
        for name, field in fields.items()
    ]


def _render_endpoint(endpoint: Endpoint, api: API, schemas: _Schemas) -> Json:
    names = re.findall(r"{(\w+)}", endpoint.path)
    parameters = [item for item in _render_parameters(_PathParameters, "path") if item["name"] in names]
    for location, kind in (("query", endpoint.query), ("header", endpoint.headers)):
        if kind is not None:
            parameters += _render_parameters(kind, location)
    document: Json = {
        "tags": [api.tag],
        "operationId": endpoint.id,
        "summary": endpoint.summary,
        "parameters": parameters,
    }
    if (body := endpoint.request_content) is not None:
        content = schemas.render_content(body, "validation")
        document["requestBody"] = {"content": content, "required": body.required}
        if body.description:
            document["requestBody"]["description"] = body.description
    if endpoint.deprecated:
        document["deprecated"] = True
    errors = {
        str(status): {"$ref": f"#/components/responses/{api.errors.kind.__name__}{status}"}
        for status in api.errors.list_statuses(endpoint)
    }
    successes = {
        str(status): _render_response(status, content, schemas)
        for status, content in endpoint.contents.items()
    }
    document["responses"] = {**errors, **successes}
    return document


def _render_response(status: StatusCode, content: Content, schemas: _Schemas) -> Json:
    headers = {"x-request-id": _REQUEST_ID}
    if content.from_model:
        headers["x-model-version"] = _MODEL_VERSION
    description = content.description or _STATUS_DESCRIPTIONS.get(status) or HTTPStatus(int(status)).phrase
    document: Json = {"description": description, "headers": headers}
    if content.types:
        document["content"] = schemas.render_content(content, "serialization")
    return document


def _render_error(status: int, api: API, schemas: _Schemas) -> Json:
    types = {} if status in api.errors.without_body else {"application/json": api.errors.kind}
    document = _render_response(status, Content(types), schemas)
    document["headers"]["x-torchrelay-reason"] = _ERROR_REASON
    if status in _RETRYABLE:
        document["headers"]["retry-after"] = _RETRY_AFTER
    return document
