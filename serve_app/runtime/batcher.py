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
from types import EllipsisType
from typing import Any, Protocol

from serve_app.errors import (
    CannotMeetDeadline,
    DeadlineExceeded,
    HandlerFailed,
    Loading,
    QueueFull,
    RelayError,
    ResponseTimeout,
    WorkerDied,
)
from serve_app.runtime.answer import Answer, timed
from serve_app.runtime.author import Author
from serve_app.runtime.pace import Pace
from serve_app.runtime.padding import fitting
from serve_app.runtime.queue import Queue
from serve_app.telemetry.metrics import Meters
from serve_app.types import Call, ModelRef, Reply, ReplyStream, Timings

log = logging.getLogger("torchrelay.batcher")

# What may lie ready behind the running batch, where that is more than one batch: no row overtakes what lies there.
_BEHIND = 64  # rows
_BEHIND_SECONDS = 0.005
_WINDOW = 256  # rows among which those of one length are looked for: 8 batches at most, 2 at least
_SHADOWS = 16  # rows of shadows that may wait, where two batches are fewer

Emit = Callable[[int, "bytes | Reply"], None]
Run = Callable[..., "list[Reply | RelayError]"]  # (calls, emit), and (calls, emit, ahead) where rows are prepared


class Timer(Protocol):
    def __call__(self, delay: float, callback: Callable[..., None], /, *args: Any) -> asyncio.TimerHandle: ...


class _Row(Answer):
    """A call that waits for its answer."""

    __slots__ = ("ahead", "arrived", "batch", "call", "emitted")

    def __init__(self, call: Call, future: asyncio.Future[Reply | ReplyStream], arrived: float) -> None:
        super().__init__(future)
        self.call = call
        self.arrived = arrived
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


