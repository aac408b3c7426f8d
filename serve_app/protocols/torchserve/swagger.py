"""The documents of ``/swagger.json``: a model's predictions in the form of Azure ML's inference server.

Clients that are generated from them keep their names: the operations and the definitions are named as there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from serve_app.errors import DocumentVersionNotFound

Json = dict[str, Any]

_VERSIONS = {"2": "2.0", "2.0": "2.0", "3": "3.0", "3.0": "3.0", "3.1": "3.1"}
_OPENAPI = {"3.0": "3.0.3", "3.1": "3.1.0"}
_DEFINITIONS = {"2.0": "#/definitions/", "3.0": "#/components/schemas/", "3.1": "#/components/schemas/"}
_ANY: Json = {"type": "object", "example": {}}
_ERROR: Json = {"type": "object", "properties": {"message": {"type": "string"}}}
_KEY: Json = {"type": "apiKey", "name": "Authorization", "in": "header"}
_HEALTHY, _RESULT, _FAILED = "The model can answer.", "The prediction.", "The request failed."
_VERSION_QUERY: Json = {"name": "version", "in": "query", "required": False}


def build_document(
    model: str, model_version: str, path: str, schemas: Mapping[str, Any] | None, version: str
) -> Json:
    """Return the document of a model in version 2, 3 or 3.1 of the specification.

    ``path`` is that of predictions, ``schemas`` are the handler's: ``documents`` of the author take
    precedence, and ``versions`` are those that its schemas have. Without schemas, input and output are any
    objects. Raises DocumentVersionNotFound for a version that there is not.
    """
    schemas = schemas or {}
    wanted = _VERSIONS.get(version)
    known = schemas.get("versions") or list(_DEFINITIONS)
    documents: Mapping[str, Json] = schemas.get("documents") or {}
    if wanted is not None and wanted in documents:
        return documents[wanted]
    if wanted is None or wanted not in known:
        there_are = ", ".join(sorted({*known, *documents}))
        raise DocumentVersionNotFound(version, there_are)
    # The schemas of model classes are JSON Schema, which only OpenAPI 3.1 has.
    has_schemas = "input" in schemas and ("versions" in schemas or wanted != "2.0")
    definitions: Json = {"ErrorResponse": _ERROR}
    for name, side in (("ServiceInput", "input"), ("ServiceOutput", "output")):
        schema = _resolve(schemas[side]["schema"], side, wanted, definitions) if has_schemas else _ANY
        definitions[name] = schema
    info = {"title": model, "version": model_version}
    if wanted == "2.0":
        return _render_swagger(info, path, definitions)
    is_json_schema = has_schemas and "versions" not in schemas
    return _render_openapi(_OPENAPI["3.1" if is_json_schema else wanted], info, path, definitions)


def _resolve(schema: Json, side: str, version: str, definitions: Json) -> Json:
    """Return a schema whose own definitions are those of the document."""
    text = orjson.dumps(schema).replace(b'"#/$defs/', f'"{_DEFINITIONS[version]}{side}.'.encode())
    resolved: Json = orjson.loads(text)
    definitions |= {f"{side}.{name}": value for name, value in resolved.pop("$defs", {}).items()}
    return resolved


def _render_swagger(info: Json, path: str, definitions: Json) -> Json:
    def response(description: str, schema: Json) -> Json:
        return {"description": description, "schema": schema}

    body = {"name": "serviceInputPayload", "in": "body", "schema": {"$ref": "#/definitions/ServiceInput"}}
    return {
        "swagger": "2.0",
        "info": info,
        "consumes": ["application/json"],
        "produces": ["application/json"],
        "securityDefinitions": {"Bearer": _KEY},
        "security": [{"Bearer": []}],
        "paths": _render_paths(path, "#/definitions/", response, {"parameters": [body]}, {"type": "string"}),
        "definitions": definitions,
    }


def _render_openapi(openapi: str, info: Json, path: str, definitions: Json) -> Json:
    def content(schema: Json) -> Json:
        return {"content": {"application/json": {"schema": schema}}}

    def response(description: str, schema: Json) -> Json:
        return {"description": description, **content(schema)}

    place = "#/components/schemas/"
    body = {"requestBody": content({"$ref": f"{place}ServiceInput"})}
    return {
        "openapi": openapi,
        "info": info,
        "security": [{"Bearer": []}],
        "paths": _render_paths(path, place, response, body, {"schema": {"type": "string"}}),
        "components": {"schemas": definitions, "securitySchemes": {"Bearer": _KEY}},
    }


def _render_paths(
    path: str, place: str, response: Callable[[str, Json], Json], body: Json, version_type: Json
) -> Json:
    """Return the operations; ``place`` is that of definitions, ``body`` the declaration of the input."""
    error = response(_FAILED, {"$ref": f"{place}ErrorResponse"})
    result = response(_RESULT, {"$ref": f"{place}ServiceOutput"})
    health = {"200": {"description": _HEALTHY}, "default": error}
    document = {
        "operationId": "GetSwaggerSpec",
        "parameters": [{**_VERSION_QUERY, **version_type}],
        "responses": {"200": response("This document.", {"type": "object"})},
    }
    run = {"operationId": "RunMLService", **body, "responses": {"200": result, "default": error}}
    return {
        "/": {"get": {"operationId": "ServiceHealthCheck", "responses": health}},
        path: {"post": run},
        "/swagger.json": {"get": document},
    }
