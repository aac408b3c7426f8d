"""Continuous batching: a row stays in the batch, a piece at each step, until its stopping criterion says so.

The handler runs step after step over the rows that are there; others join between two steps, and leave. A row
that comes again has its headers and its request id, and no input: what it needs is in the handler's own cache.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any

from serve_app.errors import DeadlineExceeded, HandlerFailed, RelayError
from serve_app.runtime.admission import QueuedAdmission
from serve_app.runtime.answer import Answer, Emit, timed
from serve_app.telemetry.metrics import Meters
from serve_app.types import Call, Chunk, ModelRef, Reply, ReplyStream, Timings

# (calls, emit); a Chunk for each row that streams, whose ``head`` is a reply with the piece in it
Run = Callable[[Sequence[Call], Emit], "list[Reply | Chunk | RelayError]"]


class _Row(Answer):
    """A call that waits, or takes part in the steps."""

    __slots__ = ("began", "over")

    def __init__(self, call: Call, future: asyncio.Future[Reply | ReplyStream], arrived: float) -> None:
        super().__init__(call, future, arrived)
        self.began: float | None = None  # its first step
        self.over = False  # nobody waits for anything more of it

    def end(self) -> None:
        self.over = True
        if self.expiry is not None:
            self.expiry.cancel()

    def settle(self, answer: Reply | RelayError) -> None:
        self.end()
        super().settle(answer)


class ContinuousBatcher(QueuedAdmission[_Row]):
    """The face of Batcher, for a handler that sets ``context.stopping_criteria``.

    ``run`` is Runner.run of a model with continuous batching; it is called in ``author``'s thread only. At most
    ``max_batch_size`` rows take part in a step, all of one kind of call. ``response_timeout`` (seconds) bounds a
    step, a deadline the whole of a row. A step that fails ends all rows that took part: how far their states had
    come nobody knows. Shadows begin when nobody else is there. ``bounds`` are QueuedAdmission's.
    """

    row = _Row

    def __init__(self, run: Run, ref: ModelRef, meters: Meters, **bounds: Any) -> None:
        super().__init__(ref, meters, **bounds)
        self._run = run
        self._rows: list[_Row] = []  # of the step that runs, or of the one before
        self._step_began: float | None = None  # None: nothing runs

    @property
    def ongoing(self) -> int:
        """Rows that wait and rows that take part, shadows apart."""
        return self.pending + sum(not row.over and row.call.priority != "shadow" for row in self._rows)

    @property
    def retry_after(self) -> int:
        """The seconds, from 1, in which the rows that wait now will have been answered."""
        return max(1, ceil(self._pace.seconds(1) * self.pending / self._max_batch_size))  # the pace is of whole rows

    @property
    def _idle(self) -> bool:
        return self._step_began is None and not self._queue.live and all(row.over for row in self._rows)

    def _may_wait(self, call: Call, waiting: int) -> None:
        if call.expired:
            raise DeadlineExceeded(self._ref.name, 0.0)

    def _joined(self, row: _Row) -> None:
        if self._step_began is None:
            self._start_soon()

    def _drop(self, row: _Row) -> None:
        """It takes part in no other step, and its place is free."""
        row.end()
        if self._queue.remove(row):
            self._look_drained()

    def _start(self) -> None:
        self._starting = False
        if self._step_began is not None:
            return
        queue = self._queue
        rows = self._rows = [row for row in self._rows if not row.over]
        room = self._max_batch_size - len(rows)
        if not rows and queue.live and queue.live < room and self._delay and not self._refusal and self._waits():
            return
        if room > 0 and queue.live and (not rows or queue.first().call.kind == rows[0].call.kind):
            rows += [row for row in queue.take(room) if not row.over]
        elif not rows and queue.shadows:
            rows += [row for row in queue.take_shadows(room) if not row.over]
        if not rows:
            self._look_drained()
            return
        now = self._step_began = self._clock()
        for row in rows:
            if row.began is None:
                row.began = now
        self.author.post(self._execute, list(rows))
        self._guard()

    # In the author's thread

    def _execute(self, rows: list[_Row]) -> None:
        def emit(index: int, piece: bytes | Reply) -> None:
            self._tell(rows[index].piece, piece, partial(self._left, rows[index]))

        began = self._clock()
        results: Sequence[Reply | Chunk | RelayError]
        try:
            results = self._run([row.call for row in rows], emit)
        except BaseException:  # Runner.run raises nothing; whatever else does must not lose rows
            results = [HandlerFailed(traceback.format_exc())] * len(rows)
        self._tell(self._finish, rows, results, self._clock() - began)

    # On the event loop again

    def _finish(self, rows: list[_Row], results: Sequence[Reply | Chunk | RelayError], seconds: float) -> None:
        began = self._step_began
        if began is None:
            return  # too late: its rows were given up
        self._step_began = None
        now = self._clock()
        waits = []
        for row, result in zip(rows, results, strict=True):
            assert row.began is not None
            if row.began == began:
                waits.append(began - row.arrived)
            if row.over:
                continue
            if isinstance(result, RelayError):
                row.settle(result)
                continue
            said = result if isinstance(result, Reply) else result.head
            assert said is not None
            said = timed(said, Timings(row.began - row.arrived, now - row.began, len(rows)))
            if isinstance(result, Chunk) and not result.last:
                row.piece(said if row.pieces is None else said.body, partial(self._left, row))
                if row.call.kind == "predict" and row.call.inputs:
                    row.call = replace(row.call, inputs=())
            else:
                row.settle(said)
                self._pace.note(1, now - row.began)
        self._rows = [row for row in rows if not row.over]
        live = rows[0].call.priority != "shadow"
        self._meters.batch(self._ref.name, self._ref.version, len(rows), seconds, waits, live)
        self._meters.overhead(now - began - seconds)
        self._meters.depth(self._ref.name, self._ref.version, self.pending)
        if self._rows or self._queue.live or self._queue.shadows:
            self._start_soon()
        self._look_drained()

    def _running(self) -> tuple[list[_Row], float | None] | None:
        return None if self._step_began is None else (self._rows, self._step_began)

    def _let_go(self) -> tuple[list[_Row], list[_Row]]:
        rows, self._rows, self._step_began = self._rows, [], None
        return rows, []
