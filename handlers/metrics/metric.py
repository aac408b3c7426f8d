"""The metrics of a model: ``context.metrics``, which creates them by kind and name, and the sink of updates.

A process holds one model, so there is one sink.
"""

from __future__ import annotations

import abc
import contextlib
import enum
import logging
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

# (metric, value, its dimensions' values, request id or ""); called in the thread of the update.
Sink = Callable[["CachingMetric", float, tuple[str, ...], str], None]

# The last updates of a process without a server: a handler in a script, or in a test.
updates: deque[tuple[CachingMetric, float, tuple[str, ...], str]] = deque(maxlen=1000)


def buffer_update(metric: CachingMetric, value: float, values: tuple[str, ...], request_id: str) -> None:
    """Append an update to ``updates``; this is the sink until ``set_sink`` replaces it."""
    updates.append((metric, value, values, request_id))


def discard(metric: CachingMetric, value: float, values: tuple[str, ...], request_id: str) -> None:
    """Ignore an update."""


_sink: Sink = buffer_update


def set_sink(sink: Sink) -> None:
    """Send every further update of this process to ``sink``, which must be fast and thread-safe."""
    global _sink
    _sink = sink


@contextlib.contextmanager
def suppress_updates() -> Iterator[None]:
    """Discard all updates until the end of the block."""
    sink = _sink
    set_sink(discard)
    try:
        yield
    finally:
        set_sink(sink)


class Dimension:
    """A name and its value; as text ``name:value``."""

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.value = value

    def __str__(self) -> str:
        return f"{self.name}:{self.value}"

    def __repr__(self) -> str:
        return f"Dimension({self.name!r}, {self.value!r})"

    def to_dict(self) -> dict[str, Any]:
        return {"Name": self.name, "Value": self.value}


UNITS: dict[str | None, str] = {
    "ms": "Milliseconds",
    "s": "Seconds",
    "percent": "Percent",
    "count": "Count",
    "MB": "Megabytes",
    "GB": "Gigabytes",
    "kB": "Kilobytes",
    "B": "Bytes",
    "": "unit",
    None: "unit",
}


class Units:
    """The table ``units`` from short to long names; any other unit is reported as given."""

    def __init__(self) -> None:
        self.units = dict(UNITS)


class MetricTypes(enum.Enum):
    """The kind of a metric: a counter adds up, a gauge holds its last value, a histogram counts values by
    size.
    """

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"

    __hash__ = object.__hash__  # Enum's is a function in Python, called for each batch


logger = logging.getLogger(__name__)


