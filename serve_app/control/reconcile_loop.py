"""The reconcile loop: observe what runs, update the health of replicas, and deploy what should run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from serve_app.control import placement_check
from serve_app.control.archive_ingestion import ArchiveIngestor
from serve_app.control.pools.tracker import PoolTracker, host_states
from serve_app.control.reconciler import ActResult, Reconciler, is_dead
from serve_app.control.recycling import ReplicaRecycler
from serve_app.control.registry import DesiredState, Registry, changed_models, desired_states
from serve_app.control.replica_health import PLACEMENT_TIMEOUT_S, HealthTracker, ObservedApp
from serve_app.control.scaling import ReplicaScaler
from serve_app.control.state import StateStore
from serve_app.domain.model import ModelRef, ModelSpec, ModelStatus, ScalingProgress
from serve_app.errors import Conflict, InsufficientResources, StartFailed
from serve_app.settings import Settings
from serve_app.telemetry import crash_reports
from serve_app.telemetry.crash_reports import CrashReport
from serve_app.telemetry.metrics import Meters

log = logging.getLogger(__name__)
T = TypeVar("T")

_BUSY_PERIOD = 0.25  # seconds between rounds while something is starting or stopping
PLACEMENT_REPORT_S = 2.0  # seconds without a place after which the missing resources are reported


class ReconcileLoop:
    """The loop that alone deploys applications. ``state`` is set before ``run`` starts."""

    state: StateStore

    def __init__(
        self,
        reconciler: Reconciler,
        health: HealthTracker,
        ingestor: ArchiveIngestor,
        meters: Meters,
        settings: Settings,
        pools: PoolTracker | None = None,
        recycler: ReplicaRecycler | None = None,
        scaler: ReplicaScaler | None = None,
    ) -> None:
        self.startup_loaded = False  # the archives that start-up loads are in the registry
        self._health = health
        self._ingestor = ingestor
        self._meters = meters
        self._settings = settings
        self._pools = pools or PoolTracker()
        self._recycler = recycler
        if recycler is not None:
            health.is_recycling = recycler.is_replacing
        self._scaler = scaler
        self.on_crash: Callable[[CrashReport], None] = lambda crash: None
        # Serve's client is not thread-safe.
        self._serve_thread = ThreadPoolExecutor(1, thread_name_prefix="serve")
        self._reconciler = reconciler
        self._observed: dict[str, ObservedApp] = {}
        # Applications of removed workflows that still execute requests.
        self._retained: dict[str, DesiredState] = {}
        # Applications of removed versions, and the digests that they may still need.
        self._draining: dict[str, str] = {}
        self._replacements = Counter[ModelRef]()  # how often a version was removed, or got another archive
        self._archive_lock = asyncio.Lock()
        self._archive_holders = 0
        # The last observation while something moved, and when it last changed.
        self._last_snapshot: Mapping[str, object] = {}
        self._changed_at = 0.0
        self._unplaced_since: dict[ModelRef, float] = {}  # versions with a replica without a place
        self._reported_waiting: set[ModelRef] = set()  # versions whose missing places are in the log
        self._trigger = asyncio.Event()
        self._round_ended = asyncio.Event()

    async def run(self) -> None:
        last_failure = ""
        while True:
            self._trigger.clear()  # before the round: a trigger during it starts the next one
            started_at = time.monotonic()
            try:
                busy = await self._reconcile()
                last_failure = ""
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
                log.error(
                    "The versions' replicas could not be compared with the registry; trying again within "
                    "%.0f s: %s",
                    self._settings.control.reconcile_period,
                    failure,
                    exc_info=failure != last_failure,  # a traceback for each attempt would hide the others
                )
                last_failure, busy = failure, False
            # Under frequent changes rounds take at most half of the time; one of 10,000 versions takes 0.5 s.
            await asyncio.sleep(time.monotonic() - started_at)
            period = _BUSY_PERIOD if busy else self._settings.control.reconcile_period
            triggered = asyncio.ensure_future(self._trigger.wait())
            try:
                # wait_for may lose a cancellation that arrives with the trigger.
                await asyncio.wait({triggered}, timeout=period)
            finally:
                triggered.cancel()

    def trigger(self) -> None:
        """Start the next round at once."""
        self._trigger.set()

    async def wait_for_round(self) -> None:
        """Wait for the end of the round in progress, or of the next one."""
        await self._round_ended.wait()

    async def run_in_serve_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that uses Ray Serve's client, in the only thread that does."""
        return await asyncio.get_running_loop().run_in_executor(self._serve_thread, function, *args)

    async def live_readers(self) -> set[str]:
        """Return the processes that read the routing table."""
        return await self.run_in_serve_thread(self._reconciler.list_replicas)

    async def running_readers(self) -> set[str]:
        """Return the readers that run already, as they do when Management is replaced."""
        return await self.run_in_serve_thread(self._reconciler.list_replicas, ("RUNNING",))

    @contextlib.asynccontextmanager
    async def hold_archives(self) -> AsyncIterator[None]:
        """Keep every archive until the end of the block."""
        async with self._archive_lock:
            self._archive_holders += 1
        try:
            yield
        finally:
            self._archive_holders -= 1

    # Single versions

    def on_change(self, before: Registry, after: Registry) -> None:
        """Start a round, and drop the health of removed versions.

        Their archives are deleted once their replicas have ended.
        """
        for name in changed_models(before, after):
            was, now = before.models.get(name), after.models.get(name)
            known = now.versions if now is not None else {}
            for version, spec in was.versions.items() if was is not None else ():
                current = known.get(version)
                if current is None:
                    self._health.remove(spec.ref)
                    if spec.digest:  # a workflow of a document has no archive
                        self._draining[spec.ref.app] = spec.digest
                if current is None or current.digest != spec.digest:
                    self._replacements[spec.ref] += 1
                kept = {adapter.digest for adapter in current.adapters} if current is not None else set()
                for adapter in spec.adapters:  # loaded where a replica still runs
                    if adapter.digest not in kept:
                        self._ingestor.mark_unused(adapter.digest)
        self.trigger()

    def watch_registration(self, ref: ModelRef) -> Callable[[], None]:
        """Return a function that raises Conflict once the registration that ``ref`` has now is replaced.

        The version may have been removed, or registered again.
        """
        replacements = self._replacements[ref]

        def check() -> None:
            if self._replacements[ref] != replacements:
                raise Conflict(f"Version {ref.version} of model {ref.name} was removed while it started.")

        return check

    def retain(self, spec: ModelSpec) -> None:
        """Keep a version's replicas running, even when the registry drops it, until ``release``."""
        if spec.min_workers or spec.max_workers:
            self._retained[spec.ref.app] = DesiredState(spec, None)

    def release(self, spec: ModelSpec) -> None:
        """Stop the replicas of a retained version, unless its removal could not be stored."""
        self._retained.pop(spec.ref.app, None)
        self.trigger()

    def reset_backoff(self, ref: ModelRef) -> None:
        """Start a version again at once, because a caller has scaled it."""
        self._health.reset_backoff(ref)

    def is_draining(self, ref: ModelRef) -> bool:
        """Return whether the application of that name is still one of a removed version."""
        return ref.app in self._draining or ref.app in self._retained

    def count_running(self, ref: ModelRef) -> int:
        """Return the number of a version's ready replicas."""
        observed = self._observed.get(ref.app)
        return observed.running if observed is not None else 0

    def get_status(self, ref: ModelRef) -> ModelStatus:
        """Return a version's status.

        A replica whose process has ended is not ready, whatever was observed last.
        """
        status = self._health.statuses.get(ref, ModelStatus())
        workers = tuple(replace(w, ready=False) if w.ready and is_dead(w) else w for w in status.workers)
        if workers == status.workers:
            return status
        self.trigger()
        running = sum(worker.ready for worker in workers)
        phase = status.phase if running or status.phase != "ready" else "loading"
        return replace(status, phase=phase, replicas=running, workers=workers)

    async def wait_until_running(
        self,
        spec: ModelSpec,
        startup_timeout: float,
        on_round: Callable[[], Awaitable[None]],
        check: Callable[[], None] = lambda: None,
    ) -> ScalingProgress:
        """Wait until the number of ready replicas is within the bounds of ``spec``. Raises StartFailed.

        ``on_round`` is called before each round that is waited for, and ``check`` after it.
        """
        ref = spec.ref
        deadline = time.monotonic() + startup_timeout + PLACEMENT_TIMEOUT_S
        while True:
            check()
            if (error := self._health.get_failure(ref)) is not None:
                raise error
            running = self.count_running(ref)
            if spec.min_workers <= running <= spec.max_workers:
                return ScalingProgress(ref, running, "done")
            if time.monotonic() > deadline:
                if running:
                    return ScalingProgress(ref, running, "partial")
                raise StartFailed(ref.name, ref.version, await self._explain_no_replica(spec))
            await on_round()
            await self.wait_for_round()

    async def find_missing_resources(self, spec: ModelSpec) -> dict[str, dict[str, Any]]:
        """Return the resources that a version without a place requests and that are not free, by kind."""
        observed = self._observed.get(spec.ref.app)
        if observed is None or not observed.unplaced:
            return {}
        free = await self.run_in_serve_thread(self._reconciler.get_free_resources)
        return placement_check.find_missing(spec.with_(memory=observed.memory), free)

    async def check_placement(self, spec: ModelSpec, accepted: int = 0) -> None:
        """Raise InsufficientResources where no node can hold a replica, or the cluster not all of them.

        No more than ``accepted``, as there were before, are never refused: their nodes may be away.
        """
        if spec.max_workers == 0 or 0 < spec.min_workers <= accepted:
            return
        machines = await self.run_in_serve_thread(self._reconciler.get_total_resources)
        node_types = self._settings.control.node_types
        if missing := placement_check.find_impossible(spec, machines, node_types):
            raise InsufficientResources(placement_check.explain_impossible(spec, missing))
        if placement_check.exceeds_cluster(spec, machines, node_types):
            raise InsufficientResources(placement_check.explain_excess(spec, machines))

    def record_crashes(
        self, crashes: Iterable[CrashReport], desired: Mapping[str, DesiredState] | None = None
    ) -> None:
        """Store why replicas of versions that should run have crashed."""
        desired = self._desired_states() if desired is None else desired
        for crash in crashes:
            self.on_crash(crash)
            wanted = desired.get(crash.app)
            if wanted is not None and wanted.spec.digest == crash.digest:
                log.error("%s: replica %s died. %s", crash.app, crash.replica, crash.cause)
                self._health.record_crash(wanted.spec, crash)
                name, version = wanted.spec.name, wanted.spec.version
                self._meters.instrument("torchrelay_replica_failures", name, version, "crashed").inc()

    async def _explain_no_replica(self, spec: ModelSpec) -> str:
        observed = self._observed.get(spec.ref.app)
        if missing := await self.find_missing_resources(spec):
            reason = placement_check.explain(spec, missing)
        else:
            reason = observed.message if observed is not None else "Ray Serve has not begun"
        return f"no replica runs: {reason or 'it waits for a place with enough free CPUs and GPUs'}"

    # One round

    def _desired_states(self) -> dict[str, DesiredState]:
        """Return the applications that should run: of versions, and of pools."""
        registry = self.state.registry
        return {**self._retained, **desired_states(registry), **host_states(registry, self._settings)}

    async def _reconcile(self) -> bool:
        """Observe, update and act once; return whether a change is in progress."""
        observed = await self.run_in_serve_thread(self._reconciler.observe)
        desired = self._desired_states()
        if self._scaler is not None:
            desired = self._scaler.apply(desired, observed)
        self._pools.set_observed(observed)
        crashes = await asyncio.to_thread(crash_reports.collect_reports, self._settings.crash_reports_dir)
        self.record_crashes(crashes, desired)
        self._health.waiting = await self._explain_waiting(desired, observed)
        registry = self.state.registry
        pooled = self._pools.desired_states(registry)
        self._update_health({**desired, **pooled}, {**observed, **self._pools.observe_all(registry)})
        self._report_replaced()
        startable = {app: state for app, state in desired.items() if self._health.may_start(state.spec.ref)}
        result = await self.run_in_serve_thread(self._reconciler.act, startable, observed)
        self._record_problems(desired, result)
        is_recycling = await self._recycle(desired, observed)
        await self._remove_archives(observed)
        self.state.publish()
        round_ended, self._round_ended = self._round_ended, asyncio.Event()
        round_ended.set()
        moving = any(
            app not in observed or observed[app].running != observed[app].replicas for app in startable
        )
        return (
            result.count > len(result.problems)
            or (moving and self._has_changed_lately(observed))
            or any(app not in desired for app in observed)
            or is_recycling
        )

    def _report_replaced(self) -> None:
        """Log and count the replicas that Serve has replaced although no process has crashed."""
        for ref, replica in self._health.take_replaced():
            log.warning(
                "%s: Ray Serve has replaced the replica %s (pid %d on %s), and no crash was reported. It "
                "failed its health checks because it hung or was paused, or its node was lost or drained",
                ref.app,
                replica.id,
                replica.pid,
                replica.node or "this node",
            )
            self._meters.instrument("torchrelay_replica_failures", ref.name, ref.version, "replaced").inc()

    async def _recycle(
        self, desired: Mapping[str, DesiredState], observed: Mapping[str, ObservedApp]
    ) -> bool:
        """Continue and begin replacements of replicas at their limits; return whether one is running."""
        recycler = self._recycler
        if recycler is None:
            return False
        waiting = [ref for ref in recycler.find_waiting(observed) if ref.app in desired]
        free = await self.run_in_serve_thread(self._reconciler.get_free_resources) if waiting else {}
        without_place = [
            ref
            for ref in waiting
            if placement_check.find_missing(
                desired[ref.app].spec.with_(memory=observed[ref.app].memory), free
            )
        ]
        for ref, replica, drain_first in recycler.plan(desired, observed, without_place):
            try:
                await self.run_in_serve_thread(recycler.replace, ref.app, replica, drain_first)
            except Exception as error:  # the controller is being replaced; the replica repeats its request
                log.warning("%s: replica %s could not be replaced: %s", ref.app, replica, error)
        return recycler.is_active

    def update_pools(self) -> None:
        """Update the status of pooled versions from the reports of their hosts, and publish it."""
        if not hasattr(self, "state"):
            return
        models = self.state.registry.models
        specs = [
            spec
            for ref in self._pools.take_changed()
            if ref.name in models and (spec := models[ref.name].versions.get(ref.version)) and spec.is_pooled
        ]
        states = {spec.ref.app: self._pools.desired_state(spec) for spec in specs}
        observed = {spec.ref.app: self._pools.observe(spec) for spec in specs}
        self._health.update_versions(states, observed, self._observed)
        self._observed = {**self._observed, **observed}
        self.state.publish()

    def _record_problems(self, desired: Mapping[str, DesiredState], result: ActResult) -> None:
        """Record in each version's status why it could not be deployed, or has fewer workers than desired."""
        for app, problem in result.problems.items():
            if (state := desired.get(app)) is not None:
                ref = state.spec.ref
                self._health.record_start_failure(state.spec, StartFailed(ref.name, ref.version, problem))
        self._health.shortages = {desired[app].spec.ref: note for app, note in result.shortages.items()}
        self._report_waiting()

    def _report_waiting(self) -> None:
        """Log once what each version without enough places waits for: the free amounts change often."""
        reasons = {**self._health.waiting, **self._health.shortages}
        for ref in reasons.keys() - self._reported_waiting:
            log.warning("%s %s has no place for all its replicas: %s", ref.name, ref.version, reasons[ref])
        # One that still has no place, although resources are free for a moment, waits on.
        placed = self._reported_waiting - reasons.keys() - self._unplaced_since.keys()
        for ref in placed:
            log.info("%s %s waits for no place any more", ref.name, ref.version)
        self._reported_waiting = (self._reported_waiting | reasons.keys()) - placed

    async def _explain_waiting(
        self, desired: Mapping[str, DesiredState], observed: Mapping[str, ObservedApp]
    ) -> dict[ModelRef, str]:
        """Return what versions wait for whose replicas have had no place for some seconds."""
        unplaced = {
            desired[app].spec.ref: (desired[app].spec, current)
            for app, current in observed.items()
            if app in desired and current.unplaced
        }
        now = time.monotonic()
        self._unplaced_since = {ref: self._unplaced_since.get(ref, now) for ref in unplaced}
        # Resources that a replica has just been given count as not free.
        waiting = [ref for ref, since in self._unplaced_since.items() if now - since >= PLACEMENT_REPORT_S]
        if not waiting:
            return {}
        free = await self.run_in_serve_thread(self._reconciler.get_free_resources)
        machines = await self.run_in_serve_thread(self._reconciler.get_total_resources)
        node_types = self._settings.control.node_types
        reasons = {}
        for ref in waiting:
            spec, current = unplaced[ref]
            claiming = spec.with_(memory=current.memory)
            if impossible := placement_check.find_impossible(claiming, machines, node_types):
                reasons[ref] = placement_check.explain_impossible(claiming, impossible)
            elif missing := placement_check.find_missing(claiming, free):
                node_type = placement_check.find_node_type(claiming, node_types)
                reasons[ref] = placement_check.explain(claiming, missing, node_type)
        return reasons

    def _has_changed_lately(self, observed: Mapping[str, ObservedApp]) -> bool:
        """Return whether anything has changed within the placement timeout.

        A replica without a place may wait for days; then rounds follow at the slow pace.
        """
        now = time.monotonic()
        snapshot = {
            app: (o.status, o.replicas, tuple((w.id, w.ready) for w in o.workers))
            for app, o in observed.items()
        }
        if snapshot != self._last_snapshot:
            self._last_snapshot, self._changed_at = snapshot, now
        return now - self._changed_at < PLACEMENT_TIMEOUT_S

    def _update_health(self, desired: Mapping[str, DesiredState], observed: dict[str, ObservedApp]) -> None:
        known = set(self._health.statuses)
        updated = self._health.update(desired, observed, self._observed)
        self._observed = observed
        for state in updated:
            ref = state.spec.ref
            app = ref.app
            wanted = (
                state.min_replicas
                if state.min_replicas == state.max_replicas
                else observed[app].replicas
                if app in observed
                else 0
            )
            self._meters.replicas(ref.name, ref.version, self._health.statuses[ref].replicas, wanted)
        for ref in known - set(self._health.statuses):
            self._meters.forget(ref.name, ref.version)
        self.state.startup_complete = self.state.startup_complete or (
            self.startup_loaded and self._health.is_startup_complete(desired)
        )

    async def _remove_archives(self, observed: Mapping[str, ObservedApp]) -> None:
        """Delete refused archives, and those of removed versions without replicas."""
        ended = [app for app in self._draining if app not in observed and app not in self._retained]
        for app in ended:
            self._ingestor.mark_unused(self._draining.pop(app))
        async with self._archive_lock:
            if not self._archive_holders:
                registry = self.state.registry
                specs = [*registry, *(state.spec for state in self._retained.values())]
                used = [*(spec.digest for spec in specs), *self._draining.values(), *registry.unreadable]
                used += (adapter.digest for spec in specs for adapter in spec.adapters)
                await asyncio.to_thread(self._ingestor.remove_unused, frozenset(used))
