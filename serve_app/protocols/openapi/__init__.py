"""The HTTP API of each port as an OpenAPI 3.1 document; each protocol's endpoints have their own module."""

from __future__ import annotations

from functools import cache

from serve_app.protocols.openapi.document import Document
from serve_app.protocols.openapi.management import (
    ADAPTERS,
    DRIFT,
    KEYS,
    MODELS,
    OPERATION,
    REWARDS,
    TRAFFIC,
    WORKFLOWS,
)
from serve_app.protocols.openapi.open_inference import OPEN_INFERENCE
from serve_app.protocols.openapi.openai import OPENAI, OPENAI_MODEL
from serve_app.protocols.openapi.torchserve import ASYNC_PREDICTIONS, DESCRIPTION, HEALTH, INFERENCE, METRICS


@cache
def inference(management: bool = False) -> Document:
    """Return the document of the inference port, with the ``management`` API if the port serves it, too."""
    features = (TRAFFIC, DRIFT, ADAPTERS, WORKFLOWS, KEYS, OPERATION)
    others = (MODELS, *features, METRICS) if management else (OPENAI_MODEL, REWARDS)
    return Document(
        "Torchrelay", INFERENCE, HEALTH, OPEN_INFERENCE, OPENAI, ASYNC_PREDICTIONS, *others, DESCRIPTION
    )


@cache
def management() -> Document:
    features = (TRAFFIC, DRIFT, ADAPTERS, WORKFLOWS, KEYS, OPERATION)
    return Document("Torchrelay: management", MODELS, *features, DESCRIPTION)


@cache
def metrics() -> Document:
    return Document("Torchrelay: metrics", METRICS, DESCRIPTION)
