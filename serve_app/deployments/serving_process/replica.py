"""The replica: one version of one model, which answers its requests directly."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path
from typing import Any

import psutil

from serve_app.dataplane.capture.recorder import CaptureRecorder
from serve_app.dataplane.capture.tap import CaptureTap
from serve_app.dataplane.capture.upload import upload_files
from serve_app.dataplane.routing.sequence_router import LocalReplica
from serve_app.deployments.cluster_data_plane import create_data_plane
from serve_app.deployments.options import drain_timeout
from serve_app.deployments.serving_process.adapters import ReplicaAdapters
from serve_app.deployments.serving_process.process import RESPONSE_FLUSH_S, ServingProcess, report_crashes
from serve_app.deployments.serving_process.ranks import RankGroup
from serve_app.deployments.serving_process.recycling import RecyclingWatch
from serve_app.deployments.serving_process.version import SHUTDOWN_MARGIN_S, ServedVersion
from serve_app.domain.adapter import AdapterSpec
from serve_app.domain.model import ModelSpec, Stage
from serve_app.domain.recycling import RecyclingReason
from serve_app.domain.routing_table import RoutingTable
from serve_app.errors import AdapterRejected, RelayError, ReplicaDied, StartFailed
from serve_app.runtime.backends import Backend
from serve_app.runtime.handler_thread import HandlerThread
from serve_app.runtime.host import malloc
from serve_app.runtime.host.memory import measure_process_memory
from serve_app.settings import Settings
from serve_app.telemetry import logs
from serve_app.telemetry.autoscaling_stats import AutoscalingStats

log = logging.getLogger(__name__)


class ModelReplica(ServingProcess):
    """A replica that opens its archive, loads and warms up its model, and serves every inference protocol."""

    async def __init__(self, spec: ModelSpec, settings: Settings) -> None:  # type: ignore[misc]  # Serve awaits it
        self._configure(spec, settings, "replica", model=spec.name, version=spec.version)
        self._process = psutil.Process()
        self._capture: CaptureRecorder | None = None  # only of a version with ``capture``
        self._upload: asyncio.Task[None] | None = None
        self._recycling: asyncio.Task[None] | None = None  # only of a version with limits of its replicas
        self._adapters: ReplicaAdapters | None = None  # only of a handler that has adapters
        self._autoscaled = AutoscalingStats()
        self._meters.on_batch = self._autoscaled.record_batch
        thread = HandlerThread(on_idle=malloc.trim)
        self._version = ServedVersion(
            spec,
            settings,
            self._meters,
            self._replica,
            thread,
            self._exit_hung,
            report_stage=self._report_stage,
        )
        try:
            await self._start()
        except BaseException:
            self._crash_reporter.close()  # the exception reports the failed start
            raise
        self._crash_reporter.set_ready()

    async def _start(self) -> None:
        spec, settings, replica, version = self._spec, self._settings, self._replica, self._version
        management = self._management_client.management
        await report_crashes(settings, replica, management)
        await self._pause_after_crashes()
        began, started_at = time.time(), time.monotonic()
        try:
            await version.open(management)
        except StartFailed as error:
            log.error("%s\n%s", error, error.detail)
            # Serve keeps only the end of a long message; Management receives the whole traceback of the
            # handler.
            await management.start_failed.remote(spec.ref, spec.digest, error, began)
            raise
        await self._declare()
        logs.restore_loggers()
        worker = f"W-{replica}-{spec.name}_{spec.version}"
        load_time = self._meters.torchserve.child("WorkerLoadTime", worker, "Host")
        load_time.record(round((time.monotonic() - started_at) * 1000))
        backend = self._start_capture()
        local = LocalReplica(spec.ref, replica, self._holds_sequence, backend)
        plane, mirror = create_data_plane(
            self._reader, self._meters, settings, self._management_client.reports, local
        )
        await self._serve(backend, plane, mirror, f"/predictions/{spec.name}")
        if self._adapters is not None:
            await self._adapters.wait_until_loaded()
        limits = spec.find_recycling(settings.runtime.recycling)
        if limits.is_limited:
            watch = RecyclingWatch(
                limits,
                lambda: self._autoscaled.total_rows,
                report=lambda problem: management.limit_is_ignored.remote(spec.ref, problem),
                measure_memory=lambda: max(self._measure_memory()),
            )
            self._recycling = asyncio.create_task(watch.run(self._request_recycling))

    async def _declare(self) -> None:
        """Prepare what the version declares of itself: its adapters, its ranks, and its description."""
        spec, version, management = self._spec, self._version, self._management_client.management
        runner = version.runner
        if runner.adapters is not None:
            self._adapters = ReplicaAdapters(runner.adapters, version.archive.open_adapter)
        memory = await asyncio.to_thread(measure_process_memory)
        self._management_client.on_connect = lambda: management.offers.remote(
            spec.ref, spec.digest, runner.signature, runner.input_type, runner.schemas, memory
        )
        if version.group is not None:
            self._group_watch = asyncio.create_task(self._exit_with_group(version.group))

    def _start_capture(self) -> Backend:
        """Return the backend of requests, which captures them where the version's file configures it."""
        spec, settings, policy = self._spec, self._settings, self._spec.capture
        if policy is None:
            return self._version
        is_folder = policy.destination and not policy.is_remote
        base = Path(policy.destination) if is_folder else settings.capture_dir
        folder = base / spec.name / spec.version
        recorder = self._capture = CaptureRecorder(spec.ref, spec.digest, policy, folder, self._replica)
        self._management_client.reports.sources["capture"] = recorder.drain
        if policy.is_remote:
            upload = upload_files(recorder, self._management_client.management, spec.ref)
            self._upload = asyncio.create_task(upload)
        return CaptureTap(self._version, recorder)

    def _update_meters(self) -> None:
        self._meters.depth(self._spec.name, self._spec.version, self._version.pending)
        memory = sum(self._measure_memory())
        name, version = self._spec.name, self._spec.version
        self._meters.instrument("torchrelay_replica_memory_bytes", name, version).set(memory)
        if self._capture is not None:
            self._capture.record_metrics(self._meters)

    def _measure_memory(self) -> list[int]:
        """Return the resident bytes of this process, and of the other ranks as they last reported them."""
        group = self._version.group
        return [self._process.memory_info().rss, *(group.memory.values() if group is not None else ())]

    @property
    def _row_counts(self) -> tuple[int, int]:
        return self._version.pending, self._version.ongoing

    def _apply_table(self, table: RoutingTable) -> None:
        """Set this replica's share of its version's concurrency and sequence limits."""
        model = table.models.get(self._spec.name)
        route = model.versions.get(self._spec.version) if model is not None else None
        if route is not None:
            self._version.set_limit(route.max_concurrent_requests, route.replicas)
            if self._adapters is not None:
                self._adapters.apply(route.adapters)
            if self._version.sequences is not None:
                self._version.sequences.set_replicas(route.replicas)

    def _holds_sequence(self, sequence: str) -> bool:
        sequences = self._version.sequences
        return sequences is not None and sequences.holds(sequence)

    async def _pause_after_crashes(self) -> None:
        """Wait as long as the crash back-off demands; no request waits for this start."""
        try:
            pause = await asyncio.wait_for(
                self._management_client.management.pause_before_start.remote(self._spec.ref), 10
            )
        except Exception as error:  # Management is being replaced: the start goes on without a pause
            log.info("Management did not say how long to pause: %s", type(error).__name__)
            return
        if pause:
            log.warning("%s: its last replicas crashed; starting in %s s", self._spec.ref.app, pause)
            await asyncio.sleep(pause)

    def _report_stage(self, stage: Stage) -> None:
        """Report the stage of this start to Management; nothing depends on it."""
        self._management_client.management.stage.remote(self._spec.ref, stage)

    def _request_recycling(self, reason: RecyclingReason, detail: str, age: float) -> None:
        self._management_client.management.recycle.remote(self._spec.ref, self._replica, reason, detail, age)

    def reconfigure(self, config: dict[str, Any]) -> None:
        """Apply the settings that need no restart."""
        self._autoscaled.period = config.get("look_back_period_s", self._autoscaled.period)
        tunables = config["torchrelay"]
        places = 2 if self._spec.continuous_batching and self._spec.sequence_batching else 1  # as in _rows_of
        self._version.batcher.configure(
            max_batch_size=tunables["batch_size"] * places,
            max_batch_delay=tunables["max_batch_delay"],
            queue_size=tunables["job_queue_size"],
            response_timeout=tunables["response_timeout"],
            retries=tunables["retries"],
        )

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the statistics that Ray Serve's autoscaler reads; see ``autoscaling_policies.py``."""
        return self._autoscaled.stats(self._version.ongoing)

    async def load_adapter(self, adapter: AdapterSpec) -> RelayError | None:
        """Load a LoRA adapter; an error is returned, as Ray would log a raised one as a fault of ours."""
        if self._adapters is None:
            return AdapterRejected(adapter.name, "the handler of this model has no adapters; llm has them")
        try:
            await self._adapters.load(adapter)
        except RelayError as error:
            return error
        return None

    async def _exit_with_group(self, group: RankGroup) -> None:
        """Fail all rows and end this process once a rank of its group is lost."""
        reason = await group.lost()
        log.error("%s: %s", self._spec.ref.app, reason)
        self._version.batcher.abandon(ReplicaDied(reason), "its replica lost a rank and is being replaced")
        self._exit_hung(reason)

    async def check_health(self) -> None:
        await super().check_health()
        await self._version.executor.check_health()

    async def _drain(self) -> None:
        """Answer the requests of the Unix-socket transport, which Ray Serve does not know; later ones go
        elsewhere.
        """
        version = self._version
        if not self._is_hung and (
            version.ongoing or (version.sequences is not None and version.sequences.open)
        ):
            timeout = drain_timeout(self._spec, self._settings) - SHUTDOWN_MARGIN_S
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(version.batcher.close(), timeout)
            await asyncio.sleep(RESPONSE_FLUSH_S)

    async def __del__(self) -> None:
        self._crash_reporter.close()
        await self._drain()
        if self._version.group is not None:
            self._group_watch.cancel()
            self._version.group.close()
        for task in (self._upload, self._recycling):
            if task is not None:
                task.cancel()
        if self._capture is not None:
            await asyncio.to_thread(self._capture.close)
        await self._disconnect()
