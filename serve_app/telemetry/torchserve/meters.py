"""One process's meters for TorchServe's metrics: numbers in memory, or lines on their way to a file.

A meter of the server's is taken once with ``child`` and kept, so an update costs one addition. Those belong
to the event loop; what handlers measure comes from their threads, through ``record``.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from typing import Literal, NamedTuple, Protocol

from handlers.metrics import CachingMetric, MetricCache, MetricTypes, send_to
from serve_app.telemetry.logs import Stamp
from serve_app.telemetry.sink import Drain
from serve_app.telemetry.torchserve.catalogue import DEFAULT, HOSTNAME, OURS, Catalogue, Family, complaint

log = logging.getLogger("torchrelay.metrics")

Mode = Literal["prometheus", "log", "legacy"]
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
LEGACY = ("ts_inference_requests_total", "ts_inference_latency_microseconds", "ts_queue_latency_microseconds")

_MOST = 10_000  # label values of handlers' metrics in one process; more is an id among the dimensions


class Reading(NamedTuple):
    """What one meter says. ``number`` of a histogram: how many values fell into each bucket, and their sum."""

    family: Family
    values: tuple[str, ...]
    number: float | tuple[float, ...]
    time: float = 0.0  # of a gauge, when it was set


class Child(Protocol):
    def record(self, value: float, request_id: str = "") -> None:
        """Count, set or observe ``value``."""


class _Counter:
    __slots__ = ("_family", "_values", "value")

    def __init__(self, family: Family, values: tuple[str, ...]) -> None:
        self._family, self._values = family, values
        self.value = 0.0

    def record(self, value: float, request_id: str = "") -> None:
        if value >= 0:
            self.value += value

    def read(self) -> Reading:
        return Reading(self._family, self._values, self.value)


class _Gauge:
    __slots__ = ("_family", "_values", "_set")

    def __init__(self, family: Family, values: tuple[str, ...]) -> None:
        self._family, self._values = family, values
        self._set = (0.0, 0.0)

    def record(self, value: float, request_id: str = "") -> None:
        self._set = (value, time.time())

    def read(self) -> Reading:
        return Reading(self._family, self._values, *self._set)


class _Histogram:
    __slots__ = ("_counts", "_family", "_sum", "_values")

    def __init__(self, family: Family, values: tuple[str, ...]) -> None:
        self._family, self._values = family, values
        self._counts = [0] * (len(BUCKETS) + 1)
        self._sum = 0.0

    def record(self, value: float, request_id: str = "") -> None:
        self._counts[bisect_left(BUCKETS, value)] += 1
        self._sum += value

    def read(self) -> Reading:
        return Reading(self._family, self._values, (*self._counts, self._sum))


class Lines:
    """A log file of metrics: ``time - Name.Unit:value|#Dimension:value,...|#hostname:h,timestamp:seconds``."""

    def __init__(self, drain: Drain) -> None:
        self._drain = drain
        self._stamp = Stamp()
        self._now = 0, "", ""  # milliseconds, and what stands before and behind in a line of theirs

    def put(self, head: str, value: float, tail: str) -> None:
        now = time.time()
        milliseconds = int(now * 1000)
        known, before, behind = self._now
        if milliseconds != known:  # a request writes several lines at once
            before, behind = f"{self._stamp(now)} - ", f",timestamp:{int(now)}"
            self._now = milliseconds, before, behind
        self._drain.put(f"{before}{head}{value!r}{tail}{behind}")

    def close(self) -> None:
        self._drain.close()


class _Line:
    """Writes each update."""

    __slots__ = ("_head", "_lines", "_tail")

    def __init__(self, lines: Lines, family: Family, values: tuple[str, ...]) -> None:
        pairs = ",".join(f"{name}:{value}" for name, value in zip(family.dimensions[:-1], values))
        self._lines = lines
        self._head = _on_one_line(f"{family.name}.{family.unit}:")
        self._tail = _on_one_line(f"|#{pairs}|#hostname:{values[-1]}")

    def record(self, value: float, request_id: str = "") -> None:
        self._lines.put(self._head, round(float(value), 3), self._tail)


class _RequestLine(_Line):
    """A handler's: it says for which request."""

    __slots__ = ()

    def record(self, value: float, request_id: str = "") -> None:
        self._lines.put(self._head, value, f"{self._tail},requestID:{_on_one_line(request_id) or 'null'}")


class _Nothing:
    """Of a metric that no file declares."""

    __slots__ = ()

    def record(self, value: float, request_id: str = "") -> None:
        pass


_NOTHING = _Nothing()
_METERS = {"counter": _Counter, "gauge": _Gauge, "histogram": _Histogram}


