"""The replacement of replicas that have reached a limit of their version's ``recycling``.

Replicas request their replacement (``deployments/serving_process/recycling.py``) and repeat it until they
stop. Here one replica of a version is replaced at a time, and a few in the cluster. The new replica starts
first; where the cluster has no place for it, the old one is drained before.

A limit of memory that is just above a new replica's memory would replace replicas without end. Where replicas
reach it soon after their start, each must be older than the one before when it is replaced.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from serve_app.control.lifecycle_events import EventHistory, EventLog
from serve_app.control.registry import DesiredState
from serve_app.control.replica_health import PLACEMENT_TIMEOUT_S, ObservedApp
from serve_app.domain.model import ModelRef
from serve_app.domain.recycling import RecyclingReason
from serve_app.telemetry.metrics import Meters

log = logging.getLogger(__name__)

PLACEMENT_DELAY_S = 10.0  # in which a new replica has a process, where the cluster has a place for it
SHORTAGE_DELAY_S = 60.0  # for which a replica without a process counts as starting
_MAX_REPLACEMENTS = 4  # at once, of all versions: each needs the memory of one more replica
_REQUEST_LIFETIME_S = 120.0  # of a request that its replica does not repeat
SETTLING_S = 300.0  # the age below which a replica has just been started
_MAX_MIN_AGE_S = 3600.0  # the age at which a replica is replaced in any case


class Replacement(NamedTuple):
    """A command: replace a replica, and with ``drain_first`` stop it before the new one has started."""

    ref: ModelRef
    replica: str
    drain_first: bool


@dataclass
class _Request:
    ref: ModelRef
    replica: str
    reason: RecyclingReason
    detail: str
    time: float  # of the last request
    age: float  # of the replica then
    reached_age: float  # of the replica at its first request
    is_reported: bool = False  # as one that waits for its age


@dataclass
class _Running:
    request: _Request
    history: EventHistory
    started_at: float
    timeout: float
    before: frozenset[str]  # ids of the replicas at its start
    count: int  # of the ready ones among them
    is_drained: bool = False  # before the new replica has started
    is_stopped: bool = False


class ReplicaRecycler:
    """The requested and the running replacements.

    ``replace`` begins the replacement of an application's replica; with True it stops the replica first.
    ``report`` stores why a limit of a version is too small.
    ``clock`` counts seconds, ``wall_clock`` since the epoch.
    """

    def __init__(
        self,
        replace: Callable[[str, str, bool], bool],
        events: EventLog,
        meters: Meters,
        report: Callable[[ModelRef, str], None],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.replace = replace
        self._events = events
        self._meters = meters
        self._report = report
        self._clock = clock
        self._wall_clock = wall_clock
        self._requests: dict[str, _Request] = {}  # by replica
        self._running: dict[ModelRef, _Running] = {}
        # The least age at which the memory of a replica replaces it, for versions whose last one was young.
        self._min_ages: dict[ModelRef, float] = {}

    @property
    def is_active(self) -> bool:
        return bool(self._running)

    def is_replacing(self, ref: ModelRef) -> bool:
        """Return whether a replica of a version is being replaced."""
        return ref in self._running

    def request(self, ref: ModelRef, replica: str, reason: RecyclingReason, detail: str, age: float) -> bool:
        """Request the replacement of a replica of an age in seconds; return whether the request is new."""
        request = _Request(ref, replica, reason, detail, self._clock(), age, age)
        if (last := self._requests.get(replica)) is not None:
            request.reached_age, request.is_reported = last.reached_age, last.is_reported
        self._requests[replica] = request
        return last is None

    def find_waiting(self, observed: Mapping[str, ObservedApp]) -> list[ModelRef]:
        """Return the versions whose new replica has had no process for some time while the old one runs."""
        latest = self._clock() - PLACEMENT_DELAY_S
        return [
            ref
            for ref, running in self._running.items()
            if running.started_at <= latest
            and not (running.is_drained or running.is_stopped)
            and (current := observed.get(ref.app)) is not None
            and any(w.pid == 0 and w.id not in running.before for w in current.workers)
        ]

    def plan(
        self,
        desired: Mapping[str, DesiredState],
        observed: Mapping[str, ObservedApp],
        without_place: Collection[ModelRef] = (),
    ) -> list[Replacement]:
        """Return the replacements to begin now.

        Those of the versions in ``without_place`` drain the old replica first: no node can hold one more.
        """
        now = self._clock()
        for ref in [ref for ref in self._min_ages if ref.app not in desired]:
            del self._min_ages[ref]
        live = {worker.id for app in observed.values() for worker in app.workers}
        self._requests = {
            replica: request
            for replica, request in self._requests.items()
            if replica in live and now - request.time < _REQUEST_LIFETIME_S
        }
        commands = [
            command
            for ref in list(self._running)
            if (command := self._continue(ref, desired, observed, ref in without_place)) is not None
        ]
        return [*commands, *self._begin(desired, observed)]

    def _continue(
        self,
        ref: ModelRef,
        desired: Mapping[str, DesiredState],
        observed: Mapping[str, ObservedApp],
        has_no_place: bool,
    ) -> Replacement | None:
        running, current = self._running[ref], observed.get(ref.app)
        replica = running.request.replica
        if ref.app not in desired or current is None:
            self._finish(ref, "failed", reason="removed", message=f"{ref.name} {ref.version} was removed.")
            return None
        if not any(worker.id == replica and worker.ready for worker in current.workers):
            if not running.is_stopped:
                running.is_stopped = True
                self._meters.replica_recycled(ref.name, ref.version, running.request.reason)
            if current.running >= min(current.replicas, running.count):
                self._finish(ref, "ready", workers=current.running)
                self._set_min_age(running.request)
                return None
        if self._clock() - running.started_at > running.timeout:
            message = f"No new replica of {ref.name} {ref.version} became ready in time; it is tried again."
            self._finish(ref, "failed", reason="start_failed", message=message)
        elif has_no_place and not (running.is_drained or running.is_stopped):
            running.is_drained = True
            self._events.append(running.history, "recycling", replica=replica, drains_first=True)
            return Replacement(ref, replica, drain_first=True)
        return None

    def _begin(
        self, desired: Mapping[str, DesiredState], observed: Mapping[str, ObservedApp]
    ) -> Iterable[Replacement]:
        for request in list(self._requests.values()):
            ref = request.ref
            state, current = desired.get(ref.app), observed.get(ref.app)
            if len(self._running) >= _MAX_REPLACEMENTS:
                return
            if ref in self._running or state is None or current is None or not self._is_due(request):
                continue
            is_short = self._is_short(current)
            if not (is_short or _is_steady(current)):
                continue
            log.info("%s: replica %s is replaced: %s", ref.app, request.replica, request.detail)
            history = self._events.open(ref.name, version=ref.version, workers=current.running)
            self._events.append(
                history, "recycling", replica=request.replica, reason=request.reason, message=request.detail
            )
            self._running[ref] = _Running(
                request,
                history,
                self._clock(),
                state.spec.startup_timeout + PLACEMENT_TIMEOUT_S,
                frozenset(worker.id for worker in current.workers),
                current.running,
                is_drained=is_short,
            )
            yield Replacement(ref, request.replica, drain_first=is_short)

    def _is_due(self, request: _Request) -> bool:
        """Return whether a replica is old enough; report once that one is not."""
        min_age = self._min_ages.get(request.ref, 0.0)
        if request.reason != "memory" or request.age >= min_age:
            return True
        if not request.is_reported:
            request.is_reported = True
            problem = (
                f"recycling.max_memory_mib is too small; raise it. {request.reached_age:.0f} s after the "
                f"start of a replica {request.detail}. It is replaced at an age of {min_age:.0f} s."
            )
            log.warning("%s: %s", request.ref.app, problem)
            self._report(request.ref, problem)
        return False

    def _set_min_age(self, request: _Request) -> None:
        """Double the age of the next replacement where this one was young, for a reason of memory."""
        ref = request.ref
        if request.reason != "memory":
            return
        if request.reached_age < SETTLING_S:
            self._min_ages[ref] = min(_MAX_MIN_AGE_S, max(SETTLING_S, 2 * self._min_ages.get(ref, 0.0)))
        else:
            self._min_ages.pop(ref, None)

    def _is_short(self, current: ObservedApp) -> bool:
        """Return whether replicas wait for a place, and all others run.

        A version of more replicas than the cluster holds is never steady.
        """
        latest = self._wall_clock() - SHORTAGE_DELAY_S
        waiting = [worker for worker in current.workers if not worker.ready]
        return (
            current.status in ("RUNNING", "DEPLOYING")
            and bool(waiting)
            and all(worker.pid == 0 and worker.started_at <= latest for worker in waiting)
        )

    def _finish(self, ref: ModelRef, stage: str, **details: object) -> None:
        running = self._running.pop(ref)
        self._requests.pop(running.request.replica, None)
        self._events.append(running.history, stage, **details)  # type: ignore[arg-type]


def _is_steady(current: ObservedApp) -> bool:
    """Return whether all replicas of an application run, and no other starts or stops."""
    return (
        current.status == "RUNNING"
        and current.running == current.replicas
        and all(worker.ready for worker in current.workers)
    )
