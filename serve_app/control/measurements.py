"""What trials have measured: the figures of every arm, who was given which, and the rewards that came later.

Figures are kept in memory and in the database, and never differ: what comes in is gathered, stored in one transaction
together with the number that its process gave it, and only then counted here and acknowledged. So whatever dies,
nothing that was acknowledged is lost, and nothing is counted twice.
"""

from __future__ import annotations

import asyncio
import json
import logging
import struct
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, islice
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.control.database import EXPOSURES, FIGURES, REWARDS, SOURCES, Database
from serve_app.errors import Unavailable
from serve_app.experiment import GROUPS, Reward
from serve_app.telemetry.observations import CALLS, REWARD, UNITS, ArmFigures, Seen

log = logging.getLogger("torchrelay.measurements")

KEEP = 1_000_000  # exposures, and rewards, that are remembered of each trial

_PAUSE = 0.25  # seconds between two transactions, unless somebody waits for an answer
_PATIENCE = 2.0  # seconds that a reward waits for its exposure, which its process may not have told of yet
_PIECE = 5_000  # rows that one transaction removes at most: others wait for it
_AT_ONCE = 500  # rows that one statement asks for
_LONGEST = 200  # characters of a unit or an event's id that are stored as they are
_REMEMBERED = 7 * 86_400  # seconds for which the numbers of a process are kept

_LIVES = ""  # the source whose number says how often measurements were opened: whoever opened them last may write


@dataclass
class _Put:
    source: str
    number: int
    seen: Seen


@dataclass
class _Rewards:
    trial: str
    rewards: Sequence[Reward]


@dataclass
class _Forget:
    trial: str


@dataclass
class _Draft:
    """What a transaction is about to change.

    ``figures`` have what it changes of an arm and nothing else: the counts, and of the sums those in ``names``.
    """

    figures: dict[tuple[str, str], ArmFigures] = field(default_factory=dict)
    names: set[tuple[str, str, str]] = field(default_factory=set)  # trial, arm, and sums, or "" for the counts
    values: dict[tuple[str, str, str], bytes] = field(default_factory=dict)  # of these names, as they are stored
    numbers: dict[str, int] = field(default_factory=dict)
    exposed: dict[str, int] = field(default_factory=dict)  # rows more, by trial
    rewarded: dict[str, int] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)


