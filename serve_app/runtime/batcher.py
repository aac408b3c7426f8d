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
from types import EllipsisType
from typing import Any, Protocol

from serve_app.errors import DeadlineExceeded, HandlerFailed, Loading, QueueFull, RelayError, ResponseTimeout
from serve_app.runtime.answer import Answer, timed
from serve_app.runtime.author import Author
from serve_app.telemetry.metrics import Meters
from serve_app.types import Call, ModelRef, Reply, ReplyStream, Timings

log = logging.getLogger("torchrelay.batcher")

_BEHIND = 64  # rows that may lie ready behind the running batch, where one full batch is fewer

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
        self._on_hung = on_hung
        self._clock = clock
        self._timer = timer
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queue: deque[_Row] = deque()
        self._flight: deque[_Batch] = deque()  # what the author's thread runs, and full batches behind it
        self._behind = 0  # rows of those, as far as somebody waits for them
        self._starting = False  # _start is due at the end of this turn of the loop
        self._delayed: asyncio.TimerHandle | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._refusal = ""  # why no more rows are taken
        self._drained: asyncio.Event | None = None
        self._max_batch_size = max(1, max_batch_size)
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
            self._max_batch_size = max(1, max_batch_size)
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
        if self._queue:
            self._start()

    @property
    def pending(self) -> int:
        """Rows that wait; those that run are not among them."""
        return len(self._queue) + self._behind

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
        answers: list[Any] = []
        for call in calls:
            try:
                answers.append(self._take_in(call).future)
            except RelayError as error:
                answers.append(error)
        waiting = [answer for answer in answers if isinstance(answer, asyncio.Future)]
        if waiting:
            await asyncio.wait(waiting)
        return [_outcome(answer) if isinstance(answer, asyncio.Future) else answer for answer in answers]

    def enqueue(self, call: Call) -> asyncio.Future[Reply | ReplyStream]:
        """The future of the call's answer; cancelling it says that the caller left. Raises RelayError at once."""
        row = self._take_in(call)
        row.future.add_done_callback(lambda future: self._forget(row) if future.cancelled() else None)
        return row.future

    def _take_in(self, call: Call) -> _Row:
        if self._refusal:
            raise Loading(self._ref.name, call.version, self._refusal)
        if self.pending >= self._queue_size:
            raise QueueFull(self._ref.name, call.version, f"{self.pending} rows wait, job_queue_size allows no more")
        if self._tickets and (self._flight or self.pending >= self._max_batch_size):
            raise QueueFull(self._ref.name, call.version, "useJobTicket: the model is busy, and no row may wait")
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
            self._timer = self._timer or loop.call_later
        assert self._timer is not None
        row = _Row(call, loop.create_future(), self._clock())
        self._queue.append(row)
        if self._prepare is not None and len(self._queue) <= 2 * self._max_batch_size:
            row.ahead = self._prepare(call)
        if not self._flight or len(self._queue) >= self._max_batch_size:
            self._start_soon()
        if call.deadline is not None:
            expiry = self._timer(call.deadline - time.time(), self._expire, row)
            row.future.add_done_callback(lambda _: expiry.cancel())
        return row

    async def close(self) -> None:
        """Take no more rows, answer those that were taken, then end the author's thread."""
        self._refusal = self._refusal or "its replica is stopping"
        if self._flight or self._queue:
            self._drained = self._drained or asyncio.Event()
            self._start()
            await self._drained.wait()
        self.author.shutdown(wait=False)

    def _left(self, row: _Row) -> None:
        if row.pieces is not None:
            row.pieces.end()
        elif row.future.done() and not row.future.cancelled():
            row.future.exception()  # the answer came as the caller left; nobody will look at it
        self._forget(row)

    def _expire(self, row: _Row) -> None:
        if not row.future.done():
            self._forget(row)
            row.future.set_exception(DeadlineExceeded(self._ref.name, self._clock() - row.arrived))

    def _forget(self, row: _Row) -> None:
        """Make room at once: rows that nobody waits for do not fill the queue."""
        if row.ahead is not None:
            row.ahead.cancel()
        try:
            self._queue.remove(row)
        except ValueError:
            batch = row.batch
            if batch is not None and not batch.ended:
                batch.waiting -= 1
                if batch is not self._flight[0]:
                    self._behind -= 1
        if self._drained is not None and not self._queue and not self._flight:
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
        started: list[_Batch] = []
        while self._queue and (len(self._flight) < 2 or self._behind < _BEHIND):
            full = len(self._queue) >= self._max_batch_size or self._queue[0].call.kind != self._queue[-1].call.kind
            if not full and (self._flight or (self._delay and not self._refusal and self._waits())):
                break
            rows = self._take()
            if rows:
                batch = _Batch(rows)
                for row in rows:
                    row.batch = batch
                if self._flight:
                    self._behind += len(rows)
                self._flight.append(batch)
                started.append(batch)
        if started:
            self.author.post(self._execute, started)
            if self._prepare is not None:
                for row in islice(self._queue, 2 * self._max_batch_size):  # no further: what is prepared takes memory
                    row.ahead = row.ahead or self._prepare(row.call)
            if self._watch is None and self._timeout > 0:
                self._look_in(self._timeout)

    def _waits(self) -> bool:
        """Whether the first row has time left to wait for others."""
        left = self._queue[0].arrived + self._delay - self._clock()
        if left <= 0:
            return False
        if self._delayed is not None:
            self._delayed.cancel()
        assert self._timer is not None
        self._delayed = self._timer(left, self._start)
        return True

    def _take(self) -> list[_Row]:
        """The next batch: rows of one kind, in the order they came."""
        queue = self._queue
        kind = queue[0].call.kind
        rows: list[_Row] = []
        while queue and len(rows) < self._max_batch_size and queue[0].call.kind == kind:
            row = queue.popleft()
            if not row.future.done():
                rows.append(row)
        return rows

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
            answers.append((row, DeadlineExceeded(self._ref.name, self._clock() - row.arrived)))
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
        if self._queue:
            self._start_soon()
        for row, answer in answers:
            row.settle(answer)
        assert self._loop is not None
        self._loop.call_soon(self._measure, batch)  # after the answers have left
        if self._drained is not None and not self._queue and not self._flight:
            self._drained.set()

    def _measure(self, batch: _Batch) -> None:
        name, version = self._ref.name, self._ref.version
        for seconds, waits in batch.runs:
            self._meters.batch(name, version, len(waits), seconds, waits)
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
        self._refusal = "its replica hangs and is being replaced"
        waiting = [row for batch in list(self._flight)[1:] for row in batch.rows] + list(self._queue)
        for batch in self._flight:
            batch.ended = True
        self._flight.clear()
        self._behind = 0
        self._queue.clear()
        for row in running:
            row.settle(ResponseTimeout(why))
        for row in waiting:
            if not row.future.done():
                row.future.set_exception(Loading(self._ref.name, row.call.version, self._refusal))
        self._meters.depth(self._ref.name, self._ref.version, 0)
        if self._drained is not None:
            self._drained.set()
        self._on_hung(f"{why}; it stood at\n{where}")


def _outcome(future: asyncio.Future[Any]) -> Any:
    return future.exception() or future.result()


def _failed_whole(results: Sequence[Reply | RelayError]) -> bool:
    """Whether the handler failed the batch rather than some of its rows: one error object stands for all."""
    first = results[0]
    return isinstance(first, HandlerFailed) and all(result is first for result in results)
