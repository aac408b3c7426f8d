"""Every metric in one table, a process's own meters, and their sum over all processes.

A process keeps its meters in a registry of its own. The Management deployment collects the
reports of all of them and shows the sums, so a scrape tells of the whole cluster and not of the
process that happened to answer it. TorchServe's metrics (torchserve/) go the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric as Metrics

from serve_app.telemetry.batches import Batches
from serve_app.telemetry.torchserve.catalogue import Family
from serve_app.telemetry.torchserve.meters import Child, Reading, TorchServeMeters
from serve_app.telemetry.torchserve.page import Page
from serve_app.types import Figures

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Metric:
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ("model", "version")
    buckets: tuple[float, ...] = ()


_STEP = ("model", "version", "step")

METRICS = (
    Metric("torchrelay_request_latency_seconds", "histogram", "From a call's arrival to its answer.", buckets=_SECONDS),
    Metric("torchrelay_queue_seconds", "histogram", "A row's wait for its batch.", buckets=_SECONDS),
    Metric("torchrelay_inference_seconds", "histogram", "A batch's time in the handler.", buckets=_SECONDS),
    Metric("torchrelay_batch_size", "histogram", "Rows that ran together.", buckets=_ROWS),
    Metric("torchrelay_requests", "counter", "Answered calls; status: ok, or why not.", ("model", "version", "status")),
    Metric("torchrelay_http_responses", "counter", "HTTP answers of the inference port.", ("code",)),
    Metric("torchrelay_grpc_responses", "counter", "Answers of the gRPC ports.", ("code",)),
    Metric("torchrelay_queue_depth", "gauge", "Rows waiting for a batch now."),
    Metric("torchrelay_sequences", "gauge", "Sequences that are open now."),
    Metric("torchrelay_sequences_ended", "counter", "Sequences that ended, by why.", ("model", "version", "why")),
    Metric("torchrelay_replicas", "gauge", "Replicas that run now."),
    Metric("torchrelay_replicas_wanted", "gauge", "Replicas that there should be."),
    Metric("torchrelay_workflow_ongoing", "gauge", "Calls that a workflow is answering now."),
    Metric("torchrelay_workflow_steps", "counter", "Steps that ended; status as of requests.", (*_STEP, "status")),
    Metric("torchrelay_workflow_step_seconds", "histogram", "A step, with its retries.", _STEP, _SECONDS),
    Metric("torchrelay_asynchronous", "gauge", "Asynchronous predictions: queued, running.", ("model", "state")),
    Metric("torchrelay_asynchronous_ended", "counter", "Asynchronous predictions that ended.", ("model", "state")),
    Metric("torchrelay_webhooks", "counter", "Webhooks, by outcome: delivered, failed.", ("outcome",)),
    Metric("torchrelay_shadow_calls", "counter", "Copies for a shadow, by outcome.", ("model", "version", "outcome")),
    Metric("torchrelay_shadow_latency_seconds", "histogram", "A copy's way to a shadow and back.", buckets=_SECONDS),
    Metric("torchrelay_shadow_label_flips", "counter", "Copies whose first label differed from the live one."),
)

Sample = tuple[str, tuple[tuple[str, str], ...], float]
_KINDS = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
# The samples of which ``Sum.figures`` is made.
_OF_FIGURES = {
    "torchrelay_requests_total": "answered",
    "torchrelay_request_latency_seconds_sum": "seconds",
    "torchrelay_batch_size_sum": "rows",
    "torchrelay_queue_seconds_sum": "queue",
    "torchrelay_inference_seconds_count": "batches",
    "torchrelay_inference_seconds_sum": "inference",
}


class _Calls:
    """The meters that an answered call moves, for one model, version and status, and the version that was asked for."""

    __slots__ = ("count", "latency", "queue_microseconds", "queue_time", "total", "microseconds")


class Meters:
    """One process's meters. Cheap enough for the hot path: what an event moves is looked up once and kept.

    ``torchserve`` are the same events under TorchServe's names.
    """

    def __init__(self, torchserve: TorchServeMeters | None = None) -> None:
        self.torchserve = torchserve or TorchServeMeters()
        self._registry = CollectorRegistry(auto_describe=False)
        self._metrics = {}
        for m in METRICS:
            extra = {"buckets": m.buckets} if m.buckets else {}
            self._metrics[m.name] = _KINDS[m.kind](m.name, m.help, m.labels, registry=self._registry, **extra)
        self._children: dict[tuple[str, ...], Counter | Gauge | Histogram] = {}
        self._calls: dict[tuple[str, str, str, str | None], _Calls] = {}
        self._batches: dict[tuple[str, str], tuple[Callable[[float], None], ...]] = {}
        self._ran: dict[tuple[str, str], Batches] = {}
        self._codes: dict[int, Counter] = {}
        self._rest: dict[int, Child] = {}
        self._thread_time = self.torchserve.child("WorkerThreadTime", "Host")
        self.on_batch: Callable[[float, Collection[float], bool], None] = lambda *batch: None  # see load.py

    def _child(self, *key: str):
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._metrics[key[0]].labels(*key[1:])
        return child

    def request(
        self,
        model: str,
        version: str,
        status: str,
        seconds: float,
        asked: str | None = None,
        queue: float | None = None,
    ) -> None:
        """A call was answered, ``seconds`` after it came; ``asked`` is the version that it named.

        ``queue`` is how long it waited for its batch, in seconds; None where it never ran.
        """
        if not version:
            asked = None  # a caller's word: to keep each would fill the memory
        calls = self._calls.get((model, version, status, asked)) or self._bound(model, version, status, asked)
        calls.count.inc()
        if not version:
            return
        calls.latency.observe(seconds)
        calls.total.record(1.0)
        if queue is not None:
            calls.microseconds.record(seconds * 1e6)
            calls.queue_microseconds.record(queue * 1e6)
            calls.queue_time.record(queue * 1e3)

    def _bound(self, model: str, version: str, status: str, asked: str | None) -> _Calls:
        calls = self._calls[model, version, status, asked] = _Calls()
        calls.count = self._child("torchrelay_requests", model, version, status)
        if version:
            calls.latency = self._child("torchrelay_request_latency_seconds", model, version)
            theirs, named = self.torchserve, (model, asked or "default")
            calls.total = theirs.child("ts_inference_requests_total", *named)
            calls.microseconds = theirs.child("ts_inference_latency_microseconds", *named)
            calls.queue_microseconds = theirs.child("ts_queue_latency_microseconds", *named)
            calls.queue_time = theirs.child("QueueTime", "Host")
        return calls

    def response(self, code: int) -> None:
        """An HTTP answer left the inference port."""
        counter = self._codes.get(code)
        if counter is None:
            counter = self._codes[code] = self._child("torchrelay_http_responses", str(code))
        counter.inc()
        self.rest(code)

    def grpc_response(self, code: str) -> None:
        """An answer left a gRPC port, with the status of that name."""
        self._child("torchrelay_grpc_responses", code).inc()

    def rest(self, code: int) -> None:
        """An HTTP answer left some port."""
        child = self._rest.get(code)
        if child is None:
            name = f"Requests{code // 100}XX" if code // 100 in (2, 4) else "Requests5XX"
            child = self._rest[code] = self.torchserve.child(name, "Host")
        child.record(1.0)

    def batch(
        self, model: str, version: str, rows: int, seconds: float, waits: Collection[float], live: bool = True
    ) -> None:
        """A batch of ``rows``, ``live`` or shadows, ran for ``seconds``; ``waits`` are their times in the queue."""
        bound = self._batches.get((model, version))
        if bound is None:
            names = ("torchrelay_batch_size", "torchrelay_inference_seconds", "torchrelay_queue_seconds")
            bound = self._batches[model, version] = tuple(self._child(name, model, version).observe for name in names)
            self._ran[model, version] = Batches()
        self.on_batch(seconds, waits, live)
        self._ran[model, version].note(rows, seconds)
        size, inference, queue = bound
        size(rows)
        inference(seconds)
        for wait in waits:
            queue(wait)

    def workflow(self, model: str, version: str, change: int) -> None:
        """So many more calls are with a workflow, or fewer."""
        self._child("torchrelay_workflow_ongoing", model, version).inc(change)

    def step(self, model: str, version: str, step: str, status: str, seconds: float) -> None:
        """A workflow's step ended after ``seconds``."""
        self._child("torchrelay_workflow_steps", model, version, step, status).inc()
        self._child("torchrelay_workflow_step_seconds", model, version, step).observe(seconds)

    def sequences(self, model: str, version: str, count: int) -> None:
        """So many sequences are open."""
        self._child("torchrelay_sequences", model, version).set(count)

    def sequence_ended(self, model: str, version: str, why: str) -> None:
        self._child("torchrelay_sequences_ended", model, version, why).inc()

    def deferrals(self, model: str, queued: int, running: int) -> None:
        """So many asynchronous predictions of a model wait, and so many run."""
        self._child("torchrelay_asynchronous", model, "queued").set(queued)
        self._child("torchrelay_asynchronous", model, "running").set(running)

    def deferral_ended(self, model: str, state: str) -> None:
        self._child("torchrelay_asynchronous_ended", model, state).inc()

    def webhook(self, outcome: str) -> None:
        self._child("torchrelay_webhooks", outcome).inc()

    def shadow(self, model: str, version: str, outcome: str) -> None:
        """What became of a copy that was meant for the shadow ``version``."""
        self._child("torchrelay_shadow_calls", model, version, outcome).inc()

    def shadow_latency(self, model: str, version: str, seconds: float) -> None:
        self._child("torchrelay_shadow_latency_seconds", model, version).observe(seconds)

    def shadow_flip(self, model: str, version: str) -> None:
        """The shadow ``version`` put another label first than was answered."""
        self._child("torchrelay_shadow_label_flips", model, version).inc()

    def overhead(self, seconds: float) -> None:
        """From a batch's start to its answers so many seconds went by that were not the handler's."""
        self._thread_time.record(seconds * 1e3)

    def depth(self, model: str, version: str, rows: int) -> None:
        self._child("torchrelay_queue_depth", model, version).set(rows)

    def replicas(self, model: str, version: str, running: int, wanted: int) -> None:
        self._child("torchrelay_replicas", model, version).set(running)
        self._child("torchrelay_replicas_wanted", model, version).set(wanted)

    def forget(self, model: str, version: str) -> None:
        """Drop the gauges of a version that is no more."""
        for name in ("torchrelay_queue_depth", "torchrelay_replicas", "torchrelay_replicas_wanted"):
            if self._children.pop((name, model, version), None) is not None:
                self._metrics[name].remove(model, version)

    def samples(self) -> list[Sample]:
        """The samples of our own metrics."""
        return [
            (sample.name, tuple(sorted(sample.labels.items())), sample.value)
            for family in self._registry.collect()
            for sample in family.samples
            if not sample.name.endswith("_created")
        ]

    def report(self) -> Report:
        """Everything as plain data, for another process to add up."""
        return Report(self.samples(), self.torchserve.readings(), self._ran)


