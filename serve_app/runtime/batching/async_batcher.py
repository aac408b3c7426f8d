"""Asynchronous handlers: many requests run at once, on an event loop in the handler thread.

An engine that batches by itself (``async def handle``) wants every request at once and reports when each is
done. So no request waits here: it starts or is refused. The interface is that of Batcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

from serve_app.domain.model import ModelRef
from serve_app.domain.request import InferenceRequest, InferenceResponse, OnDone, Timings
from serve_app.errors import DeadlineExceeded, HandlerFailed, RelayError, ReplicaDied, ResponseTimeout
from serve_app.runtime.batching.admission_control import MAX_SHADOWS, AdmissionControl
from serve_app.runtime.batching.request_queue import Emit, PendingRequest, with_timings
from serve_app.telemetry import tracing
from serve_app.telemetry.metrics import Meters

log = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 2.0  # seconds in which the handler loop must respond after a response_timeout

RunAsync = Callable[[Sequence[InferenceRequest], Emit], Awaitable["list[InferenceResponse | RelayError]"]]


@dataclass(slots=True, eq=False)
class _AsyncRow(PendingRequest):
    """A request that has started; ``task`` is the handler's, on the handler loop."""

    task: asyncio.Task[None] | None = None


class AsyncBatcher(AdmissionControl[_AsyncRow]):
    """A batcher of an asynchronous handler; ``run`` is ``Runner.run_async`` on ``handler_loop``, in the
    handler thread.

    At most ``queue_size`` requests run at once, each as a batch of one row. ``response_timeout`` (seconds)
    bounds each: its handler is cancelled. ``on_hung`` is called when the handler loop is blocked and cannot
    cancel. ``limits`` are those of AdmissionControl.

    No request waits here, so priorities change no order. A deadline refuses no request in advance; it
    cancels the handler when it passes. Shadows start only while no client's request runs, a few at once, and
    do not count against ``queue_size``.
    """

    def __init__(
        self,
        run: RunAsync,
        handler_loop: asyncio.AbstractEventLoop,
        ref: ModelRef,
        meters: Meters,
        **limits: Any,
    ) -> None:
        super().__init__(ref, meters, **limits)
        self._run = run
        self._handler_loop = handler_loop
        self._rows: set[_AsyncRow] = set()
        self._shadows = 0  # of them
        self.handler_thread.post(run_until_stopped, handler_loop)

    @property
    def pending(self) -> int:
        """Requests that run, without shadows."""
        return len(self._rows) - self._shadows

    ongoing = pending

    @property
    def retry_after(self) -> int:
        """Seconds, at least 1, in which one of the running requests will have ended."""
        return max(1, ceil(self._latency_model.estimate(1) / max(1, self.pending)))

    async def close(self) -> None:
        """Refuse new requests, let the running ones end, then end the handler loop and its thread."""
        await super().close()
        self._call_on_handler_loop(self._handler_loop.stop)

    def abandon(self, failure: ReplicaDied, rejection_reason: str) -> None:
        self._rejection_reason = rejection_reason
        for row in list(self._rows):
            row.resolve(failure)
            self._remove(row)

    @property
    def _idle(self) -> bool:
        return not self._rows

    def _admit(self, request: InferenceRequest, on_done: OnDone) -> _AsyncRow:
        if self._rejection_reason:
            raise self._loading_error(request)
        shadow = request.priority == "shadow"
        if shadow and self.pending:
            raise self._queue_full_error(request, "shadows are begun only while no other call is under way")
        if shadow and self._shadows >= MAX_SHADOWS:
            raise self._queue_full_error(request, f"{self._shadows} shadows are under way")
        if not shadow and self.pending >= self._queue_size:
            raise self._queue_full_error(request, f"{self.pending} calls are under way (job_queue_size)")
        if request.expired:
            raise DeadlineExceeded(self._ref.name, 0.0)
        loop = self._loop = self._loop or asyncio.get_running_loop()
        row = _AsyncRow(request, on_done, self._clock())
        self._rows.add(row)
        self._shadows += shadow
        limits = [self._response_timeout] if self._response_timeout > 0 else []
        if request.deadline is not None:
            limits.append(request.deadline - time.time())
        if limits:
            row.expiry = loop.call_later(min(limits), self._on_timeout, row)
        self._call_on_handler_loop(self._spawn, row)
        return row

    def _call_on_handler_loop(self, callback: Callable[..., object], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # closed: every waiting caller has its error
            self._handler_loop.call_soon_threadsafe(callback, *args)

    # On the handler loop

    def _spawn(self, row: _AsyncRow) -> None:
        if row.is_done:
            self._call_on_loop(self._finish, row, None)
        else:
            row.task = self._handler_loop.create_task(self._run_row(row))
            # A task cancelled before its first step does not report its end itself.
            row.task.add_done_callback(
                lambda task: self._call_on_loop(self._finish, row, None) if task.cancelled() else None
            )

    async def _run_row(self, row: _AsyncRow) -> None:
        def emit(index: int, chunk: bytes | InferenceResponse) -> None:
            self._call_on_loop(row.add_chunk, chunk, partial(self._discard, row))

        started_at = self._clock()
        results = await self._run([row.request], emit)
        seconds = self._clock() - started_at
        self._call_on_loop(self._finish, row, results[0], seconds, started_at - row.arrived)

    # On the event loop again

    def _finish(
        self,
        row: _AsyncRow,
        response: InferenceResponse | RelayError | None,
        seconds: float = 0.0,
        waited: float = 0.0,
    ) -> None:
        if row not in self._rows:
            return  # it was abandoned
        self._remove(row)
        if isinstance(response, InferenceResponse):
            response = with_timings(response, Timings(waited, seconds, 1))
            tracing.record(row.request, "queue", row.arrived, row.arrived + waited)
        if response is not None:
            live = row.request.priority != "shadow"
            tensor_rows = self._count_tensor_rows([row.request])
            self._meters.batch(self._ref.name, self._ref.version, 1, seconds, [waited], live, tensor_rows)
            self._meters.overhead(self._clock() - row.arrived - waited - seconds)
            self._latency_model.record(1, seconds)
        row.resolve(response or HandlerFailed("the handler was cancelled"))

    def _remove(self, row: _AsyncRow) -> None:
        self._rows.discard(row)
        self._shadows -= row.request.priority == "shadow"
        self._meters.depth(self._ref.name, self._ref.version, self.pending)
        self._notify_if_drained()

    def _discard(self, row: _AsyncRow) -> None:
        """Cancel the row's handler; the row counts until the handler has ended."""

        def cancel() -> None:
            if row.task is not None:
                row.task.cancel()

        if row in self._rows:
            self._call_on_handler_loop(cancel)

    def _on_timeout(self, row: _AsyncRow) -> None:
        """Fail a row whose deadline or response_timeout has passed."""
        if row.request.expired:
            error: RelayError = self._deadline_error(row)
        else:
            error = ResponseTimeout(
                f"the handler gave no answer within response_timeout ({self._response_timeout:g} s)"
            )
            log.error(
                "%s: %s; it is cancelled (request %s)", self._ref.app, error.detail, row.request.request_id
            )
            self._probe_handler_loop()
        row.resolve(error)
        self._discard(row)

    def _probe_handler_loop(self) -> None:
        """Abandon the replica unless the handler loop responds: a blocked loop stops every request."""
        assert self._loop is not None
        blocked = self._loop.call_later(_PROBE_TIMEOUT_S, self._on_loop_blocked)
        self._call_on_handler_loop(self._call_on_loop, blocked.cancel)

    def _on_loop_blocked(self) -> None:
        """Abandon the replica, because a cancelled handler still blocks the handler loop."""
        if not self._rejection_reason:
            self._abandon_hung("the handler's event loop is blocked", list(self._rows))


def run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    """Run ``loop`` in the handler thread until it is stopped, then cancel what an engine still runs there."""
    try:
        loop.run_forever()
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))
        loop.close()
