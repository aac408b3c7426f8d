"""The meters of a process.

Management collects the reports of all processes, so that a scrape covers the whole cluster (see
``metrics_aggregator.py``). TorchServe's metrics (torchserve/) are collected likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from serve_app.telemetry import tracing
from serve_app.telemetry.batch_stats import BatchStats
from serve_app.telemetry.instruments import (
    CounterInstrument,
    GaugeInstrument,
    HistogramInstrument,
    Sample,
    to_samples,
)
from serve_app.telemetry.metric_definitions import METRICS
from serve_app.telemetry.metrics_report import MetricsReport, ReportedValues
from serve_app.telemetry.torchserve.recorders import LabeledRecorder, TorchServeRecorders

_DEFINITIONS = {metric.name: metric for metric in METRICS}
_INSTRUMENTS: dict[str, type[CounterInstrument] | type[GaugeInstrument] | type[HistogramInstrument]] = {
    "counter": CounterInstrument,
    "gauge": GaugeInstrument,
    "histogram": HistogramInstrument,
}


@dataclass(slots=True)
class _RequestMeters:
    """The meters of a completed request, by model, version, status and requested version."""

    count: CounterInstrument
    latency: HistogramInstrument
    total: LabeledRecorder
    microseconds: LabeledRecorder
    queue_microseconds: LabeledRecorder
    queue_time: LabeledRecorder


class _BatchMeters(NamedTuple):
    """The meters of a version's batches; ``_BATCH_METRICS`` are their names, in order."""

    size: HistogramInstrument
    inference: HistogramInstrument
    queue: HistogramInstrument


_BATCH_METRICS = ("torchrelay_batch_size", "torchrelay_inference_seconds", "torchrelay_queue_seconds")


