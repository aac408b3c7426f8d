"""The store of experiment metrics: the statistics of every arm, exposures of units, and later rewards.

Statistics are kept in memory and in the database, and never differ. Reports are gathered, stored in one
transaction together with the number that their process assigned, and only then counted here and acknowledged.
After a crash, therefore, nothing acknowledged is lost, and nothing is counted twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.control.exposure_set import ExposureSet, hash_texts
from serve_app.control.metric_rows import (
    EPOCH_SOURCE,
    decode_name,
    decode_value,
    encode_name,
    encode_value,
    load_values,
    replace_rows,
    start_epoch,
)
from serve_app.control.persistence.database import ARM_STATS, EXPOSURES, METRIC_SOURCES, Database
from serve_app.dataplane.experiment_collector import (
    REQUEST_EXPOSURES,
    REWARD,
    UNITS,
    ArmStats,
    ExperimentReport,
)
from serve_app.domain.experiment import BUCKET_GROUPS, Reward
from serve_app.errors import Unavailable

log = logging.getLogger("torchrelay.metric_store")

MAX_EXPOSURES = 1_000_000  # exposures, requests, and rewards, that are remembered of each split

_COMMIT_INTERVAL = 0.25  # seconds between two transactions, unless a caller waits for a response
# Seconds that a reward waits for its exposure, which the process may not have reported yet.
_EXPOSURE_TIMEOUT = 2.0
_CLOSE_TIMEOUT = 1.0  # seconds for pending writes when Management ends
_IDLE_TIMEOUT = 600  # seconds after which an exposure set without lookups is dropped from memory

_UNITS, _EVENTS = "units", "events"  # the exposure sets of a split
_ARM_FACTOR = 65_536  # a unit's number in its set is its arm's index times this, plus its bucket


@dataclass
class _MetricsWrite:
    source: str
    number: int
    report: ExperimentReport


@dataclass
class _RewardsWrite:
    split: str
    rewards: Sequence[Reward]


@dataclass
class _ExposureLookup:
    split: str
    units: Collection[str]


@dataclass
class _MetricsDelete:
    splits: set[str]


_Job = _MetricsWrite | _RewardsWrite | _ExposureLookup | _MetricsDelete


@dataclass
class _PendingTransaction:
    """The changes of a transaction.

    ``arm_stats`` hold only the changed parts of an arm: the counts, and the sums in ``names``.
    """

    arm_stats: dict[tuple[str, str], ArmStats] = field(default_factory=dict)
    # Split, arm, and the name of the sums, or "" for the counts.
    names: set[tuple[str, str, str]] = field(default_factory=set)
    # The encoded values of these names.
    values: dict[tuple[str, str, str], bytes] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)
    has_exposures: bool = False


@dataclass
class _LoadedExposures:
    """An exposure set in memory, and the arms that its numbers refer to."""

    exposures: ExposureSet
    arms: list[str]
    used: float = 0.0  # time.monotonic()


class MetricStore:
    """The metrics of all splits. Its constructor blocks; everything else belongs to one event loop.

    ``max_exposures`` bounds the memory of each split. Beyond it the oldest exposures are dropped: their
    rewards are refused, and their units count as new. Raises Unavailable.
    """

    def __init__(
        self,
        database: Database,
        max_exposures: int = MAX_EXPOSURES,
        exposure_timeout: float = _EXPOSURE_TIMEOUT,
    ) -> None:
        self._database = database
        self._max_exposures = max_exposures
        self._exposure_timeout = exposure_timeout
        self._pending: list[tuple[_Job, asyncio.Future[Any]]] = []
        self._task: asyncio.Task[None] | None = None
        self._deleted: set[str] = set()  # a process may still report them
        # (split, name) -> sets in recent use; only the thread that stores accesses them.
        self._exposure_sets: dict[tuple[str, str], _LoadedExposures] = {}
        self._urgent = asyncio.Event()
        self._exposures_added = asyncio.Event()
        with database.transaction() as connection:
            self._epoch = start_epoch(connection)
            # split -> (arm, name) -> encoded value: most splits are rarely read, and encoded they are small.
            self._values = load_values(connection)
            self._numbers = {row.source: row.number for row in connection.execute(sa.select(METRIC_SOURCES))}

    # Queries

    @property
    def splits(self) -> set[str]:
        """The ids of all splits with metrics."""
        return set(self._values)

    def arm_stats(self, split: str) -> dict[str, ArmStats]:
        """Return the stored statistics of a split's arms."""
        stats: dict[str, ArmStats] = {}
        for (arm, name), value in self._values.get(split, {}).items():
            decode_value(stats.setdefault(arm, ArmStats()), name, value)
        return stats

    def arm_stats_by_prefix(self, prefix: str) -> dict[str, dict[str, ArmStats]]:
        """Return the statistics of every split whose id starts with ``prefix``."""
        return {split: self.arm_stats(split) for split in self._values if split.startswith(prefix)}

    async def find_exposure(self, split: str, unit: str) -> tuple[str, int] | None:
        """Return the arm and the bucket of a unit; None for an unknown unit.

        Raises Unavailable.
        """
        return (await self.find_exposures(split, [unit])).get(unit)

    async def find_exposures(self, split: str, units: Collection[str]) -> dict[str, tuple[str, int]]:
        """Return the arms and the buckets of the known units. Raises Unavailable."""
        found: dict[str, tuple[str, int]] = await self._commit(_ExposureLookup(split, units))
        return found

    # Changes

    async def record(self, source: str, number: int, report: ExperimentReport) -> None:
        """Count a process's report, and return once it is stored.

        A process numbers its reports from one upwards, and sends a report again under the same number until
        this has returned. Raises Unavailable, and then counts nothing.
        """
        await self._commit(_MetricsWrite(source, number, report))

    async def record_reward(
        self, split: str, metric: str, event: str, unit: str, value: float
    ) -> bool | None:
        """Count one reward, whose id is ``event``, as ``record_rewards`` does."""
        rewards = await self.record_rewards(split, [Reward(value, key=unit, metric=metric, id=event)])
        return rewards[0]

    async def record_rewards(self, split: str, rewards: Sequence[Reward]) -> list[bool | None]:
        """Count rewards, each of which names its metric, and return once they are stored.

        The result holds for each reward whether it is new, or None where its unit has no exposure. All
        rewards are counted, or none where one is None. Unknown units are waited for first, because a process
        reports them half a second late. Two rewards of a metric are the same where their ids are equal, or,
        without ids, their units. Raises Unavailable.
        """
        deadline = time.monotonic() + self._exposure_timeout
        while True:
            exposures_added = self._exposures_added
            results: list[bool | None] = await self._commit(_RewardsWrite(split, rewards))
            if None not in results:
                return results
            try:
                await asyncio.wait_for(exposures_added.wait(), deadline - time.monotonic())
            except asyncio.TimeoutError:
                return results

    async def delete(self, split: str) -> None:
        """Delete the metrics of a split, or, given a rollout's id, of all its steps. Raises Unavailable."""
        steps = [id for id in self._values if id.startswith(f"{split}:")]
        await self._commit(_MetricsDelete({split, split + REQUEST_EXPOSURES, *steps}))

    async def close(self) -> None:
        """Wait briefly until pending writes are stored."""
        if self._task is not None:
            self._urgent.set()
            await asyncio.wait([self._task], timeout=_CLOSE_TIMEOUT)

    # Storing

    async def _commit(self, job: _Job) -> Any:
        done = asyncio.get_running_loop().create_future()
        self._pending.append((job, done))
        if not isinstance(job, _MetricsWrite):
            self._urgent.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._store_all())
        return await done

    async def _store_all(self) -> None:
        """Store pending jobs; those that arrive during a transaction share the next one."""
        while self._pending:
            self._urgent.clear()
            batch, self._pending = self._pending, []
            try:
                draft, answers = await asyncio.to_thread(self._store, [job for job, _ in batch])
            except Exception as error:
                if not isinstance(error, Unavailable):
                    log.exception("measurements could not be stored")
                for _, done in batch:
                    if not done.done():
                        done.set_exception(Unavailable(str(error)))
            else:
                self._apply(draft)
                for (_, done), answer in zip(batch, answers):
                    if not done.done():
                        done.set_result(answer)
            try:
                await asyncio.wait_for(self._urgent.wait(), _COMMIT_INTERVAL)
            except asyncio.TimeoutError:
                continue

    def _apply(self, draft: _PendingTransaction) -> None:
        """Copy the changes of a committed transaction to memory."""
        for (split, arm, name), value in draft.values.items():
            self._values.setdefault(split, {})[arm, name] = value
        self._numbers.update(draft.numbers)
        self._deleted |= draft.deleted
        for split in draft.deleted:
            self._values.pop(split, None)
        idle = time.monotonic() - _IDLE_TIMEOUT
        self._exposure_sets = {
            name: loaded for name, loaded in self._exposure_sets.items() if loaded.used > idle
        }
        if draft.has_exposures:
            changed, self._exposures_added = self._exposures_added, asyncio.Event()
            changed.set()

    def _store(self, jobs: list[_Job]) -> tuple[_PendingTransaction, list[Any]]:
        """Store jobs in one transaction, in a thread; until its commit only exposure sets are changed."""
        draft = _PendingTransaction()
        try:
            with self._database.transaction() as connection:
                epoch = (
                    sa.select(METRIC_SOURCES.c.number)
                    .where(METRIC_SOURCES.c.source == EPOCH_SOURCE)
                    .with_for_update()
                )
                if connection.execute(epoch).scalar_one() != self._epoch:
                    raise Unavailable("Another Management keeps the measurements now.")
                exposures: dict[str, dict[int, tuple[str, int]]] = {}
                for job in jobs:
                    if isinstance(job, _MetricsWrite):
                        self._add(job, draft, exposures)
                for split, units in exposures.items():
                    self._add_exposures(connection, split, units, draft)
                answers = [self._resolve(connection, job, draft) for job in jobs]
                self._write(connection, draft)
        except BaseException:
            self._exposure_sets.clear()  # they may hold changes that were not stored
            raise
        return draft, answers

    def _add(
        self,
        write: _MetricsWrite,
        draft: _PendingTransaction,
        exposures: dict[str, dict[int, tuple[str, int]]],
    ) -> None:
        if write.number <= draft.numbers.get(write.source, self._numbers.get(write.source, 0)):
            return
        draft.numbers[write.source] = write.number
        for split, arms in write.report.figures.items():
            if split not in self._deleted:
                for arm, stats in arms.items():
                    self._arm_stats(draft, split, arm, *stats.sums).add(stats)
        for split, unit, arm, bucket in write.report.exposures:
            if split.removesuffix(REQUEST_EXPOSURES) not in self._deleted:
                exposures.setdefault(split, {}).setdefault(hash_texts(unit), (arm, bucket))

    def _arm_stats(self, draft: _PendingTransaction, split: str, arm: str, *names: str) -> ArmStats:
        """Return an arm's statistics to change: the counts, and the sums of these names."""
        stats = draft.arm_stats.setdefault((split, arm), ArmStats())
        for name in ("", *names):
            if (split, arm, name) not in draft.names:
                draft.names.add((split, arm, name))
                if (value := self._values.get(split, {}).get((arm, name))) is not None:
                    decode_value(stats, name, value)
        return stats

    def _add_exposures(
        self,
        connection: Connection,
        split: str,
        units: dict[int, tuple[str, int]],
        draft: _PendingTransaction,
    ) -> None:
        known = self._load_exposures(connection, split, _UNITS)
        draft.has_exposures = True
        stored = known.exposures.find(units)
        new = {unit: given for unit, given in units.items() if unit not in stored}
        known.arms += sorted({arm for arm, _ in new.values()} - set(known.arms))
        indices = {arm: index for index, arm in enumerate(known.arms)}
        known.exposures.add(
            {unit: indices[arm] * _ARM_FACTOR + bucket for unit, (arm, bucket) in new.items()}
        )
        if split.endswith(REQUEST_EXPOSURES):
            return
        for arm, bucket in new.values():
            stats = self._arm_stats(draft, split, arm, UNITS)
            stats.units += 1
            _add_value(stats, UNITS, bucket, 0.0)

    def _find_arms(
        self, connection: Connection, split: str, units: Iterable[str]
    ) -> dict[str, tuple[str, int]]:
        """Return the arm and the bucket of the units that have an exposure."""
        known = self._load_exposures(connection, split, _UNITS)
        keys = {unit: hash_texts(unit) for unit in units}
        found = {k: divmod(number, _ARM_FACTOR) for k, number in known.exposures.find(keys.values()).items()}
        return {unit: (known.arms[found[k][0]], found[k][1]) for unit, k in keys.items() if k in found}

    def _load_exposures(self, connection: Connection, split: str, name: str) -> _LoadedExposures:
        known = self._exposure_sets.get((split, name))
        if known is None:
            rows = connection.execute(
                sa.select(EXPOSURES).where(EXPOSURES.c.trial == split, EXPOSURES.c.name == name)
            ).all()
            arms: list[str] = max((row.arms for row in rows), key=len, default=[])
            exposures = ExposureSet(self._max_exposures, {row.part: bytes(row.value) for row in rows})
            known = self._exposure_sets[split, name] = _LoadedExposures(
                exposures, [decode_name(arm) for arm in arms]
            )
        known.used = time.monotonic()
        return known

    def _resolve(self, connection: Connection, job: _Job, draft: _PendingTransaction) -> Any:
        if isinstance(job, _RewardsWrite):
            if job.split in draft.deleted or job.split in self._deleted:
                return [None] * len(job.rewards)
            return self._reward(connection, job.split, job.rewards, draft)
        if isinstance(job, _ExposureLookup):
            return self._find_arms(connection, job.split, job.units)
        if isinstance(job, _MetricsDelete):
            for arm_key in [arm_key for arm_key in draft.arm_stats if arm_key[0] in job.splits]:
                del draft.arm_stats[arm_key]
            draft.names = {name for name in draft.names if name[0] not in job.splits}
            draft.deleted |= job.splits
            for key in [key for key in self._exposure_sets if key[0] in job.splits]:
                del self._exposure_sets[key]
            for table in (ARM_STATS, EXPOSURES):
                connection.execute(sa.delete(table).where(table.c.trial.in_(job.splits)))
        return None

    def _reward(
        self, connection: Connection, split: str, rewards: Sequence[Reward], draft: _PendingTransaction
    ) -> list[bool | None]:
        given = self._find_arms(connection, split, {reward.unit for reward in rewards})
        if calls := {reward.request_id for reward in rewards if reward.request_id} - given.keys():
            given |= self._find_arms(connection, split + REQUEST_EXPOSURES, calls)
        if any(reward.unit not in given for reward in rewards):
            return [False if reward.unit in given else None for reward in rewards]
        counted = self._load_exposures(connection, split, _EVENTS).exposures
        events = [
            hash_texts(reward.metric, "id", reward.id)
            if reward.id
            else hash_texts(reward.metric, "unit", reward.unit)
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
            _add_value(self._arm_stats(draft, split, arm, name), name, bucket, reward.value)
        counted.add(new)
        return answers

    def _write(self, connection: Connection, draft: _PendingTransaction) -> None:
        draft.values = {
            (split, arm, name): encode_value(draft.arm_stats[split, arm], name)
            for split, arm, name in draft.names
        }
        rows = [
            {"trial": split, "arm": encode_name(arm), "name": encode_name(name), "value": value}
            for (split, arm, name), value in draft.values.items()
        ]
        replace_rows(connection, ARM_STATS, rows)
        for (split, name), known in self._exposure_sets.items():
            row = {"trial": split, "name": name, "arms": [encode_name(arm) for arm in known.arms]}
            parts = [{**row, "part": part, "value": value} for part, value in known.exposures.changed.items()]
            replace_rows(connection, EXPOSURES, parts)
            known.exposures.changed.clear()
        now = time.time()
        replace_rows(
            connection,
            METRIC_SOURCES,
            [{"source": s, "number": n, "time": now} for s, n in draft.numbers.items()],
        )


def _add_value(stats: ArmStats, name: str, bucket: int, value: float) -> None:
    sums, group = stats.sums.setdefault(name, {}), bucket % BUCKET_GROUPS
    count, total = sums.get(group, (0, 0.0))
    sums[group] = (count + 1, total + value)
