"""The kinds of metric."""

from __future__ import annotations

import enum


class MetricTypes(enum.Enum):
    """A counter adds up, a gauge holds its last value, a histogram counts values by their size."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
