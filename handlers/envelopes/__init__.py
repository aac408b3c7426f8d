"""Envelopes: wire formats around a handler, as selected by TorchServe's ``service_envelope``."""

from __future__ import annotations

# name -> "module:Class", imported on first use.
ENVELOPES: dict[str, str] = {
    "body": "handlers.envelopes.body:BodyEnvelope",
    "json": "handlers.envelopes.json:JSONEnvelope",
    "kserve": "handlers.envelopes.kserve:KServeEnvelope",
    "kservev2": "handlers.envelopes.kservev2:KServev2Envelope",
    "vertex": "handlers.envelopes.vertex:VertexEnvelope",
}
