"""Admission control of batchers: limits, priorities, deadlines, refusals and shutdown.

Subclasses run the rows. Everything runs on the event loop; only ``_call_on_loop`` is called in the handler
thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from types import EllipsisType
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from serve_app.domain import tensors
from serve_app.domain.model import ModelRef
from serve_app.domain.request import Cancel, InferenceRequest, OnDone, Outcome, ResponseStream
from serve_app.domain.signature import Signature
from serve_app.errors import (
    DeadlineExceeded,
    ModelLoading,
    QueueFull,
    QuotaExceeded,
    RelayError,
    ReplicaDied,
    ResponseTimeout,
)
from serve_app.runtime.backends import Backend
from serve_app.runtime.batching.interface import RequestBatcher
from serve_app.runtime.batching.request_queue import PendingRequest, RequestQueue
from serve_app.runtime.handler_thread import HandlerThread
from serve_app.telemetry.metrics import Meters

_LATEST_WEIGHT = 0.2  # of the latest batch
_OUTLIER = 8.0  # a batch that takes longer than this many times the estimate counts as this many times
_FAST = 4.0  # a batch this many times faster than the estimate halves the estimate
_MIN_RUNS = 5  # batches after which the estimate may refuse a row


class BatchLatencyModel:
    """A linear model of seconds over rows, fitted with exponentially falling weights.

    A batch costs something between the same for any size and the same for every row. Where batches of only
    one size were seen, the model takes the smaller of the two. In doubt the estimate is low: a row that is
    admitted and comes too late costs one row, but an estimate that stays high would refuse all of them.
    """

    __slots__ = ("_covariance", "_rows", "_seconds", "_variance", "runs")

    def __init__(self) -> None:
        self.runs = 0
        self._rows = 1.0  # of a batch, in the mean, as the next
        self._seconds = 0.0
        self._variance = 0.0  # of the rows
        self._covariance = 0.0

    @property
    def is_ready(self) -> bool:
        """True when enough batches ran to refuse rows by the estimate."""
        return self.runs >= _MIN_RUNS

    def record(self, rows: int, seconds: float) -> None:
        """Record that a batch of ``rows`` rows took ``seconds``."""
        self.runs += 1
        if self.runs == 1:
            self._rows, self._seconds = float(rows), seconds
            return
        more = rows - self._rows
        expected = self.estimate(rows) if more else self._seconds
        weight = 0.5 if seconds * _FAST < expected else _LATEST_WEIGHT
        if seconds > _OUTLIER * expected > 0:
            seconds = _OUTLIER * expected
        longer = seconds - self._seconds
        self._seconds += weight * longer
        if more or self._variance:
            self._rows += weight * more
            self._variance = (1 - weight) * (self._variance + weight * more * more)
            self._covariance = (1 - weight) * (self._covariance + weight * more * longer)

    def estimate(self, rows: int) -> float:
        """Return the estimated seconds of a batch of ``rows`` rows; 0.0 before the first has run."""
        if rows == self._rows:
            return self._seconds
        per_row = self._seconds / self._rows
        if self._variance > 1e-6:
            slope = min(max(self._covariance / self._variance, 0.0), per_row)
        else:
            slope = per_row if rows < self._rows else 0.0
        return self._seconds + slope * (rows - self._rows)


log = logging.getLogger(__name__)

MAX_SHADOWS = 16  # admitted at once

R = TypeVar("R", bound=PendingRequest)


class BatchTimer(Protocol):
    def __call__(self, delay: float, callback: Callable[..., None], /, *args: Any) -> asyncio.TimerHandle: ...


class AdmissionControl(RequestBatcher, Generic[R]):
    """An admission control that answers each request exactly once, until it is closed or abandoned.

    ``queue_size`` bounds the admitted rows; ``response_timeout`` (seconds) bounds one run of the handler. 0
    means unbounded. A process whose handler exceeds it is unusable: after every waiting caller has its error,
    ``on_hung`` is called once with the reason and the handler's stack. ``clock`` returns seconds.
    ``signature`` determines the rows of a request's tensors, for the statistics.
    """

    def __init__(
        self,
        ref: ModelRef,
        meters: Meters,
        *,
        handler_thread: HandlerThread | None = None,
        queue_size: int = 100,
        response_timeout: float = 120,
        on_hung: Callable[[str], None] = lambda why: None,
        clock: Callable[[], float] = time.perf_counter,
        signature: Signature | None = None,
    ) -> None:
        self._ref = ref
        self._signature = signature
        self._meters = meters
        self.handler_thread = handler_thread or HandlerThread()
        self._queue_size = queue_size
        self._response_timeout = response_timeout
        self._on_hung = on_hung
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None  # of the first request
        self._latency_model = BatchLatencyModel()
        self._rejection_reason = ""  # why new rows are refused; empty while they are admitted
        self._drained: asyncio.Event | None = None

    def configure(
        self, *, queue_size: int | None = None, response_timeout: float | None = None, **others: Any
    ) -> None:
        """Apply new limits; a limit that is not given stays. ``others`` are limits of subclasses."""
        self._queue_size = self._queue_size if queue_size is None else queue_size
        self._response_timeout = self._response_timeout if response_timeout is None else response_timeout

    def _count_tensor_rows(self, requests: Sequence[InferenceRequest]) -> int:
        """Return the rows of a batch as the statistics count them: along the first axis of tensors."""
        if requests[0].kind != "tensors":  # a batch has requests of one kind
            return len(requests)
        return sum(tensors.count_rows(request.inputs, self._signature) for request in requests)

    def submit(self, request: InferenceRequest, on_done: OnDone) -> Cancel:
        return partial(self._withdraw, self._admit(request, on_done))

    def _withdraw(self, row: R) -> None:
        """Discard the row of a client that disconnected before it had an outcome."""
        if row.on_done is not None:
            row.on_done = None
            self._discard(row)

    async def close(self) -> None:
        """Refuse new rows, answer the admitted ones, then end the handler thread."""
        self._rejection_reason = self._rejection_reason or "its replica is stopping"
        self._flush_queue()
        if not self._idle:
            self._drained = self._drained or asyncio.Event()
            await self._drained.wait()
        self.handler_thread.shutdown(wait=False)

    @abstractmethod
    def _admit(self, request: InferenceRequest, on_done: OnDone) -> R:
        """Return the row of an admitted request. Raises RelayError."""

    @abstractmethod
    def _discard(self, row: R) -> None:
        """Free the place of a row without a waiting client."""

    @property
    @abstractmethod
    def _idle(self) -> bool:
        """Return whether no row has a waiting client."""

    def _flush_queue(self) -> None:
        """Start partial batches at once, because no more rows will come."""

    def _loading_error(self, request: InferenceRequest) -> ModelLoading:
        return ModelLoading(self._ref.name, request.version, self._rejection_reason)

    def _queue_full_error(self, request: InferenceRequest, why: str) -> QueueFull:
        error = QueueFull(self._ref.name, request.version, why)
        error.retry_after = self.retry_after
        return error

    def _deadline_error(self, row: R) -> DeadlineExceeded:
        error = DeadlineExceeded(self._ref.name, self._clock() - row.arrived)
        error.retry_after = self.retry_after
        return error

    def _on_disconnect(self, row: R) -> None:
        """Discard the row of a stream whose client disconnected."""
        if row.stream is not None:
            row.stream.finish()
        self._discard(row)

    def _notify_if_drained(self) -> None:
        if self._drained is not None and self._idle:
            self._drained.set()

    def _abandon_hung(self, why: str, rows: Sequence[R]) -> None:
        """Abandon this process, because the handler did not return from these ``rows``."""
        where = self.handler_thread.stack
        ids = ", ".join(row.request.request_id for row in rows)
        log.error("%s: %s (requests %s); it stands at\n%s", self._ref.app, why, ids, where)
        self.abandon(ResponseTimeout(why), "its replica hangs and is being replaced")
        self._on_hung(f"{why}; it stood at\n{where}")

    def _call_on_loop(self, callback: Callable[..., None], *args: Any) -> None:
        """Schedule a call on the event loop from another thread."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            log.debug("%s: the event loop is closed, no client waits any more", self._ref.app)


