"""A version of a process that loads and closes many."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from serve_app.deployments.options import drain_timeout
from serve_app.deployments.serving_process.version import ServedVersion, StartTimedOut
from serve_app.domain.model import ModelSpec
from serve_app.domain.request import Cancel, InferenceRequest, OnDone
from serve_app.errors import StartFailed
from serve_app.runtime.handler_thread import HandlerThread
from serve_app.runtime.pool.memory import MemoryUse
from serve_app.runtime.pool.pooled_runner import PooledRunner
from serve_app.runtime.runner import Runner
from serve_app.settings import Settings
from serve_app.telemetry.logs import ProcessIdentity, identify_thread
from serve_app.telemetry.metrics import Meters
from serve_app.telemetry.running_batches import BatchSlot


class PooledVersion(ServedVersion):
    """A loaded version of a pool's host, with what its cache measures.

    ``on_hung`` is called with the reason, and with the thread of a handler that hangs.
    """

    runner: PooledRunner

    def __init__(
        self,
        spec: ModelSpec,
        settings: Settings,
        meters: Meters,
        replica: str,
        slot: BatchSlot,
        on_hung: Callable[[str, int], None],
    ) -> None:
        thread = HandlerThread(own=True)
        self._on_thread_hung = lambda reason: on_hung(reason, thread.ident)
        self._identity = ProcessIdentity.of_replica(spec.name, spec.version, replica)
        self.revision = spec.revision
        self.on_closed: Callable[[], None] = lambda: None
        self.memory = MemoryUse()
        self.last_used = time.monotonic()
        create = partial(PooledRunner, slot)
        super().__init__(spec, settings, meters, replica, thread, self._on_thread_hung, create_runner=create)

    async def open(self, management: Any) -> None:
        try:
            await super().open(management)
        except StartTimedOut as error:
            self._on_thread_hung(error.detail)
            raise
        except StartFailed:
            self.handler_thread.shutdown(wait=False)
            raise

    def _load_in_thread(self, directory: Path, loop: asyncio.AbstractEventLoop) -> Runner:
        identify_thread(self._identity)
        return super()._load_in_thread(directory, loop)

    @property
    def busy_seconds(self) -> float:
        """The seconds in which its handler has run."""
        return self.runner.busy_seconds

    def submit(self, request: InferenceRequest, on_done: OnDone) -> Cancel:
        self.last_used = time.monotonic()
        return super().submit(request, on_done)

    async def close(self) -> None:
        """Answer the admitted requests, and free the model."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.batcher.close(), drain_timeout(self.spec, self._settings))
        await asyncio.to_thread(self.handler_thread.shutdown)
        runner = self.runner
        del self.runner, self.executor, self.batcher, self._limit
        runner.close()
        self.on_closed()
