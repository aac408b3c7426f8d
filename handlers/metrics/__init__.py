"""The metrics API of handlers, ``context.metrics``.

An update takes about a microsecond and never blocks: the server stores it in memory, and reports or writes it
from another thread.
"""

from __future__ import annotations

from handlers.metrics.metric import (
    CachingMetric,
    Dimension,
    Metric,
    MetricCache,
    MetricTypes,
    Sink,
    Units,
    emit_metrics,
    set_sink,
    suppress_updates,
    updates,
)

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
    "suppress_updates",
    "updates",
]
