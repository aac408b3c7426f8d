"""``context.metrics``: a model's metrics by kind and name, created on first use."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from handlers.metrics.dimension import Dimension
from handlers.metrics.errors import (
    GeneralMetricsCacheError,
    MetricsCacheIOError,
    MetricsCacheKeyError,
    MetricsCachePyYamlError,
    MetricsCacheTypeError,
    MetricsCacheValueError,
)
from handlers.metrics.metric import CachingMetric, Metric
from handlers.metrics.types import MetricTypes

logger = logging.getLogger(__name__)

_TIME_UNITS = ("ms", "s")
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
        named = {dimension.name: dimension.value for dimension in dimensions} if dimensions else {}
        defaults = (
            {"Level": "Error"} if request_id is None else {"ModelName": self.model_name, "Level": "Model"}
        )
        values = (
            {**named, **{key: defaults[key] for key in defaults if key not in named}} if named else defaults
        )
        try:
            metric = self.cache[metric_type][name]
        except (KeyError, TypeError):
            metric = self.add_metric_to_cache(name, unit, list(values), metric_type)
        metric.add_or_update(value, tuple(values.values()), request_id or "")


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
