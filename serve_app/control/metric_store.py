"""The store of experiment metrics: the statistics of every arm, exposures of units, and later rewards.

Statistics are kept in memory and in the database, and never differ. Reports are gathered, stored in one
transaction together with the number that their process assigned, and only then counted here and acknowledged.
After a crash, therefore, nothing acknowledged is lost, and nothing is counted twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

import pydantic
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.control.persistence.database import Database, upsert
from serve_app.control.persistence.schema import (
    COUNTED_EVENTS,
    EXPERIMENT_STATS,
    EXPOSED_UNITS,
    METRIC_SOURCES,
)
from serve_app.dataplane.experiment_collector import (
    REQUEST_EXPOSURES,
    REWARD,
    UNITS,
    ArmStats,
    ExperimentReport,
)
from serve_app.domain.experiment import BUCKET_GROUPS, Reward
from serve_app.errors import Unavailable

log = logging.getLogger(__name__)

# Exposures, requests, and rewards that are remembered of each split. With a million of them in SQLite, 2,000
# more take 65 ms of CPU, and each 72 bytes; with PostgreSQL 33 ms here, and 166 bytes.
MAX_EXPOSURES = 1_000_000

_COMMIT_INTERVAL = 0.25  # seconds between two transactions, unless a caller waits for a response
# Seconds that a reward waits for its exposure, which the process may not have reported yet.
_EXPOSURE_TIMEOUT = 2.0
_CLOSE_TIMEOUT = 1.0  # seconds for pending writes when Management ends
_MAX_PARAMETERS = 5_000  # of one statement; SQLite accepts 32,766

# The source whose number counts how often a store was opened: only the last one to open may write.
_EPOCH_SOURCE = ""
_SOURCE_RETENTION = 7 * 86_400  # seconds for which the numbers of a process are kept

_ARMS = pydantic.TypeAdapter(dict[str, ArmStats])  # a split's arms, as the document that is stored


@dataclass
class _Transaction:
    """An open transaction, and its changes, which are applied in memory once it is committed."""

    connection: Connection
    stats: dict[str, dict[str, ArmStats]] = field(default_factory=dict)  # the changed splits
    documents: dict[str, str] = field(default_factory=dict)  # these, encoded
    deleted: set[str] = field(default_factory=set)
    has_exposures: bool = False


_Job = Callable[[_Transaction], Any]


class MetricStore:
    """The metrics of all splits. Its constructor blocks; everything else belongs to one event loop.

    ``max_exposures`` bounds the rows of each split. Beyond it the oldest exposures are dropped: their
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
        self._urgent = asyncio.Event()
        self._exposures_added = asyncio.Event()
        with database.transaction() as connection:
            self._epoch = _start_epoch(connection)
            # Encoded, because most splits are rarely read.
            self._documents: dict[str, str] = {
                row.trial: row.document for row in connection.execute(sa.select(EXPERIMENT_STATS))
            }

    # Queries

    @property
    def splits(self) -> set[str]:
        """The ids of all splits with metrics."""
        return set(self._documents)

    def arm_stats(self, split: str) -> dict[str, ArmStats]:
        """Return the stored statistics of a split's arms."""
        return _ARMS.validate_json(self._documents.get(split, "{}"))

    # Changes

    async def record(self, source: str, number: int, report: ExperimentReport) -> None:
        """Count a process's report, and return once it is stored.

        A process numbers its reports from one upwards, and sends a report again under the same number until
        this has returned. Raises Unavailable, and then counts nothing.
        """
        await self._commit(partial(self._add_report, source, number, report), urgent=False)

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
            results: list[bool | None] = await self._commit(partial(self._add_rewards, split, rewards))
            if None not in results:
                return results
            try:
                await asyncio.wait_for(exposures_added.wait(), deadline - time.monotonic())
            except asyncio.TimeoutError:
                return results

    async def delete(self, split: str) -> None:
        """Delete the metrics of a split, or, given a rollout's id, of all its steps. Raises Unavailable."""
        steps = [id for id in self._documents if id.startswith(f"{split}:")]
        await self._commit(partial(_delete, {split, split + REQUEST_EXPOSURES, *steps}))

    async def close(self) -> None:
        """Wait briefly until pending writes are stored."""
        if self._task is not None:
            self._urgent.set()
            await asyncio.wait([self._task], timeout=_CLOSE_TIMEOUT)

    # Storing

    async def _commit(self, job: _Job, urgent: bool = True) -> Any:
        done = asyncio.get_running_loop().create_future()
        self._pending.append((job, done))
        if urgent:
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
                transaction, answers = await asyncio.to_thread(self._store, [job for job, _ in batch])
            except Exception as error:
                if not isinstance(error, Unavailable):
                    log.exception(
                        "The metrics of experiments and rollouts could not be stored; they are sent again"
                    )
                for _, done in batch:
                    if not done.done():
                        done.set_exception(Unavailable(str(error)))
            else:
                self._apply(transaction)
                for (_, done), answer in zip(batch, answers):
                    if not done.done():
                        done.set_result(answer)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._urgent.wait(), _COMMIT_INTERVAL)

    def _apply(self, transaction: _Transaction) -> None:
        """Copy the changes of a committed transaction to memory."""
        self._documents.update(transaction.documents)
        self._deleted |= transaction.deleted
        for split in transaction.deleted:
            self._documents.pop(split, None)
        if transaction.has_exposures:
            changed, self._exposures_added = self._exposures_added, asyncio.Event()
            changed.set()

    def _store(self, jobs: list[_Job]) -> tuple[_Transaction, list[Any]]:
        """Store jobs in one transaction, in a thread."""
        with self._database.transaction() as connection:
            epoch = sa.select(METRIC_SOURCES.c.number).where(METRIC_SOURCES.c.source == _EPOCH_SOURCE)
            if connection.execute(epoch.with_for_update()).scalar_one() != self._epoch:
                raise Unavailable("Another Management keeps the measurements now.")
            transaction = _Transaction(connection)
            answers = [job(transaction) for job in jobs]
            transaction.documents = {
                split: _ARMS.dump_json(arms).decode() for split, arms in transaction.stats.items()
            }
            rows = [{"trial": split, "document": text} for split, text in transaction.documents.items()]
            upsert(connection, EXPERIMENT_STATS, rows)
        return transaction, answers

    def _is_deleted(self, transaction: _Transaction, split: str) -> bool:
        trial = split.removesuffix(REQUEST_EXPOSURES)
        return trial in self._deleted or trial in transaction.deleted

    def _arm(self, transaction: _Transaction, split: str, arm: str) -> ArmStats:
        """Return an arm's statistics to change."""
        if split not in transaction.stats:
            transaction.stats[split] = self.arm_stats(split)
        return transaction.stats[split].setdefault(arm, ArmStats())

    def _add_report(
        self, source: str, number: int, report: ExperimentReport, transaction: _Transaction
    ) -> None:
        connection = transaction.connection
        last = sa.select(METRIC_SOURCES.c.number).where(METRIC_SOURCES.c.source == source)
        if number <= (connection.execute(last).scalar() or 0):
            return
        upsert(connection, METRIC_SOURCES, [{"source": source, "number": number, "time": time.time()}])
        for split, arms in report.figures.items():
            if not self._is_deleted(transaction, split):
                for arm, stats in arms.items():
                    self._arm(transaction, split, arm).add(stats)
        exposures: dict[str, dict[int, tuple[str, int]]] = {}
        for split, unit, arm, bucket in report.exposures:
            exposures.setdefault(split, {}).setdefault(_hash(unit), (arm, bucket))
        for split, units in exposures.items():
            if not self._is_deleted(transaction, split):
                self._add_exposures(transaction, split, units)

    def _add_exposures(
        self, transaction: _Transaction, split: str, units: dict[int, tuple[str, int]]
    ) -> None:
        transaction.has_exposures = True
        known = _find(transaction.connection, EXPOSED_UNITS, split, units)
        new = {unit: given for unit, given in units.items() if unit not in known}
        rows = [{"hash": unit, "arm": arm, "bucket": bucket} for unit, (arm, bucket) in new.items()]
        self._insert(transaction.connection, EXPOSED_UNITS, split, rows)
        if split.endswith(REQUEST_EXPOSURES):
            return
        for arm, bucket in new.values():
            stats = self._arm(transaction, split, arm)
            stats.units += 1
            _add_value(stats, UNITS, bucket, 0.0)

    def _add_rewards(
        self, split: str, rewards: Sequence[Reward], transaction: _Transaction
    ) -> list[bool | None]:
        if self._is_deleted(transaction, split):
            return [None] * len(rewards)
        connection = transaction.connection
        units = [_hash(reward.unit) for reward in rewards]
        exposed = _find(connection, EXPOSED_UNITS, split, set(units))
        if calls := {_hash(reward.request_id) for reward in rewards if reward.request_id} - exposed.keys():
            exposed |= _find(connection, EXPOSED_UNITS, split + REQUEST_EXPOSURES, calls)
        if any(unit not in exposed for unit in units):
            return [False if unit in exposed else None for unit in units]
        events = [
            _hash(reward.metric, "id", reward.id) if reward.id else _hash(reward.metric, "unit", reward.unit)
            for reward in rewards
        ]
        counted = set(_find(connection, COUNTED_EVENTS, split, set(events)))
        new: list[dict[str, Any]] = []
        answers: list[bool | None] = []
        for reward, unit, event in zip(rewards, units, events):
            answers.append(event not in counted)
            if event in counted:
                continue
            counted.add(event)
            new.append({"hash": event})
            given = exposed[unit]
            stats = self._arm(transaction, split, given.arm)
            _add_value(stats, REWARD + reward.metric, given.bucket, reward.value)
        self._insert(connection, COUNTED_EVENTS, split, new)
        return answers

    def _insert(
        self, connection: Connection, table: sa.Table, split: str, rows: list[dict[str, Any]]
    ) -> None:
        """Insert rows with unknown hashes, and delete the oldest beyond the limit."""
        if not rows:
            return
        of_split = table.c.trial == split
        last = connection.execute(sa.select(sa.func.max(table.c.number)).where(of_split)).scalar() or 0
        numbered = [{"trial": split, "number": n, **row} for n, row in enumerate(rows, last + 1)]
        connection.execute(sa.insert(table), numbered)
        oldest = last + len(rows) - self._max_exposures
        connection.execute(sa.delete(table).where(of_split, table.c.number <= oldest))


