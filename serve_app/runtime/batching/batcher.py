"""Dynamic batching: an idle model starts at once, a busy one collects.

Only ``_execute`` and the functions that it calls run in the handler thread, everything else on the event
loop. A batch costs two switches between the threads, however many rows it holds.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from math import ceil
from typing import Any

from serve_app.domain.model import ModelRef
from serve_app.domain.request import InferenceRequest, InferenceResponse, Timings
from serve_app.errors import CannotMeetDeadline, HandlerFailed, InvalidInput, RelayError
from serve_app.runtime.batching.admission_control import QueuedAdmissionControl
from serve_app.runtime.batching.length_bucketing import select_similar
from serve_app.runtime.batching.request_queue import PendingRequest, with_timings
from serve_app.telemetry import tracing
from serve_app.telemetry.metrics import Meters

log = logging.getLogger(__name__)

# Limits of the rows staged behind the running batch, where they allow more than one batch. No row overtakes
# them.
_MAX_STAGED_ROWS = 64  # rows
_MAX_STAGED_S = 0.005
# Seconds from which a batch is long, and the seconds in which the next one begins to compute.
_LONG_BATCH_S = 0.01
_RESPONSE_DELAY_S = 0.001
_MAX_WINDOW = 256  # rows among which similar lengths are selected: at most 8 batches, at least 2

# (requests, emit), and (requests, emit, prepared) where rows are prepared
Run = Callable[..., "list[InferenceResponse | RelayError]"]


@dataclass(slots=True, eq=False)
class _QueuedRow(PendingRequest):
    """A request that waits for its response."""

    has_emitted: bool = False  # set in the handler thread: a row that streamed is never run again
    batch: _Batch | None = None
    prepared: Future[Any] | None = None

    @property
    def measured_length(self) -> int | None:
        """The length of the row, once its handler has measured it."""
        prepared = self.prepared
        if prepared is None or not prepared.done() or prepared.cancelled() or prepared.exception():
            return None
        length: int | None = prepared.result().length
        return length


@dataclass(slots=True, eq=False)
class _Batch:
    """The rows that were passed to the handler thread together.

    ``runs`` has the seconds of each run, each row's waiting time and its request; there are several after a
    failure.
    """

    rows: list[_QueuedRow]
    active_rows: int  # rows whose callers still wait
    is_finished: bool = False
    started_at: float | None = None  # when the present run started
    runs: list[tuple[float, list[float], list[InferenceRequest]]] = field(default_factory=list)


class _BatchOutput:
    """A run's output: it sends chunks to the callers of the rows, and reports which of them have left."""

    __slots__ = ("_emit", "_rows", "_started_at")

    def __init__(self, emit: Callable[..., None], rows: list[_QueuedRow], started_at: float) -> None:
        self._emit = emit
        self._rows = rows
        self._started_at = started_at

    def __call__(self, index: int, chunk: bytes | InferenceResponse) -> None:
        self._emit(self._rows, self._started_at, index, chunk)

    def has_left(self, index: int) -> bool:
        """Return whether the caller of a row has left."""
        return self._rows[index].has_left


_Responses = list[tuple[_QueuedRow, InferenceResponse | RelayError]]


