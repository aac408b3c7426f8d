"""Models over the management API: list, describe, register, scale, unregister."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from serve_app.client._decoders import EventDecoder
from serve_app.client._operations import (
    Operation,
    RequestDescriptor,
    RequestFlow,
    StreamDescriptor,
    StreamOperation,
    fetch_list,
    fetch_object,
    fetch_text,
    join_path,
)


class ModelOperations:
    """TorchServe's routes under ``/models``, and a model's events."""

    @Operation
    def models(self) -> RequestFlow[list[dict[str, Any]]]:
        """Return every model by name: ``modelName`` and ``modelUrl`` of its default version."""
        return (yield from fetch_pages("/models", "models"))

    @Operation
    def describe(
        self, model: str, version: str | None = None, *, customized: bool = False
    ) -> RequestFlow[list[dict[str, Any]]]:
        """Describe a version of a model; without one, or with ``all``, every version, the default one first.

        ``customized`` adds the metadata of the handler, as ``customizedMetadata``; without a ``version`` it
        describes the default version.
        """
        path = join_path("models", model, version_to_describe(version, customized))
        query = {"customized": customized or None}
        return (yield from fetch_list(RequestDescriptor("management", "GET", path, query)))

    @Operation
    def register(self, /, url: str, **parameters: Any) -> RequestFlow[str]:
        """Register an archive; ``parameters`` are those of ``POST /models``."""
        query = {"url": url, **parameters}
        request = RequestDescriptor("management", "POST", "/models", query, idle_timeout=None)
        return (yield from fetch_text(request, "status"))

    @StreamOperation
    def events(self, /, model: str, **parameters: Any) -> StreamDescriptor[tuple[str, dict[str, Any]]]:
        """Yield the stages of a model's start with their details, to its end.

        ``parameters`` are those of the route.
        """
        path = join_path("models", model, "events")
        # The server sends a comment every 15 seconds.
        request = RequestDescriptor("management", "GET", path, parameters, idle_timeout=60.0)
        return StreamDescriptor(request, _StageDecoder())

    @Operation
    def scale(self, /, model: str, version: str | None = None, **parameters: Any) -> RequestFlow[str]:
        """Change the number of workers of a version; ``parameters`` are those of ``PUT /models/{model}``."""
        path = join_path("models", model, version)
        request = RequestDescriptor("management", "PUT", path, parameters, idle_timeout=None)
        return (yield from fetch_text(request, "status"))

    @Operation
    def set_default(self, model: str, version: str) -> RequestFlow[str]:
        """Route requests that name no version to this one; it holds once the call returns."""
        path = join_path("models", model, version, "set-default")
        return (yield from fetch_text(RequestDescriptor("management", "PUT", path), "status"))

    @Operation
    def unregister(self, model: str, version: str | None = None) -> RequestFlow[str]:
        """Remove a version; without one the default version, which must be the last."""
        path = join_path("models", model, version)
        return (yield from fetch_text(RequestDescriptor("management", "DELETE", path), "status"))


class _StageDecoder:
    """A decoder of events into pairs of a stage and its details."""

    def __init__(self) -> None:
        self._events = EventDecoder()

    def feed(self, data: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
        for event in self._events.feed(data):
            yield event.kind, event.json()


def version_to_describe(version: str | None, customized: bool) -> str | None:
    """Return the version to send with a request for a description.

    Raises ValueError for the metadata of all versions at once.
    """
    if customized and version == "all":
        raise ValueError(
            "customized=True describes one version: name it, or leave it out for the default one."
        )
    return version if version or customized else "all"


def fetch_pages(path: str, key: str) -> RequestFlow[list[dict[str, Any]]]:
    """Return all items of a list that is served in pages."""
    items: list[dict[str, Any]] = []
    token: str | None = "0"
    while token is not None:
        query = {"next_page_token": token}
        page = yield from fetch_object(RequestDescriptor("management", "GET", path, query))
        items += page[key]
        token = page.get("nextPageToken")
    return items
