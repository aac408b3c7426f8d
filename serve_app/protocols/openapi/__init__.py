"""The HTTP API of each port as an OpenAPI 3.1 document; each protocol's part has its own module."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import serve_app
from serve_app.protocols.openapi import open_inference, openai, torchserve
from serve_app.protocols.openapi.async_predictions import ASYNC_PREDICTIONS
from serve_app.protocols.openapi.builders import DocumentPart, Json
from serve_app.protocols.openapi.models import MODELS
from serve_app.protocols.openapi.open_inference import OPEN_INFERENCE
from serve_app.protocols.openapi.openai import OPENAI, OPENAI_MODEL
from serve_app.protocols.openapi.torchserve import DESCRIPTION, INFERENCE, METRICS
from serve_app.protocols.openapi.traffic import REWARDS, TRAFFIC
from serve_app.protocols.openapi.workflows import WORKFLOWS

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


@cache
def inference(management: bool = False) -> Json:
    """Return the document of the inference port, with the ``management`` API if the port serves it, too."""
    parts: tuple[DocumentPart, ...]
    if management:
        parts = (
            INFERENCE,
            OPEN_INFERENCE,
            OPENAI,
            MODELS,
            TRAFFIC,
            WORKFLOWS,
            ASYNC_PREDICTIONS,
            METRICS,
            DESCRIPTION,
        )
    else:
        parts = INFERENCE, OPEN_INFERENCE, OPENAI, OPENAI_MODEL, ASYNC_PREDICTIONS, REWARDS, DESCRIPTION
    return _build_document("Torchrelay", parts)


@cache
def management() -> Json:
    return _build_document("Torchrelay: management", (MODELS, TRAFFIC, WORKFLOWS, DESCRIPTION))


@cache
def metrics() -> Json:
    return _build_document("Torchrelay: metrics", (METRICS, DESCRIPTION))


def _build_document(title: str, parts: tuple[DocumentPart, ...]) -> Json:
    paths: Json = {}
    schemas: Json = {}
    responses = {
        **torchserve.ERRORS.responses,
        **open_inference.ERRORS.responses,
        **openai.ERRORS.responses,
    }
    for part in parts:
        for path, operations in part.paths.items():
            path_item = paths.setdefault(path, {})
            for method, operation in operations.items():
                path_item[method] = {"tags": [part.tag], **operation}
        schemas.update(part.schemas)
    components = {"responses": _select_referenced("responses", responses, paths)}
    components["schemas"] = _select_referenced("schemas", schemas, paths, components["responses"])
    tags = {part.tag: {"name": part.tag, "description": part.description} for part in parts}
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": serve_app.__version__, "description": _DESCRIPTION},
        "servers": [{"url": "/"}],
        "tags": list(tags.values()),
        "security": [{}, {"key": []}],
        "paths": paths,
        "components": {**components, "securitySchemes": _SECURITY_SCHEMES},
    }


def _select_referenced(kind: str, components: Json, *documents: Any) -> Json:
    """Return the ``components`` of a kind that ``documents``, or other returned components, refer to."""
    selected: Json = {}
    pending = {name for document in documents for name in _iterate_references(document, kind)}
    while pending:
        name = pending.pop()
        selected[name] = components[name]
        pending |= {*_iterate_references(components[name], kind)} - set(selected)
    return dict(sorted(selected.items()))


def _iterate_references(value: Any, kind: str) -> Iterator[str]:
    """Yield the names of the components of a kind that ``value`` refers to."""
    if isinstance(value, dict):
        if str(value.get("$ref", "")).startswith(f"#/components/{kind}/"):
            yield value["$ref"].rpartition("/")[2]
        for inner in value.values():
            yield from _iterate_references(inner, kind)
    elif isinstance(value, list):
        for inner in value:
            yield from _iterate_references(inner, kind)