class Batcher(QueuedAdmissionControl[_QueuedRow]):
    """A batcher that runs requests together and answers each with its own response or error.

    ``run`` is ``Runner.run``; it is called in the handler thread only. ``prepare`` is ``Runner.prepare``: it
    starts to prepare the rows of the next two batches while one runs. With ``use_job_ticket`` a row is
    admitted only by an idle model. ``limits`` are those of QueuedAdmissionControl.

    No row overtakes the staged batches behind the running one. A row is refused at once when its deadline is
    nearer than its estimated response; an idle model tries every row. Shadows run in batches of their own,
    when nothing else waits or runs.

    ``bucket_by_length``: a batch is the next row and the rows nearest to it in length, see
    ``length_bucketing.py``.
    """

    row_type = _QueuedRow

    def __init__(
        self,
        run: Run,
        ref: ModelRef,
        meters: Meters,
        *,
        prepare: Callable[[InferenceRequest], Future[Any]] | None = None,
        retries: bool = True,
        use_job_ticket: bool = False,
        bucket_by_length: bool = False,
        **limits: Any,
    ) -> None:
        self._bucketed = bucket_by_length
        super().__init__(ref, meters, **limits)
        self._run = run
        self._prepare = prepare
        self._use_job_ticket = self._checks_every_request = use_job_ticket
        self._retries = retries
        self._in_flight: deque[_Batch] = deque()  # the running batch and the batches staged behind it
        # Calls from the handler thread in their order, and whether the loop has a call to run them.
        self._calls: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._run_is_due = False
        self._unsent = 0  # finished batches whose responses are not yet sent
        # Rows that may be staged where one full batch is fewer; known when a batch has run.
        self._max_staged = 0

    def configure(self, *, retries: bool | None = None, **others: Any) -> None:
        self._retries = self._retries if retries is None else retries
        super().configure(**others)

    def _set_max_batch_size(self, max_batch_size: int) -> None:
        super()._set_max_batch_size(max_batch_size)
        size = self._max_batch_size
        # A full batch is staged behind the running one as soon as it is complete. With length bucketing it is
        # selected when the running one ends, from all rows that arrived meanwhile; a full window gains
        # nothing by waiting.
        self._ready_size = max(2 * size, min(8 * size, _MAX_WINDOW)) if self._bucketed else size
        # The rows that are prepared; more would take memory.
        self._prepare_window = self._ready_size if self._bucketed else 2 * size

    @property
    def ongoing(self) -> int:
        """Rows that wait or run, without shadows."""
        running = self._in_flight[0] if self._in_flight else None
        if running is None or running.rows[0].request.priority == "shadow":
            return self.pending
        return self.pending + running.active_rows

    @property
    def retry_after(self) -> int:
        """Seconds, at least 1, in which the rows that wait now will have been answered."""
        return self.estimate_seconds(self.pending)

    def estimate_seconds(self, rows: int) -> int:
        """Return the estimated seconds, at least 1, that so many rows take."""
        return max(1, ceil(rows / self._max_batch_size * self._latency_model.estimate(self._max_batch_size)))

    def check_deadline(self, request: InferenceRequest, before: int) -> None:
        """Raise CannotMeetDeadline for a request that would be late behind ``before`` rows."""
        if request.deadline is None or not self._latency_model.is_ready:
            return
        full, over = divmod(before, self._max_batch_size)
        needed = full * self._latency_model.estimate(self._max_batch_size) + self._latency_model.estimate(
            over + 1
        )
        if self._in_flight:
            running = self._in_flight[0]
            ran = self._clock() - running.started_at if running.started_at is not None else 0.0
            needed += max(0.0, self._latency_model.estimate(len(running.rows)) - ran)
        left = request.deadline - time.time()
        if needed > left:
            error = CannotMeetDeadline(self._ref.name, 0.0, needed, max(0.0, left))
            error.retry_after = max(1, ceil(needed - max(0.0, left)))
            raise error

    @property
    def _idle(self) -> bool:
        return not self._in_flight and not self._unsent and not self._queue.live

    def _check_admission(self, request: InferenceRequest, waiting: int) -> None:
        if self._use_job_ticket and (self._in_flight or waiting >= self._max_batch_size):
            raise self._queue_full_error(request, "useJobTicket: the model is busy, and no row may wait")
        if request.deadline is not None and self._in_flight and request.priority != "shadow":
            self.check_deadline(request, self._queue.count_before(request.priority) + self._staged)

    def _on_enqueued(self, row: _QueuedRow) -> None:
        live = self._queue.live
        if self._prepare is not None and live <= self._prepare_window and row.request.priority != "shadow":
            row.prepared = self._prepare(row.request)
        if not self._in_flight or live >= self._ready_size:
            self._schedule_start()

    def _expire(self, row: _QueuedRow) -> None:
        if not row.is_done:
            super()._expire(row)

    def _discard(self, row: _QueuedRow) -> None:
        if row.expiry is not None:
            row.expiry.cancel()
        if row.prepared is not None:
            row.prepared.cancel()
        if not self._queue.remove(row):
            batch = row.batch
            if batch is not None and not batch.is_finished:
                batch.active_rows -= 1
                if batch is not self._in_flight[0]:
                    self._staged -= 1
        self._notify_if_drained()

    def _start(self) -> None:
        """Pass batches to the handler thread: any batch when it is idle, full batches when it is busy.

        One full batch is staged behind the running one, so a saturated model never waits for the loop.
        Several small batches are staged, because a switch of threads costs more than a small batch.
        """
        self._starting = False
        queue = self._queue
        started: list[_Batch] = []
        while queue.live and (len(self._in_flight) < 2 or self._staged < self._max_staged):
            needed = self._ready_size if self._in_flight else self._max_batch_size
            full = queue.live >= needed or queue.has_mixed_kinds()
            if not full and (
                self._in_flight
                or (self._max_batch_delay and not self._rejection_reason and self._delays_start())
            ):
                break
            self._append_batch(
                self._take_similar() if self._bucketed else queue.take(self._max_batch_size), started
            )
        if queue.shadows and not queue.live and not self._in_flight:
            self._append_batch(queue.take_shadows(self._max_batch_size), started)
        if started:
            self.handler_thread.post(self._execute, started)
            if self._prepare is not None:
                for row in islice(queue, self._prepare_window):
                    row.prepared = row.prepared or self._prepare(row.request)
            self._start_watchdog()

    def _take_similar(self) -> list[_QueuedRow]:
        """Take the next row and the rows that fit to it without much padding.

        Lengths are those measured by the handler where it has measured the first row, else bytes.
        """
        rows = self._queue.window(self._ready_size)
        known = [(length, row) for row in rows if (length := row.measured_length) is not None]
        if not known or known[0][1] is not rows[0]:
            known = [(sum(len(part.value) for part in row.request.inputs), row) for row in rows]
        taken = select_similar(known[0], known[1:], self._max_batch_size)
        for row in taken:
            self._queue.remove(row)
        return taken

    def _append_batch(self, rows: list[_QueuedRow], started: list[_Batch]) -> None:
        """Make a batch of those ``rows`` that still have a waiting caller."""
        rows = [row for row in rows if not row.is_done]
        if not rows:
            return
        batch = _Batch(rows, len(rows))
        for row in rows:
            row.batch = batch
        if self._in_flight:
            self._staged += len(rows)
        self._in_flight.append(batch)
        started.append(batch)

    # In the handler thread

    def _execute(self, batches: list[_Batch]) -> None:
        for batch in batches:
            responses: _Responses = []
            try:
                self._run_rows(batch, batch.rows, responses)
            except BaseException:  # Runner.run raises nothing; whatever else does must not lose rows
                failure = HandlerFailed(traceback.format_exc())
                responses = [(row, failure) for row in batch.rows]
            self._post(self._finish, batch, responses)

    def _post(self, call: Callable[..., Any], *args: Any) -> None:
        """Run a call on the event loop, after the earlier ones; calls until the loop runs share one wake-up.

        A batch's end must not overtake its chunks: their response would be complete without them. It does
        not wait for the next staged batch either, which may be slow.
        """
        self._calls.append((call, args))
        if not self._run_is_due:
            self._run_is_due = True
            self._call_on_loop(self._run_calls)

    def _run_rows(self, batch: _Batch, rows: list[_QueuedRow], responses: _Responses) -> None:
        rows = [row for row in rows if self._is_wanted(row, responses)]
        if not rows:
            return
        size = len(rows)
        started_at = batch.started_at = self._clock()
        emit = _BatchOutput(self._emit, rows, started_at)  # a closure's variables cost a batch of one 1 µs
        requests = [row.request for row in rows]
        if self._prepare is None:
            results = self._run(requests, emit)
        else:
            results = self._run(requests, emit, [row.prepared for row in rows])
        seconds = self._clock() - started_at
        batch.runs.append((seconds, [started_at - row.arrived for row in rows], requests))
        if size > 1 and self._retries and (failure := _batch_failure(results)) is not None:
            retried = [
                row
                for row, result in zip(rows, results, strict=True)
                if result is failure and not row.has_emitted
            ]
            if retried:
                ids = ", ".join(row.request.request_id for row in rows)
                message = "%s: a batch of %d failed (%s); it runs again in halves (requests %s)"
                log.warning(message, self._ref.app, size, failure, ids)
                responses.extend(
                    (row, result)
                    for row, result in zip(rows, results, strict=True)
                    if result is not failure or row.has_emitted
                )
                middle = (len(retried) + 1) // 2
                self._run_rows(batch, retried[:middle], responses)
                self._run_rows(batch, retried[middle:], responses)
                return
        for row, result in zip(rows, results, strict=True):
            if isinstance(result, InferenceResponse):
                result = with_timings(result, Timings(started_at - row.arrived, seconds, size))
            responses.append((row, result))

    def _emit(
        self, rows: list[_QueuedRow], started_at: float, index: int, chunk: bytes | InferenceResponse
    ) -> None:
        """Send an intermediate chunk of a row to its caller."""
        row = rows[index]
        row.has_emitted = True
        if isinstance(chunk, InferenceResponse):
            timings = Timings(started_at - row.arrived, self._clock() - started_at, len(rows))
            chunk = with_timings(chunk, timings)
        self._post(row.add_chunk, chunk)

    def _is_wanted(self, row: _QueuedRow, responses: _Responses) -> bool:
        """Return whether a caller still waits for the row; checked just before the run."""
        if row.on_done is None:
            return False
        if row.request.deadline is not None and row.request.expired:
            responses.append((row, self._deadline_error(row)))
            return False
        return True

    # On the event loop again

    def _run_calls(self) -> None:
        """Run the calls of the handler thread: chunks, and the ends of batches."""
        self._run_is_due = False  # before the look at the calls: a later one schedules another run
        calls, resolved = self._calls, []
        while calls:
            call, args = calls.popleft()
            if call(*args):
                resolved.append(args[0])
        if resolved:
            assert self._loop is not None
            self._loop.call_soon(self._record_metrics, resolved)  # after the responses were sent
        self._notify_if_drained()

    def _finish(self, batch: _Batch, responses: _Responses) -> bool:
        """Resolve the rows; return False where they were abandoned, or are resolved later."""
        if not self._in_flight or self._in_flight[0] is not batch:
            return False
        self._in_flight.popleft()
        batch.is_finished = True
        if self._in_flight:
            self._staged -= self._in_flight[0].active_rows
        if self._queue.live or self._queue.shadows:
            self._schedule_start()
        if self._in_flight and self._latency_model.estimate(len(batch.rows)) >= _LONG_BATCH_S:
            # The next batch begins, and its thread needs the interpreter. Sending these responses now would
            # take it away a dozen times; once the model computes, it does not matter.
            assert self._loop is not None
            self._unsent += 1
            self._loop.call_later(_RESPONSE_DELAY_S, self._resolve_later, batch, responses)
            return False
        for row, response in responses:
            row.resolve(response)
        return True

    def _resolve_later(self, batch: _Batch, responses: _Responses) -> None:
        self._unsent -= 1
        for row, response in responses:
            row.resolve(response)
        self._record_metrics([batch])
        self._notify_if_drained()

    def _record_metrics(self, batches: list[_Batch]) -> None:
        name, version = self._ref.name, self._ref.version
        latency_model, size, now = self._latency_model, self._max_batch_size, self._clock()
        for batch in batches:
            live = batch.rows[0].request.priority != "shadow"
            for seconds, waits, requests in batch.runs:
                if tracing.has_traced(requests):
                    self._trace_queue(batch, waits, requests)
                tensor_rows = self._count_tensor_rows(requests)
                self._meters.batch(name, version, len(waits), seconds, waits, live, tensor_rows)
                if batch.active_rows:  # else its handler may have returned early
                    latency_model.record(len(waits), seconds)
            if batch.runs and batch.started_at is not None:
                self._meters.overhead(now - batch.started_at - batch.runs[-1][0])
            batch.rows = []  # which refer to the batch: it is freed without garbage collection
        self._max_staged = min(
            _MAX_STAGED_ROWS, int(_MAX_STAGED_S / (latency_model.estimate(size) or 1.0)) * size
        )
        self._meters.depth(name, version, self.pending)

    def _trace_queue(
        self, batch: _Batch, waits: Sequence[float], requests: Sequence[InferenceRequest]
    ) -> None:
        arrivals = {id(row.request): row.arrived for row in batch.rows}
        for waited, request in zip(waits, requests, strict=True):
            arrived = arrivals[id(request)]
            tracing.record(request, "queue", arrived, arrived + waited)

    def _running_batch(self) -> tuple[list[_QueuedRow], float | None] | None:
        return (self._in_flight[0].rows, self._in_flight[0].started_at) if self._in_flight else None

    def _release_rows(self) -> tuple[list[_QueuedRow], list[_QueuedRow]]:
        batches = [*self._in_flight]
        for batch in batches:
            batch.is_finished = True
        self._in_flight.clear()
        self._staged = 0
        return batches[0].rows if batches else [], [row for batch in batches[1:] for row in batch.rows]


def _batch_failure(results: Sequence[InferenceResponse | RelayError]) -> HandlerFailed | None:
    """Return the handler's error where it failed all of several rows: one object stands for all of them.

    Rows that were refused before the handler ran have errors of their own.
    """
    handled = [result for result in results if not isinstance(result, InvalidInput)]
    if len(handled) < 2:
        return None
    first = handled[0]
    if not isinstance(first, HandlerFailed) or any(result is not first for result in handled):
        return None
    return first
