"""The metrics of a process: instruments, the meters that feed them, and reports of what has changed.

Instruments are plain numbers of one event loop and take no lock. ``prometheus_client`` takes one for each
update, and compares a value with each bucket: 3 µs for an observation, against 0.3 µs here. A request
updates six instruments.

Management collects the reports of all processes, so that a scrape covers the whole cluster (see
``metrics_aggregator.py``). TorchServe's metrics (torchserve/) are collected likewise.
"""

from __future__ import annotations

import operator
import time
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from prometheus_client.utils import floatToGoString

from serve_app.telemetry import tracing
from serve_app.telemetry.metric_definitions import METRICS, MetricDefinition
from serve_app.telemetry.torchserve.recorders import LabeledRecorder, RecorderSample, TorchServeRecorders

Sample = tuple[str, tuple[tuple[str, str], ...], float]
Number = float | tuple[float, ...]  # of a histogram the count of each bucket, and the sum

MAX_RECENT = 100  # values; percentiles of more are estimated from the buckets


class CounterInstrument:
    """A number that only increases."""

    __slots__ = ("value",)

    def __init__(self, buckets: Sequence[float] = ()) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount

    def read(self) -> Number:
        return self.value


class GaugeInstrument(CounterInstrument):
    """A number that is set, or changes in both directions."""

    __slots__ = ()

    def set(self, value: float) -> None:
        self.value = float(value)


class HistogramInstrument:
    """Counts of values by bucket, and their sum; ``buckets`` are upper bounds.

    The last of ``counts`` is of the values beyond all ``bounds``.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, buckets: Sequence[float]) -> None:
        self.bounds = buckets
        self.counts = [0] * (len(buckets) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Iterable[float]) -> None:
        counts, bounds, total = self.counts, self.bounds, 0.0
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            total += value
        self.sum += total

    def read(self) -> Number:
        return (*self.counts, self.sum)


class RecentHistogramInstrument(HistogramInstrument):
    """A histogram with its latest values, from which percentiles of few values are exact.

    They take 12 ns of an observation, and 3 KiB.
    """

    __slots__ = ("recent",)

    def __init__(self, buckets: Sequence[float]) -> None:
        super().__init__(buckets)
        self.recent: deque[float] = deque(maxlen=MAX_RECENT)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
        self.recent.append(value)


def add_numbers(first: Number, second: Number) -> Number:
    """Return the sum of two values of one metric."""
    if isinstance(first, tuple) and isinstance(second, tuple):
        return tuple(map(operator.add, first, second))
    assert not isinstance(first, tuple)
    assert not isinstance(second, tuple)
    return first + second


def count_and_sum(number: Number | None) -> tuple[float, float]:
    """Return the number of a histogram's values, and their sum; None is a histogram without values."""
    if number is None:
        return 0, 0.0
    assert isinstance(number, tuple)
    return sum(number[:-1]), number[-1]


def list_sample_names(metric: MetricDefinition) -> tuple[str, ...]:
    """Return the names of a metric's samples in Prometheus' text format."""
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}
    return tuple(f"{metric.name}{suffix}" for suffix in suffixes[metric.kind])


def to_samples(metric: MetricDefinition, values: Sequence[str], number: Number) -> Iterator[Sample]:
    """Return the samples of a value with its label values; of a histogram the counts are cumulative."""
    labels = tuple(sorted(zip(metric.labels, values, strict=True)))
    name, *others = list_sample_names(metric)
    if not isinstance(number, tuple):
        yield name, labels, number
        return
    count = 0.0
    for bound, in_bucket in zip(_bound_labels(metric.buckets), number[:-1], strict=True):
        count += in_bucket
        yield name, tuple(sorted((*labels, bound))), count
    for other, value in zip(others, (count, number[-1]), strict=True):
        yield other, labels, value


@cache
def _bound_labels(bounds: tuple[float, ...]) -> tuple[tuple[str, str], ...]:
    """Return the labels of a histogram's buckets; few histograms have others."""
    return tuple(("le", floatToGoString(bound)) for bound in (*bounds, float("inf")))


