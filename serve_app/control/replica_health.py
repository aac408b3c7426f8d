"""Health of replicas and the back-off after crashes, derived from what Ray Serve reports.

The tracker uses neither Ray nor I/O: its caller passes in the observations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from serve_app.control.registry import DesiredState
from serve_app.domain.model import ModelRef, ModelSpec, ModelStatus, Phase, ReplicaInfo
from serve_app.domain.signature import Signature
from serve_app.errors import StartFailed, StartOutOfMemory
from serve_app.telemetry.crash_reports import CrashReport

# Seconds before the n-th start after failures or crashes.
BACKOFF_S = (0, 0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55)
PLACEMENT_TIMEOUT_S = 30.0  # seconds that a replica may wait for a place, beyond its startup_timeout
_CRASH_WINDOW_S = 300.0  # seconds for which a crash counts
_CRASH_REPORT_TIMEOUT_S = 10.0  # for which the report of a replica's crash is waited for
_STEADY = {"RUNNING", "UNHEALTHY"}  # the states of an application that is not being updated


@dataclass(frozen=True)
class ObservedApp:
    """The application of a version, as Serve reports it."""

    app: str
    route: str | None
    replicas: int  # requested
    config: Mapping[str, Any]
    attempt: int
    status: str  # of the application: RUNNING, DEPLOYING, DEPLOY_FAILED, UNHEALTHY, DELETING
    message: str
    workers: tuple[ReplicaInfo, ...]  # alive, ready or not
    scaling: Mapping[str, Any] | None = None  # the autoscaler's configuration; None without autoscaling
    memory: int = 0  # bytes that each rank of a replica claims
    pool_hosts: int = 0  # that should load it; 0: it is in no pool

    @property
    def running(self) -> int:
        return sum(worker.ready for worker in self.workers)

    @property
    def unplaced(self) -> int:
        """Return the number of requested replicas without a process."""
        return max(0, self.replicas - sum(worker.pid > 0 for worker in self.workers))

    @property
    def failed(self) -> bool:
        """Return whether Serve has stopped trying to start it."""
        return self.status == "DEPLOY_FAILED" and self.running == 0


@dataclass
class _CrashRecord:
    error: StartFailed
    count: int
    first_at: float  # of the first of these failures
    retry_at: float


@dataclass(frozen=True)
class _Declaration:
    """The declarations of a handler: inputs and outputs, their media type and schemas."""

    digest: str
    signature: Signature | None = None
    input_type: str = ""
    schemas: Mapping[str, Any] | None = None


class HealthTracker:
    """The health of every version that should run. ``clock`` counts seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.statuses: dict[ModelRef, ModelStatus] = {}
        self.revision = 0  # changes with each change of ``statuses``
        # Versions whose status only changes with these objects; nearly all of a pool's are the same.
        self._settled: dict[ModelRef, tuple[DesiredState, ObservedApp | None]] = {}
        self._failures: dict[ModelRef, _CrashRecord] = {}
        # The last attempt that Ray Serve gave up and that was recorded.
        self._failed_attempts: dict[ModelRef, int] = {}
        self._crashes: dict[ModelRef, list[float]] = {}
        # Ready replicas that Serve has replaced, with the time; their crashes may still be reported.
        self._replaced: dict[ReplicaInfo, tuple[ModelRef, float]] = {}
        self._reported_crashes: dict[str, float] = {}  # by replica; Serve may notice them later
        self._incomplete_since: dict[ModelRef, float] = {}
        self._last_errors: dict[ModelRef, tuple[str, float]] = {}
        self._loading_since: dict[ModelRef, float] = {}
        self._reset_times: dict[ModelRef, float] = {}  # in seconds of time.time()
        # The last start's seconds and the declaration are kept while a registered version does not run.
        self._start_seconds: dict[ModelRef, float] = {}
        self._declarations: dict[ModelRef, _Declaration] = {}
        self.is_recycling: Callable[[ModelRef], bool] = lambda ref: False
        self.waiting: Mapping[ModelRef, str] = {}  # what versions with replicas without a place wait for
        self.shortages: Mapping[ModelRef, str] = {}  # why fewer replicas are requested than desired

    def update(
        self,
        desired: Mapping[str, DesiredState],
        observed: Mapping[str, ObservedApp],
        previous: Mapping[str, ObservedApp],
    ) -> list[DesiredState]:
        """Derive every version's status from the present observation and the previous one.

        Return the versions whose status may have changed.
        """
        updated = self.update_versions(desired, observed, previous)
        kept = {state.spec.ref for state in desired.values()}
        for ref in self.statuses.keys() - kept:
            self.forget(ref)
        return updated

    def update_versions(
        self,
        desired: Mapping[str, DesiredState],
        observed: Mapping[str, ObservedApp],
        previous: Mapping[str, ObservedApp],
    ) -> list[DesiredState]:
        """Derive the status of some versions; return those whose status may have changed."""
        now = self._clock()
        updated = []
        for app, state in desired.items():
            current = observed.get(app)
            settled = self._settled.get(state.spec.ref)
            if settled is None or settled[0] is not state or settled[1] is not current:
                self._update_version(state, current, previous.get(app), now)
                updated.append(state)
        return updated

    def _update_version(
        self,
        state: DesiredState,
        observed: ObservedApp | None,
        previous: ObservedApp | None,
        now: float,
    ) -> None:
        ref = state.spec.ref
        running = observed.running if observed is not None else 0
        if observed is None:
            self._failed_attempts.pop(ref, None)
        elif observed.failed and self._failed_attempts.get(ref, -1) < observed.attempt:
            self._failed_attempts[ref] = observed.attempt
            # An error that a replica reported takes precedence over Ray Serve's.
            error = self.get_failure(ref) or StartFailed(ref.name, ref.version, observed.message)
            self.record_start_failure(state.spec, error)
        # A version that may scale to zero is idle while the autoscaler wants no replica; else it is waking
        # up.
        idle = (
            state.min_replicas == 0
            and running == 0
            and observed is not None
            and observed.replicas == 0
            and not observed.failed
        )
        if idle or running >= max(state.min_replicas, 1):
            self._failures.pop(ref, None)
            self._incomplete_since.pop(ref, None)
        else:
            self._incomplete_since.setdefault(ref, now)
        if observed is not None and previous is not None:
            self._count_crashes(ref, observed, previous, now)
        phase = self._phase(ref, running, idle)
        last_error, error_time = self._last_errors.get(ref, ("", 0.0))
        declared = self._declarations.get(ref)
        if declared is None or declared.digest != state.spec.digest:  # another archive declares others
            declared = _Declaration(state.spec.digest)
        status = ModelStatus(
            phase,
            running,
            last_error,
            error_time,
            observed.workers if observed is not None else (),
            self._measure_start(ref, phase, now),
            declared.signature,
            declared.input_type,
            declared.schemas,
            self.shortages.get(ref) or self.waiting.get(ref, ""),
            observed.pool_hosts if observed is not None else 0,
        )
        if status != self.statuses.get(ref):  # an unchanged one stays the same object: see TableBuilder
            self._set_status(ref, status)
        changes_with_time = (
            self._failures,
            self._incomplete_since,
            self._loading_since,
            self.waiting,
            self.shortages,
        )
        if not any(ref in by_ref for by_ref in changes_with_time):
            self._settled[ref] = state, observed
        else:
            self._settled.pop(ref, None)

    def _set_status(self, ref: ModelRef, status: ModelStatus) -> None:
        self.statuses[ref] = status
        self.revision += 1

    def _count_crashes(self, ref: ModelRef, observed: ObservedApp, previous: ObservedApp, now: float) -> None:
        """Count ready replicas that disappeared without an update or a scale-down."""
        if observed.config == previous.config and observed.replicas >= previous.replicas:
            gone = {w.id for w in previous.workers if w.ready} - {w.id for w in observed.workers}
            self._crashes.setdefault(ref, []).extend(now for _ in gone)
            if {observed.status, previous.status} <= _STEADY and not self.is_recycling(ref):
                ready = {w.id for w in observed.workers if w.ready}
                known = ready | self._reported_crashes.keys()
                lost = (w for w in previous.workers if w.ready and w.id not in known)
                self._replaced.update((worker, (ref, now)) for worker in lost)

    def take_replaced(self) -> list[tuple[ModelRef, ReplicaInfo]]:
        """Return the ready replicas that Serve has replaced some seconds ago, and that have not crashed."""
        now = self._clock()
        due = now - _CRASH_REPORT_TIMEOUT_S
        self._reported_crashes = {
            id: when for id, when in self._reported_crashes.items() if when > now - _CRASH_WINDOW_S
        }
        taken = [(ref, worker) for worker, (ref, when) in self._replaced.items() if when <= due]
        for _, worker in taken:
            del self._replaced[worker]
        return [(ref, worker) for ref, worker in taken if ref in self.statuses]

    def _phase(self, ref: ModelRef, running: int, idle: bool) -> Phase:
        if running:
            return "ready"
        if idle:
            return "idle"
        return "failed" if ref in self._failures else "loading"

    def _measure_start(self, ref: ModelRef, phase: Phase, now: float) -> float:
        """Return the seconds of a version's last start, from no replica to the first ready one.

        The result is 0.0 where no start was observed.
        """
        if phase == "loading":
            self._loading_since.setdefault(ref, now)
        elif (since := self._loading_since.pop(ref, None)) is not None and phase == "ready":
            self._start_seconds[ref] = now - since
        return self._start_seconds.get(ref, 0.0)

    def set_signature(
        self,
        spec: ModelSpec,
        signature: Signature | None,
        input_type: str = "",
        schemas: Mapping[str, Any] | None = None,
    ) -> None:
        """Store inputs, outputs, the input's media type and the schemas that a replica's handler declares."""
        self._settled.pop(spec.ref, None)
        self._declarations[spec.ref] = _Declaration(spec.digest, signature, input_type, schemas)

    def record_start_failure(self, spec: ModelSpec, error: StartFailed) -> None:
        """Schedule the next start of a replica that could not start.

        The pauses grow with each failure; after ``max_retry_timeout`` no further start is tried.
        """
        now = self._clock()
        failure = self._failures.setdefault(spec.ref, _CrashRecord(error, 0, now, now))
        failure.error = error
        failure.count += 1
        self._set_last_error(spec.ref, error.detail, time.time())
        expired = now - failure.first_at >= spec.max_retry_timeout
        failure.retry_at = float("inf") if expired else now + _backoff(failure.count + 1)

    def record_note(self, ref: ModelRef, note: str) -> None:
        """Store an error that needs no new start as a version's last one."""
        self._set_last_error(ref, note, time.time())

    def record_crash(self, spec: ModelSpec, crash: CrashReport) -> None:
        """Store the reason why a replica's process ended; while it was loading, its start has failed.

        A report of an attempt before ``reset_backoff`` changes nothing: a death before it, or a start that
        began before it. Serve kills such a start late, when it deletes the failed attempt's application.
        """
        self._reported_crashes[crash.replica] = self._clock()
        for worker in [worker for worker in self._replaced if worker.id == crash.replica]:
            del self._replaced[worker]
        if self.is_outdated(spec.ref, crash.started if crash.loading else crash.when):
            return
        if crash.loading:
            error_type = StartOutOfMemory if crash.out_of_memory else StartFailed
            self.record_start_failure(spec, error_type(spec.name, spec.version, crash.cause))
        self._set_last_error(spec.ref, crash.cause, crash.when)

    def _set_last_error(self, ref: ModelRef, error: str, when: float) -> None:
        self._settled.pop(ref, None)
        self._last_errors[ref] = (error, when)

    def get_failure(self, ref: ModelRef) -> StartFailed | None:
        """Return the error for which a version's replicas do not start."""
        failure = self._failures.get(ref)
        return failure.error if failure is not None else None

    def may_start(self, ref: ModelRef) -> bool:
        """Return whether a version may be deployed now.

        A version without a running replica is not deployed while it backs off after a failure.
        """
        failure = self._failures.get(ref)
        status = self.statuses.get(ref)
        return (
            failure is None
            or failure.retry_at <= self._clock()
            or (status is not None and status.replicas > 0)
        )

    def start_delay(self, ref: ModelRef) -> float:
        """Return the seconds that a new replica should wait after the crashes and failures before it."""
        recent = [t for t in self._crashes.get(ref, ()) if t > self._clock() - _CRASH_WINDOW_S]
        self._crashes[ref] = recent
        failure = self._failures.get(ref)
        return _backoff(len(recent) + (failure.count if failure is not None else 0))

    def find_unhealthy(self, find_spec: Callable[[ModelRef], ModelSpec | None]) -> set[ModelRef]:
        """Return the versions that are not healthy; ``find_spec`` returns the spec of a registered one."""
        specs = ((ref, find_spec(ref)) for ref in self._incomplete_since)
        return {ref for ref, spec in specs if spec is not None and not self.is_healthy(spec)}

    def is_healthy(self, spec: ModelSpec) -> bool:
        """Return whether a version has all its replicas, or time left to get them back."""
        since = self._incomplete_since.get(spec.ref)
        return since is None or self._clock() - since < spec.max_retry_timeout

    def is_startup_complete(self, desired: Mapping[str, DesiredState]) -> bool:
        """Return whether every version has all its replicas, or has failed, or had the time to start.

        A version for which the cluster has no place must not keep the server from being ready.
        """
        return all(self._has_started_or_failed(state) for state in desired.values())

    def _has_started_or_failed(self, state: DesiredState) -> bool:
        ref = state.spec.ref
        status = self.statuses.get(ref)
        waited = self._clock() - self._incomplete_since.get(ref, self._clock())
        has_no_place = ref in self.waiting or ref in self.shortages
        return (
            ref in self._failures
            or (
                has_no_place and waited > PLACEMENT_TIMEOUT_S
            )  # it does not load, so its timeout does not count
            or (status is not None and status.replicas >= state.min_replicas)
            or waited > state.spec.startup_timeout + PLACEMENT_TIMEOUT_S
        )

    def reset_backoff(self, ref: ModelRef) -> None:
        """Allow a start at once, and clear the last error, because a caller requested the version again."""
        for by_ref in (self._settled, self._failures, self._last_errors):
            by_ref.pop(ref, None)
        self._reset_times[ref] = time.time()
        if (status := self.statuses.get(ref)) is not None:
            self._set_status(ref, replace(status, last_error="", error_time=0.0))

    def is_outdated(self, ref: ModelRef, when: float) -> bool:
        """Return whether a time in seconds since the epoch is before the version's last ``reset_backoff``."""
        return when < self._reset_times.get(ref, 0.0)

    def remove(self, ref: ModelRef) -> None:
        """Drop the state of a removed version: a later one of its name is another archive."""
        self.forget(ref)
        self._start_seconds.pop(ref, None)
        self._declarations.pop(ref, None)

    def forget(self, ref: ModelRef) -> None:
        """Drop the state of a version that should not run."""
        self.revision += 1
        for by_ref in (
            self.statuses,
            self._settled,
            self._failures,
            self._failed_attempts,
            self._crashes,
            self._incomplete_since,
            self._last_errors,
            self._loading_since,
            self._reset_times,
        ):
            by_ref.pop(ref, None)


def _backoff(count: int) -> float:
    return BACKOFF_S[min(count, len(BACKOFF_S) - 1)]
