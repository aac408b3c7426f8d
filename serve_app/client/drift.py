"""Drift of captured requests over the management API."""

from __future__ import annotations

from serve_app.client._operations import (
    JsonObject,
    Operation,
    RequestFlow,
    fetch_object,
    management_request,
)


class DriftOperations:
    """Operations on the drift of models whose model-config.yaml has ``capture``."""

    @Operation
    def drift(self, model: str, version: str | None = None) -> RequestFlow[JsonObject]:
        """Return the drift of each feature of a version; without one, of every version with ``capture``."""
        return (yield from fetch_object(management_request("GET", "models", model, version, "drift")))

    @Operation
    def reset_drift(self, model: str, version: str) -> RequestFlow[JsonObject]:
        """Make the current window of a version its reference; return the document of ``drift``."""
        request = management_request("POST", "models", model, version, "drift", "reset")
        return (yield from fetch_object(request))
