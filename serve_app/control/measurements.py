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
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.control.database import FIGURES, ROLLS, SOURCES, Database
from serve_app.control.roll import Roll, key
from serve_app.errors import Unavailable
from serve_app.experiment import GROUPS, Reward
from serve_app.telemetry.observations import CALLS, REWARD, UNITS, ArmFigures, Seen

log = logging.getLogger("torchrelay.measurements")

KEEP = 1_000_000  # exposures, calls, and rewards, that are remembered of each trial

_PAUSE = 0.25  # seconds between two transactions, unless somebody waits for an answer
_PATIENCE = 2.0  # seconds that a reward waits for its exposure, which its process may not have told of yet
_LAST = 1.0  # seconds for what waits when Management ends
_IDLE = 600  # seconds after which a roll that nobody asks is not kept in memory
_REMEMBERED = 7 * 86_400  # seconds for which the numbers of a process are kept

_UNITS, _EVENTS = "units", "events"  # the rolls of a trial
_ARM = 65_536  # what a unit has in its roll: its arm's index, times this, and its bucket

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
class _Look:
    trial: str
    units: Collection[str]


@dataclass
class _Forget:
    trials: set[str]


@dataclass
class _Draft:
    """What a transaction is about to change.

    ``figures`` have what it changes of an arm and nothing else: the counts, and of the sums those in ``names``.
    """

    figures: dict[tuple[str, str], ArmFigures] = field(default_factory=dict)
    names: set[tuple[str, str, str]] = field(default_factory=set)  # trial, arm, and sums, or "" for the counts
    values: dict[tuple[str, str, str], bytes] = field(default_factory=dict)  # of these names, as they are stored
    numbers: dict[str, int] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    exposed: bool = False


