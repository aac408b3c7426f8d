"""Who runs, who failed, who crashed: what Management concludes from what it sees.

No Ray and no I/O: it is told what was seen, and asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from serve_app.control.registry import Desired
from serve_app.errors import StartFailed, StartOutOfMemory
from serve_app.signature import Signature
from serve_app.telemetry.last_words import Death
from serve_app.types import ModelRef, ModelSpec, ModelStatus, Phase, Worker

# Seconds before the n-th start after failures or crashes.
PAUSES = (0, 0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55)
_REMEMBERED = 300.0  # seconds for which a crash counts


class App(Protocol):
    """One version's application as it was seen: reconciler.Seen."""

    @property
    def config(self) -> Mapping[str, object]: ...
    @property
    def replicas(self) -> int: ...
    @property
    def attempt(self) -> int: ...
    @property
    def message(self) -> str: ...
    @property
    def workers(self) -> tuple[Worker, ...]: ...
    @property
    def running(self) -> int: ...
    @property
    def failed(self) -> bool: ...


@dataclass
class _Failure:
    error: StartFailed
    count: int
    since: float  # of the first of these failures
    again_at: float  # when it is tried again


class Vitals:
    """Of every version that should run. ``clock`` counts seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.statuses: dict[ModelRef, ModelStatus] = {}
        self._failures: dict[ModelRef, _Failure] = {}
        self._given_up: dict[ModelRef, int] = {}  # the last attempt that Ray Serve gave up, and that was noted
        self._crashes: dict[ModelRef, list[float]] = {}
        self._short_since: dict[ModelRef, float] = {}
        self._last_errors: dict[ModelRef, tuple[str, float]] = {}
        self._loading_since: dict[ModelRef, float] = {}
        self._starts: dict[ModelRef, float] = {}  # seconds of the last one; kept while a version does not run
        self._offered: dict[ModelRef, Signature] = {}  # kept likewise

    def note(self, desired: Mapping[str, Desired], seen: Mapping[str, App], before: Mapping[str, App]) -> None:
        """Draw conclusions from what is seen now, and what was seen the time before."""
        now = self._clock()
        for app, want in desired.items():
            ref, have, last = want.spec.ref, seen.get(app), before.get(app)
            running = have.running if have is not None else 0
            if have is not None and have.failed and self._given_up.get(ref, -1) < have.attempt:
                self._given_up[ref] = have.attempt
                # Where a replica has said why, its own word stands.
                self.failed(want.spec, self.failure(ref) or StartFailed(ref.name, ref.version, have.message))
            elif have is None:
                self._given_up.pop(ref, None)
            # One that may sleep does so where the autoscaler wants nobody; while it wants somebody, it wakes up.
            idle = want.low == 0 and running == 0 and have is not None and have.replicas == 0 and not have.failed
            if idle or running >= max(want.low, 1):
                self._failures.pop(ref, None)
                self._short_since.pop(ref, None)
            else:
                self._short_since.setdefault(ref, now)
            if have is not None and last is not None and have.config == last.config and have.replicas >= last.replicas:
                gone = {w.id for w in last.workers if w.ready} - {w.id for w in have.workers}
                self._crashes.setdefault(ref, []).extend(now for _ in gone)
            failure = self._failures.get(ref)
            phase: Phase = "ready" if running else "idle" if idle else "failed" if failure is not None else "loading"
            error, at = self._last_errors.get(ref, ("", 0.0))
            workers = have.workers if have is not None else ()
            took = self._start_seconds(ref, phase, now)
            self.statuses[ref] = ModelStatus(phase, running, error, at, workers, took, self._offered.get(ref))
        kept = {want.spec.ref for want in desired.values()}
        for ref in self.statuses.keys() - kept:
            self.forget(ref)

    def _start_seconds(self, ref: ModelRef, phase: Phase, now: float) -> float:
        """How long a version's last start took, from no replica to the first that is ready; 0.0 where none was seen."""
        if phase == "loading":
            self._loading_since.setdefault(ref, now)
        elif (since := self._loading_since.pop(ref, None)) is not None and phase == "ready":
            self._starts[ref] = now - since
        return self._starts.get(ref, 0.0)

    def offered(self, ref: ModelRef, signature: Signature | None) -> None:
        """A replica is ready, and this is what its handler takes and gives."""
        if signature is not None:
            self._offered[ref] = signature
        else:
            self._offered.pop(ref, None)

    def failed(self, spec: ModelSpec, error: StartFailed) -> None:
        """A replica could not start. It is tried again, later each time, until ``max_retry_timeout`` is over."""
        now = self._clock()
        failure = self._failures.setdefault(spec.ref, _Failure(error, 0, now, now))
        failure.error = error
        failure.count += 1
        self._last_errors[spec.ref] = (error.detail, time.time())
        over = now - failure.since >= spec.max_retry_timeout
        failure.again_at = float("inf") if over else now + _pause(failure.count + 1)

    def died(self, spec: ModelSpec, death: Death) -> None:
        """A replica's process ended, and why is known: one that was loading could not start."""
        if death.loading:
            failed = StartOutOfMemory if death.out_of_memory else StartFailed
            self.failed(spec, failed(spec.name, spec.version, death.why))
        self._last_errors[spec.ref] = (death.why, death.when)

    def failure(self, ref: ModelRef) -> StartFailed | None:
        """Why a version's replicas do not start."""
        failure = self._failures.get(ref)
        return failure.error if failure is not None else None

    def tried(self, ref: ModelRef) -> bool:
        """Whether a version is to be started now; not while it pauses after a failure and nothing of it runs."""
        failure = self._failures.get(ref)
        status = self.statuses.get(ref)
        return failure is None or failure.again_at <= self._clock() or (status is not None and status.replicas > 0)

    def pause(self, ref: ModelRef) -> float:
        """Seconds that a new replica should wait, because those before it crashed or failed."""
        recent = [t for t in self._crashes.get(ref, ()) if t > self._clock() - _REMEMBERED]
        self._crashes[ref] = recent
        failure = self._failures.get(ref)
        return _pause(len(recent) + (failure.count if failure is not None else 0))

    def healthy(self, spec: ModelSpec) -> bool:
        """Whether a version has what it should have, or time left to get it back."""
        since = self._short_since.get(spec.ref)
        return since is None or self._clock() - since < spec.max_retry_timeout

    def settled(self, desired: Mapping[str, Desired]) -> bool:
        """Whether every version has all its replicas, or has failed."""
        return all(
            want.spec.ref in self._failures
            or (status := self.statuses.get(want.spec.ref)) is not None
            and status.replicas >= want.low
            for want in desired.values()
        )

    def forgive(self, ref: ModelRef) -> None:
        """A version is asked for anew: it is tried at once, and what went wrong before has been seen."""
        self._failures.pop(ref, None)
        self._last_errors.pop(ref, None)
        if (status := self.statuses.get(ref)) is not None:
            self.statuses[ref] = replace(status, last_error="", error_time=0.0)

    def forget(self, ref: ModelRef) -> None:
        """A version is no more, or should not run."""
        for known in (
            self.statuses,
            self._failures,
            self._given_up,
            self._crashes,
            self._short_since,
            self._last_errors,
            self._loading_since,
        ):
            known.pop(ref, None)


def _pause(count: int) -> float:
    return PAUSES[min(count, len(PAUSES) - 1)]
