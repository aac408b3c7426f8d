"""The figures of versions that are computed from two metrics pages."""

from __future__ import annotations

import math
import pickle
import random

import pytest

from serve_app.client.live_metrics import METRIC_NAMES, MetricsWindow
from serve_app.client.prometheus_text import parse
from serve_app.telemetry.metrics import Meters
from serve_app.telemetry.metrics_aggregator import MetricsAggregator


def test_the_hit_ratio_of_the_response_cache_is_that_of_the_window() -> None:
    window, meters, total = MetricsWindow(), Meters(), MetricsAggregator()

    def read(**requests: int) -> float | None:
        meters.request("m", "1", "ok", 0.1)
        for outcome, count in requests.items():
            for _ in range(count):
                meters.cache_request("m", "1", outcome)
        total.put("a", meters.report())
        window.add(parse(total.render(METRIC_NAMES).decode()))
        return window.versions["m", "1"].cache_hit_ratio

    assert read() is None
    assert read(hit=1, miss=3) == 0.25
    assert read(hit=4) == 5 / 8


def test_the_hit_ratio_of_a_server_that_was_restarted_is_a_ratio() -> None:
    window = MetricsWindow()
    for hits, misses in ((100, 50), (1, 90)):
        meters, total = Meters(), MetricsAggregator()
        meters.request("m", "1", "ok", 0.1)
        for outcome, count in (("hit", hits), ("miss", misses)):
            for _ in range(count):
                meters.cache_request("m", "1", outcome)
        total.put("a", meters.report())
        window.add(parse(total.render(METRIC_NAMES).decode()))
    assert window.versions["m", "1"].cache_hit_ratio == 1 / 91


class Cluster:
    """Processes that report to a Management, whose pages a window reads."""

    def __init__(self) -> None:
        self.processes: dict[str, Meters] = {}
        self.sums = MetricsAggregator()
        self.window = MetricsWindow()

    def record(self, process: str, *seconds: float, version: str = "1") -> None:
        for each in seconds:
            self.processes.setdefault(process, Meters()).request("m", version, "ok", each)

    def report(self, process: str) -> None:
        meters = self.processes[process]
        for full in (False, True):
            if self.sums.put(process, pickle.loads(pickle.dumps(meters.report(full)))):
                return
        raise AssertionError("a full report is accepted")

    def end(self, process: str) -> None:
        self.report(process)
        self.sums.end(process)
        del self.processes[process]

    def read(self, *names: str) -> None:
        for process in self.processes:
            self.report(process)
        self.window.add(parse(self.sums.render(names or METRIC_NAMES).decode()))

    @property
    def latencies(self) -> tuple[float | None, float | None]:
        return self.window.total.p50, self.window.total.p99


def spread(count: int) -> list[float]:
    """Return that many latencies between 100 and 250 ms, which share a bucket, in another order."""
    return [0.1 + 0.15 * (1 + 7 * number % count) / count for number in range(count)]


@pytest.mark.parametrize("count", [1, 2, 99, 100])
def test_percentiles_of_up_to_100_requests_are_those_of_the_latencies(count: int) -> None:
    cluster = Cluster()
    cluster.record("a", *[3.0] * 500)
    cluster.read()
    cluster.record("a", *spread(count))
    cluster.read()
    ordered = sorted(spread(count))
    expected = ordered[math.ceil(count / 2) - 1], ordered[math.ceil(0.99 * count) - 1]
    assert cluster.latencies == pytest.approx(expected, abs=1e-9)
    figures = cluster.window.versions["m", "1"]
    assert (figures.p50, figures.p99) == cluster.latencies


def test_percentiles_of_101_requests_are_those_of_the_histogram() -> None:
    cluster = Cluster()
    cluster.record("a", 3.0)
    cluster.read()
    cluster.record("a", *spread(101))
    cluster.read()
    assert cluster.latencies == pytest.approx((0.1 + 0.15 * 0.5, 0.1 + 0.15 * 0.99))


