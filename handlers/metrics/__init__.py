"""What a handler measures: ``context.metrics``, and the words for it.

An update costs about a microsecond and waits for nothing: the server takes it in memory and shows or writes
it from elsewhere.
"""

from __future__ import annotations

from handlers.metrics.cache import MetricCache
from handlers.metrics.dimension import Dimension
from handlers.metrics.metric import CachingMetric, Metric, emit_metrics
from handlers.metrics.outlet import Sink, send_to, updates
from handlers.metrics.types import MetricTypes
from handlers.metrics.units import Units

__all__ = [
    "CachingMetric",
    "Dimension",
    "Metric",
    "MetricCache",
    "MetricTypes",
    "Sink",
    "Units",
    "emit_metrics",
    "send_to",
    "updates",
]