class MetricAbstract(abc.ABC):
    """The interface of a metric; ``unit`` is the long name of a known short one, else as it was given."""

    def __init__(
        self,
        metric_name: str,
        unit: str | None,
        dimension_names: list[str] | None = None,
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> None:
        self.metric_name = metric_name
        self.unit = UNITS.get(unit, unit)
        self.dimension_names = list(dimension_names or ())
        self.metric_type = metric_type

    @abc.abstractmethod
    def add_or_update(self, value: float, dimension_values: Sequence[Any], request_id: str = "") -> None:
        """Record ``value`` for these values of the metric's dimensions."""


class CachingMetric(MetricAbstract):
    """A metric that is created once and updated for every batch."""

    _has_logged_error = False

    def add_or_update(self, value: float, dimension_values: Sequence[Any] = (), request_id: str = "") -> None:
        """Add ``value`` to a counter or histogram, or set a gauge to it.

        An invalid update is ignored and logged the first time, so that no prediction fails because of it. It
        is invalid where the values do not match the dimensions, a counter would decrease, or the value is not
        a number.
        """
        try:
            number = float(value)
            if dimension_values is None or len(dimension_values) != len(self.dimension_names):
                raise ValueError(f"the dimensions are {self.dimension_names}, the values {dimension_values}")
            if number < 0 and self.metric_type is MetricTypes.COUNTER:
                raise ValueError("a counter cannot go down")
        except (TypeError, ValueError) as error:
            if not self._has_logged_error:
                self._has_logged_error = True
                logger.error("the metric %s was not updated with %r: %s", self.metric_name, value, error)
            return
        _sink(self, number, tuple(map(str, dimension_values)), request_id or "")

    def update(self, value: float, request_id: str = "", dimensions: Iterable[Dimension] = ()) -> None:
        """Record ``value`` for other dimensions, which replace the metric's own."""
        dimensions = list(dimensions)
        self.dimension_names = [dimension.name for dimension in dimensions]
        self.add_or_update(value, [dimension.value for dimension in dimensions], request_id)


class Metric:
    """A value with its unit and dimensions, for one request or none, which older handlers create
    themselves.
    """

    def __init__(
        self,
        name: str,
        value: float,
        unit: str | None,
        dimensions: list[Dimension],
        request_id: str | None = None,
        metric_method: str | None = None,
    ) -> None:
        self.metric_type = MetricTypes.COUNTER
        self.dimensions = dimensions
        self.dimension_names = [dimension.name for dimension in dimensions]
        self.dimension_values = [dimension.value for dimension in dimensions]
        self._metric = CachingMetric(name, unit, self.dimension_names, self.metric_type)
        self.name = self._metric.metric_name
        self.unit = self._metric.unit
        self.metric_method = metric_method
        self.value = value
        self.request_id = request_id

    def update(self, value: float) -> None:
        """Record ``value``."""
        self._metric.add_or_update(value, self.dimension_values, self.request_id or "")

    def reset(self) -> None:
        """Record a zero."""
        self.update(0)

    def __str__(self) -> str:
        dimensions = ",".join(map(str, self.dimensions))
        suffix = f"{socket.gethostname()},{int(time.time())}" + (
            f",{self.request_id}" if self.request_id else ""
        )
        return f"{self.name}.{self.unit}:{self.value}|#{dimensions}|#hostname:{suffix}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "MetricName": self.name,
            "Value": self.value,
            "Unit": self.unit,
            "Dimensions": self.dimensions,
            "Timestamp": int(time.time()),
            "HostName": socket.gethostname(),
            "RequestId": self.request_id,
        }


def emit_metrics(metrics: Iterable[Metric] | None) -> None:
    """Record each metric's own value."""
    for metric in metrics or ():
        metric.update(metric.value)


class GeneralMetricsCacheError(Exception):
    """A metrics file cannot be read for a reason that has no class of its own."""

    def __init__(self, message: str) -> None:
        super().__init__(f"Generic error: {message}")


class MetricsCacheIOError(OSError):
    """A metrics file cannot be read."""

    def __init__(self, message: str) -> None:
        super().__init__(f"Error reading file: {message}")


class MetricsCachePyYamlError(yaml.YAMLError):
    """A metrics file is not YAML."""

    def __init__(self, message: str) -> None:
        super().__init__(f"Error parsing file: {message}")


class MetricsCacheTypeError(TypeError):
    """An argument has the wrong type."""


class MetricsCacheValueError(ValueError):
    """A unit, or a section of a metrics file, is invalid."""


class MetricsCacheKeyError(KeyError):
    """A metric does not exist."""


_TIME_UNITS = ("ms", "s")
_MODEL_DIMENSIONS = ("ModelName", "Level")
_NO_METRICS: dict[str, CachingMetric] = {}
_SIZE_UNITS = ("MB", "kB", "GB", "B")


