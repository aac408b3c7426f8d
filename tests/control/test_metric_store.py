"""What was measured outlives every process, and counts once."""

from __future__ import annotations

import asyncio
import random
from copy import deepcopy

import pytest
import sqlalchemy as sa

from serve_app.control.metric_store import MetricStore
from serve_app.control.persistence.database import Database
from serve_app.control.persistence.schema import (
    COUNTED_EVENTS,
    EXPOSED_UNITS,
    METRIC_SOURCES,
)
from serve_app.control.registry import Registry
from serve_app.dataplane.experiment_collector import ArmStats, ExperimentReport
from serve_app.domain.experiment import BUCKET_GROUPS, Reward
from serve_app.errors import Unavailable
from tests.support.metric_stores import reward, rows, run, seen, units

pytestmark = [pytest.mark.usefixtures("fast_commits"), pytest.mark.integration]


class TestFigures:
    WHOLE = ArmStats(
        calls=10,
        units=10,
        failed={"queue_full": 2, "status_503": 1},
        empty=1,
        non_finite=2,
        missing={"output:score": 3},
        latency={188: 4, 283: 3},
        sums={
            "latency": {0: (3, 0.25), 999: (4, 1e-9)},
            "error_rate": {0: (10, 3)},
            "output:sco\x00re ü\\": {7: (1, -1e12)},
        },
    )

    def test_add_up_and_are_there_after_a_restart(self, database: Database):
        twice = deepcopy(self.WHOLE)
        twice.add(self.WHOLE)

        async def first(m: MetricStore) -> None:
            for number in (1, 2):
                await m.record(
                    "p1", number, ExperimentReport({"t": {"a\x00ü\\": self.WHOLE}, "r:1": {"b": self.WHOLE}})
                )
            assert m.arm_stats("t") == {"a\x00ü\\": twice}

        async def after(m: MetricStore) -> None:
            assert m.arm_stats("t") == {"a\x00ü\\": twice}
            assert m.arm_stats("r:1") == {"b": twice}
            await m.record("p1", 3, ExperimentReport({"t": {"a\x00ü\\": self.WHOLE}}))
            assert m.arm_stats("t")["a\x00ü\\"].sums["latency"][0] == (9, 0.75)

        run(database, first)
        run(database, after)

    def test_each_reader_gets_its_own_copy_of_the_metrics(self, database: Database):
        async def work(m: MetricStore) -> None:
            await m.record("p", 1, seen(1, sums={"latency": {1: (1, 1.0)}}))
            m.arm_stats("t")["a"].add(m.arm_stats("t")["a"])
            assert m.arm_stats("t")["a"].sums == {"latency": {1: (1, 1.0)}}
            await m.record("p", 2, seen(1, sums={"latency": {1: (1, 1.0)}}))
            assert m.arm_stats("t")["a"].calls == 2
            assert m.arm_stats("other") == {}

        run(database, work)

    def test_of_many_processes_at_once_are_stored_together(self, database: Database):
        async def work(m: MetricStore) -> None:
            await asyncio.gather(*(m.record(f"p{p}", n, seen(p + 1)) for n in (1, 2) for p in range(20)))
            assert m.arm_stats("t")["a"].calls == 2 * sum(range(1, 21))

        run(database, work)

    def test_the_registry_is_not_touched(self, database: Database):
        run(database, lambda m: m.record("p", 1, seen()))
        assert database.load() == Registry()
        assert database.generation == 0
        database.save(Registry(), Registry())