def test_the_latencies_of_two_replicas_are_merged_also_after_one_was_replaced() -> None:
    cluster = Cluster()
    cluster.record("a", *[3.0] * 80)
    cluster.record("b", *[4.0] * 80)
    cluster.read()
    cluster.record("a", 0.11, 0.12)
    cluster.record("b", 0.13)
    cluster.end("b")
    cluster.record("c", 0.14, 0.15)
    cluster.read()
    assert cluster.latencies == pytest.approx((0.13, 0.15))


def test_the_latencies_of_all_versions_are_merged() -> None:
    cluster = Cluster()
    cluster.record("a", *[0.11] * 60)
    cluster.record("b", *[0.12] * 40, version="2")
    cluster.read()
    assert cluster.latencies == pytest.approx((0.11, 0.12))
    cluster.record("b", 0.12, version="2")
    cluster.window = MetricsWindow()
    cluster.read()
    assert cluster.latencies == pytest.approx((0.1 + 0.15 * 0.5, 0.1 + 0.15 * 0.99)), "101 requests"


def test_a_lost_report_and_one_of_many_requests_leave_no_old_latencies() -> None:
    cluster = Cluster()
    cluster.record("a", 3.0)
    cluster.record("b", *[4.0] * 250)
    cluster.read()
    cluster.record("a", 0.2)
    cluster.processes["a"].report(full=False)  # is lost
    cluster.record("a", 0.21, 0.22)
    cluster.read()
    assert cluster.latencies == pytest.approx((0.21, 0.22))


def test_a_new_management_has_no_window_of_the_old_one() -> None:
    cluster = Cluster()
    cluster.record("a", *[0.2] * 50)
    cluster.record("b", *[3.0] * 30)
    cluster.end("b")
    cluster.read()
    cluster.sums = MetricsAggregator()
    cluster.record("a", *[0.12] * 49)
    cluster.read()
    assert cluster.latencies == pytest.approx((0.2, 0.2)), "all that it knows"
    assert cluster.window.total.rate == 0
    cluster.record("a", 0.15)
    cluster.read()
    assert cluster.latencies == pytest.approx((0.15, 0.15))
    assert cluster.window.total.rate > 0


def test_a_page_without_latencies_has_percentiles_of_the_histogram() -> None:
    cluster = Cluster()
    cluster.record("a", *[0.2] * 4)
    cluster.read(*(name for name in METRIC_NAMES if not name.endswith("_recent")))
    assert cluster.latencies[0] == pytest.approx(0.1 + 0.15 * 0.5)


def test_any_history_has_the_percentiles_of_the_requests_of_its_window() -> None:
    draw = random.Random(11)
    cluster, received, first = Cluster(), [], 0
    pending: dict[str, list[float]] = {}
    exact = 0
    names = ["p0", "p1", "p2"]
    for step in range(600):
        process = draw.choice(names)
        action = draw.choice(("record", "record", "report", "lose", "end", "read", "new window"))
        if action == "record":
            values = [draw.random() for _ in range(draw.choice((1, 3, 40, 130)))]
            cluster.record(process, *values)
            pending.setdefault(process, []).extend(values)
        elif process in cluster.processes and action in ("report", "end"):
            getattr(cluster, action)(process)
            received += pending.pop(process, [])
            if action == "end":  # no process has the name of an ended one
                names[names.index(process)] = f"p{step}"
        elif process in cluster.processes and action == "lose":
            cluster.processes[process].report(full=False)
        elif action in ("read", "new window"):
            if action == "new window":
                cluster.window = MetricsWindow()
            cluster.read()
            for process in cluster.processes:
                received += pending.pop(process, [])
            first = len(received) if action == "new window" else first
            values = sorted(received[first:])
            if action == "read" and step and 0 < len(values) <= 100 and cluster.window.total.rate > 0:
                exact += 1
                expected = values[math.ceil(len(values) / 2) - 1], values[math.ceil(0.99 * len(values)) - 1]
                assert cluster.latencies == pytest.approx(expected, abs=1e-9)
    assert exact > 10
