"""LoRA adapters over the management API."""

from __future__ import annotations

from serve_app.client._operations import (
    JsonObject,
    Operation,
    RequestFlow,
    fetch_list,
    fetch_object,
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
