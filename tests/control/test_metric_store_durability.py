"""Durability of the metric store when its process is killed or its database is busy."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa

import serve_app
from serve_app.control.metric_store import MetricStore
from serve_app.control.persistence.database import Database
from serve_app.control.persistence.schema import (
    COUNTED_EVENTS,
    EXPERIMENT_STATS,
    EXPOSED_UNITS,
    METRIC_SOURCES,
)
from tests.support.metric_stores import rows, run, seen

pytestmark = pytest.mark.usefixtures("fast_commits")

ROOT = Path(serve_app.__file__).parents[1]


PUT_ON_AND_ON = """
import asyncio, sys
from serve_app.control.persistence.database import Database
from serve_app.control.metric_store import MetricStore
from serve_app.domain.experiment import Reward
from serve_app.dataplane.experiment_collector import ArmStats, ExperimentReport

async def main():
    measurements = MetricStore(Database(sys.argv[1]), exposure_timeout=0.0)
    number = 0
    while True:
        number += 1
        stats = ArmStats(calls=1, sums={"latency": {1: (1, 2.0)}})
        seen = ExperimentReport({"t": {"a": stats}}, [("t", str(number), "a", 1)])
        put = asyncio.create_task(measurements.record("p", number, seen))
        before = [Reward(1.0, key=str(number - 1), metric="m")]
        if number > 1:
            assert await measurements.record_rewards("t", before) == [True]
        await put
        print(number, flush=True)

asyncio.run(main())
"""


def test_a_kill_loses_nothing_that_was_acknowledged_and_nothing_is_stored_in_part(
    url: str, database: Database
):
    line = [sys.executable, "-W", "error", "-c", PUT_ON_AND_ON, url]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.Popen(line, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    acknowledged = [int(killed.stdout.readline()) for _ in range(8)]
    os.kill(killed.pid, signal.SIGKILL)
    rest, errors = killed.stdout.read(), killed.stderr.read()
    killed.communicate()
    assert errors == ""
    last = [*acknowledged, *map(int, rest.splitlines())][-1]

    async def after(m: MetricStore) -> None:
        found = m.arm_stats("t")["a"]
        assert last <= found.calls <= last + 1
        assert found.units == found.calls == rows(database, EXPOSED_UNITS)
        assert found.sums["latency"] == {1: (found.calls, 2.0 * found.calls)}
        assert found.sums["reward:m"] == {1: (rows(database, COUNTED_EVENTS), rows(database, COUNTED_EVENTS))}
        # Its processes send again what they know of nobody having heard.
        for number in range(found.calls - 1, found.calls + 1):
            await m.record("p", number, seen(1))
        assert m.arm_stats("t")["a"].calls == found.calls

    run(database, after)


def test_the_event_loop_goes_on_while_it_stores(database: Database):
    async def work(m: MetricStore) -> None:
        free = threading.Event()
        held = threading.Event()

        def hold() -> None:
            with database.transaction() as connection:
                connection.execute(sa.select(METRIC_SOURCES).with_for_update()).all()
                held.set()
                free.wait(60)

        holder = threading.Thread(target=hold)
        holder.start()
        await asyncio.to_thread(held.wait)
        put = asyncio.create_task(m.record("p", 1, seen()))
        for _ in range(10):
            await asyncio.sleep(0.001)
        assert not put.done()
        assert m.arm_stats("t") == {}, "what is not stored is not known"
        free.set()
        await put
        holder.join()
        assert rows(database, EXPERIMENT_STATS) == 1

    run(database, work)
