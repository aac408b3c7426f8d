"""The OpenAPI 3.0.1 documents of TorchServe's REST APIs, built from ``openapi.json``.

Their operations come in TorchServe's order, with its ids, parameters and schemas, so that a client generated
from them has the same methods. The routes that TorchServe serves and does not describe follow, and then our
own. Errors of TorchServe's documents are corrected: a partial success is 206, ``synchronous`` is true.

``openapi.json`` has paths by group, and the parts that several paths share, each referred to by ``$ref``.
The documents have the parts in place of the references, as TorchServe's have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import orjson
from typing_extensions import NotRequired, TypedDict

import serve_app
from serve_app.protocols.http.endpoints import API, Call, Endpoint, get, options
from serve_app.protocols.http.json_errors import NO_ERRORS

Json = dict[str, Any]


class OpenAPIDocument(TypedDict):
    """An OpenAPI document."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: NotRequired[dict[str, Any]]


_SOURCE: Json = orjson.loads(Path(__file__).with_name("openapi.json").read_bytes())


def _resolve(value: Any) -> Any:
    """Return ``value`` with the shared parts in place of its references."""
    if isinstance(value, dict):
        if "$ref" in value:
            return _shared_part(value["$ref"])
        return {key: _resolve(inner) for key, inner in value.items()}
    return [_resolve(item) for item in value] if isinstance(value, list) else value


@cache
def _shared_part(reference: str) -> Any:
    _, kind, name = reference.split("/")
    return _resolve(_SOURCE[kind][name])


_GROUPS: dict[str, Json] = {name: _resolve(paths) for name, paths in _SOURCE["paths"].items()}


def _document(info: Json, *groups: str) -> Json:
    paths = {path: operations for group in groups for path, operations in _GROUPS[group].items()}
    return {"openapi": "3.0.1", "info": {**info, "version": serve_app.__version__}, "paths": paths}


_INFERENCE = ("inference", "description")
_MANAGEMENT = ("management", "model_management", "description")
_MANAGEMENT_EXTENSIONS = ("traffic", "management_extensions")
_INFO: Json = _SOURCE["info"]

INFERENCE = _document(_INFO, *_INFERENCE, "metrics", "inference_extensions")
MANAGEMENT = _document(_INFO, *_MANAGEMENT, "metrics", *_MANAGEMENT_EXTENSIONS)
METRICS = _document(_INFO, "metrics")
# The document of a port that serves both APIs.
BOTH = _document(_INFO, *_INFERENCE, *_MANAGEMENT, "metrics", "inference_extensions", *_MANAGEMENT_EXTENSIONS)


def describe_model(model: str, schemas: Mapping[str, Any] | None = None) -> Json:
    """Return the document of a model's routes on the inference port.

    Its first path, ``/prediction/{model}``, is TorchServe's spelling, which no server answers; the paths of
    ``/predictions`` and ``/explanations`` are ours. ``schemas`` are those of the handler; with an input
    and an output the document is one of OpenAPI 3.1, whose schemas are JSON Schema.
    """
    document = _document({"title": f"RESTful API for: {model}"}, "model")
    document["paths"] = _fill(document["paths"], model)
    if schemas is not None and {"input", "output"} <= schemas.keys():  # a script may have documents alone
        document["openapi"] = "3.1.0"
        for path in (f"/predictions/{model}", f"/predictions/{model}/{{model_version}}"):
            operation = document["paths"][path]["post"]
            operation["requestBody"] = {"required": True, "content": _content(schemas, "input", document)}
            content = _content(schemas, "output", document)
            operation["responses"]["200"] = {"description": "The result.", "content": content}
    return document


def _content(schemas: Mapping[str, Any], side: str, document: Json) -> Json:
    """Return the content of a request or response; the definitions of its schema become components."""
    text = orjson.dumps(schemas[side]["schema"])
    schema = orjson.loads(text.replace(b'"#/$defs/', f'"#/components/schemas/{side}.'.encode()))
    components = document.setdefault("components", {}).setdefault("schemas", {})
    components |= {f"{side}.{name}": definition for name, definition in schema.pop("$defs", {}).items()}
    return {schemas[side]["mediaType"] or "*/*": {"schema": schema}}


def _fill(value: Any, model: str) -> Any:
    """Return ``value`` with the model's name in place of ``{model}``."""
    if isinstance(value, dict):
        return {key.replace("{model}", model): _fill(inner, model) for key, inner in value.items()}
    if isinstance(value, list):
        return [_fill(item, model) for item in value]
    return value.replace("{model}", model) if isinstance(value, str) else value


def describe_model_management(model: str) -> Json:
    """Return the document of a model's routes on the management port."""
    title = f"RESTful Management API for: {model}"
    return _document({"title": title}, "model_management", "traffic")


def describe_path(
    path: str, id: str, call: Call | None = None, errors: tuple[int, ...] = (), query: type | None = None
) -> Endpoint:
    """Return the endpoint that describes the routes of a model."""
    summary = "Describe the model's API."
    return options(path, id, summary, OpenAPIDocument, errors, query=query, call=call)


DESCRIPTION = API("Description", "The descriptions of the port's API.", NO_ERRORS, ())


def describe_port(document: Json) -> API:
    """Return the API that serves TorchServe's document of a port, without a key."""

    async def describe(request: Any) -> Json:
        return document

    summary = "Get TorchServe's own document."
    return replace(
        DESCRIPTION,
        endpoints=(
            options("/", "described", summary, OpenAPIDocument, call=describe),
            get(
                "/api-description",
                "described_at_length",
                summary,
                OpenAPIDocument,
                deprecated=True,
                call=describe,
                rights=(),
                other_methods="same",
            ),
        ),
    )
