"""Rows become batches: an idle model starts at once, a busy one collects.

Everything but ``_execute`` and what it calls runs on the event loop; those run in the author's
thread. A batch costs two crossings between the threads, however many rows it holds.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import islice
from math import ceil
from typing import Any

from serve_app.errors import CannotMeetDeadline, HandlerFailed, RelayError
from serve_app.runtime.admission import QueuedAdmission
from serve_app.runtime.answer import Answer, timed
from serve_app.runtime.padding import fitting
from serve_app.telemetry.metrics import Meters
from serve_app.types import Call, ModelRef, Reply, ReplyStream, Timings

log = logging.getLogger("torchrelay.batcher")

# What may lie ready behind the running batch, where that is more than one batch: no row overtakes what lies there.
_BEHIND = 64  # rows
_BEHIND_SECONDS = 0.005
# A batch of so many seconds is long beside those in which the next one begins.
_LONG = 0.01
_BEGINNING = 0.001
_WINDOW = 256  # rows among which those of one length are looked for: 8 batches at most, 2 at least

Run = Callable[..., "list[Reply | RelayError]"]  # (calls, emit), and (calls, emit, ahead) where rows are prepared


class _Row(Answer):
    """A call that waits for its answer."""

    __slots__ = ("ahead", "batch", "emitted")

    def __init__(self, call: Call, future: asyncio.Future[Reply | ReplyStream], arrived: float) -> None:
        super().__init__(call, future, arrived)
        self.emitted = False  # set in the author's thread: a row that streamed is never run again
        self.batch: _Batch | None = None
        self.ahead: Future[Any] | None = None

    @property
    def measured(self) -> int | None:
        """Its length, as far as its handler has said it."""
        ahead = self.ahead
        if ahead is None or not ahead.done() or ahead.cancelled() or ahead.exception() is not None:
            return None
        return ahead.result().length


class _Batch:
    """Rows that were given to the author's thread together."""

    __slots__ = ("began", "ended", "rows", "runs", "waiting")

    def __init__(self, rows: list[_Row]) -> None:
        self.rows = rows
        self.waiting = len(rows)  # of them, those whose callers are still there
        self.ended = False
        self.began: float | None = None  # of the run that is under way
        self.runs: list[tuple[float, list[float]]] = []  # seconds, and each row's wait; more than one after a failure


