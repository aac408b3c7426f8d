"""What may be asked of the models: checked here, then sent to the one that keeps them.

The same class behind every management door. It knows no protocol and no Ray: the keeper, which
stores the registry and makes the cluster agree with it, comes in through the constructor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, Protocol

from serve_app.errors import BadRequest, MethodNotAllowed, MissingParameter
from serve_app.settings import Settings
from serve_app.types import Access, Description, Event, ModelRef, Progress, Registration, matches


class Keeper(Protocol):
    """The one writer: see deployments/management.py."""

    async def register(self, registration: Registration) -> Progress: ...

    async def scale(self, model: str, version: str | None, low: int, high: int, wait: bool) -> Progress: ...

    async def set_default(self, model: str, version: str) -> ModelRef: ...

    async def unregister(self, model: str, version: str | None) -> ModelRef: ...

    async def describe(self, model: str, version: str | None) -> Description: ...

    async def metadata(self, model: str, version: str | None) -> Any: ...

    async def versions(self, model: str) -> list[str]: ...

    async def models(self) -> list[tuple[str, str]]: ...

    async def renew_key(self, kind: Literal["inference", "management"]) -> None: ...

    async def events(
        self, model: str, registration: str | None, since: int | None, patience: float
    ) -> list[Event]: ...


class ControlPlane:
    """Every method raises RelayError; a change that came back without one is stored and in force."""

    def __init__(
        self, keeper: Keeper, settings: Settings, access: Callable[[], Access | None] = lambda: None
    ) -> None:
        self._keeper = keeper
        self._settings = settings
        self._access = access

    @property
    def access(self) -> Access | None:
        """Who may do what; None where everybody may do everything."""
        return self._access()

    async def renew_key(self, kind: Literal["inference", "management"]) -> None:
        """A new key of TorchServe's kind; from the answer on the old one is refused."""
        await self._keeper.renew_key(kind)

    async def register(self, registration: Registration) -> Progress:
        """Fetch, check and store an archive; start its workers. The first version becomes the default."""
        if not self._settings.control.enable_model_api:
            raise MethodNotAllowed()
        if not registration.url:
            raise MissingParameter("url")
        return await self._keeper.register(registration)

    async def events(
        self, model: str, registration: str | None = None, since: int | None = None, patience: float = 0.0
    ) -> list[Event]:
        """What happened to a model after the event with id ``since``, as soon as there is something; else nothing.

        Without ``since``, of its last registration or change of workers; with ``registration``, of that one
        alone, which may be yet to come. ``patience`` is in seconds. Raises ModelNotFound.
        """
        return await self._keeper.events(model, registration, since, patience)

    async def scale(self, model: str, version: str | None, low: int, high: int | None, wait: bool) -> Progress:
        """Ask for ``low`` to ``high`` replicas of a version (None: the default one)."""
        high = low if high is None else high
        if low < 0 or high < 0:
            raise BadRequest("min_worker and max_worker cannot be negative.")
        if high < low:
            raise BadRequest("max_worker cannot be less than min_worker.")
        return await self._keeper.scale(model, version, low, high, wait)

    async def set_default(self, model: str, version: str) -> ModelRef:
        """From the answer on, calls that name no version get ``version``."""
        return await self._keeper.set_default(model, version)

    async def unregister(self, model: str, version: str | None) -> ModelRef:
        """Remove a version (None: the default one, which must be the last); its replicas drain."""
        if not self._settings.control.enable_model_api:
            raise MethodNotAllowed()
        return await self._keeper.unregister(model, version)

    async def describe(
        self, model: str, version: str | None = None, every: bool = False, customized: bool = False
    ) -> list[Description]:
        """One version (None: the default one), or every version of a model.

        ``customized`` asks the one version's handler, too, for what it says of itself; NoWorker where
        none of its replicas can answer.
        """
        if not every:
            description = await self._keeper.describe(model, version)
            if customized:
                description = replace(description, metadata=await self._keeper.metadata(model, version))
            return [description]
        return [await self._keeper.describe(model, v) for v in await self._keeper.versions(model)]

    async def models(
        self, start: int = 0, limit: int = 100, within: tuple[str, ...] = ("*",)
    ) -> tuple[list[tuple[str, str]], int | None]:
        """A page of (model name, URL of its default version) by name, and where the next page starts.

        Only models whose name matches one of the patterns ``within``.
        """
        everything = [row for row in await self._keeper.models() if matches(row[0], within)]
        end = start + limit
        return everything[start:end], end if end <= len(everything) else None