class TestNumbers:
    def test_what_comes_twice_counts_once_also_at_once_and_after_a_restart(self, database: Database):
        async def first(m: MetricStore) -> None:
            await m.record("p", 1, seen(1))
            await asyncio.gather(
                m.record("p", 1, seen(1)), m.record("p", 2, seen(10)), m.record("p", 2, seen(10))
            )
            await m.record("q", 1, seen(100))
            assert m.arm_stats("t")["a"].calls == 111

        async def after(m: MetricStore) -> None:
            await m.record("p", 2, seen(10))
            await m.record("q", 1, seen(100))
            await m.record("q", 2, seen(1000))
            assert m.arm_stats("t")["a"].calls == 1111

        run(database, first)
        run(database, after)

    def test_what_could_not_be_stored_is_not_counted_and_may_come_again(self, database: Database):
        async def work(m: MetricStore) -> None:
            await m.record("p", 1, seen(1))
            with database.transaction() as connection:
                connection.execute(sa.text("ALTER TABLE torchrelay_metric_sources RENAME TO away"))
            with pytest.raises(Unavailable):
                await m.record("p", 2, seen(10, "t", "a", *units("t", "a", "u1")))
            with pytest.raises(Unavailable):
                await reward(m, "t", "clicks", "e", "u1", 1.0)
            assert m.arm_stats("t")["a"].calls == 1
            with database.transaction() as connection:
                connection.execute(sa.text("ALTER TABLE away RENAME TO torchrelay_metric_sources"))
            assert await reward(m, "t", "clicks", "e", "u1", 1.0) is None
            await m.record("p", 2, seen(10, "t", "a", *units("t", "a", "u1")))
            assert (m.arm_stats("t")["a"].calls, m.arm_stats("t")["a"].units) == (11, 2)

        run(database, work)

    def test_who_opened_them_last_writes_alone(self, database: Database):
        async def work(first: MetricStore) -> None:
            await first.record("p", 1, seen(1))
            last = await asyncio.to_thread(MetricStore, database)
            with pytest.raises(Unavailable, match="Another Management"):
                await first.record("p", 2, seen(10))
            await last.record("p", 2, seen(10))
            assert last.arm_stats("t")["a"].calls == 11
            await last.close()

        run(database, work)


class TestExposures:
    def test_units_are_counted_once_by_arm_and_group(self, database: Database):
        async def first(m: MetricStore) -> None:
            given = units("t", "a", "u1", "u2", bucket=5) + units("t", "b", "u3", bucket=5 + BUCKET_GROUPS)
            await m.record("p", 1, ExperimentReport({"t": {"a": ArmStats(2), "b": ArmStats(1)}}, given))
            await asyncio.gather(
                m.record(
                    "q",
                    1,
                    ExperimentReport({}, units("t", "a", "u1", "u4", bucket=6) + units("other", "a", "u1")),
                ),
                m.record("p", 2, ExperimentReport({}, units("t", "a", "u4", bucket=6))),
            )
            assert await reward(m, "t", "m", "", "u9", 1.0) is None
            assert [await reward(m, "t", "m", "", unit, 1.0) for unit in ("u3", "u4", "u1")] == [True] * 3
            assert m.arm_stats("t")["a"].sums["reward:m"] == {5: (1, 1.0), 6: (1, 1.0)}
            assert m.arm_stats("t")["b"].sums["reward:m"] == {5: (1, 1.0)}

        async def after(m: MetricStore) -> None:
            await m.record("q", 2, ExperimentReport({}, units("t", "a", "u1", "u5", bucket=5)))
            figures = m.arm_stats("t")
            assert (figures["a"].units, figures["b"].units) == (4, 1)
            assert figures["a"].sums["units"] == {5: (3, 0), 6: (1, 0)}
            assert figures["b"].sums["units"] == {5: (1, 0)}
            assert m.arm_stats("other")["a"].units == 1

        run(database, first)
        run(database, after)

    def test_whatever_a_caller_shows_is_a_unit(self, database: Database):
        shown = [
            "",
            "a\x00b",
            "\ud800",
            "ü\U0001f600",
            "x" * 8000,
            "x" * 8001,
            "\\x00",
            "'; DROP TABLE t --",
            "%s :u",
        ]

        async def work(m: MetricStore) -> None:
            await m.record("p", 1, ExperimentReport({}, units("t", "a\x00", *shown)))
            rewards = [Reward(1.0, key=unit or "a\x00b", metric="m\x00") for unit in shown]
            assert await m.record_rewards("t", rewards) == [True, False] + [True] * 7
            assert await m.record_rewards("t", rewards) == [False] * 9
            figures = m.arm_stats("t")["a\x00"]
            assert (figures.units, figures.sums["reward:m\x00"]) == (len(shown), {3: (8, 8.0)})

        run(database, work)

    def test_the_oldest_are_forgotten_beyond_a_number(self, database: Database):
        async def first(m: MetricStore) -> None:
            for n in range(10):
                await m.record(
                    "p", n + 1, ExperimentReport({}, units("t", "a", *(f"{n}-{i}" for i in range(10))))
                )
                await m.record_rewards("t", [Reward(1.0, key=f"{n}-{i}", metric="m") for i in range(10)])
            assert rows(database, EXPOSED_UNITS) == rows(database, COUNTED_EVENTS) == 25
            assert m.arm_stats("t")["a"].units == 100
            assert m.arm_stats("t")["a"].sums["reward:m"][3] == (100, 100.0)
            assert await reward(m, "t", "n", "", "0-0", 1.0) is None
            assert await reward(m, "t", "n", "", "9-9", 1.0) is True

        async def after(m: MetricStore) -> None:
            await m.record("q", 1, ExperimentReport({}, units("t", "a", "new") + units("other", "a", "new")))
            assert rows(database, EXPOSED_UNITS) == 26
            assert await reward(m, "t", "n", "", "new", 1.0) is True

        run(database, first, max_exposures=25)
        run(database, after, max_exposures=25)


