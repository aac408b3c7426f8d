"""The HTTP API of each port as an OpenAPI 3.1 document."""

from __future__ import annotations

from functools import cache

from serve_app.protocols.management.metrics import METRICS
from serve_app.protocols.management.routes import MANAGEMENT, REWARDS
from serve_app.protocols.openapi.anthropic import ANTHROPIC
from serve_app.protocols.openapi.document import Document
from serve_app.protocols.openapi.open_inference import OPEN_INFERENCE
from serve_app.protocols.openapi.openai import OPENAI, OPENAI_MODEL
from serve_app.protocols.openapi.route import SELF_DESCRIPTION
from serve_app.protocols.openapi.tei import TEI, TEI_OPENAI
from serve_app.protocols.openapi.torchserve import ASYNC_PREDICTIONS, HEALTH, INFERENCE
from serve_app.protocols.torchserve import openapi as torchserve


@cache
def inference(management: bool = False) -> Document:
    """Return the document of the inference port, with the ``management`` API if the port serves it, too."""
    others = (*MANAGEMENT, METRICS) if management else (OPENAI_MODEL, REWARDS)
    apis = (INFERENCE, HEALTH, OPEN_INFERENCE, OPENAI, ANTHROPIC, TEI, TEI_OPENAI, ASYNC_PREDICTIONS, *others)
    described = torchserve.BOTH if management else torchserve.INFERENCE
    return Document("Torchrelay", *apis, torchserve.describe_port(described), SELF_DESCRIPTION)


@cache
def management() -> Document:
    description = torchserve.describe_port(torchserve.MANAGEMENT)
    return Document("Torchrelay: management", *MANAGEMENT, description, SELF_DESCRIPTION)


@cache
def metrics() -> Document:
    description = torchserve.describe_port(torchserve.METRICS)
    return Document("Torchrelay: metrics", METRICS, description, SELF_DESCRIPTION)
