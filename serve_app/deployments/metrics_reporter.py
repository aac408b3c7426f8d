"""Metrics of the whole cluster, as Management renders and sums them."""

from __future__ import annotations

from serve_app.control.cluster_metrics import ClusterMetrics
from serve_app.domain.model import VersionStats
from serve_app.telemetry.metrics import Meters, MetricsAggregator


class MetricsReporter:
    """The metrics page and the statistics of each version, from fresh samples of every process."""

    def __init__(
        self, cluster_metrics: ClusterMetrics, aggregator: MetricsAggregator, meters: Meters
    ) -> None:
        self._cluster_metrics = cluster_metrics
        self._aggregator = aggregator
        self._meters = meters

    async def render(self, names: frozenset[str] | None = None) -> bytes:
        """Return the metrics page; with ``names``, only the samples of these names."""
        await self._collect()
        return self._aggregator.render(names)

    async def get_version_stats(self) -> list[VersionStats]:
        """Return what the whole cluster has counted of each version."""
        await self._collect()
        return self._aggregator.version_stats()

    async def _collect(self) -> None:
        await self._cluster_metrics.collect()
        self._aggregator.put("management", self._meters.report())