class Meters:
    """The meters of a process; each child is looked up once and cached, which the hot path needs.

    ``torchserve`` are the same events under TorchServe's names.
    """

    def __init__(self, torchserve: TorchServeRecorders | None = None) -> None:
        self.torchserve = torchserve or TorchServeRecorders()
        self._instruments: dict[tuple[str, ...], Any] = {}  # by name and label values
        self._request_meters: dict[tuple[str, str, str, str | None], _RequestMeters] = {}
        self._batches: dict[tuple[str, str], _BatchMeters] = {}
        self._batch_stats: dict[tuple[str, str], BatchStats] = {}
        self._reported = ReportedValues()
        self._responses: dict[int, CounterInstrument] = {}
        self._torchserve_responses: dict[int, LabeledRecorder] = {}
        self._thread_time = self.torchserve.child("WorkerThreadTime", "Host")
        # AutoscalingStats.record_batch in a replica that is autoscaled
        self.on_batch: Callable[[float, Collection[float], bool], None] = lambda *batch: None

    def _child(self, *key: str) -> Any:
        """Return the instrument of a metric with these label values."""
        instrument = self._instruments.get(key)
        if instrument is None:
            metric = _DEFINITIONS[key[0]]
            assert len(key) == len(metric.labels) + 1, key
            instrument = _INSTRUMENTS[metric.kind](metric.buckets)
            self._instruments[key] = instrument
        return instrument

    def request(
        self,
        model: str,
        version: str,
        status: str,
        seconds: float,
        requested_version: str | None = None,
        queue: float | None = None,
    ) -> None:
        """Record a completed request and its latency in seconds.

        ``requested_version`` is the version that it named; ``queue`` are the seconds that it waited for its
        batch, None where it never ran.
        """
        if not version:  # the client chose any name: caching its meters would fill the memory
            self._child("torchrelay_requests", model, version, status).inc()
            return
        key = (model, version, status, requested_version)
        meters = self._request_meters.get(key)
        if meters is None:
            meters = self._request_meters[key] = self._create_request_meters(*key)
        meters.count.inc()
        meters.latency.observe(seconds)
        meters.total.record(1.0)
        if queue is not None:
            meters.microseconds.record(seconds * 1e6)
            meters.queue_microseconds.record(queue * 1e6)
            meters.queue_time.record(queue * 1e3)

    def _create_request_meters(
        self, model: str, version: str, status: str, requested_version: str | None
    ) -> _RequestMeters:
        torchserve, labels = self.torchserve, (model, requested_version or "default")
        return _RequestMeters(
            self._child("torchrelay_requests", model, version, status),
            self._child("torchrelay_request_latency_seconds", model, version),
            torchserve.child("ts_inference_requests_total", *labels),
            torchserve.child("ts_inference_latency_microseconds", *labels),
            torchserve.child("ts_queue_latency_microseconds", *labels),
            torchserve.child("QueueTime", "Host"),
        )

    def response(self, code: int) -> None:
        """Record an HTTP response of the inference port."""
        responses = self._responses.get(code)
        if responses is None:
            responses = self._responses[code] = self._child("torchrelay_http_responses", str(code))
        responses.inc()
        self.rest(code)

    def grpc_response(self, code: str) -> None:
        """Record a response of a gRPC port, with the name of its status."""
        self._child("torchrelay_grpc_responses", code).inc()

    def rest(self, code: int) -> None:
        """Record an HTTP response of any port."""
        child = self._torchserve_responses.get(code)
        if child is None:
            name = f"Requests{code // 100}XX" if code // 100 in (2, 4) else "Requests5XX"
            child = self._torchserve_responses[code] = self.torchserve.child(name, "Host")
        child.record(1.0)

    def batch(
        self,
        model: str,
        version: str,
        rows: int,
        seconds: float,
        waits: Collection[float],
        live: bool = True,
        tensor_rows: int | None = None,
    ) -> None:
        """Record a batch, of ``live`` or shadow requests, that ran for ``seconds``.

        ``waits`` are its rows' times in the queue. ``tensor_rows`` counts along the first axis of tensors,
        for the statistics; None: as ``rows``.
        """
        meters = self._batches.get((model, version))
        if meters is None:
            meters = self._batches[model, version] = _BatchMeters(
                *(self._child(name, model, version) for name in _BATCH_METRICS)
            )
            self._batch_stats[model, version] = BatchStats()
        self.on_batch(seconds, waits, live)
        self._batch_stats[model, version].record(rows if tensor_rows is None else tensor_rows, seconds)
        meters.size.observe(rows)
        meters.inference.observe(seconds)
        meters.queue.observe_all(waits)

    def workflow(self, model: str, version: str, change: int) -> None:
        """Change the number of requests that a workflow is processing."""
        self._child("torchrelay_workflow_ongoing", model, version).inc(change)

    def step(self, model: str, version: str, step: str, status: str, seconds: float) -> None:
        """Record a completed step of a workflow."""
        self._child("torchrelay_workflow_steps", model, version, step, status).inc()
        self._child("torchrelay_workflow_step_seconds", model, version, step).observe(seconds)

    def sequences(self, model: str, version: str, count: int) -> None:
        """Set the number of open sequences."""
        self._child("torchrelay_sequences", model, version).set(count)

    def sequence_ended(self, model: str, version: str, why: str) -> None:
        self._child("torchrelay_sequences_ended", model, version, why).inc()

    def set_async_predictions(self, model: str, queued: int, running: int) -> None:
        """Set the numbers of a model's queued and running async predictions."""
        self._child("torchrelay_async_predictions", model, "queued").set(queued)
        self._child("torchrelay_async_predictions", model, "running").set(running)

    def count_async_prediction(self, model: str, state: str) -> None:
        self._child("torchrelay_async_predictions_ended", model, state).inc()

    def key(self, key: str, requests: int, rows: int, tokens: int, refused: Mapping[str, int]) -> None:
        """Record the use of a key."""
        self._child("torchrelay_key_requests", key).inc(requests)
        self._child("torchrelay_key_rows", key).inc(rows)
        if tokens:
            self._child("torchrelay_key_tokens", key).inc(tokens)
        for limit, count in refused.items():
            self._child("torchrelay_key_refused", key, limit).inc(count)

    def webhook(self, outcome: str) -> None:
        self._child("torchrelay_webhooks", outcome).inc()

    def shadow(self, model: str, version: str, outcome: str) -> None:
        """Record the outcome of a copy for the shadow ``version``."""
        self._child("torchrelay_shadow_requests", model, version, outcome).inc()

    def shadow_latency(self, model: str, version: str, seconds: float) -> None:
        self._child("torchrelay_shadow_latency_seconds", model, version).observe(seconds)

    def shadow_flip(self, model: str, version: str) -> None:
        """Record that the first label of the shadow ``version`` differs from the live one."""
        self._child("torchrelay_shadow_label_flips", model, version).inc()

    def captured(self, model: str, version: str, count: int, dropped: Mapping[str, int]) -> None:
        """Record captured requests, and those that were lost, by reason."""
        self._child("torchrelay_captured_requests", model, version).inc(count)
        for reason, lost in dropped.items():
            self._child("torchrelay_capture_dropped", model, version, reason).inc(lost)

    def set_drift(
        self,
        model: str,
        version: str,
        features: Iterable[tuple[str, float | None, float | None]],
        omitted: int,
    ) -> None:
        """Set the gauges of a version's features, each with its name, index and statistic."""
        self.forget_drift(model, version)
        self._child("torchrelay_drift_omitted_features", model, version).set(omitted)
        for name, psi, ks in features:
            if psi is not None:
                self._child("torchrelay_drift_psi", model, version, name).set(psi)
            if ks is not None:
                self._child("torchrelay_drift_ks", model, version, name).set(ks)

    def forget_drift(self, model: str, version: str) -> None:
        """Remove the gauges of a version's features."""
        outdated = [
            key
            for key in self._instruments
            if key[0].startswith("torchrelay_drift_") and key[1:3] == (model, version)
        ]
        for key in outdated:
            del self._instruments[key]

    def overhead(self, seconds: float) -> None:
        """Record the seconds from a batch's start to its responses outside the handler."""
        self._thread_time.record(seconds * 1e3)

    def depth(self, model: str, version: str, rows: int) -> None:
        self._child("torchrelay_queue_depth", model, version).set(rows)

    def replicas(self, model: str, version: str, running: int, desired: int) -> None:
        self._child("torchrelay_replicas", model, version).set(running)
        self._child("torchrelay_replicas_desired", model, version).set(desired)

    def replica_failure(self, model: str, version: str, reason: str) -> None:
        self._child("torchrelay_replica_failures", model, version, reason).inc()

    def rollout_ended(self, model: str, state: str, count: int = 1) -> None:
        """Record the end of a rollout; ``count=0`` exports a zero, from which Prometheus sees an increase."""
        self._child("torchrelay_rollouts_ended", model, state).inc(count)

    def instrument(self, name: str, *labels: str) -> Any:
        """Return the instrument of a metric with these label values, for callers with few of them."""
        return self._child(name, *labels)

    def replace_gauge(self, name: str, values: Mapping[tuple[str, ...], float]) -> None:
        """Set a gauge for the label values in ``values``, and remove it for all others."""
        for key in [key for key in self._instruments if key[0] == name and key[1:] not in values]:
            del self._instruments[key]
        for labels, value in values.items():
            self._child(name, *labels).set(value)

    def forget(self, model: str, version: str) -> None:
        """Remove the gauges of a removed version."""
        for name in ("torchrelay_queue_depth", "torchrelay_replicas", "torchrelay_replicas_desired"):
            self._instruments.pop((name, model, version), None)

    def instruments(self, name: str) -> list[tuple[tuple[str, ...], Any]]:
        """Return the instruments of a metric with their label values, in the order of its definition."""
        return [(key[1:], instrument) for key, instrument in self._instruments.items() if key[0] == name]

    def samples(self) -> list[Sample]:
        """Return the samples of Torchrelay's own metrics."""
        return [
            sample
            for (name, *labels), instrument in self._instruments.items()
            for sample in to_samples(_DEFINITIONS[name], labels, instrument.read())
        ]

    def report(self, full: bool = True) -> MetricsReport:
        """Return the values for another process to sum up: all, or those changed since the last report."""
        process, dropped = tracing.take_dropped()
        if dropped:
            self._child("torchrelay_spans_dropped", process).inc(dropped)
        values = {key: instrument.read() for key, instrument in self._instruments.items()}
        return self._reported.report(values, self.torchserve.samples(), self._batch_stats, full)
