"""Reports of a process contain the values that have changed, and their sums are those of full reports."""

from __future__ import annotations

import gc
import pickle
import random
import tracemalloc
from collections import Counter

import pytest

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


class Process:
    """A process with cumulative values, and what a model of the aggregator expects of it."""

    def __init__(self, source: str) -> None:
        self.source, self.meters = source, Meters()
        self.requests: Counter[str] = Counter()
        self.reported: Counter[str] = Counter()  # as last acknowledged
        self.depth = 0

    def request(self, model: str) -> None:
        self.meters.request(model, "1", "ok", 0.5, None, 0.25)
        self.meters.batch(model, "1", 2, 0.5, [0.25])
        self.meters.depth(model, "1", 1)
        self.requests[model] += 1

    def report(self, total: MetricsAggregator) -> None:
        if not total.put(self.source, sent(self.meters.report(full=False))):
            assert total.put(self.source, sent(self.meters.report()))
        self.reported, self.depth = self.requests.copy(), len(self.requests)


def counted(total: MetricsAggregator, model: str) -> list[float]:
    """Return a model's requests by each way in which they are counted; batches have two rows."""
    page = total.render().decode().splitlines()
    torchserve = f'ts_inference_requests_total{{model_name="{model}",'
    stats = [s for s in total.version_stats() if s.model == model]
    return [
        total.total("torchrelay_requests", model=model),
        sum(s.answered for s in stats),
        sum(s.rows for s in stats) / 2,
        sum(count for s in stats for _, count, _ in s.batch_sizes),
        sum(float(line.rpartition(" ")[2]) for line in page if line.startswith(torchserve)),
    ]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("max_apart", [0, 20, 20_000])
def test_silent_processes_that_return_are_counted_once(seed: int, max_apart: int) -> None:
    draw, total = random.Random(seed), MetricsAggregator(max_apart=max_apart)
    running, silent, all_processes = [Process("0")], [], [Process("unused")]
    all_processes += running
    for _ in range(150):
        process = draw.choice(running + silent)
        action = draw.choice(("request", "request", "report", "suspend", "end", "start"))
        if action == "request":
            process.request(draw.choice("ab"))
        elif action == "report":
            process.report(total)
            if process in silent:
                silent.remove(process)
                running.append(process)
        elif action == "suspend" and process in running:
            total.suspend(process.source)
            running.remove(process)
            silent.append(process)
            process.depth = 0
        elif action == "end" and len(running + silent) > 1:
            total.end(process.source)
            (running if process in running else silent).remove(process)
            process.depth = 0
            if max_apart == 20_000 and draw.random() < 0.5:  # it was cut off, and reports once more
                process.report(total)
                total.end(process.source)
                process.depth = 0
        elif action == "start":
            running.append(Process(str(len(all_processes))))
            all_processes.append(running[-1])
        for model in "ab":
            expected = sum(p.reported[model] for p in all_processes)
            assert counted(total, model) == [expected] * 5
        assert total.total("torchrelay_queue_depth") == sum(p.depth for p in all_processes)


def test_ended_processes_take_bounded_memory() -> None:
    def count_bytes(processes: int) -> int:
        total, meters = MetricsAggregator(max_apart=50), Meters()
        meters.request("a", "1", "ok", 0.5)
        tracemalloc.start()
        for number in range(processes):
            total.put(str(number), sent(meters.report()))
            total.end(str(number))
        gc.collect()  # of reports that are parts of cycles; their number depends on the tests before
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert total.total("torchrelay_requests") == processes
        return taken

    assert count_bytes(600) < 2 * count_bytes(150)
