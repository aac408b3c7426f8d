"""Recorders of TorchServe's metrics in a process: numbers in memory, or lines of a file.

Callers look up a recorder of the server's metrics once with ``child`` and keep it, so an update costs one
addition. These recorders belong to the event loop; handlers' metrics are recorded by their threads, through
``record``.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from handlers.metrics import CachingMetric, MetricCache, MetricTypes, set_sink
from serve_app.telemetry.log_writer import AsyncWriter
from serve_app.telemetry.logs import TimestampFormatter
from serve_app.telemetry.torchserve.catalog import (
    BUILT_IN,
    DEFAULT,
    HOSTNAME,
    MetricCatalog,
    MetricFamily,
    validation_error,
)

log = logging.getLogger(__name__)

Mode = Literal["prometheus", "log", "legacy"]
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
LEGACY = ("ts_inference_requests_total", "ts_inference_latency_microseconds", "ts_queue_latency_microseconds")

# Combinations of label values of handlers' metrics in one process; more means an id among the dimensions.
_MAX_LABEL_SETS = 10_000


class RecorderSample(NamedTuple):
    """The value of a recorder; of a histogram ``number`` has the count of each bucket, and the sum."""

    family: MetricFamily
    values: tuple[str, ...]
    number: float | tuple[float, ...]
    time: float = 0.0  # of a gauge, when it was set


class LabeledRecorder(Protocol):
    def record(self, value: float, request_id: str = "") -> None:
        """Count, set or observe ``value``."""


@dataclass(slots=True)
class _Counter:
    family: MetricFamily
    values: tuple[str, ...]
    value: float = 0.0

    def record(self, value: float, request_id: str = "") -> None:
        if value >= 0:
            self.value += value

    def read(self) -> RecorderSample:
        return RecorderSample(self.family, self.values, self.value)


@dataclass(slots=True)
class _Gauge:
    family: MetricFamily
    values: tuple[str, ...]
    value_and_time: tuple[float, float] = (0.0, 0.0)

    def record(self, value: float, request_id: str = "") -> None:
        self.value_and_time = (value, time.time())

    def read(self) -> RecorderSample:
        return RecorderSample(self.family, self.values, *self.value_and_time)


@dataclass(slots=True)
class _Histogram:
    family: MetricFamily
    values: tuple[str, ...]
    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    sum: float = 0.0

    def record(self, value: float, request_id: str = "") -> None:
        self.counts[bisect_left(BUCKETS, value)] += 1
        self.sum += value

    def read(self) -> RecorderSample:
        return RecorderSample(self.family, self.values, (*self.counts, self.sum))


class MetricsLog:
    """A log file: ``time - Name.Unit:value|#Dimension:value,...|#hostname:h,timestamp:seconds``."""

    def __init__(self, writer: AsyncWriter) -> None:
        self._writer = writer
        self._timestamp = TimestampFormatter()
        self._now = 0, "", ""  # milliseconds, and the prefix and suffix of lines of that time

    def put(self, head: str, value: float, tail: str) -> None:
        now = time.time()
        milliseconds = int(now * 1000)
        cached_time, prefix, suffix = self._now
        if milliseconds != cached_time:  # a request writes several lines at once
            prefix, suffix = f"{self._timestamp(now)} - ", f",timestamp:{int(now)}"
            self._now = milliseconds, prefix, suffix
        self._writer.put(f"{prefix}{head}{value!r}{tail}{suffix}")

    def close(self) -> None:
        self._writer.close()


class _LineRecorder:
    """A recorder that writes a line for each update."""

    __slots__ = ("_head", "_lines", "_tail")

    def __init__(self, lines: MetricsLog, family: MetricFamily, values: tuple[str, ...]) -> None:
        pairs = ",".join(f"{name}:{value}" for name, value in zip(family.dimensions[:-1], values))
        self._lines = lines
        self._head = _escape_line(f"{family.name}.{family.unit}:")
        self._tail = _escape_line(f"|#{pairs}|#hostname:{values[-1]}")

    def record(self, value: float, request_id: str = "") -> None:
        self._lines.put(self._head, round(float(value), 3), self._tail)


class _RequestLineRecorder(_LineRecorder):
    """A recorder of a handler's metric, whose lines have the request id."""

    __slots__ = ()

    def record(self, value: float, request_id: str = "") -> None:
        self._lines.put(self._head, value, f"{self._tail},requestID:{_escape_line(request_id) or 'null'}")


class _NoOpRecorder:
    """A recorder of an undeclared metric."""

    __slots__ = ()

    def record(self, value: float, request_id: str = "") -> None:
        pass


_NO_OP = _NoOpRecorder()
_RECORDERS: dict[str, type[_Counter] | type[_Gauge] | type[_Histogram]] = {
    "counter": _Counter,
    "gauge": _Gauge,
    "histogram": _Histogram,
}


