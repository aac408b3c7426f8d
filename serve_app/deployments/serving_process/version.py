"""A version that this process has loaded: its handler thread, batcher, queue and limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from serve_app.dataplane.routing.sequence_router import sequence_headers
from serve_app.deployments.options import drain_timeout
from serve_app.deployments.serving_process.node_archive import NodeArchive
from serve_app.deployments.serving_process.ranks import RankGroup
from serve_app.deployments.serving_process.ray_batcher import RayBatcher
from serve_app.domain.model import ModelSpec, Stage
from serve_app.domain.request import Cancel, InferenceRequest, OnDone
from serve_app.errors import RelayError, StartFailed
from serve_app.runtime.backends import Backend
from serve_app.runtime.batching.admission_control import ConcurrencyLimit
from serve_app.runtime.batching.batcher import Batcher
from serve_app.runtime.batching.interface import RequestBatcher
from serve_app.runtime.batching.row_batcher import create_row_batcher
from serve_app.runtime.batching.sequence_batcher import SequenceBatcher
from serve_app.runtime.batching.sequence_state import SequenceOptions
from serve_app.runtime.handler_thread import HandlerThread
from serve_app.runtime.runner import Runner
from serve_app.settings import Settings
from serve_app.telemetry.metrics import Meters

SHUTDOWN_MARGIN_S = 4.0  # seconds of the drain timeout that the other steps of a shutdown need


class ServedVersion(Backend):
    """A version of this process, once ``open`` has returned.

    ``on_hung`` is called with the reason where its handler hangs: the process must end. ``report_stage``
    receives the stages of the start, and ``create_runner`` creates its runner.
    """

    def __init__(
        self,
        spec: ModelSpec,
        settings: Settings,
        meters: Meters,
        replica: str,
        handler_thread: HandlerThread,
        on_hung: Callable[[str], None],
        *,
        create_runner: Callable[..., Runner] = Runner,
        report_stage: Callable[[Stage], None] = lambda stage: None,
    ) -> None:
        self.spec = spec
        self.handler_thread = handler_thread
        self.group: RankGroup | None = None  # only of a sharded version
        self.sequences: SequenceBatcher | None = None  # only of a stateful version
        self._settings = settings
        self._meters = meters
        self._replica = replica
        self._on_hung = on_hung
        self._create_runner = create_runner
        self._report_stage = report_stage

    async def open(self, management: Any) -> None:
        """Open the archive, load the model and warm it up. Raises StartFailed."""
        spec, settings = self.spec, self._settings
        self.archive = NodeArchive(spec, settings, management)
        if spec.ranks > 1:
            self.group = RankGroup(spec, settings, management, self._replica, self.handler_thread)
        limit = spec.startup_timeout + (settings.runtime.install_timeout if spec.requirements else 0)
        try:
            self.runner = await asyncio.wait_for(self._load(), limit if spec.startup_timeout else None)
        except asyncio.TimeoutError:
            cure = "raise it at the registration, or startupTimeout in model-config.yaml"
            timeout = f"startup_timeout ({spec.startup_timeout} s)"
            reason = f"not ready within {timeout}; {cure}. It stood at\n{self.handler_thread.stack}"
            raise StartTimedOut(spec.name, spec.version, reason) from None
        except RelayError as error:
            if isinstance(error, StartFailed):
                raise
            reason = "\n".join(filter(None, (str(error), getattr(error, "detail", ""))))
            raise StartFailed(spec.name, spec.version, reason) from None
        self.executor = self.group or self.runner
        self.batcher = self._create_batcher()
        self._limit = ConcurrencyLimit(self.batcher, spec.ref)

    async def _load(self) -> Runner:
        directory = await self.archive.open()
        if self.spec.requirements:
            self._report_stage("installing")
            await asyncio.to_thread(self.archive.install, directory)
        self._report_stage("loading")
        load = partial(self._load_in_thread, directory, asyncio.get_running_loop())
        if self.group is not None:
            return await self.group.load(load)
        return await asyncio.get_running_loop().run_in_executor(self.handler_thread, load)

    def _load_in_thread(self, directory: Path, loop: asyncio.AbstractEventLoop) -> Runner:
        metrics = self._meters.torchserve.cache(self.spec.name)
        runner = self.archive.create_runner(directory, metrics, self._create_runner)
        runner.load()
        loop.call_soon_threadsafe(self._report_stage, "warming")
        runner.warm_up()
        return runner

    def _create_batcher(self) -> RequestBatcher:
        """Create the batcher of this version, with sequence batching in front where it has sequences."""
        batcher = self._create_row_batcher()
        spec = self.spec
        if not spec.sequence_batching:
            return batcher
        self.sequences = SequenceBatcher(
            batcher,
            spec.ref,
            self._meters,
            self._replica,
            SequenceOptions(
                sequence_headers(self._settings),
                max_sequences=spec.max_num_sequence,
                min_sequences=spec.batch_size,
                queue_size=spec.max_sequence_job_queue_size,
                max_idle=spec.sequence_max_idle / 1000,
                timeout=spec.sequence_timeout / 1000,
                overlap=spec.continuous_batching,
                close_timeout=(drain_timeout(spec, self._settings) - SHUTDOWN_MARGIN_S) / 2,
            ),
            on_end=self._on_sequence_end,
        )
        return self.sequences

    def _on_sequence_end(self, name: str, reason: str) -> None:
        """Pass the end of a sequence to the handler, in the handler thread."""
        runner = self.runner
        if not runner.handles_sequence_end:
            return
        if runner.loop is not None:
            runner.loop.call_soon_threadsafe(runner.sequence_ended, name, reason)
        else:
            self.handler_thread.post(self.executor.sequence_ended, name, reason)

    def _create_row_batcher(self) -> RequestBatcher:
        spec = self.spec
        batcher = create_row_batcher(
            self.runner, self.executor.run, spec, self._meters, self.handler_thread, self._on_hung
        )
        if spec.batcher != "ray":
            return batcher
        if not isinstance(batcher, Batcher):
            reason = "the handler is asynchronous and runs each row by itself, so @serve.batch cannot be used"
            raise StartFailed(
                spec.name, spec.version, f"{reason}; write batcher: torchrelay into model-config.yaml"
            )
        return RayBatcher(batcher, spec.ref, spec.batch_size, spec.max_batch_delay, spec.job_queue_size)

    def submit(self, request: InferenceRequest, on_done: OnDone) -> Cancel:
        return self._limit.submit(request, on_done)

    @property
    def ongoing(self) -> int:
        """Rows that wait or run."""
        return self.batcher.ongoing

    @property
    def pending(self) -> int:
        """Rows that wait for a batch."""
        return self.batcher.pending

    def set_limit(self, max_concurrent_requests: int, replicas: int) -> None:
        """Set this process's share of the version's concurrency limit."""
        self._limit.set_limit(max_concurrent_requests, replicas)


class StartTimedOut(StartFailed):
    """An error: the version was not ready in time, and its handler may hang."""