class Report(NamedTuple):
    """What a process has measured: our own samples, what is shown under TorchServe's names, and batches by size."""

    samples: list[Sample]
    readings: list[Reading]
    batches: Mapping[tuple[str, str], Batches]  # by model and version


class Sum:
    """The reports of many processes, added up. What a process that ended had counted stays counted.

    ``shown`` are TorchServe's metrics that stand on the page before anybody has updated them.
    """

    def __init__(self, shown: Iterable[Family] = ()) -> None:
        self._live: dict[str, list[Sample]] = {}
        self._ended: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._batches: dict[str, Mapping[tuple[str, str], Batches]] = {}
        self._past: dict[tuple[str, str], Batches] = {}  # of processes that ended
        self._page = Page(shown)

    def put(self, source: str, report: Report) -> None:
        self._live[source] = report.samples
        self._batches[source] = report.batches
        self._page.put(source, report.readings)

    def end(self, source: str) -> None:
        """The process behind ``source`` is gone: keep its counts, forget its gauges."""
        gauges = {m.name for m in METRICS if m.kind == "gauge"}
        for name, labels, value in self._live.pop(source, []):
            if name not in gauges:
                self._ended[name, labels] = self._ended.get((name, labels), 0.0) + value
        _add(self._past, self._batches.pop(source, {}))
        self._page.end(source)

    @property
    def sources(self) -> list[str]:
        return list(self._live)

    def total(self, name: str, **labels: str) -> float:
        """The sum of one of our own metrics over the samples that carry ``labels``."""
        wanted = set(labels.items())
        return sum(v for (n, have), v in self._summed().items() if n == name and wanted <= set(have))

    def figures(self) -> list[Figures]:
        """What was counted of every version that has answered or refused a call, by name."""
        sums: dict[tuple[str, str], dict[str, float]] = {}
        for (name, labels), value in self._summed().items():
            said = dict(labels)
            if name in _OF_FIGURES and said["version"]:
                none = dict.fromkeys((*_OF_FIGURES.values(), "failed"), 0.0)
                of = sums.setdefault((said["model"], said["version"]), none)
                of["failed" if said.get("status", "ok") != "ok" else _OF_FIGURES[name]] += value
        ran: dict[tuple[str, str], Batches] = {}
        for batches in (self._past, *self._batches.values()):
            _add(ran, batches)
        none_ran = Batches()
        return [
            Figures(
                *version,
                int(of["answered"]),
                int(of["failed"]),
                of["seconds"],
                int(of["rows"]),
                of["queue"],
                int(of["batches"]),
                of["inference"],
                ran.get(version, none_ran).last,
                tuple((rows, *said) for rows, said in sorted(ran.get(version, none_ran).sizes.items())),
            )
            for version, of in sorted(sums.items())
        ]

    def render(self, names: Collection[str] | None = None) -> bytes:
        """The Prometheus text (format 0.0.4) of the sums; with ``names`` the samples that are called so alone."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families(self._families(names)))
        return self._page.render(names).encode() + generate_latest(registry)

    def _summed(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        summed = dict(self._ended)
        for samples in self._live.values():
            for name, labels, value in samples:
                summed[name, labels] = summed.get((name, labels), 0.0) + value
        return summed

    def _families(self, names: Collection[str] | None) -> list[Metrics]:
        families = {m.name: Metrics(m.name, m.help, m.kind) for m in METRICS}
        for (name, labels), value in self._summed().items():
            if names is not None and name not in names:
                continue
            base = name
            for suffix in ("_total", "_bucket", "_count", "_sum"):
                base = base.removesuffix(suffix) if base not in families else base
            families[base].add_sample(name, dict(labels), value)
        return [family for family in families.values() if names is None or family.samples]


def _add(to: dict[tuple[str, str], Batches], others: Mapping[tuple[str, str], Batches]) -> None:
    for version, batches in others.items():
        to.setdefault(version, Batches()).add(batches)


class _Families:
    """prometheus_client's collector protocol."""

    def __init__(self, families: list[Metrics]) -> None:
        self._families = families

    def collect(self) -> list[Metrics]:
        return self._families
