"""The LoRA adapters of a replica: those of the routing table are loaded, and others unloaded."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Protocol

import ray.exceptions
from ray import serve
from ray.serve.exceptions import RayServeException

from serve_app.domain.adapter import AdapterSpec
from serve_app.domain.model import ModelRef
from serve_app.errors import RelayError, Unavailable

log = logging.getLogger(__name__)

_RETRY_PERIOD_S = 5.0
_COMMIT_TIMEOUT_S = 60.0  # in which the table has an adapter that was loaded to check it


class AdapterLoader(Protocol):
    """The part of a runner that loads adapters in the handler."""

    async def load_adapter(self, name: str, folder: Awaitable[Path]) -> None: ...

    async def unload_adapter(self, name: str) -> None: ...


class ReplicaAdapters:
    """The adapters that were loaded at run time; ``open_folder`` returns the files of one on this node."""

    def __init__(self, loader: AdapterLoader, open_folder: Callable[[AdapterSpec], Awaitable[Path]]) -> None:
        self._loader = loader
        self._open_folder = open_folder
        self._desired: dict[str, AdapterSpec] = {}
        self._checked: dict[str, tuple[AdapterSpec, float]] = {}  # loaded, and not in the table yet
        self._tasks: dict[str, asyncio.Task[None]] = {}  # the last one of each name
        self._attempts: dict[str, asyncio.Event] = {}  # set after the first attempt to load

    def apply(self, adapters: Iterable[AdapterSpec]) -> None:
        """Load and unload adapters until there are these; those of the archive have no digest."""
        desired = {adapter.name: adapter for adapter in adapters if adapter.digest}
        for name in [name for name, adapter in self._desired.items() if desired.get(name) != adapter]:
            del self._desired[name]
            self._attempts.pop(name).set()
            self._schedule(name, self._loader.unload_adapter(name))
        for name, adapter in desired.items():
            if name not in self._desired:
                self._desired[name] = adapter
                checked, _ = self._checked.pop(name, (None, 0.0))
                attempt = self._attempts[name] = asyncio.Event()
                if checked != adapter:
                    self._schedule(name, self._keep_loading(adapter, attempt))
                else:
                    attempt.set()
        self._drop_unstored()

    async def load(self, adapter: AdapterSpec) -> None:
        """Load an adapter that the table does not have yet. Raises RelayError where that fails."""
        if (task := self._tasks.get(adapter.name)) is not None:
            await task
        await self._loader.load_adapter(adapter.name, self._open_folder(adapter))
        self._checked[adapter.name] = adapter, time.monotonic()

    async def wait_until_loaded(self) -> None:
        """Wait until each adapter was loaded, or has failed once."""
        await asyncio.gather(*(attempt.wait() for attempt in self._attempts.values()))

    def _drop_unstored(self) -> None:
        """Unload adapters that were checked and could not be stored."""
        deadline = time.monotonic() - _COMMIT_TIMEOUT_S
        for name in [name for name, (_, loaded_at) in self._checked.items() if loaded_at < deadline]:
            del self._checked[name]
            self._schedule(name, self._loader.unload_adapter(name))

    def _schedule(self, name: str, action: Awaitable[None]) -> None:
        """Run an action after the earlier ones of the same name."""
        previous = self._tasks.get(name)

        async def run() -> None:
            if previous is not None:
                await asyncio.wait([previous])
            await action

        task = self._tasks[name] = asyncio.create_task(run())
        task.add_done_callback(lambda done: self._forget(name, done))

    def _forget(self, name: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(name) is task:
            del self._tasks[name]

    async def _keep_loading(self, adapter: AdapterSpec, attempt: asyncio.Event) -> None:
        """Load an adapter, and try again until that succeeds or it is not desired any more.

        ``attempt`` is set after the first try.
        """
        while self._desired.get(adapter.name) is adapter:
            try:
                return await self._loader.load_adapter(adapter.name, self._open_folder(adapter))
            except RelayError as error:
                log.error("%s", error)
            finally:
                attempt.set()
            await asyncio.sleep(_RETRY_PERIOD_S)


async def load_in_replica(ref: ModelRef, adapter: AdapterSpec) -> None:
    """Load an adapter in one of a version's replicas. Raises its RelayError, and Unavailable."""
    try:
        error = await serve.get_deployment_handle(ref.app, ref.app).load_adapter.remote(adapter)
    except ray.exceptions.RayTaskError:
        raise
    except (ray.exceptions.RayError, RayServeException):
        raise Unavailable(
            f"A replica of {ref.app} ended while it loaded the adapter; send it again."
        ) from None
    if error is not None:
        raise error
