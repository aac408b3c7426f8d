"""Workflows over the management API; a workflow is called by its name, as a model is."""

from __future__ import annotations

from typing import Any

from serve_app.client._operations import (
    JsonObject,
    Operation,
    RequestFlow,
    fetch_list,
    fetch_pages,
    fetch_text,
    management_request,
)


class WorkflowOperations:
    """The routes under ``/workflows``."""

    @Operation
    def register_workflow(
        self, /, url: str | None = None, document: Any = None, **parameters: Any
    ) -> RequestFlow[str]:
        """Register a .war by its ``url``, or a document; ``parameters`` are those of ``POST /workflows``."""
        query = {"url": url, **parameters}
        request = management_request("POST", "workflows", query=query, document=document, idle_timeout=None)
        return (yield from fetch_text(request))

    @Operation
    def workflows(self) -> RequestFlow[list[JsonObject]]:
        """Return every workflow by name: ``workflowName`` and ``workflowUrl``."""
        return (yield from fetch_pages("workflows", "workflows"))

    @Operation
    def workflow(self, name: str) -> RequestFlow[list[JsonObject]]:
        """Return every version of a workflow, the default one first."""
        return (yield from fetch_list(management_request("GET", "workflows", name)))

    @Operation
    def unregister_workflow(self, name: str, version: str | None = None) -> RequestFlow[str]:
        """Remove a workflow and the models that came with it; with a ``version``, only that one."""
        return (yield from fetch_text(management_request("DELETE", "workflows", name, version)))