@dataclass
class _Known:
    """A roll that is in memory, and the arms that its numbers speak of."""

    roll: Roll
    arms: list[str]
    used: float = 0.0  # time.monotonic()


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
        # (trial, name) -> what a thread that stores has looked at lately; it alone touches them.
        self._rolls: dict[tuple[str, str], _Known] = {}
        self._urgent = asyncio.Event()
        self._exposed_more = asyncio.Event()
        with database.transaction() as connection:
            self._life = _begin_life(connection)
            # trial -> (arm, name) -> as it is stored: of many trials nobody asks any more, and packed they are small.
            self._values = _load(connection)
            self._numbers = {row.source: row.number for row in connection.execute(sa.select(SOURCES))}

    # What is known

    @property
    def trials(self) -> set[str]:
        """Of which there are figures."""
        return set(self._values)

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
        found: dict[str, tuple[str, int]] = await self._commit(_Look(trial, units))
        return found

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
        await self._commit(_Forget({trial, trial + CALLS, *steps}))

    async def close(self) -> None:
        """Give what waits the time to be stored."""
        if self._task is not None:
            self._urgent.set()
            await asyncio.wait([self._task], timeout=_LAST)

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
        self._forgotten |= draft.gone
        for trial in draft.gone:
            self._values.pop(trial, None)
        idle = time.monotonic() - _IDLE
        self._rolls = {whose: known for whose, known in self._rolls.items() if known.used > idle}
        if draft.exposed:
            changed, self._exposed_more = self._exposed_more, asyncio.Event()
            changed.set()

    def _store(self, jobs: list[Any]) -> tuple[_Draft, list[Any]]:
        """One transaction, in a thread: but for rolls nothing of this object's is changed before it is through."""
        draft = _Draft()
        try:
            with self._database.transaction() as connection:
                life = sa.select(SOURCES.c.number).where(SOURCES.c.source == _LIVES).with_for_update()
                if connection.execute(life).scalar_one() != self._life:
                    raise Unavailable("Another Management keeps the measurements now.")
                exposures: dict[str, dict[int, tuple[str, int]]] = {}
                for job in jobs:
                    if isinstance(job, _Put):
                        self._add(job, draft, exposures)
                for trial, units in exposures.items():
                    self._expose(connection, trial, units, draft)
                answers = [self._answer(connection, job, draft) for job in jobs]
                self._write(connection, draft)
        except BaseException:
            self._rolls.clear()  # they may have what was not stored
            raise
        return draft, answers

    def _add(self, put: _Put, draft: _Draft, exposures: dict[str, dict[int, tuple[str, int]]]) -> None:
        if put.number <= draft.numbers.get(put.source, self._numbers.get(put.source, 0)):
            return
        draft.numbers[put.source] = put.number
        for trial, arms in put.seen.figures.items():
            if trial not in self._forgotten:
                for arm, figures in arms.items():
                    self._figures_of(draft, trial, arm, *figures.sums).add(figures)
        for trial, unit, arm, bucket in put.seen.exposures:
            if trial.removesuffix(CALLS) not in self._forgotten:
                exposures.setdefault(trial, {}).setdefault(key(unit), (arm, bucket))

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
        self, connection: Connection, trial: str, units: dict[int, tuple[str, int]], draft: _Draft
    ) -> None:
        known = self._roll(connection, trial, _UNITS)
        draft.exposed = True
        told = known.roll.find(units)
        new = {unit: given for unit, given in units.items() if unit not in told}
        known.arms += sorted({arm for arm, _ in new.values()} - set(known.arms))
        indices = {arm: index for index, arm in enumerate(known.arms)}
        known.roll.add({unit: indices[arm] * _ARM + bucket for unit, (arm, bucket) in new.items()})
        if trial.endswith(CALLS):
            return
        for arm, bucket in new.values():
            figures = self._figures_of(draft, trial, arm, UNITS)
            figures.units += 1
            _sum(figures, UNITS, bucket, 0.0)

    def _given(self, connection: Connection, trial: str, units: Iterable[str]) -> dict[str, tuple[str, int]]:
        """Those of ``units`` that were given an arm, with it and their bucket."""
        known = self._roll(connection, trial, _UNITS)
        keys = {unit: key(unit) for unit in units}
        found = {k: divmod(number, _ARM) for k, number in known.roll.find(keys.values()).items()}
        return {unit: (known.arms[found[k][0]], found[k][1]) for unit, k in keys.items() if k in found}

    def _roll(self, connection: Connection, trial: str, name: str) -> _Known:
        known = self._rolls.get((trial, name))
        if known is None:
            rows = connection.execute(sa.select(ROLLS).where(ROLLS.c.trial == trial, ROLLS.c.name == name)).all()
            arms = max((row.arms for row in rows), key=len, default=[])
            roll = Roll(self._keep, {row.part: bytes(row.value) for row in rows})
            known = self._rolls[trial, name] = _Known(roll, [_said(arm) for arm in arms])
        known.used = time.monotonic()
        return known

    def _answer(self, connection: Connection, job: Any, draft: _Draft) -> Any:
        if isinstance(job, _Rewards):
            if job.trial in draft.gone or job.trial in self._forgotten:
                return [None] * len(job.rewards)
            return self._reward(connection, job.trial, job.rewards, draft)
        if isinstance(job, _Look):
            return self._given(connection, job.trial, job.units)
        if isinstance(job, _Forget):
            for figures in [figures for figures in draft.figures if figures[0] in job.trials]:
                del draft.figures[figures]
            draft.names = {name for name in draft.names if name[0] not in job.trials}
            draft.gone |= job.trials
            for roll in [roll for roll in self._rolls if roll[0] in job.trials]:
                del self._rolls[roll]
            for table in (FIGURES, ROLLS):
                connection.execute(sa.delete(table).where(table.c.trial.in_(job.trials)))
        return None

    def _reward(
        self, connection: Connection, trial: str, rewards: Sequence[Reward], draft: _Draft
    ) -> list[bool | None]:
        given = self._given(connection, trial, {reward.unit for reward in rewards})
        if calls := {reward.request_id for reward in rewards if reward.request_id} - given.keys():
            given |= self._given(connection, trial + CALLS, calls)
        if any(reward.unit not in given for reward in rewards):
            return [False if reward.unit in given else None for reward in rewards]
        counted = self._roll(connection, trial, _EVENTS).roll
        events = [
            key(reward.metric, "id", reward.id) if reward.id else key(reward.metric, "unit", reward.unit)
            for reward in rewards
        ]
        known = counted.find(events)
        new: dict[int, int] = {}
        answers: list[bool | None] = []
        for reward, event in zip(rewards, events):
            answers.append(event not in known and event not in new)
            if not answers[-1]:
                continue
            new[event] = 0
            arm, bucket = given[reward.unit]
            name = REWARD + reward.metric
            _sum(self._figures_of(draft, trial, arm, name), name, bucket, reward.value)
        counted.add(new)
        return answers

    def _write(self, connection: Connection, draft: _Draft) -> None:
        draft.values = {
            (trial, arm, name): _packed(draft.figures[trial, arm], name) for trial, arm, name in draft.names
        }
        rows = [
            {"trial": trial, "arm": _text(arm), "name": _text(name), "value": value}
            for (trial, arm, name), value in draft.values.items()
        ]
        _replace(connection, FIGURES, rows)
        for (trial, name), known in self._rolls.items():
            row = {"trial": trial, "name": name, "arms": [_text(arm) for arm in known.arms]}
            parts = [{**row, "part": part, "value": value} for part, value in known.roll.changed.items()]
            _replace(connection, ROLLS, parts)
            known.roll.changed.clear()
        now = time.time()
        _replace(connection, SOURCES, [{"source": s, "number": n, "time": now} for s, n in draft.numbers.items()])


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
    for field_name, count in said.items():
        setattr(figures, field_name, count)


def _replace(connection: Connection, table: sa.Table, rows: list[dict[str, Any]]) -> None:
    """Rows that are there or are not; one whose value is None shall not be there any more."""
    if not rows:
        return
    same = [column == sa.bindparam(column.name) for column in table.primary_key.columns]
    connection.execute(sa.delete(table).where(*same), rows)
    if stay := [row for row in rows if row.get("value", b"") is not None]:
        connection.execute(sa.insert(table), stay)


# Names. Operators write what they like, and a database refuses some of it.


def _text(said: str) -> str:
    return said.encode("unicode_escape").decode("ascii")


def _said(text: str) -> str:
    return text.encode("ascii").decode("unicode_escape")