class BatchStats:
    """The batches of one version.

    ``sizes`` maps a number of rows to the number of batches and their seconds in the handler. A request of
    tensors has as many rows as the first axis of its inputs.
    """

    __slots__ = ("last", "sizes")

    def __init__(self) -> None:
        self.last = 0.0  # in seconds since the epoch; 0: none has run
        self.sizes: dict[int, tuple[int, float]] = {}

    def record(self, rows: int, seconds: float) -> None:
        """Record a batch that has just run."""
        count, total = self.sizes.get(rows, (0, 0.0))
        self.sizes[rows] = count + 1, total + seconds
        self.last = time.time()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BatchStats) and (self.last, self.sizes) == (other.last, other.sizes)

    def copy(self) -> BatchStats:
        copy = BatchStats()
        copy.add(self)
        return copy

    def add(self, other: BatchStats) -> None:
        """Add the batches of another process."""
        self.last = max(self.last, other.last)
        for rows, (count, seconds) in other.sizes.items():
            own_count, total = self.sizes.get(rows, (0, 0.0))
            self.sizes[rows] = own_count + count, total + seconds


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
        self._recent: dict[tuple[str, ...], deque[float]] = {}  # the latest values of histograms
        self._request_meters: dict[tuple[str, str, str, str | None], _RequestMeters] = {}
        self._batches: dict[tuple[str, str], _BatchMeters] = {}
        self._batch_stats: dict[tuple[str, str], BatchStats] = {}
        self._reported = ReportedValues()
        self._responses: dict[int, CounterInstrument] = {}
        self._torchserve_responses: dict[int, LabeledRecorder] = {}
        self._thread_time = self.torchserve.child("WorkerThreadTime", "Host")
        # AutoscalingStats.record_batch in a replica that is autoscaled
        self.on_batch: Callable[[float, Collection[float], bool], None] = lambda *batch: None

    def instrument(self, *key: str) -> Any:
        """Return the instrument of a metric with these label values."""
        instrument = self._instruments.get(key)
        if instrument is None:
            metric = _DEFINITIONS[key[0]]
            assert len(key) == len(metric.labels) + 1, key
            if metric.keeps_recent:
                instrument = RecentHistogramInstrument(metric.buckets)
                self._recent[key] = instrument.recent
            else:
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
            self.instrument("torchrelay_requests", model, version, status).inc()
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
            self.instrument("torchrelay_requests", model, version, status),
            self.instrument("torchrelay_request_latency_seconds", model, version),
            torchserve.child("ts_inference_requests_total", *labels),
            torchserve.child("ts_inference_latency_microseconds", *labels),
            torchserve.child("ts_queue_latency_microseconds", *labels),
            torchserve.child("QueueTime", "Host"),
        )

    def response(self, code: int) -> None:
        """Record an HTTP response of the inference port."""
        responses = self._responses.get(code)
        if responses is None:
            responses = self._responses[code] = self.instrument("torchrelay_http_responses", str(code))
        responses.inc()
        self.rest(code)

    def grpc_response(self, code: str) -> None:
        """Record a response of a gRPC port, with the name of its status."""
        self.instrument("torchrelay_grpc_responses", code).inc()

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
                *(self.instrument(name, model, version) for name in _BATCH_METRICS)
            )
            self._batch_stats[model, version] = BatchStats()
        self.on_batch(seconds, waits, live)
        self._batch_stats[model, version].record(rows if tensor_rows is None else tensor_rows, seconds)
        meters.size.observe(rows)
        meters.inference.observe(seconds)
        meters.queue.observe_all(waits)

    def cache_request(self, model: str, version: str, outcome: str) -> None:
        """Record a request that the response cache answered, or that ran: hit or miss."""
        self.instrument("torchrelay_cache_requests", model, version, outcome).inc()

    def set_cache_bytes(self, model: str, version: str, size: int) -> None:
        """Set the bytes of a version's stored responses in this process."""
        self.instrument("torchrelay_cache_bytes", model, version).set(size)

    def workflow(self, model: str, version: str, change: int) -> None:
        """Change the number of requests that a workflow is processing."""
        self.instrument("torchrelay_workflow_ongoing", model, version).inc(change)

    def step(self, model: str, version: str, step: str, status: str, seconds: float) -> None:
        """Record a completed step of a workflow."""
        self.instrument("torchrelay_workflow_steps", model, version, step, status).inc()
        self.instrument("torchrelay_workflow_step_seconds", model, version, step).observe(seconds)

    def set_async_predictions(self, model: str, queued: int, running: int) -> None:
        """Set the numbers of a model's queued and running async predictions."""
        self.instrument("torchrelay_async_predictions", model, "queued").set(queued)
        self.instrument("torchrelay_async_predictions", model, "running").set(running)

    def key(self, key: str, requests: int, rows: int, tokens: int, refused: Mapping[str, int]) -> None:
        """Record the use of a key."""
        self.instrument("torchrelay_key_requests", key).inc(requests)
        self.instrument("torchrelay_key_rows", key).inc(rows)
        if tokens:
            self.instrument("torchrelay_key_tokens", key).inc(tokens)
        for limit, count in refused.items():
            self.instrument("torchrelay_key_refused", key, limit).inc(count)

    def shadow(self, model: str, version: str, outcome: str) -> None:
        """Record the outcome of a copy for the shadow ``version``."""
        self.instrument("torchrelay_shadow_requests", model, version, outcome).inc()

    def captured(self, model: str, version: str, count: int, dropped: Mapping[str, int]) -> None:
        """Record captured requests, and those that were lost, by reason."""
        self.instrument("torchrelay_captured_requests", model, version).inc(count)
        for reason, lost in dropped.items():
            self.instrument("torchrelay_capture_dropped", model, version, reason).inc(lost)

    def set_drift(
        self,
        model: str,
        version: str,
        features: Iterable[tuple[str, float | None, float | None]],
        omitted: int,
    ) -> None:
        """Set the gauges of a version's features, each with its name, index and statistic."""
        self.forget_drift(model, version)
        self.instrument("torchrelay_drift_omitted_features", model, version).set(omitted)
        for name, psi, ks in features:
            if psi is not None:
                self.instrument("torchrelay_drift_psi", model, version, name).set(psi)
            if ks is not None:
                self.instrument("torchrelay_drift_ks", model, version, name).set(ks)

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
        self.instrument("torchrelay_queue_depth", model, version).set(rows)

    def replicas(self, model: str, version: str, running: int, desired: int) -> None:
        self.instrument("torchrelay_replicas", model, version).set(running)
        self.instrument("torchrelay_replicas_desired", model, version).set(desired)

    def replica_recycled(self, model: str, version: str, reason: str) -> None:
        """Record a replica that was replaced because it had reached a limit."""
        self.instrument("torchrelay_replicas_recycled", model, version, reason).inc()

    def rollout_ended(self, model: str, state: str, count: int = 1) -> None:
        """Record the end of a rollout; ``count=0`` exports a zero, from which Prometheus sees an increase."""
        self.instrument("torchrelay_rollouts_ended", model, state).inc(count)

    def replace_gauge(self, name: str, values: Mapping[tuple[str, ...], float]) -> None:
        """Set a gauge for the label values in ``values``, and remove it for all others."""
        for key in [key for key in self._instruments if key[0] == name and key[1:] not in values]:
            del self._instruments[key]
        for labels, value in values.items():
            self.instrument(name, *labels).set(value)

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
            self.instrument("torchrelay_spans_dropped", process).inc(dropped)
        values = {key: instrument.read() for key, instrument in self._instruments.items()}
        return self._reported.report(values, self._recent, self.torchserve.samples(), self._batch_stats, full)


