"""Observation of a server over the management API: events, logs, the audit log, and the key's own rights."""

from __future__ import annotations

from typing import Literal

from serve_app.client._operations import (
    JsonObject,
    Operation,
    RequestFlow,
    fetch_list,
    fetch_object,
    management_request,
)


class ObservationOperations:
    """The routes ``/access``, ``/audit``, ``/events`` and ``/logs``."""

    @Operation
    def access(self) -> RequestFlow[JsonObject]:
        """Return the ``rights`` of the client's key, its ``models``, and whether one is ``required``."""
        return (yield from fetch_object(management_request("GET", "access")))

    @Operation
    def audit(self, filters: JsonObject | None = None) -> RequestFlow[list[JsonObject]]:
        """Return records of the audit log, the newest first.

        ``filters`` are ``limit``, ``actor``, ``action``, ``subject``, ``result`` (its beginning), ``since``
        (Unix time) and ``before_id``.
        """
        request = management_request("GET", "audit", query=filters or {})
        return (yield from fetch_list(request, "records"))

    @Operation
    def list_events(
        self, model: str | None = None, stage: str | None = None, limit: int = 100
    ) -> RequestFlow[list[JsonObject]]:
        """Return the stages of the starts of all models, or of one, the newest first."""
        query = {"limit": limit, "model": model, "stage": stage}
        return (yield from fetch_list(management_request("GET", "events", query=query), "events"))

    @Operation
    def logs(
        self,
        log: Literal["server", "model", "access"] = "server",
        level: str | None = None,
        model: str | None = None,
        text: str | None = None,
        limit: int = 100,
    ) -> RequestFlow[list[JsonObject]]:
        """Return records of a log of the head node, the newest first.

        ``level`` is the lowest level; ``text`` is a part of the records.
        """
        query = {"log": log, "level": level, "model": model, "text": text, "limit": limit}
        return (yield from fetch_list(management_request("GET", "logs", query=query), "records"))
