"""The kinds of metrics."""

from __future__ import annotations

import enum


class MetricTypes(enum.Enum):
    """The kind of a metric: a counter adds up, a gauge holds its last value, a histogram counts values by
    size.
    """

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
