"""Models over the management API: listed, described, registered, scaled, unregistered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from serve_app.client.ask import Ask, Listen, Talk, operation, path, streaming
from serve_app.client.pieces import Events


class Models:
    """The routes under ``/models`` that TorchServe has, and a model's events."""

    @operation
    def models(self) -> Talk[list[dict[str, Any]]]:
        """Every model by name: ``modelName`` and ``modelUrl`` of its default version."""
        return (yield from pages("/models", "models"))

    @operation
    def describe(
        self, model: str, version: str | None = None, *, customized: bool = False
    ) -> Talk[list[dict[str, Any]]]:
        """A version of a model; without one, or with ``all``, every one, the default one first.

        ``customized``: with what its handler says of itself, as ``customizedMetadata``; that of the default version
        where none is named.
        """
        where = path("models", model, described(version, customized))
        return (yield Ask("management", "GET", where, {"customized": customized or None})).json()

    @operation
    def register(self, url: str, **parameters: Any) -> Talk[str]:
        """Register an archive; ``parameters`` are those of ``POST /models``."""
        answer = yield Ask("management", "POST", "/models", {"url": url, **parameters}, silence=None)
        return answer.json()["status"]

    @streaming
    def events(self, model: str, **parameters: Any) -> Listen[tuple[str, dict[str, Any]]]:
        """How a model comes up: stages, and what is said of each, to the end; ``parameters`` are the route's."""
        # The server breaks its silence every 15 seconds.
        return Listen(Ask("management", "GET", path("models", model, "events"), parameters, silence=60.0), _Stages())

    @operation
    def scale(self, model: str, version: str | None = None, **parameters: Any) -> Talk[str]:
        """Change how many workers a version has; ``parameters`` are those of ``PUT /models/{model}``."""
        answer = yield Ask("management", "PUT", path("models", model, version), parameters, silence=None)
        return answer.json()["status"]

    @operation
    def set_default(self, model: str, version: str) -> Talk[str]:
        """From the answer on, calls that name no version get this one."""
        answer = yield Ask("management", "PUT", path("models", model, version, "set-default"))
        return answer.json()["status"]

    @operation
    def unregister(self, model: str, version: str | None = None) -> Talk[str]:
        """Remove a version; without one the default version, which must be the last."""
        return (yield Ask("management", "DELETE", path("models", model, version))).json()["status"]


class _Stages:
    """Events as pairs of a stage and what is said of it."""

    def __init__(self) -> None:
        self._events = Events()

    def feed(self, data: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
        for event in self._events.feed(data):
            yield event.kind, event.json()


def described(version: str | None, customized: bool) -> str | None:
    """The version as a server is asked for it. Raises ValueError."""
    if customized and version == "all":
        raise ValueError("A handler speaks for one version: name it, or none for the default one.")
    return version if version or customized else "all"


def pages(where: str, key: str) -> Talk[list[dict[str, Any]]]:
    """Everything that a list says, page by page."""
    found: list[dict[str, Any]] = []
    token: str | None = "0"
    while token is not None:
        page = (yield Ask("management", "GET", where, {"next_page_token": token})).json()
        found += page[key]
        token = page.get("nextPageToken")
    return found
