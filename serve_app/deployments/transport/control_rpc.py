"""The control-plane RPC: the methods of ``ControlAPI`` in Management, and the same behind a Serve handle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import ray.exceptions
from ray.serve.exceptions import RayServeException

from serve_app.control.api import ControlAPI
from serve_app.domain.audit import Actor
from serve_app.errors import RelayError, Unavailable
from serve_app.telemetry.audit_log import get_actor, set_actor

if TYPE_CHECKING:
    from serve_app.control.audit import AuditTrail  # which imports SQLAlchemy and Alembic

# The names of all methods that a process may call in Management: ``render`` is the metrics page.
METHODS = frozenset(name for name in vars(ControlAPI) if not name.startswith("_")) | {"render"}


class ControlDispatcher:
    """The server's end of the RPC: calls each method in the service that implements it.

    Calls that change something are recorded in ``trail``, a service too, whichever protocol they come from.
    """

    def __init__(self, *services: object, trail: AuditTrail | None = None) -> None:
        self._methods: dict[str, Any] = {
            name: getattr(service, name)
            for service in (*services, trail)
            for name in METHODS
            if hasattr(service, name)
        }
        if trail is not None:
            for name, method in self._methods.items():
                self._methods[name] = trail.record_calls(name, method)
        self.api = cast(ControlAPI, SimpleNamespace(**self._methods))

    async def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], actor: Actor) -> Any:
        """Return the method's result, or its RelayError as a value: raised, Ray would log it as a fault.

        Raises AttributeError for a name that is not in ``METHODS``.
        """
        if name not in self._methods:
            raise AttributeError(name)
        set_actor(actor)
        try:
            return await self._methods[name](*args, **kwargs)
        except RelayError as error:
            return error


class ControlClient:
    """The client's end of the RPC; ``management`` is Management's handle."""

    def __init__(self, management: Any) -> None:
        self._management = management
        self.api = cast(ControlAPI, SimpleNamespace(**{name: partial(self._call, name) for name in METHODS}))

    async def render(self, names: frozenset[str] | None = None) -> bytes:
        """Return the metrics page of the whole cluster; with ``names``, only the samples of these names."""
        page: bytes = await self._call("render", names)
        return page

    async def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        try:
            result = await self._management.call_control.remote(name, args, kwargs, get_actor())
        except ray.exceptions.RayTaskError:
            raise
        except (ray.exceptions.RayError, RayServeException):
            raise Unavailable("Management is being replaced; ask again.") from None
        if isinstance(result, RelayError):
            raise result
        return result