class TestRewards:
    def test_each_event_counts_once_in_its_units_arm_and_group(self, database: Database):
        async def first(m: MetricStore) -> None:
            given = units("t", "a", "ann", bucket=1) + units("t", "b", "bob", bucket=2 + BUCKET_GROUPS)
            await m.record("p", 1, ExperimentReport({}, given))
            assert await reward(m, "t", "spent", "order 1", "ann", 2.5) is True
            assert await reward(m, "t", "spent", "order 1", "ann", 2.5) is False
            assert await reward(m, "t", "spent", "order 1", "bob", 99.0) is False
            assert await reward(m, "t", "clicks", "order 1", "ann", 1.0) is True
            assert await reward(m, "t", "spent", "order 2", "cid", 1.0) is None

        async def after(m: MetricStore) -> None:
            assert await reward(m, "t", "spent", "order 1", "ann", 2.5) is False
            assert await reward(m, "t", "spent", "order 2", "bob", -1.0) is True
            assert await reward(m, "t", "spent", "order 3", "ann", 1.0) is True
            a, b = m.arm_stats("t")["a"], m.arm_stats("t")["b"]
            assert a.sums["reward:spent"] == {1: (2, 3.5)}
            assert a.sums["reward:clicks"] == {1: (1, 1.0)}
            assert b.sums["reward:spent"] == {2: (1, -1.0)}
            assert (a.calls, a.units, b.units) == (0, 1, 1)

        run(database, first)
        run(database, after)

    def test_without_an_id_those_of_a_unit_are_one(self, database: Database):
        async def work(m: MetricStore) -> None:
            await m.record("p", 1, ExperimentReport({}, units("t", "a", "u1", "u2")))
            several = [
                Reward(1.0, request_id="u1", metric="m"),
                Reward(1.0, request_id="u1", metric="m"),
                Reward(1.0, request_id="u1", metric="n"),
                Reward(1.0, request_id="u2", metric="m", id="u1"),
                Reward(1.0, request_id="u1", metric="m", id="u1"),
            ]
            assert await m.record_rewards("t", several) == [True, False, True, True, False]
            assert await m.record_rewards("t", []) == []

        run(database, work)

    def test_all_of_several_count_or_none(self, database: Database):
        async def work(m: MetricStore) -> None:
            await m.record("p", 1, ExperimentReport({}, units("t", "a", "u1", "u2")))
            several = [Reward(1.0, key=unit, metric="m") for unit in ("u1", "u9", "u2")]
            assert await m.record_rewards("t", several) == [False, None, False]
            assert "reward:m" not in m.arm_stats("t")["a"].sums
            assert await m.record_rewards("t", several[::2]) == [True, True]

        run(database, work)

    def test_of_a_trial_by_key_are_known_by_its_calls_too(self, database: Database):
        async def work(m: MetricStore) -> None:
            await m.record(
                "p", 1, ExperimentReport({}, units("t", "a", "ann") + units("t/calls", "a", "r1", "r2"))
            )
            several = [Reward(1.0, request_id=call, metric="m") for call in ("r1", "r2", "r1")]
            assert await m.record_rewards("t", several) == [True, True, False]
            assert await reward(m, "t", "m", "e", "r1", 1.0) is None, "a key is no request id"
            assert await reward(m, "t", "m", "e", "ann", 1.0) is True
            figures = m.arm_stats("t")["a"]
            assert (figures.units, figures.sums["units"]) == (1, {3: (1, 0)})
            assert figures.sums["reward:m"] == {3: (3, 3.0)}
            await m.delete("t")
            await m.record("p", 2, ExperimentReport({}, units("t/calls", "a", "r3")))
            assert rows(database, EXPOSED_UNITS) == 0

        run(database, work)

    def test_many_at_once_in_any_order(self, database: Database):
        async def work(m: MetricStore) -> None:
            names = [f"u{n}" for n in range(1500)]
            await m.record("p", 1, ExperimentReport({}, units("t", "a", *names)))
            random.shuffle(names)
            posts = [names[i : i + 100] for i in range(0, 1500, 50)]
            answers = await asyncio.gather(
                *(m.record_rewards("t", [Reward(1.0, key=n, metric="m") for n in post]) for post in posts)
            )
            assert sum(map(sum, answers)) == 1500
            assert m.arm_stats("t")["a"].sums["reward:m"] == {3: (1500, 1500.0)}

        run(database, work)

    def test_a_reward_waits_for_a_process_that_has_not_reported_its_exposure(self, database: Database):
        async def work(m: MetricStore) -> None:
            posted = [Reward(1.0, key=unit, metric="m") for unit in ("u1", "u2")]
            early = asyncio.create_task(m.record_rewards("t", posted))
            await m.record("p", 1, seen(1))
            await m.record("p", 2, ExperimentReport({}, units("t", "a", "u1")))
            await m.record("q", 1, ExperimentReport({}, units("t", "a", "u2")))
            assert await early == [True, True]
            assert m.arm_stats("t")["a"].sums["reward:m"] == {3: (2, 2.0)}

        run(database, work, exposure_timeout=30.0)


