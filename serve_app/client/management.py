"""The management API, except for models and their traffic: adapters, drift, workflows, keys, observation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from serve_app.client._operations import (
    JsonObject,
    Operation,
    RequestFlow,
    fetch_list,
    fetch_object,
    fetch_pages,
    fetch_text,
    management_request,
)


class AdapterOperations:
    """Operations on the adapters of language models; without a ``version``, those of the default version."""

    @Operation
    def adapters(self, model: str, version: str | None = None) -> RequestFlow[list[JsonObject]]:
        """Return the adapters of a version by name."""
        request = management_request("GET", "models", model, version, "adapters")
        return (yield from fetch_list(request, "adapters"))

    @Operation
    def add_adapter(
        self, model: str, name: str, url: str, version: str | None = None, *, sha256: str | None = None
    ) -> RequestFlow[JsonObject]:
        """Load an adapter in every replica of a version; requests name it as ``model:name``.

        ``url`` is a name in the model store or a URL, as for ``register``.
        """
        document = {"name": name, "url": url, **({} if sha256 is None else {"sha256": sha256})}
        path = ("models", model, version, "adapters")
        request = management_request("POST", *path, document=document, idle_timeout=None)
        return (yield from fetch_object(request))

    @Operation
    def remove_adapter(self, model: str, name: str, version: str | None = None) -> RequestFlow[str]:
        """Unload an adapter; requests for it that are under way finish."""
        return (
            yield from fetch_text(management_request("DELETE", "models", model, version, "adapters", name))
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


class KeyOperations:
    """The routes under ``/keys``."""

    @Operation
    def list_keys(self) -> RequestFlow[list[JsonObject]]:
        """Return every key by name, with its rights, models and limits, and never the key itself."""
        return (yield from fetch_list(management_request("GET", "keys"), "keys"))

    @Operation
    def create_key(
        self,
        name: str,
        role: str = "infer",
        models: str | Sequence[str] = "*",
        limits: Mapping[str, float] | None = None,
        expires_in: float | None = None,
    ) -> RequestFlow[JsonObject]:
        """Create a key and return it once, as ``key`` in its document; ``expires_in`` is in seconds."""
        document = {
            "name": name,
            "role": role,
            "models": models if isinstance(models, str) else list(models),
            "limits": dict(limits or {}),
            "expires_in": expires_in,
        }
        request = management_request("POST", "keys", document=document)
        return (yield from fetch_object(request))

    @Operation
    def rotate_key(self, name: str, grace: float = 3600.0) -> RequestFlow[JsonObject]:
        """Replace a key and return the new one; the old one is valid for ``grace`` seconds."""
        request = management_request("POST", "keys", name, "rotate", document={"grace": grace})
        return (yield from fetch_object(request))

    @Operation
    def revoke_key(self, name: str) -> RequestFlow[str]:
        """Revoke a key; it is refused everywhere once the call returns."""
        return (yield from fetch_text(management_request("DELETE", "keys", name)))


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
