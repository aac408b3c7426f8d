"""One loaded version in a host of a pool: its handler thread, batcher, queue and limits."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from serve_app.deployments.options import drain_timeout
from serve_app.deployments.serving_process.node_archive import NodeArchive
from serve_app.domain.model import ModelSpec
from serve_app.domain.request import Cancel, InferenceRequest, OnDone
from serve_app.errors import RelayError, StartFailed
from serve_app.runtime.backends import Backend
from serve_app.runtime.batching.concurrency_limit import ConcurrencyLimit
from serve_app.runtime.batching.row_batcher import create_row_batcher
from serve_app.runtime.handler_thread import HandlerThread
from serve_app.runtime.pool.memory import MemoryUse
from serve_app.runtime.pool.pooled_runner import PooledRunner
from serve_app.runtime.runner import Runner
from serve_app.settings import Settings
from serve_app.telemetry.logs import ProcessIdentity, identify_thread
from serve_app.telemetry.metrics import Meters
from serve_app.telemetry.running_batches import BatchSlot


class PooledVersion(Backend):
    """A version in a host; it is the backend of the requests that this process receives.

    ``on_hung`` is called with the reason, and with the thread of a handler that hangs: its process must end.
    """

    def __init__(
        self,
        spec: ModelSpec,
        settings: Settings,
        meters: Meters,
        slot: BatchSlot,
        on_hung: Callable[[str, int], None],
    ) -> None:
        self.spec = spec
        self.revision = spec.revision
        self.on_closed: Callable[[], None] = lambda: None
        self.memory = MemoryUse()
        self.last_used = time.monotonic()
        self._settings = settings
        self._meters = meters
        self._slot = slot
        self._on_hung = on_hung
        self._thread = HandlerThread(own=True)

    async def open(self, management: Any, replica: str) -> None:
        """Open the archive, load the model and warm it up. Raises StartFailed."""
        spec = self.spec
        archive = NodeArchive(spec, self._settings, management)
        metrics = self._meters.torchserve.cache(spec.name)
        identity = ProcessIdentity.of_replica(spec.name, spec.version, replica)

        def load(directory: Path) -> Runner:
            identify_thread(identity)
            runner = archive.create_runner(directory, metrics, partial(PooledRunner, self._slot))
            runner.load()
            runner.warm_up()
            return runner

        try:
            directory = await archive.open()
            loading = asyncio.get_running_loop().run_in_executor(self._thread, load, directory)
            self.runner = await asyncio.wait_for(loading, spec.startup_timeout or None)
        except asyncio.TimeoutError:
            reason = (
                f"startup_timeout ({spec.startup_timeout} s) passed while it stood at\n{self._thread.stack}"
            )
            self._on_hung(reason, self._thread.ident)
            raise StartFailed(spec.name, spec.version, reason) from None
        except RelayError as error:
            self._thread.shutdown(wait=False)
            if isinstance(error, StartFailed):
                raise
            reason = "\n".join(filter(None, (str(error), getattr(error, "detail", ""))))
            raise StartFailed(spec.name, spec.version, reason) from None
        assert isinstance(self.runner, PooledRunner)
        self._batcher = create_row_batcher(
            self.runner, self.runner.run, spec, self._meters, self._thread, self._exit_hung
        )
        self._limit = ConcurrencyLimit(self._batcher, spec.ref)

    @property
    def busy_seconds(self) -> float:
        """The seconds in which its handler has run."""
        assert isinstance(self.runner, PooledRunner)
        return self.runner.busy_seconds

    @property
    def ongoing(self) -> int:
        return self._batcher.ongoing

    @property
    def pending(self) -> int:
        """Rows that wait for a batch."""
        return self._batcher.pending

    def set_limit(self, max_concurrent_requests: int, hosts: int) -> None:
        """Set this host's share of the version's concurrency limit."""
        self._limit.set_limit(max_concurrent_requests, hosts)

    def submit(self, request: InferenceRequest, on_done: OnDone) -> Cancel:
        self.last_used = time.monotonic()
        return self._limit.submit(request, on_done)

    async def close(self) -> None:
        """Answer the admitted requests, and free the model."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._batcher.close(), drain_timeout(self.spec))
        await asyncio.to_thread(self._thread.shutdown)
        runner, self.runner = self.runner, None  # type: ignore[assignment]
        del self._batcher, self._limit
        assert isinstance(runner, PooledRunner)
        runner.close()
        self.on_closed()

    def _exit_hung(self, reason: str) -> None:
        self._on_hung(reason, self._thread.ident)