class TestForgetting:
    def test_everything_of_a_trial_and_of_a_rollouts_steps(self, database: Database):
        trials = ("e1", "e10", "r1:0", "r1:1")

        async def work(m: MetricStore) -> None:
            given = [row for trial in trials for row in units(trial, "a", *(f"u{n}" for n in range(20)))]
            await m.record("p", 1, ExperimentReport({trial: {"a": ArmStats(20)} for trial in trials}, given))
            await m.record_rewards("e1", [Reward(1.0, key=f"u{n}", metric="m") for n in range(20)])
            for gone in ("e1", "r1", "unknown"):
                await m.delete(gone)
            assert (m.arm_stats("e1"), m.splits) == ({}, {"e10"})
            assert m.arm_stats("e10")["a"].calls == 20
            assert (rows(database, EXPOSED_UNITS), rows(database, COUNTED_EVENTS)) == (20, 0)
            assert await reward(m, "e1", "m", "e", "u0", 1.0) is None
            # A process that has not heard of it yet.
            await m.record("p", 2, ExperimentReport({"e1": {"a": ArmStats(1)}}, units("e1", "a", "u0")))
            assert m.arm_stats("e1") == {}
            assert rows(database, EXPOSED_UNITS) == 20
            await m.record("p", 3, ExperimentReport({"e10": {"a": ArmStats(1)}}))
            assert m.arm_stats("e10")["a"].calls == 21

        async def after(m: MetricStore) -> None:
            assert m.splits == {"e10"}

        run(database, work)
        run(database, after)

    def test_processes_without_a_report_for_a_week(self, database: Database):
        run(database, lambda m: m.record("p", 1, seen()))
        with database.transaction() as connection:
            connection.execute(sa.update(METRIC_SOURCES).values(time=METRIC_SOURCES.c.time - 8 * 86_400))
        run(database, lambda m: m.record("q", 1, seen()))
        with database.transaction() as connection:
            assert set(connection.execute(sa.select(METRIC_SOURCES.c.source)).scalars()) == {"", "q"}
