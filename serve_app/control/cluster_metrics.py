"""Metrics of the whole cluster, collected from every process when they are needed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from serve_app.control.table_publisher import TablePublisher
from serve_app.domain.model import ModelRef, ReplicaInfo, VersionStats
from serve_app.telemetry.metrics import Meters
from serve_app.telemetry.metrics_aggregator import MetricsAggregator

COLLECT_TIMEOUT_S = 1.0  # for which a slow process is waited for


class ClusterMetrics:
    """The totals over all processes: the metrics page, and the statistics of each version.

    ``live_readers`` returns the processes that run; ``meters`` are those of this process.
    """

    def __init__(
        self,
        publisher: TablePublisher,
        aggregator: MetricsAggregator,
        live_readers: Callable[[], Awaitable[set[str]]],
        meters: Meters,
    ) -> None:
        self._publisher = publisher
        self._aggregator = aggregator
        self._live_readers = live_readers
        self._meters = meters
        self._collected_at = float("-inf")  # on the monotonic clock

    async def collect(self, max_age: float = 0.0, timeout: float = COLLECT_TIMEOUT_S) -> None:
        """Bring the samples of every live process up to date, unless they are younger than ``max_age``.

        Samples that arrive after ``timeout`` count from then on. Both are in seconds.
        """
        if time.monotonic() - self._collected_at < max_age:
            return
        await self._publisher.collect_metrics(timeout, self._live_readers)
        self._aggregator.put("management", self._meters.report(full=False))
        self._collected_at = time.monotonic()

    async def render(self, names: frozenset[str] | None = None) -> bytes:
        """Return the metrics page; with ``names``, only the samples of these names."""
        await self.collect()
        return await asyncio.to_thread(self._aggregator.prepare_page(names))

    async def get_version_stats(self) -> list[VersionStats]:
        """Return what the whole cluster has counted of each version."""
        await self.collect()
        return self._aggregator.version_stats()

    def add_memory(self, ref: ModelRef, replicas: tuple[ReplicaInfo, ...]) -> tuple[ReplicaInfo, ...]:
        """Return the replicas of a version with the memory that each has reported, wherever it runs."""

        def measured(replica: ReplicaInfo) -> ReplicaInfo:
            memory = self._aggregator.value_of(
                replica.id, "torchrelay_replica_memory_bytes", ref.name, ref.version
            )
            return replica if memory is None else replace(replica, memory=int(memory))

        return tuple(map(measured, replicas))

    def total(self, name: str, **labels: str) -> int:
        """Return the sum of a metric over all processes, as last collected."""
        return int(self._aggregator.total(name, **labels))
