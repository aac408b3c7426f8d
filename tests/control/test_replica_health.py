"""What Management concludes from what it sees, with a clock of the test's own."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from serve_app.control.registry import DesiredState
from serve_app.control.replica_health import BACKOFF_S, HealthTracker, ObservedApp
from serve_app.domain.model import ModelSpec, ReplicaInfo
from serve_app.domain.signature import Signature, TensorSpec
from serve_app.errors import StartFailed, StartOutOfMemory
from serve_app.telemetry.crash_reports import CrashReport

SPEC = ModelSpec(
    "m", "1", "m.mar", "d" * 64, "file:///m.mar", min_workers=2, max_workers=2, max_retry_timeout=60
)
WANT = {"m--1": DesiredState(SPEC, "/predictions/m")}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> HealthTracker:
    return HealthTracker(clock)


def app(*ids: str, status: str = "RUNNING", attempt: int = 0, message: str = "") -> dict[str, ObservedApp]:
    workers = tuple(ReplicaInfo(i, 1, 0.0, True) for i in ids)
    return {"m--1": ObservedApp("m--1", None, 2, {"v": 1}, attempt, status, message, workers)}


def test_loading_then_ready(health: HealthTracker) -> None:
    health.update(WANT, {}, {})
    assert health.statuses[SPEC.ref].phase == "loading" and not health.is_startup_complete(WANT)
    health.update(WANT, app("a"), {})
    assert health.statuses[SPEC.ref].phase == "ready" and not health.is_startup_complete(WANT)
    health.update(WANT, app("a", "b"), app("a"))
    assert health.is_startup_complete(WANT) and health.start_delay(SPEC.ref) == 0


def test_what_a_handler_offers_is_known_until_it_offers_something_else(health: HealthTracker) -> None:
    signature = Signature((TensorSpec("x", "FP32", (-1,)),))
    health.set_signature(SPEC, signature, "text/plain", {"input": {}})
    health.update(WANT, app("a"), {})
    status = health.statuses[SPEC.ref]
    assert (status.signature, status.input_type, status.schemas) == (signature, "text/plain", {"input": {}})
    health.update({}, {}, app("a"))  # it sleeps, and is asked about all the same
    health.update(WANT, app("a"), {})
    assert health.statuses[SPEC.ref].signature is signature
    health.set_signature(SPEC, None)
    health.update(WANT, app("a"), {})
    assert health.statuses[SPEC.ref].signature is None


def test_a_failure_is_reported_and_retried_with_back_off_until_it_gives_up(
    health: HealthTracker, clock: Clock
) -> None:
    error = StartFailed("m", "1", "Traceback: no such file")
    began = clock.now
    while True:
        health.record_start_failure(SPEC, error)
        health.update(WANT, {}, {})
        assert health.statuses[SPEC.ref].phase == "failed" and health.is_startup_complete(WANT)
        assert health.statuses[SPEC.ref].last_error == "Traceback: no such file"
        assert health.get_failure(SPEC.ref) is error and not health.may_start(SPEC.ref)
        clock.now += max(BACKOFF_S) + 1
        if clock.now - began > SPEC.max_retry_timeout + 2 * max(BACKOFF_S):
            break
    assert not health.may_start(SPEC.ref), "given up"
    health.reset_backoff(SPEC.ref)
    assert health.may_start(SPEC.ref), "asked for anew"


def test_what_serve_gave_up_is_noted_once_an_attempt(health: HealthTracker) -> None:
    gone = app(status="DEPLOY_FAILED", message="the actor died")
    health.update(WANT, gone, {})
    assert health.get_failure(SPEC.ref).detail == "the actor died"
    health.reset_backoff(SPEC.ref)
    health.update(WANT, gone, gone)
    assert health.get_failure(SPEC.ref) is None
    health.update(WANT, app(status="DEPLOY_FAILED", attempt=1, message="again"), gone)
    assert health.get_failure(SPEC.ref).detail == "again"


def test_the_authors_own_words_stay(health: HealthTracker) -> None:
    health.record_start_failure(SPEC, StartFailed("m", "1", "the author's traceback"))
    health.update(WANT, app(status="DEPLOY_FAILED", message="Ray's frames"), {})
    assert health.get_failure(SPEC.ref).detail == "the author's traceback"


def test_crashes_make_the_next_start_wait_and_are_forgotten(health: HealthTracker, clock: Clock) -> None:
    ids = [f"r{i}" for i in range(5)]
    for old, new in itertools.pairwise(ids):
        health.update(WANT, app(new), app(old))
    assert health.start_delay(SPEC.ref) == BACKOFF_S[4]
    clock.now += 301
    assert health.start_delay(SPEC.ref) == 0


def test_a_scale_down_is_no_crash(health: HealthTracker) -> None:
    more = {
        "m--1": ObservedApp("m--1", None, 3, {"v": 1}, 0, "RUNNING", "", app("a", "b", "c")["m--1"].workers)
    }
    health.update(WANT, app("a", "b"), more)
    assert health.start_delay(SPEC.ref) == 0


def test_a_version_is_healthy_while_it_has_time_to_recover(health: HealthTracker, clock: Clock) -> None:
    health.update(WANT, app("a", "b"), {})
    health.update(WANT, app("a"), app("a", "b"))
    assert health.is_healthy(SPEC)
    clock.now += 61
    assert not health.is_healthy(SPEC)
    health.update(WANT, app("a", "c"), app("a"))
    assert health.is_healthy(SPEC)


def test_what_should_not_run_is_forgotten(health: HealthTracker) -> None:
    health.record_start_failure(SPEC, StartFailed("m", "1", "x"))
    health.update(WANT, {}, {})
    health.update({}, {}, {})
    assert health.statuses == {} and health.get_failure(SPEC.ref) is None


def death(loading: bool = False, why: str = "it was killed", memory: bool = False) -> CrashReport:
    return CrashReport("m--1", SPEC.digest, "a", loading, 1700.5, why, out_of_memory=memory)


def test_why_a_replica_died_stays_when_all_is_well_again(health: HealthTracker) -> None:
    health.update(WANT, app("a", "b"), {})
    health.record_crash(SPEC, death())
    health.update(WANT, app("c", "b"), app("a", "b"))
    status = health.statuses[SPEC.ref]
    assert (status.phase, status.last_error, status.error_time) == ("ready", "it was killed", 1700.5)
    assert health.get_failure(SPEC.ref) is None
    health.reset_backoff(SPEC.ref)
    health.update(WANT, app("c", "b"), app("c", "b"))
    assert health.statuses[SPEC.ref].last_error == "", "who scales it has seen it"


def test_a_late_report_of_a_death_before_the_reset_changes_nothing(health: HealthTracker) -> None:
    health.update(WANT, app(), {})
    health.record_crash(SPEC, death(loading=True))
    health.reset_backoff(SPEC.ref)
    health.record_crash(SPEC, death(loading=True))
    assert health.get_failure(SPEC.ref) is None and health.may_start(SPEC.ref)
    health.update(WANT, app("a", "b"), app())
    assert health.statuses[SPEC.ref].last_error == ""
    health.record_crash(SPEC, replace(death(), when=time.time() + 1))
    health.update(WANT, app("a", "b"), app("a", "b"))
    assert health.statuses[SPEC.ref].last_error == "it was killed"


def test_a_start_of_the_attempt_before_that_is_killed_late_changes_nothing(health: HealthTracker) -> None:
    """Serve's own retry of a failed start is killed when the attempt's application is deleted."""
    health.update(WANT, app(), {})
    health.record_crash(SPEC, death(loading=True))
    began = time.time()
    health.reset_backoff(SPEC.ref)
    assert health.is_outdated(SPEC.ref, began - 1) and not health.is_outdated(SPEC.ref, began + 1)
    killed = time.time() + 1
    health.record_crash(SPEC, replace(death(loading=True), started=began - 1, when=killed))
    assert health.get_failure(SPEC.ref) is None
    health.record_crash(SPEC, replace(death(loading=True), started=began + 1, when=killed + 1))
    assert health.get_failure(SPEC.ref) is not None


def test_a_replica_that_died_while_it_loaded_failed_to_start(health: HealthTracker) -> None:
    health.update(WANT, app(), {})
    health.record_crash(SPEC, death(loading=True))
    health.update(WANT, app(), app())
    assert (health.get_failure(SPEC.ref).detail, health.statuses[SPEC.ref].phase) == (
        "it was killed",
        "failed",
    )
    assert type(health.get_failure(SPEC.ref)) is StartFailed
    health.record_crash(SPEC, death(loading=True, memory=True))
    assert isinstance(health.get_failure(SPEC.ref), StartOutOfMemory)
    assert health.statuses[SPEC.ref].error_time == 1700.5


def test_how_long_the_last_start_took_outlives_the_replicas(health: HealthTracker, clock: Clock) -> None:
    health.update(WANT, {}, {})
    clock.now += 7
    health.update(WANT, app("a"), {})
    assert health.statuses[SPEC.ref].start_seconds == 7
    clock.now += 100
    health.update({}, {}, {})  # scaled to nobody
    assert SPEC.ref not in health.statuses
    health.update(WANT, {}, {})
    clock.now += 3
    health.update(WANT, {}, {})
    assert (health.statuses[SPEC.ref].phase, health.statuses[SPEC.ref].start_seconds) == ("loading", 7)
    health.update(WANT, app("a"), {})
    assert health.statuses[SPEC.ref].start_seconds == 3


def test_a_version_without_a_place_does_not_keep_the_start_up_from_its_end(
    health: HealthTracker, clock: Clock
) -> None:
    health.update(WANT, {}, {})
    clock.now += SPEC.startup_timeout + 29
    assert not health.is_startup_complete(WANT)
    clock.now += 2
    assert health.is_startup_complete(WANT)


def test_a_version_that_waits_for_resources_is_not_waited_for_as_one_that_loads(
    health: HealthTracker, clock: Clock
) -> None:
    health.waiting = {SPEC.ref: "the cluster lacks resources"}
    health.update(WANT, {}, {})
    clock.now += 29
    assert not health.is_startup_complete(WANT), "a node may still join"
    clock.now += 2
    assert health.is_startup_complete(WANT)


def test_a_replica_that_serve_replaces_without_a_crash_is_reported(
    health: HealthTracker, clock: Clock
) -> None:
    def stopping(*ids: str, status: str = "RUNNING") -> dict[str, ObservedApp]:
        """Return the observation of a ready replica, and of others that Serve stops."""
        first = app("a", status=status)["m--1"]
        return {
            "m--1": replace(first, workers=(*first.workers, *(ReplicaInfo(i, 1, 0.0, False) for i in ids)))
        }

    health.update(WANT, app("a", "b"), {})
    health.update(WANT, stopping("b"), app("a", "b"))
    health.update(WANT, app("a"), stopping("b"))
    assert health.take_replaced() == [], "its crash may still be reported"
    clock.now += 10
    [(ref, replica)] = health.take_replaced()
    assert (ref, replica.id) == (SPEC.ref, "b") and health.take_replaced() == []
    health.update(WANT, app("a", "c"), app("a"))
    health.update(WANT, app("a"), app("a", "c"))
    health.record_crash(SPEC, CrashReport("m--1", SPEC.digest, "c", False, time.time(), "killed"))
    health.record_crash(SPEC, CrashReport("m--1", SPEC.digest, "e", False, time.time(), "killed"))
    health.update(WANT, stopping("e"), app("a", "e"))  # which Serve notices after the report
    health.update(WANT, stopping("d", status="DEPLOYING"), app("a", "d"))  # a rolling update
    clock.now += 10
    assert health.take_replaced() == []


def test_a_shortage_is_part_of_the_status(health: HealthTracker) -> None:
    health.shortages = {SPEC.ref: "too few"}
    health.update(WANT, app("a"), {})
    assert health.statuses[SPEC.ref].waiting_for == "too few"
    health.shortages = {}
    health.update(WANT, app("a", "b"), app("a"))
    assert health.statuses[SPEC.ref].waiting_for == "", "a node was added"


def test_only_changes_update_a_settled_version(health: HealthTracker) -> None:
    """A pool has 1,000 versions, of which few change between two rounds."""
    ready = app("a", "b")
    states = list(WANT.values())
    assert health.update(WANT, ready, {}) == states
    revision = health.revision
    assert health.update(WANT, ready, ready) == [] and health.revision == revision
    changes: list[Callable[[], object]] = [
        lambda: health.record_note(SPEC.ref, "evicted"),
        lambda: health.set_signature(SPEC, Signature((TensorSpec("x", "FP32", (-1,)),))),
        lambda: health.record_crash(SPEC, CrashReport("m--1", SPEC.digest, "a", False, time.time(), "gone")),
        lambda: health.record_start_failure(SPEC, StartFailed("m", "1", "no file")),
        lambda: health.reset_backoff(SPEC.ref),
    ]
    for change in changes:
        before = health.statuses[SPEC.ref]
        change()
        assert health.update(WANT, ready, ready) == states
        assert health.statuses[SPEC.ref] != before and health.revision > revision
        revision = health.revision
        assert health.update(WANT, ready, ready) == []
    assert health.update(WANT, app("a"), ready) == states
    assert health.update(WANT, app("a"), app("a")) == states, "it waits for its second replica"
    health.update({}, {}, {})
    assert health.revision > revision + 1 and not health.statuses
