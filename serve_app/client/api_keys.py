"""Keys over the management API, for a key that may manage every model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from serve_app.client._operations import (
    JsonObject,
    Operation,
    RequestFlow,
    fetch_list,
    fetch_object,
    fetch_text,
    management_request,
)


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
