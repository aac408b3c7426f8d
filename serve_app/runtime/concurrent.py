"""Asynchronous handlers: many calls under way at once, on an event loop in the author's thread.

An engine that batches by itself (``async def handle``) wants every request at once and says when each is
done. So nothing waits here: a call is begun or refused. The face is Batcher's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from math import ceil
from typing import Any

from serve_app.errors import DeadlineExceeded, HandlerFailed, RelayError, ResponseTimeout, WorkerDied
from serve_app.runtime.admission import SHADOWS, Admission
from serve_app.runtime.answer import Answer, Emit, timed
from serve_app.telemetry.metrics import Meters
from serve_app.types import Call, ModelRef, Reply, ReplyStream, Timings

log = logging.getLogger("torchrelay.concurrent")

_GRACE = 2.0  # seconds in which the author's loop must give a sign of life after a response_timeout

RunAsync = Callable[[Sequence[Call], Emit], Awaitable["list[Reply | RelayError]"]]


class _Row(Answer):
    """A call that was begun: ``task`` is the handler's, on the author's loop."""

    __slots__ = ("task",)

    def __init__(self, call: Call, future: asyncio.Future[Reply | ReplyStream], arrived: float) -> None:
        super().__init__(call, future, arrived)
        self.task: asyncio.Task[None] | None = None


class ConcurrentBatcher(Admission[_Row]):
    """``run`` is Runner.run_async on ``author_loop``, which gets the author's thread for good.

    At most ``queue_size`` calls are under way; each is a batch of one row. ``response_timeout``
    (seconds) bounds each: its handler is cancelled. Where the loop does not take even that, because
    somebody blocks it, ``on_hung`` is called. ``bounds`` are Admission's.

    No call waits here, so there is no order for priorities to change, and a deadline refuses nobody beforehand: it
    cancels the handler when it passes. Shadows are begun only while no caller's request is under way, a few at once,
    and do not count against ``queue_size``.
    """

    def __init__(
        self, run: RunAsync, author_loop: asyncio.AbstractEventLoop, ref: ModelRef, meters: Meters, **bounds: Any
    ) -> None:
        super().__init__(ref, meters, **bounds)
        self._run = run
        self._author_loop = author_loop
        self._rows: set[_Row] = set()
        self._shadows = 0  # of them
        self.author.post(run_until_stopped, author_loop)

    @property
    def pending(self) -> int:
        """Calls under way; shadows are not among them."""
        return len(self._rows) - self._shadows

    ongoing = pending

    @property
    def retry_after(self) -> int:
        """The seconds, from 1, in which one of the calls under way will have ended."""
        return max(1, ceil(self._pace.seconds(1) / max(1, self.pending)))

    async def close(self) -> None:
        """Take no more calls, let those under way end, then end the author's loop and thread."""
        await super().close()
        self._in_authors_loop(self._author_loop.stop)

    def abandon(self, failure: WorkerDied, refusal: str) -> None:
        self._refusal = refusal
        for row in list(self._rows):
            row.settle(failure)
            self._forget(row)

    @property
    def _idle(self) -> bool:
        return not self._rows

    def _take_in(self, call: Call) -> _Row:
        if self._refusal:
            raise self._closed(call)
        shadow = call.priority == "shadow"
        if shadow and self.pending:
            raise self._full(call, "shadows are begun only while no other call is under way")
        if shadow and self._shadows >= SHADOWS:
            raise self._full(call, f"{self._shadows} shadows are under way")
        if not shadow and self.pending >= self._queue_size:
            raise self._full(call, f"{self.pending} calls are under way (job_queue_size)")
        if call.expired:
            raise DeadlineExceeded(self._ref.name, 0.0)
        loop = self._loop = self._loop or asyncio.get_running_loop()
        row = _Row(call, loop.create_future(), self._clock())
        self._rows.add(row)
        self._shadows += shadow
        limits = [self._timeout] if self._timeout > 0 else []
        if call.deadline is not None:
            limits.append(call.deadline - time.time())
        if limits:
            row.expiry = loop.call_later(min(limits), self._too_late, row)
        self._in_authors_loop(self._spawn, row)
        return row

    def _in_authors_loop(self, callback: Callable[..., object], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # closed: whoever waited there was told
            self._author_loop.call_soon_threadsafe(callback, *args)

    # On the author's loop

    def _spawn(self, row: _Row) -> None:
        if row.future.done():
            self._tell(self._end, row, None)
        else:
            row.task = self._author_loop.create_task(self._answer(row))
            # One that is cancelled before its first step says nothing itself.
            row.task.add_done_callback(lambda task: self._tell(self._end, row, None) if task.cancelled() else None)

    async def _answer(self, row: _Row) -> None:
        def emit(index: int, piece: bytes | Reply) -> None:
            self._tell(row.piece, piece, partial(self._drop, row))

        began = self._clock()
        results = await self._run([row.call], emit)
        seconds = self._clock() - began
        self._tell(self._end, row, results[0], seconds, began - row.arrived)

    # On the event loop again

    def _end(self, row: _Row, answer: Reply | RelayError | None, seconds: float = 0.0, waited: float = 0.0) -> None:
        if row not in self._rows:
            return  # it was given up
        self._forget(row)
        if isinstance(answer, Reply):
            answer = timed(answer, Timings(waited, seconds, 1))
        if answer is not None:
            live = row.call.priority != "shadow"
            self._meters.batch(self._ref.name, self._ref.version, 1, seconds, [waited], live)
            self._meters.overhead(self._clock() - row.arrived - waited - seconds)
            self._pace.note(1, seconds)
        row.settle(answer or HandlerFailed("the handler was cancelled"))

    def _forget(self, row: _Row) -> None:
        self._rows.discard(row)
        self._shadows -= row.call.priority == "shadow"
        if row.expiry is not None:
            row.expiry.cancel()
        self._meters.depth(self._ref.name, self._ref.version, self.pending)
        self._look_drained()

    def _drop(self, row: _Row) -> None:
        """Its handler is told so, and the row counts until it has heard it."""

        def cancel() -> None:
            if row.task is not None:
                row.task.cancel()

        if row in self._rows:
            self._in_authors_loop(cancel)

    def _too_late(self, row: _Row) -> None:
        """The row's time is over: its caller's, or the handler's."""
        if row.call.expired:
            error: RelayError = self._late(row)
        else:
            error = ResponseTimeout(f"the handler gave no answer within response_timeout ({self._timeout:g} s)")
            log.error("%s: %s; it is cancelled (request %s)", self._ref.app, error.detail, row.call.request_id)
            self._look_for_life()
        row.settle(error)
        self._drop(row)

    def _look_for_life(self) -> None:
        """End the replica unless the author's loop answers: one call may be slow, a blocked loop stops them all."""
        assert self._loop is not None
        blocked = self._loop.call_later(_GRACE, self._blocked)
        self._in_authors_loop(self._tell, blocked.cancel)

    def _blocked(self) -> None:
        """A handler that was cancelled did not come back: the loop that all of them run on is blocked."""
        if not self._refusal:
            self._give_up("the handler's event loop is blocked", list(self._rows))


def run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    """The author's thread belongs to ``loop`` until it is stopped; what an engine still runs there is cancelled."""
    try:
        loop.run_forever()
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))
        loop.close()
