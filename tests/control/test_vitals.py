"""What Management concludes from what it sees, with a clock of the test's own."""

from __future__ import annotations

import pytest

from serve_app.control.reconciler import Seen
from serve_app.control.registry import Desired
from serve_app.control.vitals import PAUSES, Vitals
from serve_app.errors import StartFailed, StartOutOfMemory
from serve_app.signature import Port, Signature
from serve_app.telemetry.last_words import Death
from serve_app.types import ModelSpec, Worker

SPEC = ModelSpec("m", "1", "m.mar", "d" * 64, "file:///m.mar", min_workers=2, max_workers=2, max_retry_timeout=60)
WANT = {"m--1": Desired(SPEC, "/predictions/m")}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def vitals(clock: Clock) -> Vitals:
    return Vitals(clock)


def app(*ids: str, status: str = "RUNNING", attempt: int = 0, message: str = "") -> dict[str, Seen]:
    workers = tuple(Worker(i, 1, 0.0, True) for i in ids)
    return {"m--1": Seen("m--1", None, 2, {"v": 1}, attempt, status, message, workers)}


def test_loading_then_ready(vitals: Vitals) -> None:
    vitals.note(WANT, {}, {})
    assert vitals.statuses[SPEC.ref].phase == "loading" and not vitals.settled(WANT)
    vitals.note(WANT, app("a"), {})
    assert vitals.statuses[SPEC.ref].phase == "ready" and not vitals.settled(WANT)
    vitals.note(WANT, app("a", "b"), app("a"))
    assert vitals.settled(WANT) and vitals.pause(SPEC.ref) == 0


def test_what_a_handler_offers_is_known_until_it_offers_something_else(vitals: Vitals) -> None:
    signature = Signature((Port("x", "FP32", (-1,)),))
    vitals.offered(SPEC.ref, signature)
    vitals.note(WANT, app("a"), {})
    assert vitals.statuses[SPEC.ref].signature is signature
    vitals.note({}, {}, app("a"))  # it sleeps, and is asked about all the same
    vitals.note(WANT, app("a"), {})
    assert vitals.statuses[SPEC.ref].signature is signature
    vitals.offered(SPEC.ref, None)
    vitals.note(WANT, app("a"), {})
    assert vitals.statuses[SPEC.ref].signature is None


def test_a_failure_is_told_and_tried_again_later_each_time_then_no_more(vitals: Vitals, clock: Clock) -> None:
    error = StartFailed("m", "1", "Traceback: no such file")
    began = clock.now
    while True:
        vitals.failed(SPEC, error)
        vitals.note(WANT, {}, {})
        assert vitals.statuses[SPEC.ref].phase == "failed" and vitals.settled(WANT)
        assert vitals.statuses[SPEC.ref].last_error == "Traceback: no such file"
        assert vitals.failure(SPEC.ref) is error and not vitals.tried(SPEC.ref)
        clock.now += max(PAUSES) + 1
        if clock.now - began > SPEC.max_retry_timeout + 2 * max(PAUSES):
            break
    assert not vitals.tried(SPEC.ref), "given up"
    vitals.forgive(SPEC.ref)
    assert vitals.tried(SPEC.ref), "asked for anew"


def test_what_serve_gave_up_is_noted_once_an_attempt(vitals: Vitals) -> None:
    gone = app(status="DEPLOY_FAILED", message="the actor died")
    vitals.note(WANT, gone, {})
    assert vitals.failure(SPEC.ref).detail == "the actor died"
    vitals.forgive(SPEC.ref)
    vitals.note(WANT, gone, gone)
    assert vitals.failure(SPEC.ref) is None
    vitals.note(WANT, app(status="DEPLOY_FAILED", attempt=1, message="again"), gone)
    assert vitals.failure(SPEC.ref).detail == "again"


def test_the_authors_own_words_stay(vitals: Vitals) -> None:
    vitals.failed(SPEC, StartFailed("m", "1", "the author's traceback"))
    vitals.note(WANT, app(status="DEPLOY_FAILED", message="Ray's frames"), {})
    assert vitals.failure(SPEC.ref).detail == "the author's traceback"