class TorchServeMeters:
    """``server_lines`` and ``model_lines`` take what the mode writes instead of showing it."""

    def __init__(
        self,
        catalogue: Catalogue = DEFAULT,
        mode: Mode = "prometheus",
        auto_detect: bool = False,
        server_lines: Lines | None = None,
        model_lines: Lines | None = None,
    ) -> None:
        self.catalogue = catalogue
        self.hostname = socket.gethostname()
        self._mode = mode
        self._auto_detect = auto_detect
        self._server_lines = server_lines
        self._model_lines = model_lines
        self._lock = threading.Lock()
        self._detected: dict[str, Family] = {}
        self._server: dict[tuple[str, ...], Child] = {}
        self._model: dict[tuple[str, tuple[str, ...]], Child] = {}
        self._told: set[str] = set()

    @property
    def shown(self) -> Iterator[Family]:
        """What stands on the page from the beginning, in this mode: what TorchServe's own page shows then."""
        for family in self.catalogue:
            if family in OURS:
                continue
            if self._mode == "prometheus" or (self._mode == "legacy" and family.name in LEGACY):
                yield family

    def child(self, name: str, *values: str) -> Child:
        """The meter of one of the server's metrics under these dimensions; the host's name is added to them."""
        key = (name, *values)
        with self._lock:
            child = self._server.get(key)
            if child is None:
                child = self._server[key] = self._made(name, (*values, self.hostname))
            return child

    def _made(self, name: str, values: tuple[str, ...]) -> Child:
        family = self.catalogue.server.get(name)
        if family is None:
            return _NOTHING
        if self._mode == "prometheus" or (self._mode == "legacy" and name in LEGACY):
            return _METERS[family.kind](family, values)
        return _NOTHING if self._server_lines is None else _Line(self._server_lines, family, values)

    def cache(self, model: str) -> MetricCache:
        """``context.metrics`` of this process: it begins with what is declared, and its updates come here."""
        cache = MetricCache(model)
        for family in self.catalogue.model.values():
            cache.add_metric_to_cache(family.name, family.unit, list(family.dimensions[:-1]), MetricTypes(family.kind))
        send_to(self.record)
        return cache

    def record(self, metric: CachingMetric, value: float, values: tuple[str, ...], request_id: str) -> None:
        """Take an update of a handler's: handlers.metrics.Sink."""
        child = self._model.get((metric.metric_name, values)) or self._adopt(metric, values)
        with self._lock:
            child.record(value, request_id)

    def _adopt(self, metric: CachingMetric, values: tuple[str, ...]) -> Child:
        """The meter of dimensions that were not seen before; one that records nothing where they cannot be taken."""
        name = metric.metric_name
        with self._lock:
            family = self.catalogue.model.get(name) or self._detected.get(name) or self._detect(metric)
            if family is None:
                return _NOTHING
            if len(family.dimensions) != len(values) + 1:
                wanted = ", ".join(family.dimensions[:-1])
                return self._drop(name, f"its dimensions are {wanted}, and it came with {len(values)} values")
            room = len(self._model) < _MOST
            if self._mode == "prometheus" and not room:
                return self._drop(name, f"{_MOST} combinations of dimensions are counted already; it takes fewer")
            child = self._made_of(family, (*values, self.hostname))
            if room:
                self._model[name, values] = child
            return child

    def _detect(self, metric: CachingMetric) -> Family | None:
        name, dimensions = metric.metric_name, (*metric.dimension_names, HOSTNAME)
        why = complaint(name, dimensions) if self._mode == "prometheus" else ""
        if name in self.catalogue.server:
            why = "the server has a metric of this name"
        if not self._auto_detect:
            cure = "declare it in telemetry.metrics_config, or set telemetry.model_metrics_auto_detect"
            why = f"no file declares it; {cure}"
        if why:
            self._drop(name, why)
            return None
        family = self._detected[name] = Family(name, metric.metric_type.value, str(metric.unit), dimensions)
        return family

    def _made_of(self, family: Family, values: tuple[str, ...]) -> Child:
        if self._mode == "prometheus":
            return _METERS[family.kind](family, values)
        return _NOTHING if self._model_lines is None else _RequestLine(self._model_lines, family, values)

    def _drop(self, name: str, why: str) -> Child:
        if name not in self._told:
            self._told.add(name)
            log.warning("the metric %s is dropped: %s", name, why)
        return _NOTHING

    def readings(self) -> list[Reading]:
        """What every meter says now; a gauge that nobody has set says nothing."""
        with self._lock:
            children = [*self._server.values(), *self._model.values()]
            readings = [child.read() for child in children if isinstance(child, (_Counter, _Gauge, _Histogram))]
        return [reading for reading in readings if reading.time or reading.family.kind != "gauge"]

    def close(self) -> None:
        """Write what is left."""
        for lines in (self._server_lines, self._model_lines):
            if lines is not None:
                lines.close()


def _on_one_line(text: str) -> str:
    return text if text.isprintable() else text.encode("unicode_escape").decode()