InstrumentKey = tuple[str, ...]  # the name of one of Torchrelay's own metrics, and its label values
VersionKey = tuple[str, str]  # model and version


class MetricsReport(NamedTuple):
    """The values of a process that differ from its report ``base``; 0: it has all of them.

    With 1,000 versions a process has 6,000 instruments, whose values take 20 ms to collect, send and read.
    Most of them have not changed since the report before.

    ``values`` are of Torchrelay's own metrics, ``samples`` of those under TorchServe's names, and ``batches``
    are the batches by size. Only gauges are ever ``removed``. ``recent`` are the values that histograms have
    received since the report ``base``, of each at most the last MAX_RECENT, the oldest first.
    """

    number: int  # counts the reports of the process from 1
    base: int
    values: Mapping[InstrumentKey, Number]
    recent: Mapping[InstrumentKey, array[float]]
    removed: tuple[InstrumentKey, ...]
    samples: tuple[RecorderSample, ...]
    batches: Mapping[VersionKey, BatchStats]


class ReportedValues:
    """The values of a process as last reported, kept at both ends."""

    def __init__(self) -> None:
        self.number = 0  # of the last report
        self.values: dict[InstrumentKey, Number] = {}
        self.samples: dict[tuple[str, tuple[str, ...]], RecorderSample] = {}  # by name and label values
        self.batches: dict[VersionKey, BatchStats] = {}

    def report(
        self,
        values: Mapping[InstrumentKey, Number],
        recent: Mapping[InstrumentKey, deque[float]],
        samples: Iterable[RecorderSample],
        batches: Mapping[VersionKey, BatchStats],
        full: bool,
    ) -> MetricsReport:
        """Return the next report of a process that has these values now."""
        base = 0 if full else self.number
        if full:
            self._clear()
        changed = {key: number for key, number in values.items() if self.values.get(key) != number}
        report = MetricsReport(
            number=self.number + 1,
            base=base,
            values=changed,
            recent={
                key: array("d", list(recent[key])[-self.count_new(key, number) :])
                for key, number in changed.items()
                if key in recent
            },
            removed=tuple(self.values.keys() - values.keys()),
            samples=tuple(sample for sample in samples if self.samples.get(_key(sample)) != sample),
            batches={key: stats.copy() for key, stats in batches.items() if self.batches.get(key) != stats},
        )
        self.apply(report)
        return report

    def count_new(self, key: InstrumentKey, number: Number) -> int:
        """Return how many values a histogram has received since the last report."""
        return int(count_and_sum(number)[0] - count_and_sum(self.values.get(key))[0])

    def apply(self, report: MetricsReport) -> bool:
        """Take over a report; return False where it continues another one than the last."""
        if report.base == 0:
            self._clear()
        elif report.base != self.number:
            return False
        self.number = report.number
        self.values.update(report.values)
        for key in report.removed:
            del self.values[key]
        self.samples.update((_key(sample), sample) for sample in report.samples)
        self.batches.update(report.batches)
        return True

    def _clear(self) -> None:
        self.values.clear()
        self.samples.clear()
        self.batches.clear()


def _key(sample: RecorderSample) -> tuple[str, tuple[str, ...]]:
    return sample.family.name, sample.values
