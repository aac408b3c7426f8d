"""The host of a pool: a process that loads many versions on demand, and answers their requests directly."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import time
from typing import Any

from serve_app.deployments.cluster_data_plane import PoolHostBackends, create_data_plane
from serve_app.deployments.serving_process.pooled_version import PooledVersion
from serve_app.deployments.serving_process.process import ServingProcess, report_crashes
from serve_app.deployments.transport.pool_client import LocalHost
from serve_app.domain.model import ModelRef, ModelSpec
from serve_app.domain.request import Cancel, InferenceRequest, InferenceResponse, OnDone, ResponseStream
from serve_app.domain.routing_table import RoutingTable, VersionRoute
from serve_app.errors import ModelLoading, ModelNotFound, RelayError, Unavailable
from serve_app.runtime.backends import Backend, TaskRequest
from serve_app.runtime.handler_thread import IDLE_AFTER_S
from serve_app.runtime.host import malloc
from serve_app.runtime.pool.host_reports import HostReporter
from serve_app.runtime.pool.leaks import LeakDetector
from serve_app.runtime.pool.memory import MemoryUse, claim_device, measure
from serve_app.runtime.pool.version_cache import CacheLimits, VersionCache
from serve_app.settings import Settings
from serve_app.telemetry import logs
from serve_app.telemetry.crash_reports import RUNNING_SUFFIX
from serve_app.telemetry.running_batches import RunningBatches

log = logging.getLogger(__name__)

_SAMPLE_PERIOD_S = 1.0  # seconds between measurements of the process
Response = InferenceResponse | ResponseStream


class PoolHost(ServingProcess):
    """A host: a data plane with the versions that it has loaded, and a cache that loads and evicts them."""

    async def __init__(self, spec: ModelSpec, settings: Settings) -> None:  # type: ignore[misc]  # Serve awaits it
        self._configure(spec, settings, "pool", pool=spec.version)
        self._pool, replica = spec.version, self._replica
        self._specs: dict[ModelRef, ModelSpec] = {}  # that this host has loaded, or was sent
        self._counted_evictions = 0
        self._running = RunningBatches(
            (settings.crash_reports_dir / replica).with_name(f"{replica}{RUNNING_SUFFIX}")
        )
        faulthandler.enable(all_threads=True)  # which names the thread that crashes; Ray's setting does not
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop keeps only weak references
        device_bytes = await asyncio.to_thread(claim_device, spec.num_gpus) if spec.num_gpus else 0
        budget = MemoryUse(int(spec.config["memory"]) << 20, device_bytes)
        self._cache = VersionCache(
            self._open_version,
            self._find_spec,
            CacheLimits(self._pool, budget),
            on_change=self._on_cache_change,
            on_failure=lambda spec, error: self._reporter.load_failed(spec, error),
        )
        self._leaks = LeakDetector(budget, measure())
        management = self._management_client.management
        self._reporter = HostReporter(self._pool, replica, self._cache, management)
        self._management_client.on_connect = self._report_all
        await report_crashes(settings, replica, management)
        local = LocalHost(replica, self.infer_here)
        plane, mirror = create_data_plane(
            self._reader,
            self._meters,
            settings,
            self._management_client.reports,
            host=PoolHostBackends(local, self._cache.loaded),
        )
        await self._serve(_HostBackend(self), plane, mirror, "/predictions")
        self._crash_reporter.set_ready()
        self._start(self._reporter.run())
        self._start(self._watch_memory())

    # Requests

    def find_loaded(self, ref: ModelRef) -> PooledVersion | None:
        """Return a version, where it is loaded with the revision of the routing table."""
        return self._cache.find(ref, self._find_revision(ref))

    async def infer_here(self, request: InferenceRequest, revision: str = "") -> Response:
        """Return the response of this host's own version, which is loaded first where it is not."""
        ref = ModelRef(request.model, request.version or "")
        revision = revision or self._find_revision(ref)
        if self._cache.find(ref, revision) is None:
            self._meters.instrument("torchrelay_pool_misses", self._pool).inc()
        for attempt in (1, 2):
            hosted = await self._cache.get(ref, revision)
            try:
                return await hosted.infer(request)
            except ModelLoading:  # it was evicted at this moment
                if attempt == 2:
                    raise
        raise AssertionError("unreachable")

    async def load(self, spec: ModelSpec) -> RelayError | None:
        """Load a version; an error is returned, as Ray would log a raised one as a fault of ours."""
        self._specs[spec.ref] = spec
        self._cache.forget_failure(spec.ref)
        try:
            await self._cache.get(spec.ref, spec.revision)
        except RelayError as error:
            return error
        return None

    # Versions

    async def _find_spec(self, ref: ModelRef, revision: str) -> ModelSpec:
        """Return a version's spec, from Management unless it is known.

        Raises ModelNotFound, and Unavailable while Management is being replaced.
        """
        known = self._specs.get(ref)
        if known is not None and revision in ("", known.revision):
            return known
        try:
            spec: ModelSpec | None = await self._management_client.management.pooled_spec.remote(ref)
        except Exception as error:  # Management is down or being replaced
            log.info("no spec of %s from Management (%s)", ref.app, type(error).__name__)
            raise Unavailable(f"Management does not answer, so {ref.name} cannot be loaded now.") from None
        if spec is None:
            raise ModelNotFound(ref.name)
        self._specs[ref] = spec
        return spec

    async def _open_version(self, spec: ModelSpec) -> PooledVersion:
        slot = self._running.open_slot(spec.ref.app)
        version = PooledVersion(spec, self._settings, self._meters, self._replica, slot, self._on_hung)
        started_at = time.perf_counter()
        try:
            await version.open(self._management_client.management)
        except BaseException:
            self._running.close_slot(slot)
            raise
        version.on_closed = lambda: self._running.close_slot(slot)
        logs.restore_loggers()
        seconds = time.perf_counter() - started_at
        self._meters.instrument("torchrelay_pool_load_seconds", self._pool).observe(seconds)
        self._apply_limit(version, self._find_route(spec.ref))
        return version

    def _on_hung(self, reason: str, thread: int) -> None:
        self._exit_hung(reason, thread=thread)

    def _find_route(self, ref: ModelRef) -> VersionRoute | None:
        model = self._reader.table.models.get(ref.name)
        return model.versions.get(ref.version) if model is not None else None

    def _find_revision(self, ref: ModelRef) -> str:
        """Return the revision in the routing table; empty where this host's table has no such version."""
        route = self._find_route(ref)
        return route.revision if route is not None else ""

    def _apply_limit(self, version: PooledVersion, route: VersionRoute | None) -> None:
        if route is not None:
            version.set_limit(route.max_concurrent_requests, max(route.replicas, route.pool_hosts))

    def _apply_table(self, table: RoutingTable) -> None:
        """Evict versions that were removed or left the pool; load pinned ones; set limits."""
        routes = {
            ModelRef(name, version): route
            for name, model in table.models.items()
            for version, route in model.versions.items()
            if route.pool == self._pool
        }
        revisions = {ref: route.revision for ref, route in routes.items()}
        self._cache.retain(revisions)
        self._reporter.retain(revisions)
        for ref, spec in list(self._specs.items()):
            if revisions.get(ref) != spec.revision:
                del self._specs[ref]
        for version in self._cache.loaded.values():
            self._apply_limit(version, routes.get(version.spec.ref))
        self._cache.pinned = frozenset(ref for ref, route in routes.items() if route.pin_loaded)
        self._reporter.load_pinned(table, {ref: routes[ref] for ref in self._cache.pinned})

    def _on_cache_change(self) -> None:
        self._leaks.restart(measure(), {version.spec.ref for version in self._cache.loaded.values()})
        for version in self._cache.loaded.values():
            self._reporter.loaded(version.spec, version.runner, version.memory.host)
        self._reporter.report_soon()

    def _report_all(self) -> None:
        """Report everything to a new Management, which knows no declaration."""
        self._reporter.retain({})
        self._on_cache_change()

    # The process

    async def _watch_memory(self) -> None:
        """Measure the process, evict what grows beyond the budget, and return an idle process's memory."""
        idle_seconds = 0.0
        while True:
            await asyncio.sleep(_SAMPLE_PERIOD_S)
            is_idle = not any(version.ongoing for version in self._cache.loaded.values())
            idle_seconds = idle_seconds + _SAMPLE_PERIOD_S if is_idle else 0.0
            if idle_seconds == IDLE_AFTER_S:
                await asyncio.to_thread(malloc.trim)
            versions = {v.spec.ref: v.busy_seconds for v in self._cache.loaded.values()}
            leak = self._leaks.sample(measure(), self._cache.used, versions)
            if leak is not None:
                self._reporter.leaked(self._cache.loaded[leak.ref.name, leak.ref.version].spec, leak)
                await self._cache.evict(leak.ref)

    def _update_meters(self) -> None:
        versions = self._cache.loaded.values()
        for version in versions:
            self._meters.depth(version.spec.name, version.spec.version, version.pending)
        for name, value in (
            ("torchrelay_pool_loaded_versions", len(versions)),
            ("torchrelay_pool_memory_bytes", self._cache.used.host),
        ):
            self._meters.instrument(name, self._pool).set(value)
        evictions = self._meters.instrument("torchrelay_pool_evictions", self._pool)
        evictions.inc(self._cache.evictions - self._counted_evictions)
        self._counted_evictions = self._cache.evictions

    @property
    def _row_counts(self) -> tuple[int, int]:
        versions = self._cache.loaded.values()
        return sum(v.pending for v in versions), sum(v.ongoing for v in versions)

    def reconfigure(self, config: dict[str, Any]) -> None:
        """Accept Ray Serve's configuration; a host has no setting that changes."""

    def _start(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def __del__(self) -> None:
        self._crash_reporter.close()
        if not self._is_hung:
            await self._cache.close()
        for task in list(self._tasks):
            task.cancel()
        self._running.close()
        await self._disconnect()


class _HostBackend(Backend):
    """The versions of a host, for the requests of other processes; one that is not loaded is loaded first."""

    def __init__(self, host: PoolHost) -> None:
        self._host = host

    def submit(self, request: InferenceRequest, on_done: OnDone) -> Cancel:
        hosted = self._host.find_loaded(ModelRef(request.model, request.version or ""))
        if hosted is not None:
            return hosted.submit(request, on_done)
        return TaskRequest(self._host.infer_here(request), on_done).cancel
