"""Rates and latencies of a server's versions, from its metrics page, while somebody looks at them."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from serve_app.client import AsyncClient
from serve_app.console.prometheus_text import Sample, parse, quantile

_LATENCY = "torchrelay_request_latency_seconds"
_STEP = "torchrelay_workflow_step_seconds"
_NAMES = (
    f"{_LATENCY}_bucket",
    f"{_STEP}_bucket",
    "torchrelay_requests_total",
    "torchrelay_queue_depth",
    "torchrelay_replicas",
    "torchrelay_replicas_desired",
    "MemoryUsed",
    "MemoryUtilization",
    "CPUUtilization",
    "GPUUtilization",
    "GPUMemoryUtilization",
)
_WINDOW_S = 10.0  # over which rates and latencies are computed
_MAX_POINTS = 300
_SHARE_OF_TIME = 0.2  # the parser may take this part of the time

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


@dataclass
class _Counters:
    """The counters of one metrics page."""

    time: float
    requests: dict[tuple[str, str, str], float] = field(default_factory=dict)  # version and status
    buckets: dict[Key, dict[float, float]] = field(default_factory=dict)


class LiveMetrics:
    """The metrics of one server for one client; ``refresh`` is called by every page that shows them."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._pages: deque[_Counters] = deque()
        self._lock = asyncio.Lock()
        self._next = 0.0
        self.versions: dict[Version, VersionFigures] = {}
        self.total = VersionFigures()
        self.gauges: dict[str, list[Sample]] = {}
        self.history: deque[tuple[float, VersionFigures]] = deque(maxlen=_MAX_POINTS)
        self.version_history: dict[Version, deque[tuple[float, VersionFigures]]] = {}

    async def refresh(self, interval: float = 2.0) -> None:
        """Read the metrics page, unless another caller did less than ``interval`` seconds ago.

        Raises ServerError and TransportError.
        """
        async with self._lock:
            started = time.monotonic()
            if started < self._next:
                return
            page = await self._client.metrics(*_NAMES)
            fetched = time.monotonic()
            samples = await asyncio.to_thread(parse, page)
            self._add(samples)
            parsing = time.monotonic() - fetched
            self._next = started + max(interval * 0.9, parsing / _SHARE_OF_TIME)

    def step_latency(self, workflow: str, version: str, step: str, q: float) -> float | None:
        """Return a quantile of a workflow's step in seconds, since the first page that was read."""
        return self._quantile([(_STEP, workflow, version, step)], q, self._pages[0] if self._pages else None)

    def _add(self, samples: dict[str, list[Sample]]) -> None:
        counters = _Counters(time.monotonic())
        for sample in samples.pop("torchrelay_requests_total", []):
            labels = sample.labels
            key = labels.get("model", ""), labels.get("version", ""), labels.get("status", "")
            counters.requests[key] = counters.requests.get(key, 0.0) + sample.value
        for name in (_LATENCY, _STEP):
            for sample in samples.pop(f"{name}_bucket", []):
                labels = sample.labels
                where = (
                    name,
                    labels["model"],
                    labels["version"],
                    *([labels["step"]] if name == _STEP else []),
                )
                counters.buckets.setdefault(where, {})[float(labels["le"])] = sample.value
        self.gauges = samples
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

    def _quantile(self, keys: Iterable[Key], q: float, before: _Counters | None) -> float | None:
        """Return a quantile of the values that several histograms received since ``before``."""
        if not self._pages:
            return None
        changes: dict[float, float] = defaultdict(float)
        for key in keys:
            earlier = (
                before.buckets.get(key, {}) if before is not None and before is not self._pages[-1] else {}
            )
            for bound, count in self._pages[-1].buckets.get(key, {}).items():
                changes[bound] += max(0.0, count - earlier.get(bound, 0.0))
        return quantile(changes.items(), q)
