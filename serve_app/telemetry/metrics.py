"""Every metric in one table, a process's own meters, and their sum over all processes.

A process keeps its meters in a registry of its own. The Management deployment collects the
samples of all of them and shows the sums, so a scrape tells of the whole cluster and not of the
process that happened to answer it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric as Family

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Metric:
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ("model", "version")
    buckets: tuple[float, ...] = ()


METRICS = (
    Metric("torchrelay_request_latency_seconds", "histogram", "From a call's arrival to its answer.", buckets=_SECONDS),
    Metric("torchrelay_queue_seconds", "histogram", "A row's wait for its batch.", buckets=_SECONDS),
    Metric("torchrelay_inference_seconds", "histogram", "A batch's time in the handler.", buckets=_SECONDS),
    Metric("torchrelay_batch_size", "histogram", "Rows that ran together.", buckets=_ROWS),
    Metric("torchrelay_requests", "counter", "Answered calls; status: ok, or why not.", ("model", "version", "status")),
    Metric("torchrelay_http_responses", "counter", "HTTP answers of the inference port.", ("code",)),
    Metric("torchrelay_queue_depth", "gauge", "Rows waiting for a batch now."),
    Metric("torchrelay_replicas", "gauge", "Replicas that run now."),
    Metric("torchrelay_replicas_wanted", "gauge", "Replicas that there should be."),
)

Sample = tuple[str, tuple[tuple[str, str], ...], float]
_KINDS = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}


class Meters:
    """One process's meters. Cheap enough for the hot path: bound children are kept."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._metrics = {}
        for m in METRICS:
            extra = {"buckets": m.buckets} if m.buckets else {}
            self._metrics[m.name] = _KINDS[m.kind](m.name, m.help, m.labels, registry=self._registry, **extra)
        self._children: dict[tuple[str, ...], Counter | Gauge | Histogram] = {}

    def _child(self, *key: str):
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._metrics[key[0]].labels(*key[1:])
        return child

    def request(self, model: str, version: str, status: str, seconds: float) -> None:
        """A call was answered, ``seconds`` after it came."""
        self._child("torchrelay_requests", model, version, status).inc()
        if version:
            self._child("torchrelay_request_latency_seconds", model, version).observe(seconds)

    def response(self, code: int) -> None:
        """An HTTP answer left."""
        self._child("torchrelay_http_responses", str(code)).inc()

    def batch(self, model: str, version: str, rows: int, seconds: float, waits: Iterable[float]) -> None:
        """A batch of ``rows`` ran for ``seconds``; ``waits`` are its rows' times in the queue."""
        self._child("torchrelay_batch_size", model, version).observe(rows)
        self._child("torchrelay_inference_seconds", model, version).observe(seconds)
        queue = self._child("torchrelay_queue_seconds", model, version)
        for wait in waits:
            queue.observe(wait)

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
        """This process's samples as plain data, for another process to add up."""
        return [
            (sample.name, tuple(sorted(sample.labels.items())), sample.value)
            for family in self._registry.collect()
            for sample in family.samples
            if not sample.name.endswith("_created")
        ]


class Sum:
    """The samples of many processes, added up. What a process that ended had counted stays counted."""

    def __init__(self) -> None:
        self._live: dict[str, list[Sample]] = {}
        self._ended: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def put(self, source: str, samples: list[Sample]) -> None:
        self._live[source] = samples

    def end(self, source: str) -> None:
        """The process behind ``source`` is gone: keep its counts, forget its gauges."""
        gauges = {m.name for m in METRICS if m.kind == "gauge"}
        for name, labels, value in self._live.pop(source, []):
            if name not in gauges:
                self._ended[name, labels] = self._ended.get((name, labels), 0.0) + value

    @property
    def sources(self) -> list[str]:
        return list(self._live)

    def total(self, name: str, **labels: str) -> float:
        """The sum of one metric over the samples that carry ``labels``."""
        wanted = set(labels.items())
        return sum(v for (n, have), v in self._summed().items() if n == name and wanted <= set(have))

    def render(self) -> bytes:
        """The Prometheus text (format 0.0.4) of the sums."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def _summed(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        summed = dict(self._ended)
        for samples in self._live.values():
            for name, labels, value in samples:
                summed[name, labels] = summed.get((name, labels), 0.0) + value
        return summed

    def collect(self) -> Iterator[Family]:
        """prometheus_client's collector protocol."""
        families = {m.name: Family(m.name, m.help, m.kind) for m in METRICS}
        for (name, labels), value in self._summed().items():
            base = name
            for suffix in ("_total", "_bucket", "_count", "_sum"):
                base = base.removesuffix(suffix) if base not in families else base
            families[base].add_sample(name, dict(labels), value)
        yield from families.values()
