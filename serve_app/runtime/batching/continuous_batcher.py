"""Continuous batching: a row stays in the batch, with a chunk at each step, until its stopping criterion is
met.

The handler runs step after step over the present rows; others join and leave between two steps. After its
first step a row has its headers and its request id but no input: the handler's own cache holds what it needs.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any

from serve_app.domain.model import ModelRef
from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseChunk, Timings
from serve_app.errors import DeadlineExceeded, HandlerFailed, RelayError
from serve_app.runtime.batching.admission_control import QueuedAdmissionControl
from serve_app.runtime.batching.request_queue import Emit, PendingRequest, with_timings
from serve_app.telemetry import tracing
from serve_app.telemetry.metrics import Meters

# (requests, emit); a ResponseChunk for each row that streams, whose ``head`` is a response with the chunk in
# it
Run = Callable[[Sequence[InferenceRequest], Emit], "Sequence[InferenceResponse | ResponseChunk | RelayError]"]


@dataclass(slots=True, eq=False)
class _StepRow(PendingRequest):
    """A request that waits or takes part in the steps."""

    started_at: float | None = None  # start of its first step
    is_finished: bool = False  # its client waits for no further chunk

    def finish(self) -> None:
        self.is_finished = True
        if self.expiry is not None:
            self.expiry.cancel()

    def resolve(self, response: InferenceResponse | RelayError) -> None:
        self.finish()
        PendingRequest.resolve(self, response)  # super() needs the class before dataclass added the slots


class ContinuousBatcher(QueuedAdmissionControl[_StepRow]):
    """A batcher with the interface of Batcher, for a handler that sets ``context.stopping_criteria``.

    ``run`` is ``Runner.run`` of a model with continuous batching; it is called in the handler thread only. At
    most ``max_batch_size`` rows take part in a step, all of one kind of request. ``response_timeout``
    (seconds) bounds a step, a deadline a whole row. A failed step ends all its rows, because their states are
    unknown. Shadows start when no other row is present. ``limits`` are those of QueuedAdmissionControl.
    """

    row_type = _StepRow

    def __init__(self, run: Run, ref: ModelRef, meters: Meters, **limits: Any) -> None:
        super().__init__(ref, meters, **limits)
        self._run = run
        self._rows: list[_StepRow] = []  # of the step that runs, or of the one before
        self._step_started_at: float | None = None  # None: nothing runs

    @property
    def ongoing(self) -> int:
        """Rows that wait or take part, without shadows."""
        return self.pending + sum(
            not row.is_finished and row.request.priority != "shadow" for row in self._rows
        )

    @property
    def retry_after(self) -> int:
        """Seconds, at least 1, in which the rows that wait now will have been answered."""
        # The latency model is of whole rows.
        return max(1, ceil(self._latency_model.estimate(1) * self.pending / self._max_batch_size))

    @property
    def _idle(self) -> bool:
        return (
            self._step_started_at is None
            and not self._queue.live
            and all(row.is_finished for row in self._rows)
        )

    def _check_admission(self, request: InferenceRequest, waiting: int) -> None:
        if request.expired:
            raise DeadlineExceeded(self._ref.name, 0.0)

    def _on_enqueued(self, row: _StepRow) -> None:
        if self._step_started_at is None:
            self._schedule_start()

    def _discard(self, row: _StepRow) -> None:
        """Take the row out of all further steps, and free its place."""
        row.finish()
        if self._queue.remove(row):
            self._notify_if_drained()

    def _start(self) -> None:
        self._starting = False
        if self._step_started_at is not None:
            return
        queue = self._queue
        rows = self._rows = [row for row in self._rows if not row.is_finished]
        room = self._max_batch_size - len(rows)
        if (
            not rows
            and queue.live
            and queue.live < room
            and self._max_batch_delay
            and not self._rejection_reason
            and self._delays_start()
        ):
            return
        if room > 0 and queue.live and (not rows or queue.peek().request.kind == rows[0].request.kind):
            rows += [row for row in queue.take(room) if not row.is_finished]
        elif not rows and queue.shadows:
            rows += [row for row in queue.take_shadows(room) if not row.is_finished]
        if not rows:
            self._notify_if_drained()
            return
        now = self._step_started_at = self._clock()
        for row in rows:
            if row.started_at is None:
                row.started_at = now
        self.handler_thread.post(self._execute, list(rows))
        self._start_watchdog()

    # In the handler thread

    def _execute(self, rows: list[_StepRow]) -> None:
        def emit(index: int, chunk: bytes | InferenceResponse) -> None:
            self._call_on_loop(rows[index].add_chunk, chunk, partial(self._on_disconnect, rows[index]))

        started_at = self._clock()
        results: Sequence[InferenceResponse | ResponseChunk | RelayError]
        try:
            results = self._run([row.request for row in rows], emit)
        except BaseException:  # Runner.run raises nothing; whatever else does must not lose rows
            results = [HandlerFailed(traceback.format_exc())] * len(rows)
        self._call_on_loop(self._finish, rows, results, self._clock() - started_at)

    # On the event loop again

    def _finish(
        self,
        rows: list[_StepRow],
        results: Sequence[InferenceResponse | ResponseChunk | RelayError],
        seconds: float,
    ) -> None:
        started_at = self._step_started_at
        if started_at is None:
            return  # its rows were abandoned
        self._step_started_at = None
        now = self._clock()
        waits = []
        for row, result in zip(rows, results, strict=True):
            assert row.started_at is not None
            if row.started_at == started_at:
                waits.append(started_at - row.arrived)
            if row.is_finished:
                continue
            if isinstance(result, RelayError):
                row.resolve(result)
                continue
            response = result if isinstance(result, InferenceResponse) else result.head
            assert response is not None
            response = with_timings(
                response, Timings(row.started_at - row.arrived, now - row.started_at, len(rows))
            )
            if isinstance(result, ResponseChunk) and not result.last:
                row.add_chunk(
                    response if row.stream is None else response.body, partial(self._on_disconnect, row)
                )
                if row.request.kind == "predict" and row.request.inputs:
                    row.request = replace(row.request, inputs=())
            else:
                tracing.record(row.request, "queue", row.arrived, row.started_at)
                tracing.record(row.request, "generation", row.started_at, now)
                row.resolve(response)
                self._latency_model.record(1, now - row.started_at)
        self._rows = [row for row in rows if not row.is_finished]
        live = rows[0].request.priority != "shadow"
        self._meters.batch(self._ref.name, self._ref.version, len(rows), seconds, waits, live)
        self._meters.overhead(now - started_at - seconds)
        self._meters.depth(self._ref.name, self._ref.version, self.pending)
        if self._rows or self._queue.live or self._queue.shadows:
            self._schedule_start()
        self._notify_if_drained()

    def _running_batch(self) -> tuple[list[_StepRow], float | None] | None:
        return None if self._step_started_at is None else (self._rows, self._step_started_at)

    def _release_rows(self) -> tuple[list[_StepRow], list[_StepRow]]:
        rows, self._rows, self._step_started_at = self._rows, [], None
        return rows, []
