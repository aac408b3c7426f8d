"""A metric: its name, unit, dimensions and kind, and the method that updates it."""

from __future__ import annotations

import abc
import logging
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Any

from handlers.metrics import update_sink
from handlers.metrics.dimension import Dimension
from handlers.metrics.types import MetricTypes
from handlers.metrics.units import UNITS

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
        update_sink.emit_update(self, number, tuple(map(str, dimension_values)), request_id or "")

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
