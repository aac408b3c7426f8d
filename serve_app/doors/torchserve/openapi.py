"""What the two REST APIs say of themselves: OpenAPI 3.0.1 documents, made from the routes below."""

from __future__ import annotations

import re
from typing import Any

import serve_app

# Path, then method: what it does, its query parameters, its statuses.
Operation = tuple[str, tuple[str, ...], tuple[int, ...]]
_INFERRED = (200, 400, 404, 413, 500, 503, 504, 507)

INFERENCE: dict[str, dict[str, Operation]] = {
    "/": {"options": ("This document.", (), (200,))},
    "/api-description": {"get": ("This document.", (), (200,))},
    "/ping": {"get": ("Whether every default version has its workers.", (), (200, 500))},
    "/health/live": {"get": ("Whether this server answers.", (), (200,))},
    "/health/ready": {"get": ("Whether everything that should be loaded has been.", (), (200, 503))},
    "/predictions/{model_name}": {"post": ("Ask a model's default version.", (), _INFERRED)},
    "/predictions/{model_name}/{model_version}": {"post": ("Ask one version of a model.", (), _INFERRED)},
    "/explanations/{model_name}": {"post": ("An explanation by a model's default version.", (), _INFERRED)},
    "/explanations/{model_name}/{model_version}": {"post": ("An explanation by one version.", (), _INFERRED)},
}

_DESCRIBE: Operation = ("Describe a version; without one, the default version.", ("customized",), (200, 404, 503))
_SCALE: Operation = (
    "Change how many workers a version has; without one, the default version.",
    ("min_worker", "max_worker", "synchronous"),
    (200, 202, 206, 400, 404, 500, 507),
)
_UNREGISTER: Operation = ("Remove a version; without one, the default version.", (), (200, 403, 404, 405))
_REGISTRATION = (
    "url",
    "model_name",
    "handler",
    "runtime",
    "batch_size",
    "max_batch_delay",
    "initial_workers",
    "response_timeout",
    "startup_timeout",
    "synchronous",
)

MANAGEMENT: dict[str, dict[str, Operation]] = {
    "/": {"options": ("This document.", (), (200,))},
    "/api-description": {"get": ("This document.", (), (200,))},
    "/models": {
        "get": ("List the models by name.", ("limit", "next_page_token"), (200,)),
        "post": ("Register an archive.", _REGISTRATION, (200, 202, 206, 400, 404, 405, 409, 500, 507)),
    },
    "/models/{model_name}": {"get": _DESCRIBE, "put": _SCALE, "delete": _UNREGISTER},
    "/models/{model_name}/all": {"get": ("Describe every version of a model.", (), (200, 404))},
    "/models/{model_name}/{model_version}": {"get": _DESCRIBE, "put": _SCALE, "delete": _UNREGISTER},
    "/models/{model_name}/{model_version}/set-default": {
        "put": ("Make a version the one that answers calls that name none.", (), (200, 404))
    },
    "/v1/models/{model_name}": {"get": ("Whether a model's default version is ready.", (), (200, 404))},
}


def document(routes: dict[str, dict[str, Operation]]) -> dict[str, Any]:
    return {
        "openapi": "3.0.1",
        "info": {"title": "Torchrelay APIs", "version": serve_app.__version__},
        "paths": {
            path: {method: _operation(path, *operation) for method, operation in methods.items()}
            for path, methods in routes.items()
        },
    }


def of_model(routes: dict[str, dict[str, Operation]], model: str) -> dict[str, Any]:
    """The document of the routes that name a model, with this one's name in them."""
    named = {path.replace("{model_name}", model): methods for path, methods in routes.items() if "{model_name}" in path}
    return document(named)


def _operation(path: str, summary: str, query: tuple[str, ...], statuses: tuple[int, ...]) -> dict[str, Any]:
    parameters = [
        {"in": "path", "name": name, "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    parameters += [{"in": "query", "name": name, "schema": {"type": "string"}} for name in query]
    operation: dict[str, Any] = {"summary": summary}
    if parameters:
        operation["parameters"] = parameters
    operation["responses"] = {str(status): {"description": _MEANING[status]} for status in statuses}
    return operation


_MEANING = {
    200: "Done.",
    202: "Accepted; it happens in the background.",
    206: "Some of the workers are still on their way.",
    400: "The request is wrong.",
    403: "The default version cannot go while others stand behind it.",
    404: "No such model, version, archive or route.",
    405: "Not allowed.",
    409: "That version is there already.",
    413: "The body is larger than max_request_size.",
    500: "A worker or the server failed.",
    503: "Nobody can answer now, or the handler failed.",
    504: "The caller's deadline passed.",
    507: "Out of memory.",
}
