"""The control-plane RPC: the operations in Management, and the same behind its Serve handle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray.exceptions
from ray.serve.exceptions import RayServeException

from serve_app.control.operations import OPERATIONS, ControlAPI
from serve_app.domain.audit import Actor
from serve_app.errors import RelayError, Unavailable
from serve_app.telemetry.audit_log import get_actor, set_actor

if TYPE_CHECKING:
    from serve_app.control.audit import AuditTrail  # which imports SQLAlchemy and Alembic


class ControlDispatcher(ControlAPI):
    """The server's end of the RPC: carries out each operation in the service that implements it.

    Operations that change something are recorded in ``trail``, a service too, whichever protocol they come
    from.
    """

    def __init__(self, *services: object, trail: AuditTrail | None = None) -> None:
        self._methods: dict[str, Any] = {
            name: getattr(service, name)
            for service in (*services, trail)
            for name in OPERATIONS
            if hasattr(service, name)
        }
        if trail is not None:
            for name, method in self._methods.items():
                self._methods[name] = trail.record_calls(name, method)

    async def dispatch(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], actor: Actor) -> Any:
        """Return the operation's result, or its RelayError as a value: raised, Ray would log it as a fault.

        Raises KeyError for a name that is no operation.
        """
        set_actor(actor)
        try:
            return await self._invoke(name, args, kwargs)
        except RelayError as error:
            return error

    async def _invoke(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return await self._methods[name](*args, **kwargs)


class ControlClient(ControlAPI):
    """The client's end of the RPC; ``management`` is Management's handle."""

    def __init__(self, management: Any) -> None:
        self._management = management

    async def _invoke(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        try:
            result = await self._management.call_control.remote(name, args, kwargs, get_actor())
        except ray.exceptions.RayTaskError:
            raise
        except (ray.exceptions.RayError, RayServeException):
            raise Unavailable("Management is being replaced; ask again.") from None
        if isinstance(result, RelayError):
            raise result
        return result
