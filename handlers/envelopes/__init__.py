"""Wire formats around a handler: what TorchServe's ``service_envelope`` names."""

from __future__ import annotations

# name -> "module:Class", imported when asked for.
ENVELOPES: dict[str, str] = {
    "body": "handlers.envelopes.body:BodyEnvelope",
    "json": "handlers.envelopes.json:JSONEnvelope",
    "kserve": "handlers.envelopes.kserve:KServeEnvelope",
    "kservev2": "handlers.envelopes.kservev2:KServev2Envelope",
}