class Batcher:
    """Answers each call with its own reply or error, running many together where they meet.

    ``run`` is Runner.run; it is called in ``author``'s thread only. ``max_batch_delay`` (milliseconds)
    is how long an idle model waits for a batch to fill, counted from its first row; None or 0: not at
    all. ``prepare`` is Runner.prepare: it begins rows of the next two batches while one runs. With ``tickets`` a
    row is taken only if the model is idle. ``response_timeout`` (seconds) bounds one run of the handler; 0: unbounded.

    More urgent rows go first (see queue.py), but for what lies ready behind the running batch already. In a full queue
    a more urgent row takes the place of the newest of the least urgent ones. A row whose deadline is nearer than its
    answer, as the batches before it went, is refused at once; an idle model tries every row. Shadows run when nobody
    else waits and nothing runs, in batches of their own; a few may wait, and they count nowhere.

    ``bucket_by_length``: a batch is the row that is next and the rows nearest to it in length, see padding.py.

    ``on_hung`` is called once with what happened and where the handler stands, after everybody who waited was
    told, when a run exceeds it: the process is then of no more use. ``clock`` counts seconds; ``timer`` is
    ``call_later`` of the loop that submits.
    """

    def __init__(
        self,
        run: Run,
        ref: ModelRef,
        meters: Meters,
        *,
        author: Author | None = None,
        prepare: Callable[[Call], Future[Any]] | None = None,
        max_batch_size: int = 1,
        max_batch_delay: int | None = None,
        queue_size: int = 100,
        response_timeout: float = 120,
        retries: bool = True,
        tickets: bool = False,
        bucket_by_length: bool = False,
        on_hung: Callable[[str], None] = lambda why: None,
        clock: Callable[[], float] = time.perf_counter,
        timer: Timer | None = None,
    ) -> None:
        self._run = run
        self._ref = ref
        self._meters = meters
        self.author = author or Author()
        self._prepare = prepare
        self._tickets = tickets
        self._bucketed = bucket_by_length
        self._on_hung = on_hung
        self._clock = clock
        self._timer = timer
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queue: Queue[_Row] = Queue()
        self._pace = Pace()
        self._flight: deque[_Batch] = deque()  # what the author's thread runs, and full batches behind it
        self._behind = 0  # rows of those, as far as somebody waits for them
        self._most_behind = 0  # rows, where one full batch is fewer; known when a batch has run
        self._starting = False  # _start is due at the end of this turn of the loop
        self._delayed: asyncio.TimerHandle | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._refusal = ""  # why no more rows are taken
        self._drained: asyncio.Event | None = None
        self._limit(max_batch_size)
        self._delay = max(0, max_batch_delay or 0) / 1000
        self._queue_size = queue_size
        self._timeout = response_timeout
        self._retries = retries

    def configure(
        self,
        *,
        max_batch_size: int | None = None,
        max_batch_delay: int | None | EllipsisType = ...,
        queue_size: int | None = None,
        response_timeout: float | None = None,
        retries: bool | None = None,
    ) -> None:
        """Take new limits; what is not given stays."""
        if max_batch_size is not None:
            self._limit(max_batch_size)
        if not isinstance(max_batch_delay, EllipsisType):
            self._delay = max(0, max_batch_delay or 0) / 1000
        if queue_size is not None:
            self._queue_size = queue_size
        if retries is not None:
            self._retries = retries
        if response_timeout is not None:
            self._timeout = response_timeout
            if self._watch is not None:
                self._watch.cancel()
                self._look()
        if self._queue.live:
            self._start()

    def _limit(self, max_batch_size: int) -> None:
        size = self._max_batch_size = max(1, max_batch_size)
        # A full batch goes behind the running one as soon as it is there. Where rows are to be alike, it is chosen when
        # the running one ends, from all that came meanwhile; nothing more is to be gained once the window is full.
        self._enough = max(2 * size, min(8 * size, _WINDOW)) if self._bucketed else size
        self._begun = self._enough if self._bucketed else 2 * size  # rows that are prepared: more would take memory

    @property
    def pending(self) -> int:
        """Rows that wait; those that run are not among them, nor are shadows."""
        return self._queue.live + self._behind

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

    async def submit(self, call: Call) -> Reply | ReplyStream:
        """The call's answer, when its batch has run. Raises RelayError; QueueFull does so at once."""
        row = self._take_in(call)
        try:
            return await row.future
        except asyncio.CancelledError:
            self._left(row)
            raise

    async def submit_all(self, calls: Sequence[Call]) -> list[Any]:
        """For each call that came with the others its Reply, its ReplyStream or its RelayError."""
        answers: list[_Row | RelayError] = []
        for call in calls:
            try:
                answers.append(self._take_in(call))
            except RelayError as error:
                answers.append(error)
        rows = [answer for answer in answers if isinstance(answer, _Row)]
        try:
            if rows:
                await asyncio.wait([row.future for row in rows])
        except asyncio.CancelledError:
            for row in rows:
                row.future.cancel()
                self._left(row)
            raise
        return [_outcome(answer.future) if isinstance(answer, _Row) else answer for answer in answers]

    def enqueue(self, call: Call) -> asyncio.Future[Reply | ReplyStream]:
        """The future of the call's answer; cancelling it says that the caller left. Raises RelayError at once."""
        row = self._take_in(call)
        row.future.add_done_callback(lambda future: self._forget(row) if future.cancelled() else None)
        return row.future

    def _take_in(self, call: Call) -> _Row:
        if self._refusal:
            raise Loading(self._ref.name, call.version, self._refusal)
        queue = self._queue
        waiting = queue.live + self._behind
        yields: _Row | None = None
        if call.priority == "shadow":
            if len(queue.shadows) >= max(_SHADOWS, 2 * self._max_batch_size):
                raise self._full(call, f"{len(queue.shadows)} shadows wait")
        elif waiting >= self._queue_size:
            yields = queue.newest_below(call.priority)
            if yields is None:
                raise self._full(call, f"{waiting} rows wait, job_queue_size allows no more")
        if self._tickets and (self._flight or waiting >= self._max_batch_size):
            raise self._full(call, "useJobTicket: the model is busy, and no row may wait")
        if call.deadline is not None and self._flight and call.priority != "shadow":
            self.must_make_it(call, queue.before(call.priority) + self._behind)
        if yields is not None:
            self._forget(yields)
            yields.settle(self._full(yields.call, f"{waiting} rows wait, and a more urgent one came"))
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
            self._timer = self._timer or loop.call_later
        assert self._timer is not None
        row = _Row(call, loop.create_future(), self._clock())
        queue.put(row)
        if self._prepare is not None and queue.live <= self._begun and call.priority != "shadow":
            row.ahead = self._prepare(call)
        if not self._flight or queue.live >= self._enough:
            self._start_soon()
        if call.deadline is not None:
            expiry = self._timer(call.deadline - time.time(), self._expire, row)
            row.future.add_done_callback(lambda _: expiry.cancel())
        return row

    async def close(self) -> None:
        """Take no more rows, answer those that were taken, then end the author's thread."""
        self._refusal = self._refusal or "its replica is stopping"
        while self._queue.shadows:
            row = self._queue.shadows.popleft()
            row.settle(Loading(self._ref.name, row.call.version, self._refusal))
        if self._flight or self._queue.live:
            self._drained = self._drained or asyncio.Event()
            self._start()
            await self._drained.wait()
        self.author.shutdown(wait=False)

    def _full(self, call: Call, why: str) -> QueueFull:
        error = QueueFull(self._ref.name, call.version, why)
        error.retry_after = self.retry_after
        return error

    def _late(self, row: _Row) -> DeadlineExceeded:
        error = DeadlineExceeded(self._ref.name, self._clock() - row.arrived)
        error.retry_after = self.retry_after
        return error

    def _left(self, row: _Row) -> None:
        if row.pieces is not None:
            row.pieces.end()
        elif row.future.done() and not row.future.cancelled():
            row.future.exception()  # the answer came as the caller left; nobody will look at it
        self._forget(row)

    def _expire(self, row: _Row) -> None:
        if not row.future.done():
            self._forget(row)
            row.future.set_exception(self._late(row))

    def _forget(self, row: _Row) -> None:
        """Make room at once: rows that nobody waits for do not fill the queue."""
        if row.ahead is not None:
            row.ahead.cancel()
        if not self._queue.remove(row):
            batch = row.batch
            if batch is not None and not batch.ended:
                batch.waiting -= 1
                if batch is not self._flight[0]:
                    self._behind -= 1
        if self._drained is not None and not self._queue.live and not self._flight:
            self._drained.set()

    def _start_soon(self) -> None:
        """Start at the end of the loop's turn: what was read in the same turn goes together."""
        if not self._starting:
            assert self._loop is not None
            self._starting = True
            self._loop.call_soon(self._start)

    def _start(self) -> None:
        """Give the author's thread what may run: anything when it is idle, full batches when it is not.

        A full batch lies ready behind the running one, so a saturated model never waits for the loop; of
        small batches several do, for to change threads costs more than a small batch.
        """
        self._starting = False
        queue = self._queue
        started: list[_Batch] = []
        while queue.live and (len(self._flight) < 2 or self._behind < self._most_behind):
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
            if self._watch is None and self._timeout > 0:
                self._look_in(self._timeout)

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
            self._behind += len(rows)
        self._flight.append(batch)
        started.append(batch)

    def _waits(self) -> bool:
        """Whether the first row has time left to wait for others."""
        left = self._queue.since() + self._delay - self._clock()
        if left <= 0:
            return False
        if self._delayed is not None:
            self._delayed.cancel()
        assert self._timer is not None
        self._delayed = self._timer(left, self._start)
        return True

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

    def _tell(self, callback: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            log.debug("%s: the event loop is closed, nobody waits any more", self._ref.app)

    # On the event loop again

    def _finish(self, batch: _Batch, answers: list[tuple[_Row, Reply | RelayError]]) -> None:
        if not self._flight or self._flight[0] is not batch:
            return  # too late: its rows were given up
        self._flight.popleft()
        batch.ended = True
        if self._flight:
            self._behind -= self._flight[0].waiting
        if self._queue.live or self._queue.shadows:
            self._start_soon()
        for row, answer in answers:
            row.settle(answer)
        assert self._loop is not None
        self._loop.call_soon(self._measure, batch)  # after the answers have left
        if self._drained is not None and not self._queue.live and not self._flight:
            self._drained.set()

    def _measure(self, batch: _Batch) -> None:
        name, version = self._ref.name, self._ref.version
        pace, size = self._pace, self._max_batch_size
        live = batch.rows[0].call.priority != "shadow"
        for seconds, waits in batch.runs:
            self._meters.batch(name, version, len(waits), seconds, waits, live)
            pace.note(len(waits), seconds)
        self._most_behind = min(_BEHIND, int(_BEHIND_SECONDS / (pace.seconds(size) or 1.0)) * size)
        if batch.runs and batch.began is not None:
            self._meters.overhead(self._clock() - batch.began - batch.runs[-1][0])
        self._meters.depth(name, version, self.pending)

    # The watch over a handler that does not come back: one timer, moved on when it fires, not one a batch

    def _look_in(self, seconds: float) -> None:
        assert self._timer is not None
        self._watch = self._timer(seconds, self._look)

    def _look(self) -> None:
        self._watch = None
        if not self._flight or self._timeout <= 0:
            return
        began = self._flight[0].began
        left = self._timeout if began is None else began + self._timeout - self._clock()
        if left > 0:
            self._look_in(left)
        else:
            self._give_up()

    def _give_up(self) -> None:
        why = f"the handler gave no answer within response_timeout ({self._timeout:g} s)"
        where = self.author.where
        running = self._flight[0].rows
        ids = ", ".join(row.call.request_id for row in running)
        log.error("%s: %s (requests %s); it stands at\n%s", self._ref.app, why, ids, where)
        self.abandon(ResponseTimeout(why), "its replica hangs and is being replaced")
        self._on_hung(f"{why}; it stood at\n{where}")

    def abandon(self, failure: WorkerDied, refusal: str) -> None:
        """This process is of no more use: answer what runs with ``failure``, and what waits, or comes, with Loading."""
        self._refusal = refusal
        running = self._flight[0].rows if self._flight else []
        waiting = [row for batch in list(self._flight)[1:] for row in batch.rows] + self._queue.clear()
        for batch in self._flight:
            batch.ended = True
        self._flight.clear()
        self._behind = 0
        for row in running:
            row.settle(failure)
        for row in waiting:
            if not row.future.done():
                row.future.set_exception(Loading(self._ref.name, row.call.version, self._refusal))
        self._meters.depth(self._ref.name, self._ref.version, 0)
        if self._drained is not None:
            self._drained.set()


def _outcome(future: asyncio.Future[Any]) -> Any:
    return future.exception() or future.result()


def _failed_whole(results: Sequence[Reply | RelayError]) -> bool:
    """Whether the handler failed the batch rather than some of its rows: one error object stands for all."""
    first = results[0]
    return isinstance(first, HandlerFailed) and all(result is first for result in results)