class Batcher(QueuedAdmission[_Row]):
    """Answers each call with its own reply or error, running many together where they meet.

    ``run`` is Runner.run; it is called in ``author``'s thread only. ``prepare`` is Runner.prepare: it begins rows of
    the next two batches while one runs. With ``tickets`` a row is taken only if the model is idle. ``bounds`` are
    QueuedAdmission's.

    No row overtakes what lies ready behind the running batch already. A row whose deadline is nearer than its answer,
    as the batches before it went, is refused at once; an idle model tries every row. Shadows run when nobody else
    waits and nothing runs, in batches of their own.

    ``bucket_by_length``: a batch is the row that is next and the rows nearest to it in length, see padding.py.
    """

    row = _Row

    def __init__(
        self,
        run: Run,
        ref: ModelRef,
        meters: Meters,
        *,
        prepare: Callable[[Call], Future[Any]] | None = None,
        retries: bool = True,
        tickets: bool = False,
        bucket_by_length: bool = False,
        **bounds: Any,
    ) -> None:
        self._bucketed = bucket_by_length
        super().__init__(ref, meters, **bounds)
        self._run = run
        self._prepare = prepare
        self._tickets = self._asks_of_all = tickets
        self._retries = retries
        self._flight: deque[_Batch] = deque()  # what the author's thread runs, and full batches ready behind it
        self._untold = 0  # batches that have run, whose answers are about to leave
        self._most_ready = 0  # rows, where one full batch is fewer; known when a batch has run

    def configure(self, *, retries: bool | None = None, **others: Any) -> None:
        self._retries = self._retries if retries is None else retries
        super().configure(**others)

    def _limit(self, max_batch_size: int) -> None:
        super()._limit(max_batch_size)
        size = self._max_batch_size
        # A full batch goes behind the running one as soon as it is there. Where rows are to be alike, it is chosen when
        # the running one ends, from all that came meanwhile; nothing more is to be gained once the window is full.
        self._enough = max(2 * size, min(8 * size, _WINDOW)) if self._bucketed else size
        self._begun = self._enough if self._bucketed else 2 * size  # rows that are prepared: more would take memory

    @property
    def ongoing(self) -> int:
        """Rows that wait and rows that run, shadows apart."""
        running = self._flight[0] if self._flight else None
        shadows = running is None or running.rows[0].call.priority == "shadow"
        return self.pending + (0 if shadows else running.waiting)

    @property
    def retry_after(self) -> int:
        """The seconds, from 1, in which the rows that wait now will have been answered."""
        return self.in_turn(self.pending)

    def in_turn(self, rows: int) -> int:
        """The seconds, from 1, that so many rows take."""
        return max(1, ceil(rows / self._max_batch_size * self._pace.seconds(self._max_batch_size)))

    def must_make_it(self, call: Call, before: int) -> None:
        """Raise CannotMeetDeadline for a call that has so many rows before it and whose time will not do."""
        if call.deadline is None or not self._pace.known:
            return
        full, over = divmod(before, self._max_batch_size)
        needed = full * self._pace.seconds(self._max_batch_size) + self._pace.seconds(over + 1)
        if self._flight:
            running = self._flight[0]
            ran = self._clock() - running.began if running.began is not None else 0.0
            needed += max(0.0, self._pace.seconds(len(running.rows)) - ran)
        left = call.deadline - time.time()
        if needed > left:
            error = CannotMeetDeadline(self._ref.name, 0.0, needed, max(0.0, left))
            error.retry_after = max(1, ceil(needed - max(0.0, left)))
            raise error

    @property
    def _idle(self) -> bool:
        return not self._flight and not self._untold and not self._queue.live

    def _may_wait(self, call: Call, waiting: int) -> None:
        if self._tickets and (self._flight or waiting >= self._max_batch_size):
            raise self._full(call, "useJobTicket: the model is busy, and no row may wait")
        if call.deadline is not None and self._flight and call.priority != "shadow":
            self.must_make_it(call, self._queue.before(call.priority) + self._ready)

    def _joined(self, row: _Row) -> None:
        live = self._queue.live
        if self._prepare is not None and live <= self._begun and row.call.priority != "shadow":
            row.ahead = self._prepare(row.call)
        if not self._flight or live >= self._enough:
            self._start_soon()
        expiry = row.expiry
        if expiry is not None:
            row.future.add_done_callback(lambda _: expiry.cancel())

    def _expire(self, row: _Row) -> None:
        if not row.future.done():
            super()._expire(row)

    def _drop(self, row: _Row) -> None:
        if row.ahead is not None:
            row.ahead.cancel()
        if not self._queue.remove(row):
            batch = row.batch
            if batch is not None and not batch.ended:
                batch.waiting -= 1
                if batch is not self._flight[0]:
                    self._ready -= 1
        self._look_drained()

    def _start(self) -> None:
        """Give the author's thread what may run: anything when it is idle, full batches when it is not.

        A full batch lies ready behind the running one, so a saturated model never waits for the loop; of
        small batches several do, for to change threads costs more than a small batch.
        """
        self._starting = False
        queue = self._queue
        started: list[_Batch] = []
        while queue.live and (len(self._flight) < 2 or self._ready < self._most_ready):
            needed = self._enough if self._flight else self._max_batch_size
            full = queue.live >= needed or queue.mixed()
            if not full and (self._flight or (self._delay and not self._refusal and self._waits())):
                break
            self._add(self._alike() if self._bucketed else queue.take(self._max_batch_size), started)
        if queue.shadows and not queue.live and not self._flight:
            self._add(queue.take_shadows(self._max_batch_size), started)
        if started:
            self.author.post(self._execute, started)
            if self._prepare is not None:
                for row in islice(queue, self._begun):
                    row.ahead = row.ahead or self._prepare(row.call)
            self._guard()

    def _alike(self) -> list[_Row]:
        """Take the row that is next, and those that go with it without much padding.

        Lengths are those that the handler measured, where it has measured the first row's, else bytes.
        """
        rows = self._queue.window(self._enough)
        known = [(length, row) for row in rows if (length := row.measured) is not None]
        if not known or known[0][1] is not rows[0]:
            known = [(sum(len(part.value) for part in row.call.inputs), row) for row in rows]
        taken = fitting(known[0], known[1:], self._max_batch_size)
        for row in taken:
            self._queue.remove(row)
        return taken

    def _add(self, rows: list[_Row], started: list[_Batch]) -> None:
        """The rows become the next batch, as far as somebody still waits for them."""
        rows = [row for row in rows if not row.future.done()]
        if not rows:
            return
        batch = _Batch(rows)
        for row in rows:
            row.batch = batch
        if self._flight:
            self._ready += len(rows)
        self._flight.append(batch)
        started.append(batch)

    # In the author's thread

    def _execute(self, batches: list[_Batch]) -> None:
        for batch in batches:
            answers: list[tuple[_Row, Reply | RelayError]] = []
            try:
                self._attempt(batch, batch.rows, answers)
            except BaseException:  # Runner.run raises nothing; whatever else does must not lose rows
                failure = HandlerFailed(traceback.format_exc())
                answers = [(row, failure) for row in batch.rows]
            self._tell(self._finish, batch, answers)

    def _attempt(self, batch: _Batch, rows: list[_Row], answers: list[tuple[_Row, Reply | RelayError]]) -> None:
        rows = [row for row in rows if self._wanted(row, answers)]
        if not rows:
            return
        size = len(rows)
        began = batch.began = self._clock()

        def emit(index: int, piece: bytes | Reply) -> None:
            row = rows[index]
            row.emitted = True
            if isinstance(piece, Reply):
                piece = timed(piece, Timings(began - row.arrived, self._clock() - began, size))
            self._tell(row.piece, piece)

        calls = [row.call for row in rows]
        if self._prepare is None:
            results = self._run(calls, emit)
        else:
            results = self._run(calls, emit, [row.ahead for row in rows])
        seconds = self._clock() - began
        batch.runs.append((seconds, [began - row.arrived for row in rows]))
        if size > 1 and self._retries and _failed_whole(results):
            again = [row for row in rows if not row.emitted]
            if again:
                ids = ", ".join(row.call.request_id for row in rows)
                said = "%s: a batch of %d failed (%s); it runs again in halves (requests %s)"
                log.warning(said, self._ref.app, size, results[0], ids)
                answers.extend((row, result) for row, result in zip(rows, results, strict=True) if row.emitted)
                middle = (len(again) + 1) // 2
                self._attempt(batch, again[:middle], answers)
                self._attempt(batch, again[middle:], answers)
                return
        for row, result in zip(rows, results, strict=True):
            if isinstance(result, Reply):
                result = timed(result, Timings(began - row.arrived, seconds, size))
            answers.append((row, result))

    def _wanted(self, row: _Row, answers: list[tuple[_Row, Reply | RelayError]]) -> bool:
        """Whether somebody still waits for the row, asked at the last moment."""
        if row.future.done():
            return False
        if row.call.expired:
            answers.append((row, self._late(row)))
            return False
        return True

    # On the event loop again

    def _finish(self, batch: _Batch, answers: list[tuple[_Row, Reply | RelayError]]) -> None:
        if not self._flight or self._flight[0] is not batch:
            return  # too late: its rows were given up
        self._flight.popleft()
        batch.ended = True
        if self._flight:
            self._ready -= self._flight[0].waiting
        if self._queue.live or self._queue.shadows:
            self._start_soon()
        self._untold += 1
        if self._flight and self._pace.seconds(len(batch.rows)) >= _LONG:
            # Another batch begins, and its thread wants the interpreter: what the loop does for these answers would
            # take it away a dozen times. Once the model computes, nobody misses it.
            assert self._loop is not None
            self._loop.call_later(_BEGINNING, self._answer, batch, answers)
        else:
            self._answer(batch, answers)

    def _answer(self, batch: _Batch, answers: list[tuple[_Row, Reply | RelayError]]) -> None:
        self._untold -= 1
        for row, answer in answers:
            row.settle(answer)
        assert self._loop is not None
        self._loop.call_soon(self._measure, batch)  # after the answers have left
        self._look_drained()

    def _measure(self, batch: _Batch) -> None:
        name, version = self._ref.name, self._ref.version
        pace, size = self._pace, self._max_batch_size
        live = batch.rows[0].call.priority != "shadow"
        for seconds, waits in batch.runs:
            self._meters.batch(name, version, len(waits), seconds, waits, live)
            pace.note(len(waits), seconds)
        self._most_ready = min(_BEHIND, int(_BEHIND_SECONDS / (pace.seconds(size) or 1.0)) * size)
        if batch.runs and batch.began is not None:
            self._meters.overhead(self._clock() - batch.began - batch.runs[-1][0])
        self._meters.depth(name, version, self.pending)

    def _running(self) -> tuple[list[_Row], float | None] | None:
        return (self._flight[0].rows, self._flight[0].began) if self._flight else None

    def _let_go(self) -> tuple[list[_Row], list[_Row]]:
        batches = [*self._flight]
        for batch in batches:
            batch.ended = True
        self._flight.clear()
        self._ready = 0
        return batches[0].rows if batches else [], [row for batch in batches[1:] for row in batch.rows]


def _failed_whole(results: Sequence[Reply | RelayError]) -> bool:
    """Whether the handler failed the batch rather than some of its rows: one error object stands for all."""
    first = results[0]
    return isinstance(first, HandlerFailed) and all(result is first for result in results)
