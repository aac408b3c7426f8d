"""The replica: one version of one model, which answers its requests directly."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

from ray import serve

from serve_app.dataplane.capture.recorder import CaptureRecorder
from serve_app.dataplane.capture.tap import CaptureTap
from serve_app.dataplane.capture.upload import upload_files
from serve_app.dataplane.data_plane import RoutingTableReader
from serve_app.dataplane.routing.sequence_router import LocalReplica, sequence_headers
from serve_app.deployments.cluster_data_plane import create_data_plane
from serve_app.deployments.management_client import ManagementClient
from serve_app.deployments.options import drain_timeout
from serve_app.deployments.ray_internals import metrics as ray_metrics
from serve_app.deployments.ray_internals.metrics import ExportedLoad, ExportedProcess
from serve_app.deployments.serving_process.adapters import ReplicaAdapters
from serve_app.deployments.serving_process.node_archive import NodeArchive
from serve_app.deployments.serving_process.process import (
    RESPONSE_FLUSH_S,
    create_asgi_app,
    exit_after_flush,
    pickle_responses,
    report_crashes,
    stream_chunks,
)
from serve_app.deployments.serving_process.ranks import RankGroup
from serve_app.deployments.serving_process.ray_batcher import RayBatcher
from serve_app.deployments.transport.unix_socket import UdsServer, socket_path
from serve_app.domain.adapter import AdapterSpec
from serve_app.domain.adapter_errors import AdapterRejected
from serve_app.domain.model import ModelSpec, Stage
from serve_app.domain.request import InferenceRequest, ResponseChunk
from serve_app.domain.routing_table import RoutingTable
from serve_app.errors import RelayError, ReplicaDied, StartFailed
from serve_app.net.private_files import restrict_umask
from serve_app.runtime.batching.batcher import Batcher
from serve_app.runtime.batching.concurrency_limit import ConcurrencyLimit
from serve_app.runtime.batching.interface import RequestBatcher
from serve_app.runtime.batching.row_batcher import create_row_batcher
from serve_app.runtime.batching.sequence_batcher import SequenceBatcher
from serve_app.runtime.batching.sequence_state import SequenceOptions
from serve_app.runtime.handler_thread import HandlerThread
from serve_app.runtime.host import malloc
from serve_app.runtime.host.memory import measure_process_memory
from serve_app.runtime.runner import Runner
from serve_app.settings import Settings
from serve_app.telemetry import access_log, host_metrics, logs, torchserve, tracing
from serve_app.telemetry.autoscaling_stats import AutoscalingStats
from serve_app.telemetry.crash_reports import CrashReporter
from serve_app.telemetry.logs import ProcessIdentity
from serve_app.telemetry.metrics import Meters

log = logging.getLogger("torchrelay.model")

_SHUTDOWN_MARGIN_S = 4.0  # seconds of the drain timeout that the other steps of a shutdown need


@serve.deployment
@serve.ingress()
class ModelReplica:
    """A replica that opens its archive, loads and warms up its model, and serves every inference protocol."""

    async def __init__(self, spec: ModelSpec, settings: Settings) -> None:  # type: ignore[misc]  # Serve awaits it
        restrict_umask()
        replica = serve.get_replica_context().replica_id.unique_id
        logs.configure(
            settings,
            ProcessIdentity.of_replica(spec.name, spec.version, replica),
            spec.config.get("log_level"),
        )
        tracing.configure(settings, "replica", model=spec.name, version=spec.version, replica=replica)
        self._spec = spec
        self._settings = settings
        self._hung = False
        self._handle_rows = 0  # in calls of Ray's handles, which Ray counts as ongoing
        self._group: RankGroup | None = None  # only of a sharded version
        self._replica = replica
        self._handler_thread = HandlerThread(on_idle=malloc.trim)
        self._capture: CaptureRecorder | None = None  # only of a version with ``capture``
        self._upload: asyncio.Task[None] | None = None
        self._sequences: SequenceBatcher | None = None  # only of a stateful version
        self._adapters: ReplicaAdapters | None = None  # only of a handler that has adapters
        self._meters = Meters(torchserve.create_recorders(settings))
        self._autoscaled = AutoscalingStats()
        self._meters.on_batch = self._autoscaled.record_batch
        self._crash_reporter = CrashReporter(settings.crash_reports_dir, spec.ref.app, spec.digest, replica)
        try:
            await self._start()
        except BaseException:
            self._crash_reporter.close()  # the exception reports the failed start
            raise
        self._crash_reporter.set_ready()

    async def _start(self) -> None:
        spec, settings, replica = self._spec, self._settings, self._replica
        reader = RoutingTableReader(on_table=self._apply_table)
        self._management_client = ManagementClient(reader, self._meters, settings.counts_dir)
        await report_crashes(settings, replica, self._management_client.management)
        await self._pause_after_crashes()
        started_at = time.monotonic()
        try:
            await self._load()
        except StartFailed as error:
            log.error("%s\n%s", error, error.detail)
            # Serve keeps only the end of a long message; Management receives the whole traceback of the
            # handler.
            await self._management_client.management.start_failed.remote(spec.ref, spec.digest, error)
            raise
        logs.restore_loggers()
        worker = f"W-{replica}-{spec.name}_{spec.version}"
        load_time = self._meters.torchserve.child("WorkerLoadTime", worker, "Host")
        load_time.record(round((time.monotonic() - started_at) * 1000))
        self._concurrency_limit = ConcurrencyLimit(self._batcher, spec.ref)
        self._requests = self._start_capture(self._concurrency_limit)
        local = LocalReplica(spec.ref, replica, self._holds_sequence, self._requests)
        self._plane, self._mirror = create_data_plane(
            reader, self._meters, settings, self._management_client.reports, local
        )
        self._management_client.key_limiter = self._plane.key_limiter
        self._access = access_log.access_log(settings)
        self._uds_server = UdsServer(self._requests.submit, self._holds_sequence)
        await self._uds_server.open(socket_path(replica))
        self._management_client.before_report = self._update_meters
        self._host_metrics = host_metrics.start(self._meters.torchserve, settings)
        process = ExportedProcess(spec.ref.app, replica, f"/predictions/{spec.name}")
        self._ray_metrics = ray_metrics.start(settings, self._meters, process, self._measure_load)
        self._management_client.start()
        await self._management_client.wait_for_table(timeout=30)
        if self._adapters is not None:
            await self._adapters.wait_until_loaded()

    def _start_capture(self, limit: ConcurrencyLimit) -> ConcurrencyLimit | CaptureTap:
        """Return the interface of requests, which captures them where the version's file configures it."""
        spec, settings, policy = self._spec, self._settings, self._spec.capture
        if policy is None:
            return limit
        is_folder = policy.destination and not policy.is_remote
        base = Path(policy.destination) if is_folder else settings.capture_dir
        folder = base / spec.name / spec.version
        recorder = self._capture = CaptureRecorder(spec.ref, spec.digest, policy, folder, self._replica)
        self._management_client.reports.sources["capture"] = recorder.drain
        if policy.is_remote:
            upload = upload_files(recorder, self._management_client.management, spec.ref)
            self._upload = asyncio.create_task(upload)
        return CaptureTap(limit, recorder)

    def _update_meters(self) -> None:
        self._meters.depth(self._spec.name, self._spec.version, self._batcher.pending)
        if self._capture is not None:
            self._capture.record_metrics(self._meters)

    def _measure_load(self) -> ExportedLoad:
        return ExportedLoad(self._batcher.pending, max(0, self._batcher.ongoing - self._handle_rows))

    def _apply_table(self, table: RoutingTable) -> None:
        """Set this replica's share of its version's concurrency and sequence limits."""
        model = table.models.get(self._spec.name)
        row = model.versions.get(self._spec.version) if model is not None else None
        if row is not None:
            self._concurrency_limit.set_limit(row.max_concurrent_requests, row.replicas)
            if self._adapters is not None:
                self._adapters.apply(row.adapters)
            if self._sequences is not None:
                self._sequences.set_replicas(row.replicas)

    def _holds_sequence(self, sequence: str) -> bool:
        return self._sequences is not None and self._sequences.holds(sequence)

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

    async def _load(self) -> None:
        spec, settings, handler_thread = self._spec, self._settings, self._handler_thread
        loop = asyncio.get_running_loop()
        management = self._management_client.management
        archive = NodeArchive(spec, settings, management)
        if spec.ranks > 1:
            self._group = RankGroup(spec, settings, management, self._replica, handler_thread)

        def load(directory: Path) -> Runner:
            runner = archive.create_runner(directory, self._meters.torchserve.cache(spec.name))
            runner.load()
            loop.call_soon_threadsafe(self._report_stage, "warming")
            runner.warm_up()
            return runner

        async def open_and_load() -> Runner:
            directory = await archive.open()
            if spec.requirements:
                self._report_stage("installing")
                await asyncio.to_thread(archive.install, directory)
            self._report_stage("loading")
            if self._group is not None:
                return await self._group.load(partial(load, directory))
            return await loop.run_in_executor(handler_thread, load, directory)

        limit = spec.startup_timeout + (settings.runtime.install_timeout if spec.requirements else 0)
        try:
            runner = await asyncio.wait_for(open_and_load(), limit if spec.startup_timeout else None)
        except asyncio.TimeoutError:
            cure = "raise it at the registration, or startupTimeout in model-config.yaml"
            timeout = f"startup_timeout ({spec.startup_timeout} s)"
            reason = f"not ready within {timeout}; {cure}. It stood at\n{handler_thread.stack}"
            raise StartFailed(spec.name, spec.version, reason) from None
        except RelayError as error:
            if isinstance(error, StartFailed):
                raise
            reason = "\n".join(filter(None, (str(error), getattr(error, "detail", ""))))
            raise StartFailed(spec.name, spec.version, reason) from None
        self._executor = self._group or runner
        self._batcher = self._create_batcher(runner)
        if runner.adapters is not None:
            self._adapters = ReplicaAdapters(runner.adapters, archive.open_adapter)
        memory = await asyncio.to_thread(measure_process_memory)
        self._management_client.on_connect = lambda: management.offers.remote(
            spec.ref, spec.digest, runner.signature, runner.input_type, runner.schemas, memory
        )
        if self._group is not None:
            self._group_watch = loop.create_task(self._exit_with_group(self._group))

    def _create_batcher(self, runner: Runner) -> RequestBatcher:
        """Create the batcher of this version, with sequence batching in front where it has sequences."""
        batcher = self._create_row_batcher(runner)
        spec = self._spec
        if not spec.sequence_batching:
            return batcher
        self._sequences = SequenceBatcher(
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
                close_timeout=(drain_timeout(spec) - _SHUTDOWN_MARGIN_S) / 2,
            ),
            on_end=self._sequence_end_callback(runner),
        )
        return self._sequences

    def _sequence_end_callback(self, runner: Runner) -> Callable[[str, str], None]:
        """Return the function that passes the end of a sequence to the handler, in the handler thread."""
        if not runner.handles_sequence_end:
            return lambda name, reason: None

        def on_end(name: str, reason: str) -> None:
            if runner.loop is not None:
                runner.loop.call_soon_threadsafe(runner.sequence_ended, name, reason)
            else:
                self._handler_thread.post(self._executor.sequence_ended, name, reason)

        return on_end

    def _create_row_batcher(self, runner: Runner) -> RequestBatcher:
        spec = self._spec
        batcher = create_row_batcher(
            runner, self._executor.run, spec, self._meters, self._handler_thread, self._exit_hung
        )
        if spec.batcher != "ray":
            return batcher
        if not isinstance(batcher, Batcher):
            reason = "the handler is asynchronous and runs each row by itself, so @serve.batch cannot be used"
            raise StartFailed(
                spec.name, spec.version, f"{reason}; write batcher: torchrelay into model-config.yaml"
            )
        return RayBatcher(batcher, spec.ref, spec.batch_size, spec.max_batch_delay, spec.job_queue_size)

    def _report_stage(self, stage: Stage) -> None:
        """Report the stage of this start to Management; nothing depends on it."""
        self._management_client.management.stage.remote(self._spec.ref, stage)

    def __serve_build_asgi_app__(self) -> Any:
        management = self._management_client.management
        return create_asgi_app(self._plane, self._settings, self._meters, self._access, management)

    def reconfigure(self, config: dict[str, Any]) -> None:
        """Apply the settings that need no restart."""
        self._autoscaled.period = config.get("look_back_period_s", self._autoscaled.period)
        tunables = config["torchrelay"]
        places = 2 if self._spec.continuous_batching and self._spec.sequence_batching else 1  # as in _rows_of
        self._batcher.configure(
            max_batch_size=tunables["batch_size"] * places,
            max_batch_delay=tunables["max_batch_delay"],
            queue_size=tunables["job_queue_size"],
            response_timeout=tunables["response_timeout"],
            retries=tunables["retries"],
        )

    async def awake(self) -> None:
        """Return at once: Ray Serve starts a replica for this request where there is none."""

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the statistics that Ray Serve's autoscaler reads; see ``autoscaling_policies.py``."""
        return self._autoscaled.stats(self._batcher.ongoing)

    async def infer(self, payload: bytes) -> bytes:
        """Answer pickled requests of another process: an InferenceResponse, a RelayError or a list of chunks
        for each.
        """
        requests = pickle.loads(payload)
        self._handle_rows += len(requests)
        try:
            return await pickle_responses(await self._requests.infer_all(requests))
        finally:
            self._handle_rows -= len(requests)

    async def stream(self, request: InferenceRequest) -> AsyncIterator[ResponseChunk | RelayError]:
        """Answer one request as chunks or an error; see ``stream_chunks``."""
        self._handle_rows += 1
        try:
            async with contextlib.aclosing(stream_chunks(self._requests.infer(request))) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self._handle_rows -= 1

    async def load_adapter(self, adapter: AdapterSpec) -> RelayError | None:
        """Load a LoRA adapter; an error is returned, as Ray would log a raised one as a fault of ours."""
        if self._adapters is None:
            return AdapterRejected(adapter.name, "the handler of this model has no adapters; llm has them")
        try:
            await self._adapters.load(adapter)
        except RelayError as error:
            return error
        return None

    async def holds(self, sequence: str) -> bool:
        """Return whether the state of a sequence is here."""
        return self._holds_sequence(sequence)

    def _exit_hung(self, reason: str) -> None:
        """End this process after the last responses were sent, because its handler hangs; Serve starts
        another replica.
        """
        self._crash_reporter.report(reason)
        self._hung = True
        exit_after_flush()

    async def _exit_with_group(self, group: RankGroup) -> None:
        """Fail all rows and end this process once a rank of its group is lost."""
        reason = await group.lost()
        log.error("%s: %s", self._spec.ref.app, reason)
        self._batcher.abandon(ReplicaDied(reason), "its replica lost a rank and is being replaced")
        self._exit_hung(reason)

    async def check_health(self) -> None:
        if self._hung:
            raise RuntimeError("the handler hangs")
        await self._executor.check_health()

    async def _drain(self) -> None:
        """Answer the requests of the Unix-socket transport, which Ray Serve does not know; later ones go
        elsewhere.
        """
        if not self._hung and (
            self._batcher.ongoing or (self._sequences is not None and self._sequences.open)
        ):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._batcher.close(), drain_timeout(self._spec) - _SHUTDOWN_MARGIN_S)
            await asyncio.sleep(RESPONSE_FLUSH_S)

    async def __del__(self) -> None:
        self._crash_reporter.close()
        await self._drain()
        self._uds_server.close()
        if self._group is not None:
            self._group_watch.cancel()
            self._group.close()
        await self._mirror.close()
        if self._upload is not None:
            self._upload.cancel()
        if self._capture is not None:
            await asyncio.to_thread(self._capture.close)
        await asyncio.to_thread(tracing.shutdown)
        await self._management_client.disconnect()
