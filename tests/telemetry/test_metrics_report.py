"""Reports of a process contain the values that have changed, and their sums are those of full reports."""

from __future__ import annotations

import pickle
import random

from serve_app.telemetry.metrics import Meters, MetricsReport
from serve_app.telemetry.metrics_aggregator import MetricsAggregator


def sent(report: MetricsReport) -> MetricsReport:
    """Return the report as another process receives it."""
    received: MetricsReport = pickle.loads(pickle.dumps(report))
    return received


def test_a_report_has_only_what_has_changed() -> None:
    meters = Meters()
    for model in ("a", "b"):
        meters.request(model, "1", "ok", 0.5)
        meters.depth(model, "1", 1)
    first = meters.report()
    assert first.base == 0 and {key[1] for key in first.values} == {"a", "b"}
    meters.request("b", "1", "ok", 0.5)
    second = meters.report(full=False)
    assert second.base == first.number and not second.batches and not second.removed
    assert set(second.values) == {
        ("torchrelay_requests", "b", "1", "ok"),
        ("torchrelay_request_latency_seconds", "b", "1"),
    }
    assert {sample.values[0] for sample in second.samples} == {"b"}
    unchanged = meters.report(full=False)
    assert not unchanged.values and not unchanged.samples
    meters.forget("a", "1")
    assert meters.report(full=False).removed == (("torchrelay_queue_depth", "a", "1"),)


def test_a_report_after_a_lost_one_is_refused_until_a_full_one() -> None:
    meters, total = Meters(), MetricsAggregator()
    meters.depth("a", "1", 1)
    assert total.put("p", meters.report())
    meters.depth("b", "1", 2)
    lost = meters.report(full=False)
    meters.depth("c", "1", 4)
    assert not total.put("p", meters.report(full=False))
    assert total.total("torchrelay_queue_depth") == 1, "a refused report changes nothing"
    assert total.put("p", meters.report())
    assert total.total("torchrelay_queue_depth") == 7
    assert not total.put("p", lost), "an old report arrives late"
    assert not total.put("other", lost), "a process that is not known yet"


def test_changes_add_up_to_the_page_of_full_reports() -> None:
    draw = random.Random(5)
    processes, by_changes, by_all = [Meters() for _ in range(3)], MetricsAggregator(), MetricsAggregator()
    for _ in range(200):
        number = draw.randrange(3)
        meters, model = processes[number], f"m{draw.randrange(4)}"
        action = draw.choice(("request", "batch", "depth", "forget", "handler", "report", "end"))
        if action == "request":
            meters.request(model, "1", draw.choice(("ok", "deadline")), draw.random(), None, 0.25)
        elif action == "batch":
            meters.batch(model, "1", draw.randrange(1, 9), draw.random(), [0.25])
        elif action == "depth":
            meters.depth(model, "1", draw.randrange(9))
        elif action == "forget":
            meters.forget(model, "1")
        elif action == "handler":
            meters.torchserve.child("QueueTime", "Host").record(draw.random())
        elif action == "report":
            assert by_changes.put(str(number), sent(meters.report(full=False)))
        else:
            for total, full in ((by_changes, False), (by_all, True)):
                total.put(str(number), sent(meters.report(full)))
                total.end(str(number))
            processes[number] = Meters()
    for number, meters in enumerate(processes):
        by_changes.put(str(number), sent(meters.report(full=False)))
        by_all.put(str(number), sent(meters.report()))
    assert sorted(by_changes.render().splitlines()) == sorted(by_all.render().splitlines())
    assert by_changes.version_stats() == by_all.version_stats()
    assert any(stats.batches for stats in by_all.version_stats())
