"""The sums of many processes' metrics, and their pages in Prometheus' text format."""

from __future__ import annotations

import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric as Metrics

from serve_app.domain.model import VersionStats
from serve_app.telemetry.metric_definitions import METRICS
from serve_app.telemetry.metrics import (
    MAX_RECENT,
    BatchStats,
    InstrumentKey,
    MetricsReport,
    Number,
    ReportedValues,
    VersionKey,
    add_numbers,
    count_and_sum,
    list_sample_names,
    to_samples,
)
from serve_app.telemetry.torchserve.catalog import MetricFamily
from serve_app.telemetry.torchserve.exposition import MetricsPage

_GAUGES = {metric.name for metric in METRICS if metric.kind == "gauge"}
# Values of ended processes that are kept apart, about 500 bytes each: a process that was only cut off may
# report again.
_MAX_APART = 20_000
_RECENT = "_recent"  # the suffix of the latest values; only requests that name them receive them
_LABELS = {metric.name: metric.labels for metric in METRICS}


# The histograms of which the statistics of versions are made, with the names of their count and sum there.
_STATS = {
    "torchrelay_request_latency_seconds": ("", "seconds"),
    "torchrelay_batch_size": ("", "rows"),
    "torchrelay_queue_seconds": ("", "queue_seconds"),
    "torchrelay_inference_seconds": ("batches", "inference_seconds"),
}


class MetricsAggregator:
    """The sums of many processes' reports; the counts of ended processes are kept.

    Reports are cumulative. The values of a process that ended or fell silent are therefore kept apart from
    those of others, so that its next report replaces them instead of being added. ``initial`` are
    TorchServe's metrics that are rendered before their first update.
    """

    def __init__(self, initial: Iterable[MetricFamily] = (), max_apart: int = _MAX_APART) -> None:
        self._live: dict[str, ReportedValues] = {}
        self._silent: dict[str, ReportedValues] = {}  # processes that may run and report again
        self._gone: dict[str, ReportedValues] = {}  # the latest ended processes, the oldest first
        self._max_apart = max_apart
        # Of earlier ended processes.
        self._ended: dict[InstrumentKey, Number] = {}
        self._ended_batches: dict[VersionKey, BatchStats] = {}
        self._recent: defaultdict[InstrumentKey, array[float]] = defaultdict(lambda: array("d"))
        self._created_at = time.time()
        self._page = MetricsPage(initial)

    def put(self, source: str, report: MetricsReport) -> bool:
        """Take over a report; return False where an earlier one is missing, so that a full one is needed."""
        reported = self._find(source) or ReportedValues()
        new = {key: reported.count_new(key, report.values[key]) for key in report.recent}
        if not reported.apply(report):
            return False
        self._silent.pop(source, None)
        self._gone.pop(source, None)
        self._live[source] = reported
        for key, values in report.recent.items():
            if new[key] > 0:  # a full report contains known values
                recent = self._recent[key]
                recent.extend(values[-new[key] :])
                del recent[:-MAX_RECENT]
        return True

    def suspend(self, source: str) -> None:
        """Keep the counts of a process that has fallen silent, and hide its gauges until it reports again.

        The caller calls ``end`` once the process is known to have ended: until then its values take memory.
        """
        if (reported := self._live.pop(source, None)) is not None:
            self._silent[source] = reported

    def end(self, source: str) -> None:
        """Keep the counts of the ended process ``source``, and remove its gauges."""
        reported = self._live.pop(source, None) or self._silent.pop(source, None)
        if reported is None:
            return
        self._gone[source] = reported
        excess = sum(len(kept.values) for kept in self._gone.values()) - self._max_apart
        while excess > 0:
            oldest = self._gone.pop(next(iter(self._gone)))
            excess -= len(oldest.values)
            _add_values(self._ended, _counts_of(oldest))
            _add_batches(self._ended_batches, oldest.batches)
            self._page.keep_counts(oldest.samples.values())

    def _find(self, source: str) -> ReportedValues | None:
        return self._live.get(source) or self._silent.get(source) or self._gone.get(source)

    @property
    def _apart(self) -> list[ReportedValues]:
        """The reports whose counts are valid, but not their gauges."""
        return [*self._silent.values(), *self._gone.values()]

    @property
    def sources(self) -> list[str]:
        return list(self._live)

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of one of Torchrelay's own counters or gauges over the values with ``labels``."""
        positions = [(_LABELS[name].index(label) + 1, value) for label, value in labels.items()]
        live = (reported.values for reported in self._live.values())
        apart = (dict(_counts_of(reported)) for reported in self._apart)
        total: Number = 0.0
        for values in (self._ended, *live, *apart):
            for key, number in values.items():
                if key[0] == name and all(key[position] == value for position, value in positions):
                    total = add_numbers(total, number)
        assert not isinstance(total, tuple)
        return total

    def value_of(self, source: str, name: str, *labels: str) -> float | None:
        """Return what one process has reported of a counter or gauge; None where it has not."""
        reported = self._live.get(source)
        value = None if reported is None else reported.values.get((name, *labels))
        assert not isinstance(value, tuple)
        return value

    def version_stats(self) -> list[VersionStats]:
        """Return the statistics of every version with a completed or refused request, sorted by name."""
        sums: defaultdict[VersionKey, defaultdict[str, float]] = defaultdict(partial(defaultdict, float))
        for (name, *labels), number in self._sums().items():
            if name == "torchrelay_requests" and labels[1]:
                assert not isinstance(number, tuple)
                sums[labels[0], labels[1]]["answered" if labels[2] == "ok" else "failed"] += number
            elif name == "torchrelay_cache_requests":
                assert not isinstance(number, tuple)
                sums[labels[0], labels[1]][f"cache_{labels[2]}"] += number
            elif name in _STATS:
                version_sums = sums[labels[0], labels[1]]
                for field, value in zip(_STATS[name], count_and_sum(number)):
                    version_sums[field] += value
        batch_stats: dict[VersionKey, BatchStats] = {}
        reports = (*self._live.values(), *self._apart)
        for batches in (self._ended_batches, *(reported.batches for reported in reports)):
            _add_batches(batch_stats, batches)
        no_batches = BatchStats()
        return [
            VersionStats(
                *version,
                int(version_sums["answered"]),
                int(version_sums["failed"]),
                version_sums["seconds"],
                int(version_sums["rows"]),
                version_sums["queue_seconds"],
                int(version_sums["batches"]),
                version_sums["inference_seconds"],
                batch_stats.get(version, no_batches).last,
                tuple(
                    (rows, *totals)
                    for rows, totals in sorted(batch_stats.get(version, no_batches).sizes.items())
                ),
                int(version_sums["cache_hit"]),
                int(version_sums["cache_miss"]),
            )
            for version, version_sums in sorted(sums.items())
        ]

    def render(self, names: Collection[str] | None = None) -> bytes:
        """Return the sums in Prometheus' text format 0.0.4; with ``names`` only these samples."""
        return self.prepare_page(names)()

    def prepare_page(self, names: Collection[str] | None = None) -> Callable[[], bytes]:
        """Return a function that renders the present sums as ``render`` does, in any thread.

        The page of 1,000 versions takes 0.8 s.
        """
        sums = self._sums()
        recent = {
            key: values[:] for key, values in self._recent.items() if names and key[0] + _RECENT in names
        }
        live = (sample for reported in self._live.values() for sample in reported.samples.values())
        apart = (sample for reported in self._apart for sample in reported.samples.values())
        counts = (sample for sample in apart if sample.family.kind != "gauge")
        torchserve_page = self._page.prepare(chain(live, counts), names)

        def render() -> bytes:
            registry = CollectorRegistry(auto_describe=False)
            families = [*_families(sums, names), *_recent_families(recent, self._created_at)]
            registry.register(_MetricCollector(families))
            return torchserve_page().encode() + generate_latest(registry)

        return render

    def _sums(self) -> dict[InstrumentKey, Number]:
        sums = dict(self._ended)
        for reported in self._live.values():
            _add_values(sums, reported.values.items())
        for reported in self._apart:
            _add_values(sums, _counts_of(reported))
        return sums