class Measurements:
    """Opening it blocks: do that in a thread. Everything else belongs to one event loop.

    ``keep`` bounds what is remembered of each trial, the oldest is forgotten: its rewards come too late then, and who
    comes back after that is counted as new. Raises Unavailable.
    """

    def __init__(self, database: Database, keep: int = KEEP, patience: float = _PATIENCE) -> None:
        self._database = database
        self._keep = keep
        self._patience = patience
        self._waiting: list[tuple[Any, asyncio.Future[Any]]] = []
        self._task: asyncio.Task[None] | None = None
        self._forgotten: set[str] = set()  # of which a process may still tell
        self._urgent = asyncio.Event()
        self._exposed_more = asyncio.Event()
        with database.transaction() as connection:
            self._life = _begin_life(connection)
            # trial -> (arm, name) -> as it is stored: of many trials nobody asks any more, and packed they are small.
            self._values = _load(connection)
            self._numbers = {row.source: row.number for row in connection.execute(sa.select(SOURCES))}
            self._exposed = _count(connection, EXPOSURES)
            self._rewarded = _count(connection, REWARDS)

    # What is known

    def figures(self, trial: str) -> dict[str, ArmFigures]:
        """What a trial's arms came to, as far as it is stored."""
        found: dict[str, ArmFigures] = {}
        for (arm, name), value in self._values.get(trial, {}).items():
            _unpack(found.setdefault(arm, ArmFigures()), name, value)
        return found

    def figures_like(self, prefix: str) -> dict[str, dict[str, ArmFigures]]:
        """The same of every trial whose id begins so."""
        return {trial: self.figures(trial) for trial in self._values if trial.startswith(prefix)}

    async def exposure(self, trial: str, unit: str) -> tuple[str, int] | None:
        """The arm and the bucket that a unit was given; None for one that is not known. Raises Unavailable."""
        return (await self.exposures(trial, [unit])).get(unit)

    async def exposures(self, trial: str, units: Collection[str]) -> dict[str, tuple[str, int]]:
        """The same for many: those that are known."""

        def look() -> dict[str, tuple[str, int]]:
            with self._database.transaction() as connection:
                return _exposures(connection, trial, {_key(unit) for unit in units})

        known = await asyncio.to_thread(look)
        return {unit: known[key] for unit in units if (key := _key(unit)) in known}

    # What comes in

    async def put(self, source: str, number: int, seen: Seen) -> None:
        """Count what a process has seen; when this returns it is stored. Raises Unavailable, and nothing is counted.

        A process numbers what it sends from one upwards, and sends the same again under the same number until this
        has returned.
        """
        await self._commit(_Put(source, number, seen))

    async def reward(self, trial: str, metric: str, event: str, unit: str, value: float) -> bool | None:
        """``rewards`` for one, whose id is ``event``."""
        return (await self.rewards(trial, [Reward(value, key=unit, metric=metric, id=event)]))[0]

    async def rewards(self, trial: str, rewards: Sequence[Reward]) -> list[bool | None]:
        """Count rewards, each of which names its metric: whether it is new; None where its unit was given no arm.

        All of them are counted, or none where one is None: units that are not known yet are waited for first, as a
        process tells of them half a second late. Two of a metric are the same where their ids are, or, without ids,
        their units. When this returns all is stored. Raises Unavailable.
        """
        until = time.monotonic() + self._patience
        while True:
            exposed_more = self._exposed_more
            answers: list[bool | None] = await self._commit(_Rewards(trial, rewards))
            if None not in answers:
                return answers
            try:
                await asyncio.wait_for(exposed_more.wait(), until - time.monotonic())
            except asyncio.TimeoutError:
                return answers

    async def forget(self, trial: str) -> None:
        """Remove everything of a trial, or, by a rollout's id, of all its steps. Raises Unavailable."""
        steps = [id for id in self._values if id.startswith(f"{trial}:")]
        for one in [trial, trial + CALLS, *steps]:
            while await self._commit(_Forget(one)) >= _PIECE:
                pass

    async def close(self) -> None:
        """Store what waits, and take no more."""
        if self._task is not None:
            self._urgent.set()
            await asyncio.wait([self._task])

    # Storing

    async def _commit(self, job: Any) -> Any:
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((job, done))
        if not isinstance(job, _Put):
            self._urgent.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._store_all())
        return await done

    async def _store_all(self) -> None:
        """What comes while a transaction is under way goes into the next, together."""
        while self._waiting:
            self._urgent.clear()
            batch, self._waiting = self._waiting, []
            try:
                draft, answers = await asyncio.to_thread(self._store, [job for job, _ in batch])
            except Exception as error:
                if not isinstance(error, Unavailable):
                    log.exception("measurements could not be stored")
                for _, done in batch:
                    if not done.done():
                        done.set_exception(Unavailable(str(error)))
            else:
                self._take_over(draft)
                for (_, done), answer in zip(batch, answers):
                    if not done.done():
                        done.set_result(answer)
            try:
                await asyncio.wait_for(self._urgent.wait(), _PAUSE)
            except asyncio.TimeoutError:
                continue

    def _take_over(self, draft: _Draft) -> None:
        """A transaction has come to its end: what it stored holds."""
        for (trial, arm, name), value in draft.values.items():
            self._values.setdefault(trial, {})[arm, name] = value
        self._numbers.update(draft.numbers)
        for counts, more in ((self._exposed, draft.exposed), (self._rewarded, draft.rewarded)):
            for trial, count in more.items():
                counts[trial] = counts.get(trial, 0) + count
        self._forgotten |= draft.gone
        for trial in draft.gone:
            for held in (self._values, self._exposed, self._rewarded):
                held.pop(trial, None)
        if draft.exposed:
            changed, self._exposed_more = self._exposed_more, asyncio.Event()
            changed.set()

    def _store(self, jobs: list[Any]) -> tuple[_Draft, list[Any]]:
        """One transaction, in a thread: nothing of this object's is changed before it is through."""
        draft = _Draft()
        with self._database.transaction() as connection:
            life = sa.select(SOURCES.c.number).where(SOURCES.c.source == _LIVES).with_for_update()
            if connection.execute(life).scalar_one() != self._life:
                raise Unavailable("Another Management keeps the measurements now.")
            exposures: dict[str, dict[str, tuple[str, int]]] = {}
            for job in jobs:
                if isinstance(job, _Put):
                    self._add(job, draft, exposures)
            for trial, units in exposures.items():
                self._expose(connection, trial, units, draft)
            answers = [self._answer(connection, job, draft) for job in jobs]
            self._write(connection, draft)
        return draft, answers

    def _add(self, put: _Put, draft: _Draft, exposures: dict[str, dict[str, tuple[str, int]]]) -> None:
        if put.number <= draft.numbers.get(put.source, self._numbers.get(put.source, 0)):
            return
        draft.numbers[put.source] = put.number
        for trial, arms in put.seen.figures.items():
            if trial not in self._forgotten:
                for arm, figures in arms.items():
                    self._figures_of(draft, trial, arm, *figures.sums).add(figures)
        for trial, unit, arm, bucket in put.seen.exposures:
            if trial.removesuffix(CALLS) not in self._forgotten:
                exposures.setdefault(trial, {}).setdefault(_key(unit), (arm, bucket))

    def _figures_of(self, draft: _Draft, trial: str, arm: str, *names: str) -> ArmFigures:
        """An arm's figures, to be changed: the counts, and the sums of these names."""
        figures = draft.figures.setdefault((trial, arm), ArmFigures())
        for name in ("", *names):
            if (trial, arm, name) not in draft.names:
                draft.names.add((trial, arm, name))
                if (value := self._values.get(trial, {}).get((arm, name))) is not None:
                    _unpack(figures, name, value)
        return figures

    def _expose(
        self, connection: Connection, trial: str, units: dict[str, tuple[str, int]], draft: _Draft
    ) -> None:
        known = _exposures(connection, trial, units.keys())
        now = time.time()
        new = [
            {"trial": trial, "unit": unit, "arm": _text(arm), "bucket": bucket, "time": now}
            for unit, (arm, bucket) in units.items()
            if unit not in known
        ]
        if not new:
            return
        connection.execute(sa.insert(EXPOSURES), new)
        for unit in () if trial.endswith(CALLS) else units.keys() - known.keys():
            arm, bucket = units[unit]
            figures = self._figures_of(draft, trial, arm, UNITS)
            figures.units += 1
            _sum(figures, UNITS, bucket, 0.0)
        held = self._exposed.get(trial, 0) + len(new)
        draft.exposed[trial] = len(new) - _drop_oldest(connection, EXPOSURES, trial, held - self._keep)

    def _answer(self, connection: Connection, job: Any, draft: _Draft) -> Any:
        if isinstance(job, _Rewards):
            if job.trial in draft.gone or job.trial in self._forgotten:
                return [None] * len(job.rewards)
            return self._reward(connection, job.trial, job.rewards, draft)
        if isinstance(job, _Forget):
            for key in [key for key in draft.figures if key[0] == job.trial]:
                del draft.figures[key]
            draft.names = {name for name in draft.names if name[0] != job.trial}
            draft.gone.add(job.trial)
            connection.execute(sa.delete(FIGURES).where(FIGURES.c.trial == job.trial))
            return sum(_drop_oldest(connection, table, job.trial, _PIECE) for table in (EXPOSURES, REWARDS))
        return None

    def _reward(
        self, connection: Connection, trial: str, rewards: Sequence[Reward], draft: _Draft
    ) -> list[bool | None]:
        given = _exposures(connection, trial, {_key(reward.unit) for reward in rewards})
        calls = {_key(reward.request_id) for reward in rewards if reward.request_id}
        given |= _exposures(connection, trial + CALLS, calls - given.keys())
        if any(_key(reward.unit) not in given for reward in rewards):
            return [False if _key(reward.unit) in given else None for reward in rewards]
        events = {(reward.metric, _event(reward)) for reward in rewards}
        counted = {
            (metric, row.event)
            for metric in {metric for metric, _ in events}
            for some in _pieces({event for m, event in events if m == metric})
            for row in connection.execute(
                sa.select(REWARDS.c.event).where(
                    REWARDS.c.trial == trial, REWARDS.c.metric == _text(metric), REWARDS.c.event.in_(some)
                )
            )
        }
        answers: list[bool | None] = []
        new: list[dict[str, Any]] = []
        now = time.time()
        for reward in rewards:
            event = (reward.metric, _event(reward))
            answers.append(event not in counted)
            if event in counted:
                continue
            counted.add(event)
            new.append({"trial": trial, "metric": _text(reward.metric), "event": event[1], "time": now})
            arm, bucket = given[_key(reward.unit)]
            name = REWARD + reward.metric
            _sum(self._figures_of(draft, trial, arm, name), name, bucket, reward.value)
        if new:
            connection.execute(sa.insert(REWARDS), new)
            more = draft.rewarded.get(trial, 0) + len(new)
            over = self._rewarded.get(trial, 0) + more - self._keep
            draft.rewarded[trial] = more - _drop_oldest(connection, REWARDS, trial, over)
        return answers

    def _write(self, connection: Connection, draft: _Draft) -> None:
        draft.values = {
            (trial, arm, name): _packed(draft.figures[trial, arm], name) for trial, arm, name in draft.names
        }
        rows = [
            {"t": trial, "a": _text(arm), "n": _text(name), "v": value}
            for (trial, arm, name), value in draft.values.items()
        ]
        _replace(connection, FIGURES, rows, {"trial": "t", "arm": "a", "name": "n"}, {"value": "v"})
        now = time.time()
        numbers = [{"s": source, "n": number, "w": now} for source, number in draft.numbers.items()]
        _replace(connection, SOURCES, numbers, {"source": "s"}, {"number": "n", "time": "w"})


