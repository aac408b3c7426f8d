"""The counts of a process in Ray's metrics: increases, buckets at Ray's bounds, and no call counted twice."""

from __future__ import annotations

from collections import Counter as Counts
from typing import Any

import pytest

from serve_app.deployments.ray_internals import metrics as ray_metrics
from serve_app.deployments.ray_internals.metrics import ExportedLoad, ExportedProcess, RayMetricsExporter
from serve_app.domain.model import ModelRef
from serve_app.telemetry.metrics import Meters

REF = ModelRef("m", "1.0")
LATENCY = "serve_deployment_processing_latency_ms_bucket"


class RecordedMetrics:
    """Ray's counters and gauges without Ray: the values by name and tags."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}

    def create(self, name: str, tag_keys: tuple[str, ...]) -> Any:
        recorded = self

        class Metric:
            def set(self, value: float, tags: dict[str, str]) -> None:
                assert set(tags) == set(tag_keys)
                recorded.values[name, frozenset(tags.items())] = value

            def inc(self, value: float, tags: dict[str, str]) -> None:
                assert value > 0, "Ray refuses any other"
                self.set(recorded.values.get((name, frozenset(tags.items())), 0) + value, tags)

        return Metric()

    def find(self, name: str, **tags: str) -> float:
        return sum(v for (n, found), v in self.values.items() if n == name and tags.items() <= set(found))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> RecordedMetrics:
    recorded = RecordedMetrics()
    for kind in ("Counter", "Gauge"):
        monkeypatch.setattr(ray_metrics, kind, recorded.create)
    # As serve.env has it: Ray does not count in HAProxy.
    monkeypatch.setattr(ray_metrics, "RAY_SERVE_HAPROXY_METRICS_ENABLED", False)
    return recorded


def make_exporter(
    meters: Meters, load: ExportedLoad | None = None, calls: Counts[ModelRef] | None = None
) -> RayMetricsExporter:
    process = ExportedProcess(REF.app, "r1", "/predictions/m")
    calls = Counts() if calls is None else calls
    return RayMetricsExporter(meters, process, lambda: load or ExportedLoad(), calls)


def test_each_export_adds_what_is_new(recorded: RecordedMetrics) -> None:
    meters = Meters()
    exporter = make_exporter(meters)
    for _ in range(3):
        meters.request("m", "1.0", "ok", 0.003)
        meters.response(200)
    meters.request("m", "1.0", "queue_full", 0.0001)
    meters.response(503)
    for _ in range(2):  # the second has nothing new
        exporter.export()
        own = {"application": "m--1.0", "deployment": "m--1.0", "replica": "r1", "route": "/predictions/m"}
        assert recorded.find("serve_deployment_request_counter", **own) == 4
        assert recorded.find("serve_deployment_error_counter", **own, exception_type="queue_full") == 1
        http = {"application": "m--1.0", "route": "/predictions/m"}
        assert recorded.find("serve_num_http_requests", **http) == 4
        assert recorded.find("serve_num_http_error_requests", **http, error_code="503") == 1
        assert recorded.find(LATENCY, **own, le="+Inf") == 4
        assert recorded.find(LATENCY, **own, le="1.0") == 1
        assert recorded.find(LATENCY, **own, le="2.0") == pytest.approx(1), "the others took from 2.5 to 5 ms"
        assert recorded.find(LATENCY, **own, le="5.0") == 4
    meters.request("m", "1.0", "ok", 1000.0)
    exporter.export()
    assert recorded.find(LATENCY, le="600000.0") == 4 and recorded.find(LATENCY, le="+Inf") == 5


def test_unknown_models_have_no_series(recorded: RecordedMetrics) -> None:
    meters = Meters()
    meters.request("guess", "", "model_not_found", 0.001)
    make_exporter(meters).export()
    assert not [name for name, _ in recorded.values if name.startswith("serve_deployment_request")]


def test_calls_of_handles_are_counted_by_ray_alone(recorded: RecordedMetrics) -> None:
    meters, calls = Meters(), Counts({REF: 2})  # of which one has not ended yet
    exporter = make_exporter(meters, calls=calls)
    for _ in range(10):
        meters.request("m", "1.0", "ok", 0.003)
    exporter.export()
    assert recorded.find("serve_deployment_request_counter") + calls[REF] == 10
    assert recorded.find(LATENCY, le="+Inf") + calls[REF] == pytest.approx(10)
    calls[REF] += 3
    exporter.export()
    meters.request("m", "1.0", "ok", 0.003)
    exporter.export()
    assert recorded.find("serve_deployment_request_counter") == 8
    for _ in range(2):
        meters.request("m", "1.0", "ok", 0.003)
    meters.request("m", "1.0", "ok", 0.003)
    exporter.export()
    assert recorded.find("serve_deployment_request_counter") + calls[REF] == 14


def test_load_of_a_replica(recorded: RecordedMetrics) -> None:
    make_exporter(Meters(), ExportedLoad(queued=3, processing=5)).export()
    tags = {"application": "m--1.0", "replica": "r1"}
    assert recorded.find("serve_deployment_queued_queries", **tags) == 3
    assert recorded.find("serve_replica_processing_queries", **tags, deployment="m--1.0") == 5
    assert recorded.find("serve_num_ongoing_http_requests", **tags) == 5


def test_latencies_of_a_gateway_are_divided_between_its_protocols(recorded: RecordedMetrics) -> None:
    meters = Meters()
    for _ in range(4):
        meters.request("m", "1.0", "ok", 0.003)
    meters.response(200)
    for code in ("OK", "OK", "UNAVAILABLE"):
        meters.grpc_response(code)
    process = ExportedProcess("torchrelay", "g1", "/")
    RayMetricsExporter(meters, process, lambda: ExportedLoad(grpc=2), {}).export()
    tags = {"application": "torchrelay", "le": "+Inf"}
    assert recorded.find("serve_http_request_latency_ms_bucket", **tags, route="/") == pytest.approx(1)
    assert recorded.find("serve_grpc_request_latency_ms_bucket", **tags) == pytest.approx(3)
    assert recorded.find("serve_num_grpc_requests", status_code="OK") == 2
    assert recorded.find("serve_num_grpc_error_requests", error_code="UNAVAILABLE") == 1
    assert recorded.find("serve_num_ongoing_grpc_requests", replica="g1") == 2
    assert not [name for name, _ in recorded.values if name.endswith("queued_queries")]
