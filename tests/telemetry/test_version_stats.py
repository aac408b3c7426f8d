"""The statistics of each version, summed over processes."""

from __future__ import annotations

import pickle
import time

from serve_app.domain.model import VersionStats
from serve_app.telemetry.metrics import Meters
from serve_app.telemetry.metrics_aggregator import MetricsAggregator


def test_stats_cover_all_processes_including_ended_ones() -> None:
    total, started_at = MetricsAggregator(), time.time()
    for source in ("a", "b"):
        meters = Meters()
        meters.request("m", "1", "ok", 0.5)
        meters.request("m", "1", "deadline", 0.25)
        meters.request("m", "2", "ok", 1.0)
        meters.request("", "", "model_not_found", 1.0)
        meters.batch("m", "1", 3, 0.125, [0.5, 0.25, 0.0])
        if source == "b":
            meters.batch("m", "1", 1, 0.5, [0.0])
        total.put(source, pickle.loads(pickle.dumps(meters.report())))
    total.end("a")
    total.version_stats()  # reading changes nothing
    first, second = total.version_stats()
    assert started_at <= first.last_batch_at <= time.time()
    assert first == VersionStats(
        "m",
        "1",
        answered=2,
        failed=2,
        seconds=1.5,
        rows=7,
        queue_seconds=1.5,
        batches=3,
        inference_seconds=0.75,
        last_batch_at=first.last_batch_at,
        batch_sizes=((1, 1, 0.5), (3, 2, 0.25)),
    )
    assert (second.version, second.answered, second.rows) == ("2", 2, 0)
    assert (second.last_batch_at, second.batch_sizes) == (0.0, ())
