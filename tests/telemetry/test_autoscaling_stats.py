"""The load that a replica reports to the autoscaler, with a fake clock."""

from __future__ import annotations

import pytest

from serve_app.telemetry.autoscaling_stats import AutoscalingStats
from serve_app.telemetry.metrics import Meters


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def load(clock: Clock) -> AutoscalingStats:
    return AutoscalingStats(period=4.0, clock=clock)


def test_quick_rows_count_although_none_is_ongoing(load: AutoscalingStats, clock: Clock) -> None:
    for _ in range(20):  # in a second, each 50 ms in the queue and 100 ms in the handler
        load.record_batch(0.1, [0.05])
    clock.now += 1
    assert load.stats(ongoing=0) == {
        "rows": pytest.approx(3.0),
        "answered": 20.0,
        "p95_ms": pytest.approx(150.0),
    }


def test_slow_rows_count_before_any_is_completed(load: AutoscalingStats, clock: Clock) -> None:
    clock.now += 1
    assert load.stats(ongoing=5) == {"rows": 5.0, "answered": 0.0, "p95_ms": 0.0}


def test_percentile_and_count_cover_the_period(load: AutoscalingStats, clock: Clock) -> None:
    load.record_batch(1.0, [0.0])
    for second in range(8):
        load.record_batch(0.010, [0.0] * 19)
        load.record_batch(0.500, [0.0])
        clock.now += 1
        stats = load.stats(0)
        assert stats["answered"] == min(second + 1, 4) * 20 + (second < 4)
    assert stats["p95_ms"] == pytest.approx(500.0)
    clock.now += 5
    assert load.stats(0) == {"rows": 0.0, "answered": 0.0, "p95_ms": 0.0}


def test_old_counts_are_dropped_after_a_long_pause(load: AutoscalingStats, clock: Clock) -> None:
    load.record_batch(0.1, [0.0] * 1000)
    clock.now += 600
    assert load.stats(0)["answered"] == 0


def test_shadow_batches_count_for_the_load_only(load: AutoscalingStats, clock: Clock) -> None:
    load.record_batch(0.5, [30.0, 30.0], live=False)
    clock.now += 1
    assert load.stats(0) == {"rows": pytest.approx(1.0), "answered": 0.0, "p95_ms": 0.0}


def test_meters_report_every_batch(load: AutoscalingStats, clock: Clock) -> None:
    meters = Meters()
    meters.on_batch = load.record_batch
    meters.batch("m", "1", 2, 0.1, [0.0, 0.1])
    meters.batch("m", "1", 1, 9.0, [0.0], live=False)
    clock.now += 10
    assert load.stats(0)["rows"] == pytest.approx((0.1 + 0.2 + 9.0) / 10)
