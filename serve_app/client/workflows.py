"""Workflows over the management API; a workflow is called by its name, as a model is."""

from __future__ import annotations

from typing import Any

from serve_app.client._operations import (
    Operation,
    RequestDescriptor,
    RequestFlow,
    fetch_list,
    fetch_text,
    join_path,
    json_body,
)
from serve_app.client.models import fetch_pages


class WorkflowOperations:
    """The routes under ``/workflows``."""

    @Operation
    def register_workflow(
        self, /, url: str | None = None, document: Any = None, **parameters: Any
    ) -> RequestFlow[str]:
        """Register a .war by its ``url``, or a document; ``parameters`` are those of ``POST /workflows``."""
        query = {"url": url, **parameters}
        request = RequestDescriptor(
            "management", "POST", "/workflows", query, **json_body(document), idle_timeout=None
        )
        return (yield from fetch_text(request, "status"))

    @Operation
    def workflows(self) -> RequestFlow[list[dict[str, Any]]]:
        """Return every workflow by name: ``workflowName`` and ``workflowUrl``."""
        return (yield from fetch_pages("/workflows", "workflows"))

    @Operation
    def workflow(self, name: str) -> RequestFlow[list[dict[str, Any]]]:
        """Return every version of a workflow, the default one first."""
        return (yield from fetch_list(RequestDescriptor("management", "GET", join_path("workflows", name))))

    @Operation
    def unregister_workflow(self, name: str, version: str | None = None) -> RequestFlow[str]:
        """Remove a workflow and the models that came with it; with a ``version``, only that one."""
        path = join_path("workflows", name, version)
        return (yield from fetch_text(RequestDescriptor("management", "DELETE", path), "status"))
