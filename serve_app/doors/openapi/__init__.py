"""What each port speaks over HTTP, as one OpenAPI 3.1 document: a file for each door's part."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import serve_app
from serve_app.doors.openapi import oip, openai, torchserve
from serve_app.doors.openapi.asynchronous import ASYNCHRONOUS
from serve_app.doors.openapi.models import MODELS
from serve_app.doors.openapi.oip import OIP
from serve_app.doors.openapi.openai import OPENAI, SHOWN
from serve_app.doors.openapi.torchserve import DESCRIPTION, INFERENCE, METRICS
from serve_app.doors.openapi.traffic import REWARDS, TRAFFIC
from serve_app.doors.openapi.words import Json, Part
from serve_app.doors.openapi.workflows import WORKFLOWS

_ABOUT = """Serves PyTorch models on Ray Serve, by TorchServe's API, the Open Inference Protocol and OpenAI's API.

Errors come in the words of the protocol that was asked; each has the header `x-torchrelay-reason`, and those that pass `retry-after`.
"""  # noqa: E501
_KEY = {
    "key": {
        "type": "http",
        "scheme": "bearer",
        "description": "Where the server wants keys: one that is allowed what is asked.",
    }
}


@cache
def inference(management: bool = False) -> Json:
    """What a gateway answers; with the ``management`` API where that is on its port, too."""
    if management:
        parts = INFERENCE, OIP, OPENAI, MODELS, TRAFFIC, WORKFLOWS, ASYNCHRONOUS, METRICS, DESCRIPTION
    else:
        parts = INFERENCE, OIP, OPENAI, SHOWN, ASYNCHRONOUS, REWARDS, DESCRIPTION
    return _joined("Torchrelay", parts)


@cache
def management() -> Json:
    return _joined("Torchrelay: management", (MODELS, TRAFFIC, WORKFLOWS, DESCRIPTION))


@cache
def metrics() -> Json:
    return _joined("Torchrelay: metrics", (METRICS, DESCRIPTION))


def _joined(title: str, parts: tuple[Part, ...]) -> Json:
    paths: Json = {}
    schemas: Json = {}
    refusals = {**torchserve.DIALECT.responses, **oip.DIALECT.responses, **openai.DIALECT.responses}
    for part in parts:
        for path, operations in part.paths.items():
            at = paths.setdefault(path, {})
            for method, operation in operations.items():
                at[method] = {"tags": [part.tag], **operation}
        schemas.update(part.schemas)
    components = {"responses": _used("responses", refusals, paths)}
    components["schemas"] = _used("schemas", schemas, paths, components["responses"])
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": serve_app.__version__, "description": _ABOUT},
        "servers": [{"url": "/"}],
        "tags": list({part.tag: {"name": part.tag, "description": part.about} for part in parts}.values()),
        "security": [{}, {"key": []}],
        "paths": paths,
        "components": {**components, "securitySchemes": _KEY},
    }


def _used(kind: str, known: Json, *where: Any) -> Json:
    """Those of the ``known`` components of a kind that are referred to, by others of them too."""
    found: Json = {}
    asked = {name for one in where for name in _references(one, kind)}
    while asked:
        name = asked.pop()
        found[name] = known[name]
        asked |= {*_references(known[name], kind)} - set(found)
    return dict(sorted(found.items()))


def _references(value: Any, kind: str) -> Iterator[str]:
    """The names of the components of a kind that are referred to in ``value``."""
    if isinstance(value, dict):
        if str(value.get("$ref", "")).startswith(f"#/components/{kind}/"):
            yield value["$ref"].rpartition("/")[2]
        for inner in value.values():
            yield from _references(inner, kind)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner, kind)
