"""Whether a server answers, and what it measures."""

from __future__ import annotations

from typing import Any

import httpx

from serve_app.client.ask import Ask, Talk, operation
from serve_app.client.errors import ServerError


class Health:
    """Of the inference port, and of the one that Prometheus asks."""

    @operation
    def live(self) -> Talk[bool]:
        """Whether the server answers at all."""
        return (yield from _is_well("/health/live"))

    @operation
    def ready(self) -> Talk[bool]:
        """Whether the server has its table, and every version that start-up wanted is ready or has failed."""
        return (yield from _is_well("/health/ready"))

    @operation
    def readiness(self) -> Talk[dict[str, Any]]:
        """``ready``, and the versions that are ``loading`` or have ``failed``, as model/version."""
        return (yield Ask("inference", "GET", "/health/ready", once=True, also=(503,))).json()

    @operation
    def metrics(self, *names: str) -> Talk[str]:
        """The metrics of the whole cluster as Prometheus reads them; with ``names``, only these."""
        return (yield Ask("metrics", "GET", "/metrics", {"name[]": list(names)} if names else {})).text

    @operation
    def api(self, port: str = "inference") -> Talk[dict[str, Any]]:
        """The OpenAPI document of a port: ``inference``, ``management`` or ``metrics``."""
        return (yield Ask(port, "GET", "/openapi.json")).json()  # type: ignore[arg-type]


def _is_well(path: str) -> Talk[bool]:
    try:
        yield Ask("inference", "GET", path, silence=2.0, once=True)
    except (httpx.HTTPError, ServerError):
        return False
    return True
