"""Fixtures and helpers of the metric store's tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import sqlalchemy as sa

from serve_app.control.metric_store import MetricStore
from serve_app.control.persistence.database import Database
from serve_app.dataplane.experiment_collector import ArmStats, ExperimentReport
from serve_app.domain.experiment import Reward
from serve_app.domain.traffic_policy import shorten_key


def seen(
    calls: int = 1, trial: str = "t", arm: str = "a", *exposures: tuple[str, str, str, int], **more
) -> ExperimentReport:
    figures = ArmStats(calls=calls, units=0 if exposures else calls, **more)
    return ExperimentReport({trial: {arm: figures}}, list(exposures))


def units(trial: str, arm: str, *names: str, bucket: int = 3) -> list[tuple[str, str, str, int]]:
    return [(trial, shorten_key(name), arm, bucket) for name in names]


async def reward(
    store: MetricStore, trial: str, metric: str, event: str, unit: str, value: float
) -> bool | None:
    """Record one reward; return whether it is new, or None for an unknown unit."""
    (new,) = await store.record_rewards(trial, [Reward(value, key=unit, metric=metric, id=event)])
    return new


def run(database: Database, work: Callable[[MetricStore], Awaitable[None]], **more) -> None:
    """Open the measurements, do something with them, and store what waits."""

    async def main() -> None:
        measurements = await asyncio.to_thread(
            lambda: MetricStore(database, **{"exposure_timeout": 0.0, **more})
        )
        await work(measurements)
        await measurements.close()

    asyncio.run(main())


def rows(database: Database, table: sa.Table) -> int:
    with database.transaction() as connection:
        return connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
