"""The metrics API of handlers, ``context.metrics``.

An update takes about a microsecond and never blocks: the server stores it in memory, and reports or writes it
from another thread.
"""

from __future__ import annotations

from handlers.metrics.cache import MetricCache
from handlers.metrics.dimension import Dimension
from handlers.metrics.metric import CachingMetric, Metric, emit_metrics
from handlers.metrics.types import MetricTypes
from handlers.metrics.units import Units
from handlers.metrics.update_sink import Sink, set_sink, updates

__all__ = [
    "CachingMetric",
    "Dimension",
    "Metric",
    "MetricCache",
    "MetricTypes",
    "Sink",
    "Units",
    "emit_metrics",
    "set_sink",
    "updates",
]