class TorchServeRecorders:
    """All recorders of a process; ``server_lines`` and ``model_lines`` are the log files of other modes."""

    def __init__(
        self,
        catalog: MetricCatalog = DEFAULT,
        mode: Mode = "prometheus",
        auto_detect: bool = False,
        server_lines: MetricsLog | None = None,
        model_lines: MetricsLog | None = None,
    ) -> None:
        self.catalog = catalog
        self.hostname = socket.gethostname()
        self._mode = mode
        self._auto_detect = auto_detect
        self._server_lines = server_lines
        self._model_lines = model_lines
        self._lock = threading.Lock()
        self._detected: dict[str, MetricFamily] = {}
        self._server: dict[tuple[str, ...], LabeledRecorder] = {}
        self._model: dict[tuple[str, tuple[str, ...]], LabeledRecorder] = {}
        self._warned: set[str] = set()

    @property
    def initial(self) -> list[MetricFamily]:
        """The metrics that are rendered before their first update in this mode, as by TorchServe."""
        return [f for f in self.catalog if f not in BUILT_IN and self._is_rendered(f.name)]

    def _is_rendered(self, name: str) -> bool:
        """Return whether this mode renders the metric as a page, instead of lines of a file."""
        return self._mode == "prometheus" or (self._mode == "legacy" and name in LEGACY)

    def child(self, name: str, *values: str) -> LabeledRecorder:
        """Return the recorder of a server metric with these label values; the host's name is added."""
        key = (name, *values)
        with self._lock:
            child = self._server.get(key)
            if child is None:
                family = self.catalog.server.get(name)
                child = self._server[key] = (
                    self._create_recorder(family, values, self._server_lines, _LineRecorder)
                    if family is not None
                    else _NO_OP
                )
            return child

    def _create_recorder(
        self,
        family: MetricFamily,
        values: tuple[str, ...],
        lines: MetricsLog | None,
        line_recorder: type[_LineRecorder],
    ) -> LabeledRecorder:
        values = (*values, self.hostname)
        if self._is_rendered(family.name):
            return _RECORDERS[family.kind](family, values)
        return _NO_OP if lines is None else line_recorder(lines, family, values)

    def cache(self, model: str) -> MetricCache:
        """Return ``context.metrics`` of this process with the declared metrics; it records updates here."""
        cache = MetricCache(model)
        for family in self.catalog.model.values():
            cache.add_metric_to_cache(
                family.name, family.unit, list(family.dimensions[:-1]), MetricTypes(family.kind)
            )
        set_sink(self.record)
        return cache

    def record(self, metric: CachingMetric, value: float, values: tuple[str, ...], request_id: str) -> None:
        """Record an update of a handler's metric: handlers.metrics.Sink."""
        child = self._model.get((metric.metric_name, values)) or self._add_labels(metric, values)
        with self._lock:
            child.record(value, request_id)

    def _add_labels(self, metric: CachingMetric, values: tuple[str, ...]) -> LabeledRecorder:
        """Return a recorder for new label values; a no-op where they are not accepted."""
        name = metric.metric_name
        with self._lock:
            family = self.catalog.model.get(name) or self._detected.get(name) or self._detect(metric)
            if family is None:
                return _NO_OP
            if len(family.dimensions) != len(values) + 1:
                dimensions = ", ".join(family.dimensions[:-1])
                return self._drop(name, f"its dimensions are {dimensions}, and it has {len(values)} values")
            has_room = len(self._model) < _MAX_LABEL_SETS
            if self._mode == "prometheus" and not has_room:
                return self._drop(
                    name, f"{_MAX_LABEL_SETS} combinations of dimensions exist already; use fewer"
                )
            child = self._create_recorder(family, values, self._model_lines, _RequestLineRecorder)
            if has_room:
                self._model[name, values] = child
            return child

    def _detect(self, metric: CachingMetric) -> MetricFamily | None:
        name, dimensions = metric.metric_name, (*metric.dimension_names, HOSTNAME)
        reason = validation_error(name, dimensions) if self._mode == "prometheus" else ""
        if name in self.catalog.server:
            reason = "the server has a metric of this name"
        if not self._auto_detect:
            remedy = "declare it in telemetry.metrics_config, or set telemetry.model_metrics_auto_detect"
            reason = f"no file declares it; {remedy}"
        if reason:
            self._drop(name, reason)
            return None
        family = self._detected[name] = MetricFamily(
            name, metric.metric_type.value, str(metric.unit), dimensions
        )
        return family

    def _drop(self, name: str, reason: str) -> LabeledRecorder:
        if name not in self._warned:
            self._warned.add(name)
            log.warning("the metric %s is dropped: %s", name, reason)
        return _NO_OP

    def samples(self) -> list[RecorderSample]:
        """Return the value of every recorder, except of gauges that have not been set."""
        with self._lock:
            children = [*self._server.values(), *self._model.values()]
            samples = [
                child.read() for child in children if isinstance(child, (_Counter, _Gauge, _Histogram))
            ]
        return [sample for sample in samples if sample.time or sample.family.kind != "gauge"]

    def close(self) -> None:
        """Write the remaining lines."""
        for lines in (self._server_lines, self._model_lines):
            if lines is not None:
                lines.close()


def _escape_line(text: str) -> str:
    return text if text.isprintable() else text.encode("unicode_escape").decode()