def _sum(figures: ArmFigures, name: str, bucket: int, value: float) -> None:
    sums, group = figures.sums.setdefault(name, {}), bucket % GROUPS
    count, total = sums.get(group, (0, 0.0))
    sums[group] = (count + 1, total + value)


# Rows


def _begin_life(connection: Connection) -> int:
    """The number of this life. Whoever lives longer than the next one's beginning can store nothing any more."""
    now = time.time()
    lives = SOURCES.c.source == _LIVES
    if connection.execute(sa.update(SOURCES).where(lives).values(number=SOURCES.c.number + 1)).rowcount == 0:
        connection.execute(sa.insert(SOURCES).values(source=_LIVES, number=1, time=now))
    connection.execute(sa.delete(SOURCES).where(~lives, SOURCES.c.time < now - _REMEMBERED))
    return int(connection.execute(sa.select(SOURCES.c.number).where(lives)).scalar_one())


def _load(connection: Connection) -> dict[str, dict[tuple[str, str], bytes]]:
    found: dict[str, dict[tuple[str, str], bytes]] = {}
    for row in connection.execute(sa.select(FIGURES)):
        found.setdefault(row.trial, {})[_said(row.arm), _said(row.name)] = bytes(row.value)
    return found


def _packed(figures: ArmFigures, name: str) -> bytes:
    """One row's value: the sums of ``name`` as (group, count, sum), or of no name everything else."""
    if name:
        numbers = [(group, *sums) for group, sums in figures.sums.get(name, {}).items()]
        return struct.pack(f"<{3 * len(numbers)}d", *chain.from_iterable(numbers))
    return json.dumps({key: value for key, value in vars(figures).items() if key != "sums"}).encode()


