"""Models: list, describe, register, scale, unregister, and their statistics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from serve_app.client._decoders import EventDecoder
from serve_app.client._operations import (
    JsonObject,
    Operation,
    RequestFlow,
    StreamDescriptor,
    StreamOperation,
    fetch_list,
    fetch_object,
    fetch_pages,
    fetch_text,
    management_request,
)


class ModelOperations:
    """TorchServe's routes under ``/models``, and a model's events."""

    @Operation
    def models(self) -> RequestFlow[list[JsonObject]]:
        """Return every model by name: ``modelName`` and ``modelUrl`` of its default version."""
        return (yield from fetch_pages("models", "models"))

    @Operation
    def models_page(self, start: int = 0, limit: int = 100) -> RequestFlow[JsonObject]:
        """Return ``limit`` models by name from the ``start``-th on, with ``nextPageToken`` if more follow."""
        query = {"next_page_token": start, "limit": limit}
        return (yield from fetch_object(management_request("GET", "models", query=query)))

    @Operation
    def describe(
        self, model: str, version: str | None = None, *, customized: bool = False
    ) -> RequestFlow[list[JsonObject]]:
        """Describe a version of a model; without one, or with ``all``, every version, the default one first.

        ``customized`` adds the metadata of the handler, as ``customizedMetadata``; without a ``version`` it
        describes the default version. Raises ValueError for the metadata of all versions at once.
        """
        if customized and version == "all":
            raise ValueError(
                "customized=True describes one version: name it, or leave it out for the default one."
            )
        selected = version if version or customized else "all"
        query = {"customized": customized or None}
        return (yield from fetch_list(management_request("GET", "models", model, selected, query=query)))

    @Operation
    def statistics(self, model: str | None = None) -> RequestFlow[list[JsonObject]]:
        """Return the counts of each version, of one model or of all, by the Open Inference Protocol.

        ``inference_stats`` has the requests of the whole cluster: ``success`` and ``fail``, each with
        ``count`` and ``ns``.
        """
        request = management_request("GET", "v2", "models", model, "stats", port="inference")
        return (yield from fetch_list(request, "model_stats"))

    @Operation
    def register(self, /, url: str, **parameters: Any) -> RequestFlow[str]:
        """Register an archive; ``parameters`` are those of ``POST /models``."""
        query = {"url": url, **parameters}
        return (yield from fetch_text(management_request("POST", "models", query=query, idle_timeout=None)))

    @StreamOperation
    def events(self, /, model: str, **parameters: Any) -> StreamDescriptor[tuple[str, JsonObject]]:
        """Yield the stages of a model's start with their details, to its end.

        ``parameters`` are those of the route.
        """
        # The server sends a comment every 15 seconds.
        request = management_request("GET", "models", model, "events", query=parameters, idle_timeout=60.0)
        return StreamDescriptor(request, _StageDecoder())

    @Operation
    def all_events(self, /, **parameters: Any) -> RequestFlow[list[JsonObject]]:
        """Return the events of the latest starts of all models, the newest first.

        ``parameters`` are those of ``GET /events``: ``model``, ``stage`` and ``limit``.
        """
        return (yield from fetch_list(management_request("GET", "events", query=parameters), "events"))

    @Operation
    def scale(self, /, model: str, version: str | None = None, **parameters: Any) -> RequestFlow[str]:
        """Change the number of workers of a version; ``parameters`` are those of ``PUT /models/{model}``."""
        request = management_request("PUT", "models", model, version, query=parameters, idle_timeout=None)
        return (yield from fetch_text(request))

    @Operation
    def set_default(self, model: str, version: str) -> RequestFlow[str]:
        """Route requests that name no version to this one; it holds once the call returns."""
        return (yield from fetch_text(management_request("PUT", "models", model, version, "set-default")))

    @Operation
    def unregister(self, model: str, version: str | None = None) -> RequestFlow[str]:
        """Remove a version; without one the default version, which must be the last."""
        return (yield from fetch_text(management_request("DELETE", "models", model, version)))


class _StageDecoder:
    """A decoder of events into pairs of a stage and its details."""

    def __init__(self) -> None:
        self._events = EventDecoder()

    def feed(self, data: bytes) -> Iterator[tuple[str, JsonObject]]:
        for event in self._events.feed(data):
            yield event.kind, event.json()