def _families(sums: Mapping[InstrumentKey, Number], names: Collection[str] | None) -> Iterator[Metrics]:
    """Return the metrics with their samples; with ``names``, those that have samples of these names."""
    values: defaultdict[str, list[tuple[list[str], Number]]] = defaultdict(list)
    for (name, *label_values), number in sums.items():
        values[name].append((label_values, number))
    for metric in METRICS:
        if names is not None and not any(name in names for name in list_sample_names(metric)):
            continue
        family = Metrics(metric.name, metric.help, metric.kind)
        for label_values, number in values[metric.name]:
            for sample, labels, value in to_samples(metric, label_values, number):
                if names is None or sample in names:
                    family.add_sample(sample, dict(labels), value)
        if names is None or family.samples:
            yield family


def _recent_families(recent: Mapping[InstrumentKey, array[float]], created_at: float) -> Iterator[Metrics]:
    """Return the latest values of histograms, each histogram's in one label: the oldest first.

    They are those that the histogram received last from all processes, so that of two pages with the same
    ``created_at`` the difference of their counts is the number of values that are new on the second.
    """
    for metric in METRICS:
        family = Metrics(metric.name + _RECENT, f"The latest values. {metric.help}", "gauge")
        for (name, *labels), values in recent.items():
            if name == metric.name:
                text = " ".join([f"{value:.9g}" for value in values])
                family.add_sample(
                    family.name, {**dict(zip(metric.labels, labels, strict=True)), "values": text}, created_at
                )
        if family.samples:
            yield family


def _counts_of(reported: ReportedValues) -> Iterator[tuple[InstrumentKey, Number]]:
    """Return the values of a process without its gauges."""
    return ((key, number) for key, number in reported.values.items() if key[0] not in _GAUGES)


def _add_values(totals: dict[InstrumentKey, Number], values: Iterable[tuple[InstrumentKey, Number]]) -> None:
    for key, number in values:
        known = totals.get(key)
        totals[key] = number if known is None else add_numbers(known, number)


def _add_batches(totals: dict[VersionKey, BatchStats], others: Mapping[VersionKey, BatchStats]) -> None:
    for version, batches in others.items():
        totals.setdefault(version, BatchStats()).add(batches)


class _MetricCollector:
    """prometheus_client's collector protocol."""

    def __init__(self, families: list[Metrics]) -> None:
        self._families = families

    def collect(self) -> list[Metrics]:
        return self._families
