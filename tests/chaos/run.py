"""One fault under load: what failed, what was acknowledged and lost, and how long recovery took."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
import psutil

from tests.chaos.changes import ChangeWriter
from tests.chaos.chaos_server import PROCESSES, ChaosServer
from tests.chaos.faults import Fault
from tests.chaos.load import WRONG, OpenLoop, Outcome, by_second, failures, unavailable_seconds
from tests.chaos.setups import Setup

RECOVERY_LIMIT_S = 30.0  # from the end of a fault
CHANGE_LIMIT_S = 25.0  # for a response to a change: twice the wait for the database's lock, and a margin
_WARM_UP_S = 2.0
_QUIET_S = 2.0  # without a failure, for a server that counts as recovered
_RECOVERY_TIMEOUT_S = 90.0
_COUNT_TIMEOUT_S = 15.0


@dataclass
class Result:
    """What one application of a fault did."""

    fault: str
    unavailable: float = 0.0
    failed: dict[str, int] = field(default_factory=dict)
    details: dict[str, int] = field(default_factory=dict)  # the errors' bodies
    requests: int = 0
    longest: float = 0.0  # seconds of the slowest answered request
    recovery: float = 0.0
    acknowledged: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    slowest_change: float = 0.0
    lost: list[str] = field(default_factory=list)
    answered: int = 0  # requests with the experiment's arm
    counted: int = 0  # by the experiment
    restarts: int = 0
    problems: list[str] = field(default_factory=list)
    seconds: list[dict[str, object]] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.problems


def run_fault(setup: Setup, fault: Fault, *, seed: int = 0) -> Result:
    """Apply a fault under load, wait for recovery, and compare the outcome with the documented limits."""
    server, result = setup.server, Result(fault.name)
    server.wait(server.is_up, description="recovery from the fault before")
    server.note_run()
    restarts, counted_before = server.restarts, _counted(server)
    old = {process.pid for process in PROCESSES[fault.replaces](server)} if fault.replaces else set()
    changes = ChangeWriter(server, seed)
    load = OpenLoop(server.url, server.process.grpc["inference"], seed=seed)
    with load, changes:
        time.sleep(_WARM_UP_S)
        began = time.monotonic()
        fault.apply(setup)
        ended = time.monotonic()
        recovered = _wait_until_recovered(server, load, changes, fault, old, ended)
    outcomes = list(load.outcomes)
    if recovered is None:
        result.problems.append(f"not recovered within {_RECOVERY_TIMEOUT_S:.0f} s")
        result.recovery = _RECOVERY_TIMEOUT_S
    else:
        last_failure = max((outcome.due for outcome in outcomes if not outcome.is_ok), default=ended)
        result.recovery = round(max(0.0, recovered - ended, last_failure - ended), 2)
    result.unavailable = round(unavailable_seconds(outcomes), 2)
    result.details = dict(Counter(outcome.detail for outcome in outcomes if outcome.detail).most_common(10))
    result.failed, result.requests = failures(outcomes), len(outcomes)
    result.longest = round(max((o.seconds for o in outcomes if o.is_ok), default=0.0), 2)
    result.seconds = by_second(outcomes, began)
    result.acknowledged, result.refused = sum(changes.acknowledged.values()), dict(changes.refused)
    result.slowest_change = round(changes.longest, 2)
    result.restarts = server.restarts - restarts
    with contextlib.suppress(httpx.HTTPError):
        result.lost = changes.lost()
    allowed = allowed_counts(outcomes)
    result.answered = sum(bool(outcome.arm) for outcome in outcomes)
    result.counted = _wait_for_counts(server, counted_before, allowed)
    server.note_run()
    result.problems += judge(result, fault, allowed)
    return result


def judge(result: Result, fault: Fault, allowed: tuple[int, int]) -> list[str]:
    """Return the documented limits that a result exceeds."""
    problems = []
    if wrong := {kind: n for kind, n in result.failed.items() if kind.split(": ")[1] in WRONG}:
        problems.append(f"wrong responses: {wrong}")
    if result.lost:
        problems.append(f"acknowledged changes lost: {'; '.join(result.lost)}")
    if not allowed[0] <= result.counted <= allowed[1]:
        problems.append(f"experiment counted {result.counted} of {allowed[0]} to {allowed[1]} requests")
    if result.recovery > RECOVERY_LIMIT_S + (fault.unavailable > RECOVERY_LIMIT_S) * RECOVERY_LIMIT_S:
        problems.append(f"recovery took {result.recovery:.1f} s")
    if result.unavailable > fault.unavailable:
        problems.append(f"unavailable for {result.unavailable:.1f} s, limit {fault.unavailable:.0f} s")
    if result.slowest_change > CHANGE_LIMIT_S:
        problems.append(f"a change was answered after {result.slowest_change:.1f} s")
    if unclear := {kind: n for kind, n in result.refused.items() if kind.endswith("status 500")}:
        problems.append(f"changes refused without a reason: {unclear}")
    if not result.acknowledged:
        problems.append("no change was acknowledged")
    return problems


def allowed_counts(outcomes: Sequence[Outcome]) -> tuple[int, int]:
    """Return how many requests the experiment must have counted at least, and may have counted at most.

    A request without a response may have been answered nevertheless.
    """
    split = [outcome for outcome in outcomes if outcome.stream == "gateway"]
    return sum(bool(outcome.arm) for outcome in split), len(split)


def _wait_until_recovered(
    server: ChaosServer, load: OpenLoop, changes: ChangeWriter, fault: Fault, old: set[int], ended: float
) -> float | None:
    """Return when models, processes and changes were back; None where they were not in time.

    All streams are answered for two seconds before this returns.
    """
    back: float | None = None
    while time.monotonic() < ended + _RECOVERY_TIMEOUT_S:
        if back is None:
            written = changes.last_ok > ended
            if written and was_replaced(server, fault, old) and server.is_up():
                back = time.monotonic()
        elif time.monotonic() - back > _QUIET_S and load.ok_since(time.monotonic() - _QUIET_S):
            return back
        time.sleep(0.1)
    return None


def was_replaced(server: ChaosServer, fault: Fault, old: set[int]) -> bool:
    """Return whether the processes that a fault kills are new; False while the server starts again."""
    if not fault.replaces:
        return True
    with contextlib.suppress(httpx.HTTPError, LookupError, ValueError, OSError, psutil.Error):
        present = {process.pid for process in PROCESSES[fault.replaces](server)}
        return bool(present) and (present != old)
    return False


def _counted(server: ChaosServer) -> int:
    arms = server.client.experiment(server.experiment)["arms"]
    return sum(int(arm["calls"]) for arm in arms.values())


def _wait_for_counts(server: ChaosServer, before: int, allowed: tuple[int, int]) -> int:
    """Return the requests that were counted since ``before``, once they suffice or time is over."""
    until, counted = time.monotonic() + _COUNT_TIMEOUT_S, -1
    while time.monotonic() < until:
        try:
            counted = _counted(server) - before
            if counted >= allowed[0]:
                time.sleep(1.0)  # what is counted twice arrives, too
                return _counted(server) - before
        except Exception:  # Management is being replaced; the clients raise errors of several libraries
            counted = -1
        time.sleep(0.3)
    return counted
