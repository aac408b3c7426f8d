"""What was measured outlives every process, and counts once."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from copy import deepcopy
from pathlib import Path

import pytest
import sqlalchemy as sa

import serve_app
from serve_app.control.database import FIGURES, ROLLS, SOURCES, Database
from serve_app.control.measurements import Measurements
from serve_app.control.registry import Registry
from serve_app.errors import Unavailable
from serve_app.experiment import GROUPS, Reward
from serve_app.telemetry.observations import ArmFigures, Seen

ROOT = Path(serve_app.__file__).parents[1]


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    opened = Database(url)
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.control.measurements._PAUSE", 0.01)


def seen(calls: int = 1, trial: str = "t", arm: str = "a", *exposures: tuple[str, str, str, int], **more) -> Seen:
    figures = ArmFigures(calls=calls, units=0 if exposures else calls, **more)
    return Seen({trial: {arm: figures}}, list(exposures))


def units(trial: str, arm: str, *names: str, bucket: int = 3) -> list[tuple[str, str, str, int]]:
    return [(trial, name, arm, bucket) for name in names]


def run(database: Database, work: Callable[[Measurements], Awaitable[None]], **more) -> None:
    """Open the measurements, do something with them, and store what waits."""

    async def main() -> None:
        measurements = await asyncio.to_thread(lambda: Measurements(database, **{"patience": 0.0, **more}))
        await work(measurements)
        await measurements.close()

    asyncio.run(main())


def rows(database: Database, table: sa.Table) -> int:
    with database.transaction() as connection:
        return connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()


def remembered(database: Database, name: str) -> int:
    """How many units, or events, all trials remember together."""
    with database.transaction() as connection:
        parts = connection.execute(sa.select(ROLLS.c.value).where(ROLLS.c.name == name)).scalars()
        return sum(len(part) // 12 for part in parts)


class TestFigures:
    WHOLE = ArmFigures(
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
            "output:sco\x00re ü\ud800\\": {7: (1, -1e12)},
        },
    )

    def test_add_up_and_are_there_after_a_restart(self, database: Database):
        twice = deepcopy(self.WHOLE)
        twice.add(self.WHOLE)

        async def first(m: Measurements) -> None:
            for number in (1, 2):
                await m.put("p1", number, Seen({"t": {"a\x00ü\\": self.WHOLE}, "r:1": {"b": self.WHOLE}}))
            assert m.figures("t") == {"a\x00ü\\": twice}

        async def after(m: Measurements) -> None:
            assert m.figures("t") == {"a\x00ü\\": twice}
            assert m.figures_like("r:") == {"r:1": {"b": twice}}
            await m.put("p1", 3, Seen({"t": {"a\x00ü\\": self.WHOLE}}))
            assert m.figures("t")["a\x00ü\\"].sums["latency"][0] == (9, 0.75)

        run(database, first)
        run(database, after)

    def test_whoever_asks_gets_figures_of_his_own(self, database: Database):
        async def work(m: Measurements) -> None:
            await m.put("p", 1, seen(1, sums={"latency": {1: (1, 1.0)}}))
            m.figures("t")["a"].add(m.figures("t")["a"])
            assert m.figures("t")["a"].sums == {"latency": {1: (1, 1.0)}}
            await m.put("p", 2, seen(1, sums={"latency": {1: (1, 1.0)}}))
            assert m.figures("t")["a"].calls == 2
            assert m.figures("other") == {}

        run(database, work)

    def test_of_many_processes_at_once_are_stored_together(self, database: Database):
        async def work(m: Measurements) -> None:
            await asyncio.gather(*(m.put(f"p{p}", n, seen(p + 1)) for n in (1, 2) for p in range(20)))
            assert m.figures("t")["a"].calls == 2 * sum(range(1, 21))

        run(database, work)

    def test_the_registry_is_not_touched(self, database: Database):
        run(database, lambda m: m.put("p", 1, seen()))
        assert database.load() == Registry()
        assert database.generation == 0
        database.save(Registry(), Registry())


class TestNumbers:
    def test_what_comes_twice_counts_once_also_at_once_and_after_a_restart(self, database: Database):
        async def first(m: Measurements) -> None:
            await m.put("p", 1, seen(1))
            await asyncio.gather(m.put("p", 1, seen(1)), m.put("p", 2, seen(10)), m.put("p", 2, seen(10)))
            await m.put("q", 1, seen(100))
            assert m.figures("t")["a"].calls == 111

        async def after(m: Measurements) -> None:
            await m.put("p", 2, seen(10))
            await m.put("q", 1, seen(100))
            await m.put("q", 2, seen(1000))
            assert m.figures("t")["a"].calls == 1111

        run(database, first)
        run(database, after)

    def test_what_could_not_be_stored_is_not_counted_and_may_come_again(self, database: Database):
        async def work(m: Measurements) -> None:
            await m.put("p", 1, seen(1))
            with database.transaction() as connection:
                connection.execute(sa.text("ALTER TABLE torchrelay_sources RENAME TO away"))
            with pytest.raises(Unavailable):
                await m.put("p", 2, seen(10, "t", "a", *units("t", "a", "u1")))
            with pytest.raises(Unavailable):
                await m.reward("t", "clicks", "e", "u1", 1.0)
            assert m.figures("t")["a"].calls == 1
            with database.transaction() as connection:
                connection.execute(sa.text("ALTER TABLE away RENAME TO torchrelay_sources"))
            assert await m.exposure("t", "u1") is None
            await m.put("p", 2, seen(10, "t", "a", *units("t", "a", "u1")))
            assert (m.figures("t")["a"].calls, m.figures("t")["a"].units) == (11, 2)

        run(database, work)

    def test_who_opened_them_last_writes_alone(self, database: Database):
        async def work(first: Measurements) -> None:
            await first.put("p", 1, seen(1))
            last = await asyncio.to_thread(Measurements, database)
            with pytest.raises(Unavailable, match="Another Management"):
                await first.put("p", 2, seen(10))
            await last.put("p", 2, seen(10))
            assert last.figures("t")["a"].calls == 11
            await last.close()

        run(database, work)


class TestExposures:
    def test_units_are_counted_once_by_arm_and_group(self, database: Database):
        async def first(m: Measurements) -> None:
            given = units("t", "a", "u1", "u2", bucket=5) + units("t", "b", "u3", bucket=5 + GROUPS)
            await m.put("p", 1, Seen({"t": {"a": ArmFigures(2), "b": ArmFigures(1)}}, given))
            await asyncio.gather(
                m.put("q", 1, Seen({}, units("t", "a", "u1", "u4", bucket=6) + units("other", "a", "u1"))),
                m.put("p", 2, Seen({}, units("t", "a", "u4", bucket=6))),
            )
            assert await m.exposure("t", "u3") == ("b", 5 + GROUPS)
            assert await m.exposure("t", "u9") is None
            assert await m.exposures("t", ["u9", "u4", "u1"]) == {"u1": ("a", 5), "u4": ("a", 6)}

        async def after(m: Measurements) -> None:
            await m.put("q", 2, Seen({}, units("t", "a", "u1", "u5", bucket=5)))
            figures = m.figures("t")
            assert (figures["a"].units, figures["b"].units) == (4, 1)
            assert figures["a"].sums["units"] == {5: (3, 0), 6: (1, 0)}
            assert figures["b"].sums["units"] == {5: (1, 0)}
            assert m.figures("other")["a"].units == 1

        run(database, first)
        run(database, after)

    def test_whatever_a_caller_shows_is_a_unit(self, database: Database):
        shown = ["", "a\x00b", "\ud800", "ü\U0001f600", "x" * 8000, "x" * 8001, "\\x00", "'; DROP TABLE t --", "%s :u"]

        async def work(m: Measurements) -> None:
            await m.put("p", 1, Seen({}, units("t", "a\x00", *shown)))
            assert await m.exposures("t", shown) == dict.fromkeys(shown, ("a\x00", 3))
            rewards = [Reward(1.0, key=unit or "a\x00b", metric="m\x00") for unit in shown]
            assert await m.rewards("t", rewards) == [True, False] + [True] * 7
            assert await m.rewards("t", rewards) == [False] * 9
            assert m.figures("t")["a\x00"].units == len(shown)

        run(database, work)

    def test_the_oldest_are_forgotten_beyond_a_number(self, database: Database):
        async def first(m: Measurements) -> None:
            for n in range(10):
                await m.put("p", n + 1, Seen({}, units("t", "a", *(f"{n}-{i}" for i in range(10)))))
                await m.rewards("t", [Reward(1.0, key=f"{n}-{i}", metric="m") for i in range(10)])
            assert remembered(database, "units") == remembered(database, "events") == 30
            assert m.figures("t")["a"].units == 100
            assert m.figures("t")["a"].sums["reward:m"][3] == (100, 100.0)
            assert await m.exposure("t", "0-0") is None
            assert await m.exposure("t", "9-9") == ("a", 3)

        async def after(m: Measurements) -> None:
            await m.put("q", 1, Seen({}, units("t", "a", "new") + units("other", "a", "new")))
            assert remembered(database, "units") == 32
            assert await m.exposure("t", "new") == ("a", 3)

        run(database, first, keep=25)
        run(database, after, keep=25)


class TestRewards:
    def test_each_event_counts_once_in_its_units_arm_and_group(self, database: Database):
        async def first(m: Measurements) -> None:
            given = units("t", "a", "ann", bucket=1) + units("t", "b", "bob", bucket=2 + GROUPS)
            await m.put("p", 1, Seen({}, given))
            assert await m.reward("t", "spent", "order 1", "ann", 2.5) is True
            assert await m.reward("t", "spent", "order 1", "ann", 2.5) is False
            assert await m.reward("t", "spent", "order 1", "bob", 99.0) is False
            assert await m.reward("t", "clicks", "order 1", "ann", 1.0) is True
            assert await m.reward("t", "spent", "order 2", "cid", 1.0) is None

        async def after(m: Measurements) -> None:
            assert await m.reward("t", "spent", "order 1", "ann", 2.5) is False
            assert await m.reward("t", "spent", "order 2", "bob", -1.0) is True
            assert await m.reward("t", "spent", "order 3", "ann", 1.0) is True
            a, b = m.figures("t")["a"], m.figures("t")["b"]
            assert a.sums["reward:spent"] == {1: (2, 3.5)}
            assert a.sums["reward:clicks"] == {1: (1, 1.0)}
            assert b.sums["reward:spent"] == {2: (1, -1.0)}
            assert (a.calls, a.units, b.units) == (0, 1, 1)

        run(database, first)
        run(database, after)

    def test_without_an_id_those_of_a_unit_are_one(self, database: Database):
        async def work(m: Measurements) -> None:
            await m.put("p", 1, Seen({}, units("t", "a", "u1", "u2")))
            several = [
                Reward(1.0, request_id="u1", metric="m"),
                Reward(1.0, request_id="u1", metric="m"),
                Reward(1.0, request_id="u1", metric="n"),
                Reward(1.0, request_id="u2", metric="m", id="u1"),
                Reward(1.0, request_id="u1", metric="m", id="u1"),
            ]
            assert await m.rewards("t", several) == [True, False, True, True, False]
            assert await m.rewards("t", []) == []

        run(database, work)

    def test_all_of_several_count_or_none(self, database: Database):
        async def work(m: Measurements) -> None:
            await m.put("p", 1, Seen({}, units("t", "a", "u1", "u2")))
            several = [Reward(1.0, key=unit, metric="m") for unit in ("u1", "u9", "u2")]
            assert await m.rewards("t", several) == [False, None, False]
            assert "reward:m" not in m.figures("t")["a"].sums
            assert await m.rewards("t", several[::2]) == [True, True]

        run(database, work)

    def test_of_a_trial_by_key_are_known_by_its_calls_too(self, database: Database):
        async def work(m: Measurements) -> None:
            await m.put("p", 1, Seen({}, units("t", "a", "ann") + units("t/calls", "a", "r1", "r2")))
            several = [Reward(1.0, request_id=call, metric="m") for call in ("r1", "r2", "r1")]
            assert await m.rewards("t", several) == [True, True, False]
            assert await m.reward("t", "m", "e", "r1", 1.0) is None, "a key is no request id"
            assert await m.reward("t", "m", "e", "ann", 1.0) is True
            figures = m.figures("t")["a"]
            assert (figures.units, figures.sums["units"]) == (1, {3: (1, 0)})
            assert figures.sums["reward:m"] == {3: (3, 3.0)}
            await m.forget("t")
            await m.put("p", 2, Seen({}, units("t/calls", "a", "r3")))
            assert remembered(database, "units") == 0

        run(database, work)

    def test_many_at_once_in_any_order(self, database: Database):
        async def work(m: Measurements) -> None:
            names = [f"u{n}" for n in range(1500)]
            await m.put("p", 1, Seen({}, units("t", "a", *names)))
            random.shuffle(names)
            posts = [names[i : i + 100] for i in range(0, 1500, 50)]
            answers = await asyncio.gather(
                *(m.rewards("t", [Reward(1.0, key=n, metric="m") for n in post]) for post in posts)
            )
            assert sum(map(sum, answers)) == 1500
            assert m.figures("t")["a"].sums["reward:m"] == {3: (1500, 1500.0)}

        run(database, work)

    def test_one_waits_for_a_process_that_has_not_told_of_its_unit_yet(self, database: Database):
        async def work(m: Measurements) -> None:
            posted = [Reward(1.0, key=unit, metric="m") for unit in ("u1", "u2")]
            early = asyncio.create_task(m.rewards("t", posted))
            await m.put("p", 1, seen(1))
            await m.put("p", 2, Seen({}, units("t", "a", "u1")))
            await m.put("q", 1, Seen({}, units("t", "a", "u2")))
            assert await early == [True, True]
            assert m.figures("t")["a"].sums["reward:m"] == {3: (2, 2.0)}

        run(database, work, patience=30.0)


class TestForgetting:
    def test_everything_of_a_trial_and_of_a_rollouts_steps(self, database: Database):
        trials = ("e1", "e10", "r1:0", "r1:1")

        async def work(m: Measurements) -> None:
            given = [row for trial in trials for row in units(trial, "a", *(f"u{n}" for n in range(20)))]
            await m.put("p", 1, Seen({trial: {"a": ArmFigures(20)} for trial in trials}, given))
            await m.rewards("e1", [Reward(1.0, key=f"u{n}", metric="m") for n in range(20)])
            for gone in ("e1", "r1", "unknown"):
                await m.forget(gone)
            assert (m.figures("e1"), m.figures_like("r1:")) == ({}, {})
            assert m.figures("e10")["a"].calls == 20
            assert (remembered(database, "units"), remembered(database, "events")) == (20, 0)
            assert await m.reward("e1", "m", "e", "u0", 1.0) is None
            # A process that has not heard of it yet.
            await m.put("p", 2, Seen({"e1": {"a": ArmFigures(1)}}, units("e1", "a", "u0")))
            assert m.figures("e1") == {}
            assert remembered(database, "units") == 20
            await m.put("p", 3, Seen({"e10": {"a": ArmFigures(1)}}))
            assert m.figures("e10")["a"].calls == 21

        async def after(m: Measurements) -> None:
            assert list(m.figures_like("")) == ["e10"]

        run(database, work)
        run(database, after)

    def test_processes_that_were_not_heard_of_for_a_week(self, database: Database):
        run(database, lambda m: m.put("p", 1, seen()))
        with database.transaction() as connection:
            connection.execute(sa.update(SOURCES).values(time=SOURCES.c.time - 8 * 86_400))
        run(database, lambda m: m.put("q", 1, seen()))
        with database.transaction() as connection:
            assert set(connection.execute(sa.select(SOURCES.c.source)).scalars()) == {"", "q"}


PUT_ON_AND_ON = """
import asyncio, sys
from serve_app.control.database import Database
from serve_app.control.measurements import Measurements
from serve_app.experiment import Reward
from serve_app.telemetry.observations import ArmFigures, Seen