class MetricCache:
    """A recorder whose methods ``add_...`` record one value each and create its metric if that is new.

    ``idx`` is the row's place in the batch; without it the value belongs to all rows. ModelName and
    Level=Model are added to ``dimensions`` unless given; for an error, Level=Error is. The server reports the
    metrics that its metrics file declares, or all with ``telemetry.model_metrics_auto_detect``.
    """

    def __init__(self, model_name: str | None = None) -> None:
        self.cache: dict[MetricTypes, dict[str, CachingMetric]] = {}
        self.store: list[Metric] = []  # stays empty, as TorchServe's does; handlers pass it to emit_metrics
        self.model_name = model_name
        self._request_ids: Mapping[int, str] | str | None = None
        self._all_request_ids: str | None = None  # the ids of all rows, joined on first use
        self.set_request_ids(
            str(uuid.uuid4())
        )  # loading has an id too, as a value without one counts as an error

    @property
    def request_ids(self) -> Mapping[int, str] | str | None:
        """The batch's ids by row; before the first batch, one id for the loading."""
        return self._request_ids

    @request_ids.setter
    def request_ids(self, request_ids: Mapping[int, str] | str | None) -> None:
        self._request_ids = request_ids
        self._all_request_ids = None if isinstance(request_ids, Mapping) else request_ids

    def set_request_ids(self, request_ids: Mapping[int, str] | str | None) -> None:
        self.request_ids = request_ids

    def add_metric(
        self,
        name: str,
        value: float,
        unit: str,
        idx: int | None = None,
        dimensions: Iterable[Dimension] = (),
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> None:
        """Record a value of any metric, in any unit."""
        self._add(name, value, unit, self._request_id(idx), dimensions, metric_type)

    def add_counter(
        self, name: str, value: float, idx: int | None = None, dimensions: Iterable[Dimension] = ()
    ) -> None:
        """Add ``value`` to a counter."""
        self._add(name, value, "count", self._request_id(idx), dimensions, MetricTypes.COUNTER)

    def add_time(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "ms",
        dimensions: Iterable[Dimension] = (),
        metric_type: MetricTypes = MetricTypes.GAUGE,
    ) -> None:
        """Record a time in ``ms`` or ``s``; another unit raises MetricsCacheValueError."""
        if unit not in _TIME_UNITS:
            raise MetricsCacheValueError(f"the unit for a timed metric should be one of {list(_TIME_UNITS)}")
        self._add(name, value, unit, self._request_id(idx), dimensions, metric_type)

    def add_size(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "MB",
        dimensions: Iterable[Dimension] = (),
        metric_type: MetricTypes = MetricTypes.GAUGE,
    ) -> None:
        """Record a size in ``MB``, ``kB``, ``GB`` or ``B``; another unit raises ValueError."""
        if unit not in _SIZE_UNITS:
            raise ValueError(f"The unit for size based metric is one of {list(_SIZE_UNITS)}")
        self._add(name, value, unit, self._request_id(idx), dimensions, metric_type)

    def add_percent(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        dimensions: Iterable[Dimension] = (),
        metric_type: MetricTypes = MetricTypes.GAUGE,
    ) -> None:
        """Record a percentage."""
        self._add(name, value, "percent", self._request_id(idx), dimensions, metric_type)

    def add_error(self, name: str, value: float, dimensions: Iterable[Dimension] = ()) -> None:
        """Add ``value`` to a counter of errors."""
        self._add(name, value, "", None, dimensions, MetricTypes.COUNTER)

    def add_metric_to_cache(
        self,
        metric_name: str,
        unit: str,
        dimension_names: list[str] | None = None,
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> CachingMetric:
        """Return a new metric with exactly these dimensions; it replaces one of the same kind and name.

        Raises MetricsCacheTypeError for an argument of the wrong type.
        """
        _check(metric_name, str, "`metric_name` must be a str")
        _check(unit, str, "`unit` must be a str")
        _check(metric_type, MetricTypes, "`metric_type` must be a MetricTypes enum")
        _check(dimension_names or [], list, "`dimension_names` should be a list of dimension name strings")
        metrics = self.cache.setdefault(metric_type, {})
        if metric_name in metrics:
            logger.warning("the metric %s (%s) is replaced by a new one", metric_name, metric_type.value)
        metric = metrics[metric_name] = CachingMetric(metric_name, unit, dimension_names, metric_type)
        return metric

    def get_metric(self, metric_name: str, metric_type: MetricTypes = MetricTypes.COUNTER) -> CachingMetric:
        """Return the metric of that kind and name.

        Raises MetricsCacheKeyError where it does not exist.
        """
        _check(metric_name, str, "`metric_name` must be a str")
        _check(metric_type, MetricTypes, "`metric_type` must be a MetricTypes enum")
        metric = self.cache.get(metric_type, {}).get(metric_name)
        if metric is None:
            raise MetricsCacheKeyError(
                f"Metric of type '{metric_type}' and name '{metric_name}' doesn't exist"
            )
        return metric

    def cache_keys(self) -> list[str]:
        """Return ``kind:name`` of every metric."""
        return [f"{kind.value}:{name}" for kind, metrics in self.cache.items() for name in metrics]

    def _request_id(self, idx: int | None) -> str | None:
        if idx is None and self._all_request_ids is not None:
            return self._all_request_ids
        ids = self._request_ids
        if idx is not None and (type(ids) is dict or isinstance(ids, Mapping)) and idx in ids:
            return ids[idx]
        if self._all_request_ids is None and isinstance(ids, Mapping):
            self._all_request_ids = ",".join(ids.values())
        return self._all_request_ids

    def _add(
        self,
        name: str,
        value: float,
        unit: str,
        request_id: str | None,
        dimensions: Iterable[Dimension],
        metric_type: MetricTypes,
    ) -> None:
        names: tuple[str, ...] = _MODEL_DIMENSIONS
        values: tuple[Any, ...] = (self.model_name, "Model")
        if request_id and not dimensions and type(value) is float and value >= 0:
            # A metric that is known, and nothing to check: half the time, for the time of each batch too.
            known = self.cache.get(metric_type, _NO_METRICS).get(name)
            if known is not None and (*known.dimension_names,) == names and type(self.model_name) is str:
                _sink(known, value, values, request_id)
                return
        if request_id is None:
            names, values = ("Level",), ("Error",)
        if dimensions:
            named = {dimension.name: dimension.value for dimension in dimensions}
            others = {key: value for key, value in zip(names, values, strict=True) if key not in named}
            names, values = (*named, *others), (*named.values(), *others.values())
        try:
            metric = self.cache[metric_type][name]
        except (KeyError, TypeError):
            metric = self.add_metric_to_cache(name, unit, list(names), metric_type)
        metric.add_or_update(value, values, request_id or "")


class MetricsCacheYamlImpl(MetricCache):
    """A cache that starts with the ``model_metrics`` of a YAML file, added by ``initialize_cache``."""

    def __init__(self, config_file_path: str | Path) -> None:
        super().__init__()
        self.config_file_path = config_file_path
        if not config_file_path:
            raise MetricsCacheTypeError("Config file not initialized")
        try:
            self._document: Any = yaml.safe_load(Path(config_file_path).read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise MetricsCachePyYamlError(f"{config_file_path}: {error}") from None
        except OSError as error:
            raise MetricsCacheIOError(f"{config_file_path}: {error}") from None
        except Exception as error:
            raise GeneralMetricsCacheError(f"{config_file_path}: {error}") from None

    def initialize_cache(self) -> None:
        """Add the metrics that the file declares.

        Raises MetricsCacheKeyError or MetricsCacheValueError where the file is incomplete.
        """
        try:
            section = self._document["model_metrics"]
        except (KeyError, TypeError):
            raise MetricsCacheKeyError("'model_metrics' key not found in yaml file") from None
        if not section:
            raise MetricsCacheValueError("Missing `model_metrics` specification")
        for kind, metrics in section.items():
            try:
                metric_type = MetricTypes(kind)
            except ValueError as error:
                raise MetricsCacheKeyError(f"Invalid metric type: {error}") from None
            for metric in metrics:
                try:
                    self.add_metric_to_cache(
                        metric["name"], metric["unit"], metric["dimensions"], metric_type
                    )
                except KeyError as error:
                    raise MetricsCacheKeyError(f"Key not found in cache spec: {error}") from None


def _check(value: Any, expected: type, message: str) -> None:
    if not isinstance(value, expected):
        raise MetricsCacheTypeError(message)