def test_crashes_make_the_next_start_wait_and_are_forgotten(vitals: Vitals, clock: Clock) -> None:
    ids = [f"r{i}" for i in range(5)]
    for old, new in zip(ids, ids[1:]):
        vitals.note(WANT, app(new), app(old))
    assert vitals.pause(SPEC.ref) == PAUSES[4]
    clock.now += 301
    assert vitals.pause(SPEC.ref) == 0


def test_a_scale_down_is_no_crash(vitals: Vitals) -> None:
    more = {"m--1": Seen("m--1", None, 3, {"v": 1}, 0, "RUNNING", "", app("a", "b", "c")["m--1"].workers)}
    vitals.note(WANT, app("a", "b"), more)
    assert vitals.pause(SPEC.ref) == 0


def test_a_version_is_healthy_while_it_has_time_to_recover(vitals: Vitals, clock: Clock) -> None:
    vitals.note(WANT, app("a", "b"), {})
    vitals.note(WANT, app("a"), app("a", "b"))
    assert vitals.healthy(SPEC)
    clock.now += 61
    assert not vitals.healthy(SPEC)
    vitals.note(WANT, app("a", "c"), app("a"))
    assert vitals.healthy(SPEC)


def test_what_should_not_run_is_forgotten(vitals: Vitals) -> None:
    vitals.failed(SPEC, StartFailed("m", "1", "x"))
    vitals.note(WANT, {}, {})
    vitals.note({}, {}, {})
    assert vitals.statuses == {} and vitals.failure(SPEC.ref) is None


def death(loading: bool = False, why: str = "it was killed", memory: bool = False) -> Death:
    return Death("m--1", SPEC.digest, "a", loading, 1700.5, why, memory)


def test_why_a_replica_died_stays_when_all_is_well_again(vitals: Vitals) -> None:
    vitals.note(WANT, app("a", "b"), {})
    vitals.died(SPEC, death())
    vitals.note(WANT, app("c", "b"), app("a", "b"))
    status = vitals.statuses[SPEC.ref]
    assert (status.phase, status.last_error, status.error_time) == ("ready", "it was killed", 1700.5)
    assert vitals.failure(SPEC.ref) is None
    vitals.forgive(SPEC.ref)
    vitals.note(WANT, app("c", "b"), app("c", "b"))
    assert vitals.statuses[SPEC.ref].last_error == "", "who scales it has seen it"


def test_a_replica_that_died_while_it_loaded_failed_to_start(vitals: Vitals) -> None:
    vitals.note(WANT, app(), {})
    vitals.died(SPEC, death(loading=True))
    vitals.note(WANT, app(), app())
    assert (vitals.failure(SPEC.ref).detail, vitals.statuses[SPEC.ref].phase) == ("it was killed", "failed")
    assert type(vitals.failure(SPEC.ref)) is StartFailed
    vitals.died(SPEC, death(loading=True, memory=True))
    assert isinstance(vitals.failure(SPEC.ref), StartOutOfMemory)
    assert vitals.statuses[SPEC.ref].error_time == 1700.5


def test_how_long_the_last_start_took_outlives_the_replicas(vitals: Vitals, clock: Clock) -> None:
    vitals.note(WANT, {}, {})
    clock.now += 7
    vitals.note(WANT, app("a"), {})
    assert vitals.statuses[SPEC.ref].start_seconds == 7
    clock.now += 100
    vitals.note({}, {}, {})  # scaled to nobody
    assert SPEC.ref not in vitals.statuses
    vitals.note(WANT, {}, {})
    clock.now += 3
    vitals.note(WANT, {}, {})
    assert (vitals.statuses[SPEC.ref].phase, vitals.statuses[SPEC.ref].start_seconds) == ("loading", 7)
    vitals.note(WANT, app("a"), {})
    assert vitals.statuses[SPEC.ref].start_seconds == 3
