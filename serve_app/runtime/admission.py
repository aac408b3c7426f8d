"""How calls come into a batcher and leave it: bounds, priorities, deadlines, refusals, and the end.

What runs the rows is a subclass's. All of it is on the event loop; ``_tell`` alone is called in the author's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from serve_app.errors import DeadlineExceeded, Loading, QueueFull, RelayError, ResponseTimeout, WorkerDied
from serve_app.runtime.answer import Answer
from serve_app.runtime.author import Author
from serve_app.runtime.pace import Pace
from serve_app.runtime.queue import Queue
from serve_app.telemetry.metrics import Meters
from serve_app.types import Call, ModelRef, Reply, ReplyStream

log = logging.getLogger("torchrelay.admission")

SHADOWS = 16  # that are let in at once

R = TypeVar("R", bound=Answer)


class Timer(Protocol):
    def __call__(self, delay: float, callback: Callable[..., None], /, *args: Any) -> asyncio.TimerHandle: ...


class Admission(ABC, Generic[R]):
    """Lets calls in until it is closed or given up, and sees each to its one answer.

    ``queue_size`` bounds the rows that are let in, ``response_timeout`` (seconds) one run of the handler; 0: unbounded.
    When a run exceeds it the process is of no more use: ``on_hung`` is called once with what happened and where the
    handler stands, after everybody who waited was told. ``clock`` counts seconds.
    """

    def __init__(
        self,
        ref: ModelRef,
        meters: Meters,
        *,
        author: Author | None = None,
        queue_size: int = 100,
        response_timeout: float = 120,
        on_hung: Callable[[str], None] = lambda why: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._ref = ref
        self._meters = meters
        self.author = author or Author()
        self._queue_size = queue_size
        self._timeout = response_timeout
        self._on_hung = on_hung
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None  # that of the first call
        self._pace = Pace()
        self._refusal = ""  # why no more rows are taken
        self._drained: asyncio.Event | None = None

    def configure(self, *, queue_size: int | None = None, response_timeout: float | None = None, **others: Any) -> None:
        """Take new limits; what is not given stays. ``others`` are of what there is none of here."""
        self._queue_size = self._queue_size if queue_size is None else queue_size
        self._timeout = self._timeout if response_timeout is None else response_timeout

    @property
    @abstractmethod
    def pending(self) -> int:
        """Rows that count against ``queue_size``; shadows are not among them."""

    @property
    @abstractmethod
    def ongoing(self) -> int:
        """Rows that wait and rows that run, shadows apart."""

    @property
    @abstractmethod
    def retry_after(self) -> int:
        """The seconds, from 1, after which a caller who is refused now may come again."""

    async def submit(self, call: Call) -> Reply | ReplyStream:
        """The call's answer: a stream from its first piece on. Raises RelayError; QueueFull does so at once."""
        row = self._take_in(call)
        try:
            return await row.future
        except asyncio.CancelledError:
            self._left(row)
            raise

    async def submit_all(self, calls: Sequence[Call]) -> list[Any]:
        """For each call that came with the others its Reply, its ReplyStream or its RelayError."""
        answers: list[R | RelayError] = []
        for call in calls:
            try:
                answers.append(self._take_in(call))
            except RelayError as error:
                answers.append(error)
        rows = [answer for answer in answers if isinstance(answer, Answer)]
        try:
            if rows:
                await asyncio.wait([row.future for row in rows])
        except asyncio.CancelledError:
            for row in rows:
                row.future.cancel()
                self._left(row)
            raise
        return [_outcome(answer.future) if isinstance(answer, Answer) else answer for answer in answers]

    def enqueue(self, call: Call) -> asyncio.Future[Reply | ReplyStream]:
        """The future of the call's answer; cancelling it says that the caller left. Raises RelayError at once."""
        row = self._take_in(call)
        row.future.add_done_callback(lambda future: self._left(row) if future.cancelled() else None)
        return row.future

    async def close(self) -> None:
        """Take no more rows, answer those that were taken, then end the author's thread."""
        self._refusal = self._refusal or "its replica is stopping"
        self._hasten()
        if not self._idle:
            self._drained = self._drained or asyncio.Event()
            await self._drained.wait()
        self.author.shutdown(wait=False)

    @abstractmethod
    def abandon(self, failure: WorkerDied, refusal: str) -> None:
        """This process is of no more use: answer what runs with ``failure``, and what waits, or comes, with Loading."""

    @abstractmethod
    def _take_in(self, call: Call) -> R:
        """The call as a row, or a RelayError."""

    @abstractmethod
    def _drop(self, row: R) -> None:
        """Nobody waits for the row any more: it makes room."""

    @property
    @abstractmethod
    def _idle(self) -> bool:
        """Whether there is no row left that somebody waits for."""

    def _hasten(self) -> None:
        """No more rows will come: nothing that is there waits for company."""

    def _closed(self, call: Call) -> Loading:
        return Loading(self._ref.name, call.version, self._refusal)

    def _full(self, call: Call, why: str) -> QueueFull:
        error = QueueFull(self._ref.name, call.version, why)
        error.retry_after = self.retry_after
        return error

    def _late(self, row: R) -> DeadlineExceeded:
        error = DeadlineExceeded(self._ref.name, self._clock() - row.arrived)
        error.retry_after = self.retry_after
        return error

    def _left(self, row: R) -> None:
        """The row's caller is gone."""
        if row.pieces is not None:
            row.pieces.end()
        elif row.future.done() and not row.future.cancelled():
            row.future.exception()  # the answer came as the caller left; nobody will look at it
        self._drop(row)

    def _look_drained(self) -> None:
        if self._drained is not None and self._idle:
            self._drained.set()

    def _give_up(self, why: str, rows: Sequence[R]) -> None:
        """The handler does not come back from these ``rows``."""
        where = self.author.where
        ids = ", ".join(row.call.request_id for row in rows)
        log.error("%s: %s (requests %s); it stands at\n%s", self._ref.app, why, ids, where)
        self.abandon(ResponseTimeout(why), "its replica hangs and is being replaced")
        self._on_hung(f"{why}; it stood at\n{where}")

    def _tell(self, callback: Callable[..., None], *args: Any) -> None:
        """Call that on the event loop, from another thread."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            log.debug("%s: the event loop is closed, nobody waits any more", self._ref.app)


class QueuedAdmission(Admission[R]):
    """An admission whose rows wait in a queue until the model is free.

    More urgent rows go first (see queue.py). In a full queue a more urgent row takes the place of the newest of the
    least urgent ones. Shadows wait apart, as many as two batches, at least 16; they count nowhere.

    ``max_batch_delay`` (milliseconds) is how long an idle model waits for a batch to fill, counted from its first
    row; None or 0: not at all. ``timer`` is ``call_later`` of the loop that submits.
    """

    row: ClassVar[type[Any]]  # R

    def __init__(
        self,
        ref: ModelRef,
        meters: Meters,
        *,
        max_batch_size: int = 1,
        max_batch_delay: int | None = None,
        timer: Timer | None = None,
        **bounds: Any,
    ) -> None:
        super().__init__(ref, meters, **bounds)
        self._timer = timer
        self._queue: Queue[R] = Queue()
        self._ready = 0  # rows that have left the queue and wait still, as far as somebody waits for them
        self._asks_of_all = False  # whether _may_wait is asked of calls without a deadline too
        self._starting = False  # _start is due at the end of this turn of the loop
        self._delayed: asyncio.TimerHandle | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._limit(max_batch_size)
        self._delay = max(0, max_batch_delay or 0) / 1000

    def configure(
        self, *, max_batch_size: int | None = None, max_batch_delay: int | None | EllipsisType = ..., **others: Any
    ) -> None:
        super().configure(**others)
        if max_batch_size is not None:
            self._limit(max_batch_size)
        if not isinstance(max_batch_delay, EllipsisType):
            self._delay = max(0, max_batch_delay or 0) / 1000
        if self._watch is not None:
            self._watch.cancel()
            self._look()
        if self._queue.live:
            self._start_soon()

    def _limit(self, max_batch_size: int) -> None:
        self._max_batch_size = max(1, max_batch_size)

    @property
    def pending(self) -> int:
        """Rows that wait; those that run are not among them, nor are shadows."""
        return self._queue.live + self._ready

    def abandon(self, failure: WorkerDied, refusal: str) -> None:
        self._refusal = refusal
        running, ready = self._let_go()
        for row in running:
            row.settle(failure)
        for row in ready + self._queue.clear():
            row.settle(self._closed(row.call))
        self._meters.depth(self._ref.name, self._ref.version, 0)
        self._look_drained()

    @abstractmethod
    def _start(self) -> None:
        """Run what may run now."""

    @abstractmethod
    def _running(self) -> tuple[Sequence[R], float | None] | None:
        """The rows that run, and since when, as far as that is known; None: nothing does."""

    @abstractmethod
    def _let_go(self) -> tuple[list[R], list[R]]:
        """Forget the rows that run, and those that lie ready behind them."""

    def _may_wait(self, call: Call, waiting: int) -> None:
        """Raise RelayError for a call that is not to wait behind so many rows, though there would be room."""

    def _joined(self, row: R) -> None:
        """The row has just come into the queue."""

    def _take_in(self, call: Call) -> R:
        if self._refusal:
            raise self._closed(call)
        queue = self._queue
        waiting = queue.live + self._ready
        yields: R | None = None
        if call.priority == "shadow":
            if len(queue.shadows) >= max(SHADOWS, 2 * self._max_batch_size):
                raise self._full(call, f"{len(queue.shadows)} shadows wait")
        elif waiting >= self._queue_size:
            yields = queue.newest_below(call.priority)
            if yields is None:
                raise self._full(call, f"{waiting} rows wait, job_queue_size allows no more")
        if call.deadline is not None or self._asks_of_all:
            self._may_wait(call, waiting)
        if yields is not None:
            self._drop(yields)
            yields.settle(self._full(yields.call, f"{waiting} rows wait, and a more urgent one came"))
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
            self._timer = self._timer or loop.call_later
        row: R = self.row(call, loop.create_future(), self._clock())
        if call.deadline is not None:
            assert self._timer is not None
            row.expiry = self._timer(call.deadline - time.time(), self._expire, row)
        queue.put(row)
        self._joined(row)
        return row

    def _expire(self, row: R) -> None:
        self._drop(row)
        row.settle(self._late(row))

    def _hasten(self) -> None:
        while self._queue.shadows:
            row = self._queue.shadows.popleft()
            row.settle(self._closed(row.call))
        if self._queue.live:
            self._start_soon()

    def _start_soon(self) -> None:
        """Start at the end of the loop's turn: what was read in the same turn goes together."""
        if not self._starting:
            assert self._loop is not None
            self._starting = True
            self._loop.call_soon(self._start)

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

    # The watch over a handler that does not come back: one timer, moved on when it fires, not one a run

    def _guard(self) -> None:
        if self._watch is None and self._timeout > 0:
            assert self._timer is not None
            self._watch = self._timer(self._timeout, self._look)

    def _look(self) -> None:
        self._watch = None
        running = self._running()
        if running is None or self._timeout <= 0:
            return
        rows, began = running
        left = self._timeout if began is None else began + self._timeout - self._clock()
        if left > 0:
            assert self._timer is not None
            self._watch = self._timer(left, self._look)
        else:
            self._give_up(f"the handler gave no answer within response_timeout ({self._timeout:g} s)", rows)


def _outcome(future: asyncio.Future[Any]) -> Any:
    return future.exception() or future.result()