class QueuedAdmissionControl(AdmissionControl[R]):
    """An admission control whose rows wait in a queue until the model is free.

    Rows of higher priority run first (see ``request_queue.py``). In a full queue a row of higher priority
    replaces the newest row of the lowest priority. Shadows wait apart: at most two batches of them, or 16
    where that is more. They count nowhere.

    ``max_batch_delay`` (milliseconds) is how long an idle model waits for a batch to fill, counted from the
    first row; None or 0 means not at all. ``timer`` is ``call_later`` of the event loop.
    """

    row_type: ClassVar[type[Any]]  # R

    def __init__(
        self,
        ref: ModelRef,
        meters: Meters,
        *,
        max_batch_size: int = 1,
        max_batch_delay: int | None = None,
        timer: BatchTimer | None = None,
        **limits: Any,
    ) -> None:
        super().__init__(ref, meters, **limits)
        self._timer = timer
        self._queue: RequestQueue[R] = RequestQueue()
        self._staged = 0  # rows with a waiting caller that have left the queue and do not run yet
        self._checks_every_request = False  # whether requests without a deadline are checked too
        self._starting = False  # _start is due at the end of this turn of the loop
        self._delay_timer: asyncio.TimerHandle | None = None
        self._watchdog: asyncio.TimerHandle | None = None
        self._set_max_batch_size(max_batch_size)
        self._max_batch_delay = max(0, max_batch_delay or 0) / 1000

    def configure(
        self,
        *,
        max_batch_size: int | None = None,
        max_batch_delay: int | EllipsisType | None = ...,
        **others: Any,
    ) -> None:
        super().configure(**others)
        if max_batch_size is not None:
            self._set_max_batch_size(max_batch_size)
        if not isinstance(max_batch_delay, EllipsisType):
            self._max_batch_delay = max(0, max_batch_delay or 0) / 1000
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._check_watchdog()
        if self._queue.live:
            self._schedule_start()

    def _set_max_batch_size(self, max_batch_size: int) -> None:
        self._max_batch_size = max(1, max_batch_size)

    @property
    def pending(self) -> int:
        """Rows that wait, without running rows and shadows."""
        return self._queue.live + self._staged

    def abandon(self, failure: ReplicaDied, rejection_reason: str) -> None:
        self._rejection_reason = rejection_reason
        running, ready = self._release_rows()
        for row in running:
            row.resolve(failure)
        for row in ready + self._queue.clear():
            row.resolve(self._loading_error(row.request))
        self._meters.depth(self._ref.name, self._ref.version, 0)
        self._notify_if_drained()

    @abstractmethod
    def _start(self) -> None:
        """Start the batches that may run now."""

    @abstractmethod
    def _running_batch(self) -> tuple[Sequence[R], float | None] | None:
        """Return the running rows and their start time, None where it is unknown; None when nothing runs."""

    @abstractmethod
    def _release_rows(self) -> tuple[list[R], list[R]]:
        """Remove and return the running rows and the staged rows."""

    def _check_admission(self, request: InferenceRequest, waiting: int) -> None:
        """Raise RelayError for a request that may not wait behind ``waiting`` rows in a queue with room."""

    def _on_enqueued(self, row: R) -> None:
        """Handle a row that has just entered the queue."""

    def _admit(self, request: InferenceRequest, on_done: OnDone) -> R:
        if self._rejection_reason:
            raise self._loading_error(request)
        queue = self._queue
        waiting = queue.live + self._staged
        evicted: R | None = None
        if request.priority == "shadow":
            if len(queue.shadows) >= max(MAX_SHADOWS, 2 * self._max_batch_size):
                raise self._queue_full_error(request, f"{len(queue.shadows)} shadows wait")
        elif waiting >= self._queue_size:
            evicted = queue.newest_below(request.priority)
            if evicted is None:
                raise self._queue_full_error(request, f"{waiting} rows wait, job_queue_size allows no more")
        if request.deadline is not None or self._checks_every_request:
            self._check_admission(request, waiting)
        if evicted is not None:
            self._discard(evicted)
            evicted.resolve(
                self._queue_full_error(evicted.request, f"{waiting} rows wait, and a more urgent one came")
            )
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._timer = self._timer or self._loop.call_later
        row: R = self.row_type(request, on_done, self._clock())
        if request.deadline is not None:
            assert self._timer is not None
            row.expiry = self._timer(request.deadline - time.time(), self._expire, row)
        queue.put(row)
        self._on_enqueued(row)
        return row

    def _expire(self, row: R) -> None:
        self._discard(row)
        row.resolve(self._deadline_error(row))

    def _flush_queue(self) -> None:
        while self._queue.shadows:
            row = self._queue.shadows.popleft()
            row.resolve(self._loading_error(row.request))
        if self._queue.live:
            self._schedule_start()

    def _schedule_start(self) -> None:
        """Start batches at the end of this turn of the event loop, so that rows of one turn run together."""
        if not self._starting:
            assert self._loop is not None
            self._starting = True
            self._loop.call_soon(self._start)

    def _delays_start(self) -> bool:
        """Return whether the first row still has time to wait for others, and set the timer then."""
        left = self._queue.oldest_arrival() + self._max_batch_delay - self._clock()
        if left <= 0:
            return False
        if self._delay_timer is not None:
            self._delay_timer.cancel()
        assert self._timer is not None
        self._delay_timer = self._timer(left, self._start)
        return True

    # The watchdog of the handler: one timer, moved on when it fires, instead of one timer for each run.

    def _start_watchdog(self) -> None:
        if self._watchdog is None and self._response_timeout > 0:
            assert self._timer is not None
            self._watchdog = self._timer(self._response_timeout, self._check_watchdog)

    def _check_watchdog(self) -> None:
        self._watchdog = None
        running = self._running_batch()
        if running is None or self._response_timeout <= 0:
            return
        rows, started_at = running
        left = (
            self._response_timeout
            if started_at is None
            else started_at + self._response_timeout - self._clock()
        )
        if left > 0:
            assert self._timer is not None
            self._watchdog = self._timer(left, self._check_watchdog)
        else:
            self._abandon_hung(
                f"the handler gave no answer within response_timeout ({self._response_timeout:g} s)", rows
            )


