"""The batcher ``ray``: Ray Serve's own batching in front of our batcher, for users who want its semantics.

``@serve.batch`` decides which rows run together. Each batch goes through our batcher as a whole, which runs
it at once and does the rest: errors of single rows, retries in halves, streams, timeouts. Ray's queue is
first in, first out: priorities change nothing in it. Shadows go to our batcher directly, which runs them when
it is idle. A row whose deadline cannot be met is refused here too.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from ray import serve

from serve_app.domain.model import ModelRef
from serve_app.domain.request import Cancel, InferenceRequest, InferenceResponse, OnDone, ResponseStream
from serve_app.errors import DeadlineExceeded, QueueFull, ReplicaDied
from serve_app.runtime.backends import TaskRequest
from serve_app.runtime.batching.batcher import Batcher
from serve_app.runtime.batching.interface import RequestBatcher

_TORCHSERVE_DELAY = 100  # milliseconds that Ray's batches wait by default


class RayBatcher(RequestBatcher):
    """A batcher that collects rows with ``@serve.batch``."""

    def __init__(
        self,
        batcher: Batcher,
        ref: ModelRef,
        max_batch_size: int,
        max_batch_delay: int | None,
        queue_size: int,
    ) -> None:
        self._batcher = batcher
        self._ref = ref
        self._pending = 0

        @serve.batch(max_batch_size=max_batch_size)
        async def run_batch(requests: list[InferenceRequest]) -> list[Any]:
            # An exception in the list is one row's error; raised, it would be every row's.
            return await batcher.infer_all(requests)

        self._run_batch = run_batch
        self.configure(max_batch_size=max_batch_size, max_batch_delay=max_batch_delay, queue_size=queue_size)

    def configure(
        self, *, max_batch_size: int, max_batch_delay: int | None, queue_size: int, **rest: Any
    ) -> None:
        delay = _TORCHSERVE_DELAY if max_batch_delay is None else max_batch_delay
        self._queue_size = queue_size
        self._max_batch_size = max_batch_size
        self._run_batch.set_max_batch_size(max_batch_size)
        self._run_batch.set_batch_wait_timeout_s(delay / 1000)
        self._batcher.configure(max_batch_size=max_batch_size, max_batch_delay=None, **rest)

    @property
    def pending(self) -> int:
        """Rows that wait or run: Ray does not distinguish them."""
        return self._pending

    ongoing = pending

    @property
    def retry_after(self) -> int:
        """Seconds, at least 1, in which the present rows will have been answered."""
        return self._batcher.estimate_seconds(self._pending)

    async def close(self) -> None:
        """Refuse new rows, and answer those of our batcher."""
        await self._batcher.close()

    def abandon(self, failure: ReplicaDied, rejection_reason: str) -> None:
        """Abandon our batcher, see ``Batcher.abandon``."""
        self._batcher.abandon(failure, rejection_reason)

    def submit(self, request: InferenceRequest, on_done: OnDone) -> Cancel:
        if request.priority == "shadow":
            return self._batcher.submit(request, on_done)
        if self._pending >= self._queue_size:
            error = QueueFull(
                self._ref.name, request.version, f"{self._pending} rows wait, job_queue_size allows no more"
            )
            error.retry_after = self.retry_after
            raise error
        if self._pending:  # an idle model tries; of those before it, one batch runs
            self._batcher.check_deadline(request, max(0, self._pending - self._max_batch_size))
        self._pending += 1
        answer = TaskRequest(self._answer(request), on_done)
        answer.task.add_done_callback(self._release)
        return answer.cancel

    def _release(self, task: asyncio.Task[Any]) -> None:
        self._pending -= 1

    async def _answer(self, request: InferenceRequest) -> InferenceResponse | ResponseStream:
        """Return the result of Ray's batch; a row that waits too long fails at its deadline."""
        arrived = time.time()
        timeout = None if request.deadline is None else request.deadline - arrived
        try:
            outcome = await asyncio.wait_for(self._run_batch(request), timeout)
        except asyncio.TimeoutError:
            error = DeadlineExceeded(self._ref.name, time.time() - arrived)
            error.retry_after = self.retry_after
            raise error from None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome
