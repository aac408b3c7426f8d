"""Metrics of the whole cluster, collected from every process when they are needed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from serve_app.control.table_publisher import TablePublisher
from serve_app.telemetry.metrics import MetricsAggregator

_COLLECT_TIMEOUT = 1.0  # seconds for which a slow process is waited for


class ClusterMetrics:
    """The totals over all processes; ``live_readers`` returns the processes that run."""

    def __init__(
        self,
        publisher: TablePublisher,
        aggregator: MetricsAggregator,
        live_readers: Callable[[], Awaitable[set[str]]],
    ) -> None:
        self._publisher = publisher
        self._aggregator = aggregator
        self._live_readers = live_readers

    async def collect(self) -> None:
        """Bring the samples of every live process up to date."""
        await self._publisher.collect_metrics(_COLLECT_TIMEOUT, self._live_readers)

    def total(self, name: str, **labels: str) -> int:
        """Return the sum of a metric over all processes, as last collected."""
        return int(self._aggregator.total(name, **labels))
