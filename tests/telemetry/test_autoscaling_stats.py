"""What a replica tells the autoscaler of its load, with a clock of the test's own."""

from __future__ import annotations

import pytest

from serve_app.telemetry.load import Load
from serve_app.telemetry.metrics import Meters


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def load(clock: Clock) -> Load:
    return Load(period=4.0, clock=clock)


def test_quick_rows_are_seen_although_none_is_there_when_it_is_asked(load: Load, clock: Clock) -> None:
    for _ in range(20):  # in a second, each 50 ms in the queue and 100 ms in the handler
        load.batch(0.1, [0.05])
    clock.now += 1
    assert load.stats(ongoing=0) == {"rows": pytest.approx(3.0), "answered": 20.0, "p95_ms": pytest.approx(150.0)}


def test_slow_rows_are_seen_before_any_is_answered(load: Load, clock: Clock) -> None:
    clock.now += 1
    assert load.stats(ongoing=5) == {"rows": 5.0, "answered": 0.0, "p95_ms": 0.0}


def test_the_percentile_and_the_count_are_of_the_period(load: Load, clock: Clock) -> None:
    load.batch(1.0, [0.0])
    for second in range(8):
        load.batch(0.010, [0.0] * 19)
        load.batch(0.500, [0.0])
        clock.now += 1
        said = load.stats(0)
        assert said["answered"] == min(second + 1, 4) * 20 + (second < 4)
    assert said["p95_ms"] == pytest.approx(500.0)
    clock.now += 5
    assert load.stats(0) == {"rows": 0.0, "answered": 0.0, "p95_ms": 0.0}


def test_who_was_not_asked_for_long_begins_anew(load: Load, clock: Clock) -> None:
    load.batch(0.1, [0.0] * 1000)
    clock.now += 600
    assert load.stats(0)["answered"] == 0


def test_shadows_take_time_and_count_for_nothing_else(load: Load, clock: Clock) -> None:
    load.batch(0.5, [30.0, 30.0], live=False)
    clock.now += 1
    assert load.stats(0) == {"rows": pytest.approx(1.0), "answered": 0.0, "p95_ms": 0.0}


def test_the_meters_tell_it_of_every_batch(load: Load, clock: Clock) -> None:
    meters = Meters()
    meters.on_batch = load.batch
    meters.batch("m", "1", 2, 0.1, [0.0, 0.1])
    meters.batch("m", "1", 1, 9.0, [0.0], live=False)
    clock.now += 10
    assert load.stats(0)["rows"] == pytest.approx((0.1 + 0.2 + 9.0) / 10)
