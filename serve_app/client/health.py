"""Health and metrics of a server."""

from __future__ import annotations

from typing import Any

from serve_app.client._operations import Operation, Port, RequestDescriptor, RequestFlow, fetch_object
from serve_app.client.errors import ServerError, TransportError

CHECK_TIMEOUT_S = 2.0


class HealthOperations:
    """The health routes of the inference port, the metrics port, and the API documents."""

    @Operation
    def live(self) -> RequestFlow[bool]:
        """Return whether the server responds at all."""
        return (yield from _check("/health/live"))

    @Operation
    def ready(self) -> RequestFlow[bool]:
        """Return whether the server has a routing table and no version of its start-up is still loading."""
        return (yield from _check("/health/ready"))

    @Operation
    def readiness(self) -> RequestFlow[dict[str, Any]]:
        """Return ``ready``, and the versions that are ``loading`` or have ``failed``, as model/version."""
        request = RequestDescriptor(
            "inference", "GET", "/health/ready", retryable=False, accepted_statuses=(503,)
        )
        return (yield from fetch_object(request))

    @Operation
    def metrics(self, *names: str) -> RequestFlow[str]:
        """Return the metrics of the whole cluster in Prometheus' text format; with ``names``, only these."""
        query = {"name[]": list(names)} if names else {}
        return (yield RequestDescriptor("metrics", "GET", "/metrics", query)).text

    @Operation
    def api(self, port: Port = "inference") -> RequestFlow[dict[str, Any]]:
        """Return the OpenAPI document of a port: ``inference``, ``management`` or ``metrics``."""
        return (yield from fetch_object(RequestDescriptor(port, "GET", "/openapi.json")))


def _check(path: str) -> RequestFlow[bool]:
    try:
        yield RequestDescriptor("inference", "GET", path, idle_timeout=CHECK_TIMEOUT_S, retryable=False)
    except (TransportError, ServerError):
        return False
    return True
