"""The export of a process's counts to Ray's own metrics, under the names that Ray's dashboard queries.

Requests bypass Ray Serve's request handling, so that Ray counts none of them. Once a second the counters of
``Meters`` are read, and their increases are added to Ray's; no request costs anything. The names and labels
are those of ``serve_dashboard_panels.py`` and ``serve_deployment_dashboard_panels.py`` of the pinned Ray.

A latency is exported as one gauge for each bucket, because Ray's histograms take a call for each value, in
this process and again in the agent of the node. The agent drops a gauge that was not set for two of its
intervals, so that each is set again once in an interval.

Ray itself counts the calls of its handles, by which rows reach replicas of other machines. They are
subtracted here, so that the sum over all processes is the number of requests.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import ray
from prometheus_client.utils import floatToGoString
from ray.serve._private.constants import (
    RAY_SERVE_ENABLE_HA_PROXY,
    RAY_SERVE_HAPROXY_METRICS_ENABLED,
    REQUEST_LATENCY_BUCKETS_MS,
)
from ray.util.metrics import Counter, Gauge

from serve_app.deployments.transport.replica_client import calls_counted_by_ray
from serve_app.domain.model import ModelRef
from serve_app.settings import Settings
from serve_app.telemetry.metrics import HistogramInstrument, Meters

_COLLECTION = "RAY_enable_metrics_collection"  # Ray's variable
_PERIOD = 1.0  # seconds
_BOUNDS = [float(bound) for bound in REQUEST_LATENCY_BUCKETS_MS]
_LE = [floatToGoString(bound) for bound in (*_BOUNDS, float("inf"))]

Tags = dict[str, str]


@dataclass(frozen=True)
class ExportedLoad:
    """The current numbers of requests in a process."""

    queued: int = 0  # rows that wait for a batch
    processing: int = 0  # rows that wait or run, without those of Ray's handle calls
    grpc: int = 0  # gRPC calls


@dataclass(frozen=True)
class ExportedProcess:
    """A replica or gateway as Ray names it: its application, replica id and route."""

    application: str
    replica: str
    route: str


class RayMetricsExporter:
    """The copy of one process's counts in Ray's metrics.

    ``load`` returns the current numbers of requests, ``calls_counted_by_ray`` are the calls of Ray's handles
    that this process has made to each version.
    """

    def __init__(
        self,
        meters: Meters,
        process: ExportedProcess,
        load: Callable[[], ExportedLoad],
        calls_counted_by_ray: Mapping[ModelRef, int],
    ) -> None:
        self._meters = meters
        self._process = process
        self._load = load
        self._calls_counted_by_ray = calls_counted_by_ray
        self._seen: dict[tuple[str, ...], float] = {}  # the values of counters at the last export
        self._seen_buckets: dict[tuple[str, ...], list[int]] = {}
        self._seen_calls: dict[ModelRef, int] = {}
        self._to_subtract: defaultdict[ModelRef, float] = defaultdict(float)  # calls that Ray has counted
        self._responses = {"http": 0.0, "grpc": 0.0}
        self._metrics: dict[str, Any] = {}
        # Counts at Ray's bounds and in all, by metric and tags.
        self._latencies: dict[tuple[str, tuple[tuple[str, str], ...]], Any] = {}

    async def run(self) -> None:
        interval = max(1.0, ray._config.metrics_report_interval_ms() / 1000)
        refreshed_at = time.monotonic()
        while True:
            await asyncio.sleep(_PERIOD)
            self.export()
            if time.monotonic() - refreshed_at >= interval - _PERIOD / 2:
                refreshed_at = time.monotonic()
                for name, tags in self._latencies:
                    self._set_latencies(name, tags)

    def export(self) -> None:
        """Add everything since the last export to Ray's metrics."""
        self._export_responses()
        self._export_requests()
        self._export_load()

    def _export_responses(self) -> None:
        """Export the responses of the HTTP and gRPC ports."""
        process = self._process
        for (code,), count in self._take_increases("torchrelay_http_responses").items():
            self._responses["http"] += count
            if RAY_SERVE_HAPROXY_METRICS_ENABLED:
                continue  # Ray counts the requests in HAProxy
            tags = {"application": process.application, "route": process.route, "method": ""}
            self._count("serve_num_http_requests", count, {**tags, "status_code": code})
            if code >= "400":
                self._count("serve_num_http_error_requests", count, {**tags, "error_code": code})
        for (code,), count in self._take_increases("torchrelay_grpc_responses").items():
            self._responses["grpc"] += count
            tags = {"application": process.application, "method": ""}
            self._count("serve_num_grpc_requests", count, {**tags, "status_code": code})
            if code != "OK":
                self._count("serve_num_grpc_error_requests", count, {**tags, "error_code": code})

    def _export_requests(self) -> None:
        """Export the requests and latencies of each version, and those of this process."""
        requests: defaultdict[ModelRef, float] = defaultdict(float)
        for (model, version, status), count in self._take_increases("torchrelay_requests").items():
            if version:  # else no model has that name
                ref = ModelRef(model, version)
                requests[ref] += count
                if status != "ok":
                    tags = {**self._deployment_tags(ref), "exception_type": status}
                    self._count("serve_deployment_error_counter", count, tags)
        self._add_handle_calls()
        total = np.zeros(len(_LE))
        for labels, histogram in self._meters.instruments("torchrelay_request_latency_seconds"):
            ref = ModelRef(*labels)
            if (count := requests.get(ref, 0.0)) == 0:
                continue
            subtracted = min(count, self._to_subtract[ref])
            self._to_subtract[ref] -= subtracted
            tags = self._deployment_tags(ref)
            if count > subtracted:
                self._count("serve_deployment_request_counter", count - subtracted, tags)
            increases = self._take_buckets(labels, histogram)
            share = 1 - subtracted / count
            self._add_latencies("serve_deployment_processing_latency_ms", increases * share, tags)
            total += increases
        if total[-1]:
            self._export_port_latencies(total)

    def _export_port_latencies(self, increases: np.ndarray) -> None:
        """Export latencies by protocol, in the proportion of its responses: they are not counted apart."""
        process, responses = self._process, self._responses
        grpc = responses["grpc"] / (sum(responses.values()) or 1.0)
        tags = {"application": process.application, "route": process.route, "method": ""}
        if not RAY_SERVE_HAPROXY_METRICS_ENABLED:
            self._add_latencies("serve_http_request_latency_ms", increases * (1 - grpc), tags)
        if grpc:
            del tags["route"]
            self._add_latencies("serve_grpc_request_latency_ms", increases * grpc, tags)

    def _export_load(self) -> None:
        load, process = self._load(), self._process
        tags = {"application": process.application, "replica": process.replica}
        self._set("serve_num_ongoing_grpc_requests", load.grpc, tags)
        if process.route == "/":  # a gateway, which has no queue
            return
        self._set("serve_num_ongoing_http_requests", load.processing, tags)
        tags = {**tags, "deployment": process.application, "route": process.route}
        self._set("serve_deployment_queued_queries", load.queued, tags)
        self._set("serve_replica_processing_queries", load.processing, tags)

    # What has increased

    def _take_increases(self, name: str) -> dict[tuple[str, ...], float]:
        """Return by how much each counter of a metric has increased, where it has, by its label values."""
        increases = {}
        for labels, counter in self._meters.instruments(name):
            key = (name, *labels)
            if increase := counter.value - self._seen.get(key, 0.0):
                self._seen[key] = counter.value
                increases[labels] = increase
        return increases

    def _take_buckets(self, labels: tuple[str, ...], histogram: HistogramInstrument) -> np.ndarray:
        """Return the increase of a histogram of seconds, cumulative at Ray's bounds and in all."""
        before = self._seen_buckets.get(labels) or [0] * len(histogram.counts)
        increases = list(accumulate(now - then for now, then in zip(histogram.counts, before, strict=True)))
        self._seen_buckets[labels] = list(histogram.counts)
        return _convert_buckets(histogram.bounds, increases)

    def _add_handle_calls(self) -> None:
        for ref, calls in self._calls_counted_by_ray.items():
            self._to_subtract[ref] += calls - self._seen_calls.get(ref, 0)
            self._seen_calls[ref] = calls

    # Ray's metrics

    def _deployment_tags(self, ref: ModelRef) -> Tags:
        route = f"/predictions/{ref.name}"
        return {
            "application": ref.app,
            "deployment": ref.app,
            "replica": self._process.replica,
            "route": route,
        }

    def _count(self, name: str, count: float, tags: Tags) -> None:
        metric = self._metrics.get(name)
        if metric is None:
            metric = self._metrics[name] = Counter(name, tag_keys=tuple(tags))
        metric.inc(count, tags)

    def _set(self, name: str, value: float, tags: Tags) -> None:
        metric = self._metrics.get(name)
        if metric is None:
            metric = self._metrics[name] = Gauge(name, tag_keys=tuple(tags))
        metric.set(value, tags)

    def _add_latencies(self, name: str, increases: np.ndarray, tags: Tags) -> None:
        key = name, tuple(tags.items())
        self._latencies[key] = self._latencies.get(key, 0.0) + increases
        self._set_latencies(*key)

    def _set_latencies(self, name: str, tags: tuple[tuple[str, str], ...]) -> None:
        for le, count in zip(_LE, self._latencies[name, tags], strict=True):
            self._set(f"{name}_bucket", float(count), {**dict(tags), "le": le})


def start(
    settings: Settings, meters: Meters, process: ExportedProcess, load: Callable[[], ExportedLoad]
) -> asyncio.Task[None] | None:
    """Start the export where Ray collects metrics and ``telemetry.ray_metrics`` permits it.

    Without HAProxy every request passes Ray's own proxy and handling, which count it.
    """
    collects = os.environ.get(_COLLECTION, "1").lower() not in ("0", "false")
    if not (collects and settings.telemetry.ray_metrics and RAY_SERVE_ENABLE_HA_PROXY):
        return None
    exporter = RayMetricsExporter(meters, process, load, calls_counted_by_ray)
    return asyncio.get_running_loop().create_task(exporter.run())


def _convert_buckets(bounds: Sequence[float], counts: Sequence[int]) -> np.ndarray:
    """Return cumulative counts at bounds in seconds as counts at Ray's bounds, interpolated linearly."""
    milliseconds = [0.0, *(1000 * bound for bound in bounds)]
    return np.append(np.interp(_BOUNDS, milliseconds, [0.0, *counts[:-1]]), counts[-1])
