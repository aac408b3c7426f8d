"""Workflows over the management API; they are called as models are, by their names."""

from __future__ import annotations

from typing import Any

from serve_app.client.ask import Ask, Talk, of_json, operation, path
from serve_app.client.models import pages


class Workflows:
    """The routes under ``/workflows``."""

    @operation
    def register_workflow(self, url: str | None = None, document: Any = None, **parameters: Any) -> Talk[str]:
        """Register a .war by its ``url``, or a document; ``parameters`` are those of ``POST /workflows``."""
        asked = {"url": url, **parameters}
        answer = yield Ask("management", "POST", "/workflows", asked, **of_json(document), silence=None)
        return answer.json()["status"]

    @operation
    def workflows(self) -> Talk[list[dict[str, Any]]]:
        """Every workflow by name: ``workflowName`` and ``workflowUrl``."""
        return (yield from pages("/workflows", "workflows"))

    @operation
    def workflow(self, name: str) -> Talk[list[dict[str, Any]]]:
        """Every version of a workflow, the default one first."""
        return (yield Ask("management", "GET", path("workflows", name))).json()

    @operation
    def unregister_workflow(self, name: str, version: str | None = None) -> Talk[str]:
        """Remove a workflow with what came with it; with a ``version``, that one."""
        return (yield Ask("management", "DELETE", path("workflows", name, version))).json()["status"]
