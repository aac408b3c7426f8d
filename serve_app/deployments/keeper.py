"""The keeper of the control plane: put together in Management, and behind a handle for a gateway."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import ray.exceptions
from ray.serve.exceptions import RayServeException

from serve_app.controlplane import Keeper
from serve_app.errors import RelayError, Unavailable

QUESTIONS = frozenset(name for name in vars(Keeper) if not name.startswith("_")) | {"render"}


class LocalKeeper:
    """``controlplane.Keeper`` in the process that keeps everything: each question goes to the owner that answers it."""

    def __init__(self, *owners: Any) -> None:
        self._answers = {
            name: getattr(owner, name) for owner in owners for name in QUESTIONS if hasattr(type(owner), name)
        }

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        try:
            return self._answers[name]
        except KeyError:
            raise AttributeError(name) from None


class RemoteKeeper:
    """Every method of ``controlplane.Keeper``, and ``render``, which gives the whole cluster's metrics."""

    def __init__(self, management: Any) -> None:
        self._management = management

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        if name not in QUESTIONS:
            raise AttributeError(name)
        return partial(self._ask, name)

    async def _ask(self, question: str, *args: Any) -> Any:
        try:
            answer = await self._management.answer.remote(question, args)
        except ray.exceptions.RayTaskError:
            raise
        except (ray.exceptions.RayError, RayServeException):
            raise Unavailable("Management is being replaced; ask again.") from None
        if isinstance(answer, RelayError):
            raise answer
        return answer