def _start_epoch(connection: Connection) -> int:
    """Return the number of this epoch; a store of an earlier epoch can write nothing any more."""
    sources, now = METRIC_SOURCES.c, time.time()
    last = connection.execute(sa.select(sources.number).where(sources.source == _EPOCH_SOURCE)).scalar() or 0
    upsert(connection, METRIC_SOURCES, [{"source": _EPOCH_SOURCE, "number": last + 1, "time": now}])
    outdated = sources.time < now - _SOURCE_RETENTION
    connection.execute(sa.delete(METRIC_SOURCES).where(sources.source != _EPOCH_SOURCE, outdated))
    return int(last + 1)


def _delete(splits: set[str], transaction: _Transaction) -> None:
    transaction.deleted |= splits
    for split in splits:
        transaction.stats.pop(split, None)
    for table in (EXPERIMENT_STATS, EXPOSED_UNITS, COUNTED_EVENTS):
        transaction.connection.execute(sa.delete(table).where(table.c.trial.in_(splits)))


def _hash(*texts: str) -> int:
    """Return a text's signed 64-bit hash, so that the database holds no key of a caller.

    Two of a million texts have the same hash with a probability of one in thirty million; the second text is
    then taken for the first.
    """
    joined = "\0".join(texts).encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(joined, digest_size=8).digest(), "little", signed=True)


def _find(
    connection: Connection, table: sa.Table, split: str, hashes: Collection[int]
) -> dict[int, sa.Row[Any]]:
    """Return the rows of the known hashes."""
    wanted = list(hashes)
    found: dict[int, sa.Row[Any]] = {}
    for start in range(0, len(wanted), _MAX_PARAMETERS):
        chunk = wanted[start : start + _MAX_PARAMETERS]
        rows = connection.execute(sa.select(table).where(table.c.trial == split, table.c.hash.in_(chunk)))
        found |= {row.hash: row for row in rows}
    return found


def _add_value(stats: ArmStats, name: str, bucket: int, value: float) -> None:
    sums, group = stats.sums.setdefault(name, {}), bucket % BUCKET_GROUPS
    count, total = sums.get(group, (0, 0.0))
    sums[group] = (count + 1, total + value)