def _unpack(figures: ArmFigures, name: str, value: bytes) -> None:
    if name:
        numbers = iter(struct.unpack(f"<{len(value) // 8}d", value))
        figures.sums[name] = {int(group): (count, total) for group, count, total in zip(numbers, numbers, numbers)}
        return
    said = json.loads(value)
    said["latency"] = {int(bin): count for bin, count in said["latency"].items()}
    for key, count in said.items():
        setattr(figures, key, count)


def _replace(
    connection: Connection, table: sa.Table, rows: list[dict[str, Any]], key: dict[str, str], values: dict[str, str]
) -> None:
    """Rows that are there or are not. ``key`` and ``values``: which column has which of a row's entries."""
    if rows:
        where = [table.c[column] == sa.bindparam(entry) for column, entry in key.items()]
        connection.execute(sa.delete(table).where(*where), rows)
        both = {**key, **values}
        connection.execute(sa.insert(table), [{column: row[entry] for column, entry in both.items()} for row in rows])


def _exposures(connection: Connection, trial: str, units: Collection[str]) -> dict[str, tuple[str, int]]:
    """Those of ``units`` that were given an arm."""
    what = sa.select(EXPOSURES.c.unit, EXPOSURES.c.arm, EXPOSURES.c.bucket).where(EXPOSURES.c.trial == trial)
    return {
        row.unit: (_said(row.arm), row.bucket)
        for some in _pieces(units)
        for row in connection.execute(what.where(EXPOSURES.c.unit.in_(some)))
    }


def _drop_oldest(connection: Connection, table: sa.Table, trial: str, count: int) -> int:
    """Remove up to ``count`` rows of a trial, a piece at a time; how many were."""
    if count <= 0:
        return 0
    key = list(table.primary_key.columns)[1:]
    oldest = sa.select(*key).where(table.c.trial == trial).order_by(table.c.time).limit(min(count, _PIECE))
    within = sa.tuple_(*key).in_(oldest) if len(key) > 1 else key[0].in_(oldest)
    return int(connection.execute(sa.delete(table).where(table.c.trial == trial, within)).rowcount)


def _count(connection: Connection, table: sa.Table) -> dict[str, int]:
    rows = connection.execute(sa.select(table.c.trial, sa.func.count()).group_by(table.c.trial))
    return {row[0]: row[1] for row in rows}


def _pieces(keys: Iterable[str]) -> Iterator[list[str]]:
    rest = iter(keys)
    while piece := list(islice(rest, _AT_ONCE)):
        yield piece


def _event(reward: Reward) -> str:
    return _key(f"id {reward.id}" if reward.id else f"unit {reward.unit}")


# Texts. Callers and operators write what they like, and a database refuses some of it.


def _text(said: str) -> str:
    return said.encode("unicode_escape").decode("ascii")


def _said(text: str) -> str:
    return text.encode("ascii").decode("unicode_escape")


def _key(said: str) -> str:
    """What a caller showed, as a key of bounded length."""
    text = _text(said)
    return text if len(text) <= _LONGEST else "#" + blake2b(text.encode(), digest_size=16).hexdigest()