class ConcurrencyLimit(Backend):
    """A backend that admits its share of a version's limit, and raises QuotaExceeded beyond it.

    Every path into the replica leads through here, so the replicas together keep the limit. A request counts
    while it waits and runs, a stream until it ends; shadows never count. The limit is divided evenly among
    the replicas and rounded down, at least one for each.
    """

    def __init__(self, batcher: RequestBatcher, ref: ModelRef) -> None:
        self._batcher = batcher
        self._ref = ref
        self._limit = 0  # of the whole version; 0: none
        self._replica_limit = 0
        self._active = 0

    def set_limit(self, limit: int, replicas: int) -> None:
        """Set the version's limit, and how many replicas share it."""
        self._limit = limit
        self._replica_limit = max(1, limit // max(1, replicas)) if limit else 0

    def submit(self, request: InferenceRequest, on_done: OnDone) -> Cancel:
        if not self._replica_limit or request.priority == "shadow":
            return self._batcher.submit(request, on_done)
        if self._active >= self._replica_limit:
            error = QuotaExceeded(self._ref.name, self._ref.version, self._limit)
            error.retry_after = self._batcher.retry_after
            raise error
        place = _Place(self, on_done)
        self._active += 1
        try:
            place.withdraw = self._batcher.submit(request, place.complete)
        except RelayError:
            self._active -= 1
            raise
        return place.cancel

    def release(self) -> None:
        """Free the place of a request that has ended."""
        self._active -= 1


class _Place:
    """The place of one request, until it is answered or its stream has ended."""

    __slots__ = ("_limit", "_on_done", "withdraw")

    def __init__(self, limit: ConcurrencyLimit, on_done: OnDone) -> None:
        self._limit = limit
        self._on_done: OnDone | None = on_done
        self.withdraw: Cancel | None = None

    def complete(self, outcome: Outcome) -> None:
        on_done, self._on_done = self._on_done, None
        assert on_done is not None
        if isinstance(outcome, ResponseStream):
            outcome.add_done_callback(self._limit.release)
        else:
            self._limit.release()
        on_done(outcome)

    def cancel(self) -> None:
        if self._on_done is not None:
            self._on_done = None
            self._limit.release()
            assert self.withdraw is not None
            self.withdraw()