async def main():
    measurements = Measurements(Database(sys.argv[1]), patience=0.0)
    number = 0
    while True:
        number += 1
        seen = Seen({"t": {"a": ArmFigures(calls=1, sums={"latency": {1: (1, 2.0)}})}}, [("t", str(number), "a", 1)])
        put = asyncio.create_task(measurements.put("p", number, seen))
        before = [Reward(1.0, key=str(number - 1), metric="m")]
        if number > 1:
            assert await measurements.rewards("t", before) == [True]
        await put
        print(number, flush=True)

asyncio.run(main())
"""


def test_a_kill_loses_nothing_that_was_acknowledged_and_nothing_is_stored_in_part(url: str, database: Database):
    line = [sys.executable, "-W", "error", "-c", PUT_ON_AND_ON, url]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.Popen(line, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    acknowledged = [int(killed.stdout.readline()) for _ in range(8)]
    os.kill(killed.pid, signal.SIGKILL)
    rest, errors = killed.stdout.read(), killed.stderr.read()
    killed.communicate()
    assert errors == ""
    last = [*acknowledged, *map(int, rest.splitlines())][-1]

    async def after(m: Measurements) -> None:
        found = m.figures("t")["a"]
        assert last <= found.calls <= last + 1
        assert found.units == found.calls == remembered(database, "units")
        assert found.sums["latency"] == {1: (found.calls, 2.0 * found.calls)}
        assert found.sums["reward:m"] == {1: (remembered(database, "events"), remembered(database, "events"))}
        # Its processes send again what they know of nobody having heard.
        for number in range(found.calls - 1, found.calls + 1):
            await m.put("p", number, seen(1))
        assert m.figures("t")["a"].calls == found.calls

    run(database, after)


def test_the_event_loop_goes_on_while_it_stores(database: Database):
    async def work(m: Measurements) -> None:
        free = threading.Event()
        held = threading.Event()

        def hold() -> None:
            with database.transaction() as connection:
                connection.execute(sa.select(SOURCES).with_for_update()).all()
                held.set()
                free.wait(60)

        holder = threading.Thread(target=hold)
        holder.start()
        await asyncio.to_thread(held.wait)
        put = asyncio.create_task(m.put("p", 1, seen()))
        for _ in range(10):
            await asyncio.sleep(0.001)
        assert not put.done()
        assert m.figures("t") == {}, "what is not stored is not known"
        free.set()
        await put
        holder.join()
        assert rows(database, FIGURES) == 1

    run(database, work)
