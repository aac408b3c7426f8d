"""Rates and latencies of a server's versions, computed from two of its metrics pages."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass, field

from serve_app.client.prometheus_text import Sample, percentile, quantile

_LATENCY = "torchrelay_request_latency_seconds"
_STEP = "torchrelay_workflow_step_seconds"
METRIC_NAMES = (  # the metrics of a page that are read
    *(f"{name}_{part}" for name in (_LATENCY, _STEP) for part in ("bucket", "recent")),
    "torchrelay_requests_total",
    "torchrelay_cache_requests_total",
    "torchrelay_queue_depth",
    "torchrelay_replicas",
    "torchrelay_replicas_desired",
    "MemoryUsed",
    "MemoryUtilization",
    "CPUUtilization",
    "GPUUtilization",
    "GPUMemoryUtilization",
    "GPUMemoryUsed",
)
_WINDOW_S = 10.0  # over which rates and latencies are computed
_MAX_EXACT = 100  # values of a window, of which percentiles are exact
_MAX_POINTS = 300

Version = tuple[str, str]  # model and version
Key = tuple[str, ...]


@dataclass
class VersionFigures:
    """The figures of a version, or of the whole server; None where there were no requests."""

    rate: float = 0.0  # requests a second
    error_rate: float = 0.0  # failed requests a second
    p50: float | None = None  # seconds
    p99: float | None = None
    queue: float = 0.0
    replicas: float = 0.0
    desired: float = 0.0
    cache_hit_ratio: float | None = None  # of the requests to the response cache


@dataclass
class _Counters:
    """The counters of one metrics page."""

    time: float
    requests: dict[tuple[str, str, str], float] = field(default_factory=dict)  # version and status
    cached: dict[tuple[str, str, str], float] = field(default_factory=dict)  # version and outcome
    buckets: dict[Key, dict[float, float]] = field(default_factory=dict)
    recent: dict[Key, str] = field(default_factory=dict)  # the latest values, the oldest first
    counted_since: float = 0.0  # the server's time; 0 where no histogram has a value


class MetricsWindow:
    """The figures of one server over the last seconds, from the metrics pages that are added.

    Percentiles of up to 100 requests are exact: the nearest rank of the latencies themselves, which the page
    has. Those of more are interpolated in the histogram.
    """

    def __init__(self) -> None:
        self._pages: deque[_Counters] = deque()
        self.versions: dict[Version, VersionFigures] = {}
        self.total = VersionFigures()
        self.gauges: dict[str, list[Sample]] = {}
        self.history: deque[tuple[float, VersionFigures]] = deque(maxlen=_MAX_POINTS)
        self.version_history: dict[Version, deque[tuple[float, VersionFigures]]] = {}

    def step_latency(self, workflow: str, version: str, step: str, q: float) -> float | None:
        """Return a quantile of a workflow's step in seconds, since the first page that was read."""
        return self._quantile([(_STEP, workflow, version, step)], q, self._pages[0] if self._pages else None)

    def add(self, samples: dict[str, list[Sample]]) -> None:
        """Add the samples of a page, whose metrics are ``METRIC_NAMES``, and compute the figures anew."""
        counters = _Counters(time.monotonic())
        for sample in samples.pop("torchrelay_requests_total", []):
            labels = sample.labels
            key = labels.get("model", ""), labels.get("version", ""), labels.get("status", "")
            counters.requests[key] = counters.requests.get(key, 0.0) + sample.value
        for labels, value in samples.pop("torchrelay_cache_requests_total", []):
            counters.cached[labels["model"], labels["version"], labels["outcome"]] = value
        for name in (_LATENCY, _STEP):
            for sample in samples.pop(f"{name}_bucket", []):
                where = _key(name, sample)
                counters.buckets.setdefault(where, {})[float(sample.labels["le"])] = sample.value
            for sample in samples.pop(f"{name}_recent", []):
                counters.recent[_key(name, sample)] = sample.labels["values"]
                counters.counted_since = sample.value
        self.gauges = samples
        if self._pages and 0 < self._pages[-1].counted_since != counters.counted_since:
            self._pages.clear()  # a new Management counts from zero
        self._pages.append(counters)
        while len(self._pages) > 2 and counters.time - self._pages[1].time >= _WINDOW_S:
            self._pages.popleft()
        self._compute()

    def _compute(self) -> None:
        before, now = self._pages[0], self._pages[-1]
        seconds = now.time - before.time
        figures: dict[Version, VersionFigures] = defaultdict(VersionFigures)
        for (model, version, status), count in now.requests.items():
            each = figures[model, version]
            if seconds > 0:
                change = max(0.0, count - before.requests.get((model, version, status), 0.0)) / seconds
                each.rate += change
                each.error_rate += change if status != "ok" else 0.0
        for name, attribute in (
            ("torchrelay_queue_depth", "queue"),
            ("torchrelay_replicas", "replicas"),
            ("torchrelay_replicas_desired", "desired"),
        ):
            for labels, value in self.gauges.get(name, []):
                setattr(figures[labels["model"], labels["version"]], attribute, value)
        for (model, version), each in figures.items():
            where = [(_LATENCY, model, version)]
            each.p50, each.p99 = (self._quantile(where, q, before) for q in (0.5, 0.99))
            earlier = before.cached if before is not now else {}
            hits, misses = (
                max(0.0, now.cached.get(key, 0.0) - earlier.get(key, 0.0))  # a new server counts from zero
                for key in ((model, version, "hit"), (model, version, "miss"))
            )
            each.cache_hit_ratio = hits / (hits + misses) if hits + misses > 0 else None
        self.versions = dict(figures)
        self.total = self._sum(before)
        stamp = time.time()
        self.history.append((stamp, self.total))
        for key, each in figures.items():
            self.version_history.setdefault(key, deque(maxlen=_MAX_POINTS)).append((stamp, each))
        for removed in self.version_history.keys() - figures.keys():
            del self.version_history[removed]

    def _sum(self, before: _Counters) -> VersionFigures:
        every = [key for key in self._pages[-1].buckets if key[0] == _LATENCY]
        total = VersionFigures(
            p50=self._quantile(every, 0.5, before), p99=self._quantile(every, 0.99, before)
        )
        for each in self.versions.values():
            total.rate += each.rate
            total.error_rate += each.error_rate
            total.queue += each.queue
            total.replicas += each.replicas
            total.desired += each.desired
        return total

    def _quantile(self, keys: Collection[Key], q: float, before: _Counters | None) -> float | None:
        """Return a quantile of the values that several histograms received since ``before``."""
        if not self._pages:
            return None
        changes: dict[float, float] = defaultdict(float)
        now = self._pages[-1]
        earlier = _Counters(0.0) if before is None or before is now else before
        recent: list[float] = []
        for key in keys:
            counts, buckets = earlier.buckets.get(key, {}), now.buckets.get(key, {})
            for bound, count in buckets.items():
                changes[bound] += max(0.0, count - counts.get(bound, 0.0))
            new = int(buckets.get(math.inf, 0.0) - counts.get(math.inf, 0.0))
            if 0 < new <= _MAX_EXACT and len(recent) < _MAX_EXACT:
                recent += map(float, now.recent.get(key, "").split()[-new:])
        if 0 < len(recent) == changes[math.inf] <= _MAX_EXACT:
            return percentile(sorted(recent), q)
        return quantile(changes.items(), q)


def _key(name: str, sample: Sample) -> Key:
    """Return the key of a histogram's sample."""
    labels = sample.labels
    return (name, labels["model"], labels["version"], *([labels["step"]] if name == _STEP else []))
