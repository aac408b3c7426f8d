"""``batcher: ray``: Ray Serve's own batching in front of the same runner, for those who want its semantics.

``@serve.batch`` decides which rows run together; each batch it forms then goes through our batcher
whole, which runs it at once and keeps everything else: one error a row, halves, streams, time-outs.
Ray's queue is first in, first out: priorities change nothing in it, except that shadows never stand there. They go to
our batcher, which runs them when nothing else is to be run. A deadline that cannot be met refuses a row here too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from ray import serve

from serve_app.errors import DeadlineExceeded, QueueFull, RelayError, WorkerDied
from serve_app.runtime.batcher import Batcher
from serve_app.types import Call, ModelRef, Reply, ReplyStream

_TORCHSERVE_DELAY = 100  # milliseconds; what Ray's batches wait for company when nobody said how long


class RayBatcher:
    """The same face as ``Batcher``."""

    def __init__(
        self, batcher: Batcher, ref: ModelRef, max_batch_size: int, max_batch_delay: int | None, queue_size: int
    ) -> None:
        self._batcher = batcher
        self._ref = ref
        self._waiting = 0

        @serve.batch(max_batch_size=max_batch_size)
        async def together(calls: list[Call]) -> list[Any]:
            # An exception in the list is one row's; raised, it would be every row's.
            return await batcher.submit_all(calls)

        self._together = together
        self.configure(max_batch_size=max_batch_size, max_batch_delay=max_batch_delay, queue_size=queue_size)

    def configure(
        self, *, max_batch_size: int, max_batch_delay: int | None, queue_size: int, **rest: Any
    ) -> None:
        delay = _TORCHSERVE_DELAY if max_batch_delay is None else max_batch_delay
        self._queue_size = queue_size
        self._max_batch_size = max_batch_size
        self._together.set_max_batch_size(max_batch_size)
        self._together.set_batch_wait_timeout_s(delay / 1000)
        self._batcher.configure(max_batch_size=max_batch_size, max_batch_delay=None, **rest)

    @property
    def pending(self) -> int:
        """Rows that wait, and those that run: Ray does not tell them apart."""
        return self._waiting

    ongoing = pending

    @property
    def retry_after(self) -> int:
        """The seconds, from 1, in which the rows that are here now will have been answered."""
        return self._batcher.in_turn(self._waiting)

    async def close(self) -> None:
        """Take no more rows, and answer those that our batcher has."""
        await self._batcher.close()

    def abandon(self, failure: WorkerDied, refusal: str) -> None:
        """As ``Batcher.abandon``."""
        self._batcher.abandon(failure, refusal)

    async def submit(self, call: Call) -> Reply | ReplyStream:
        if call.priority == "shadow":
            return await self._batcher.submit(call)
        if self._waiting >= self._queue_size:
            error = QueueFull(self._ref.name, call.version, f"{self._waiting} rows wait, job_queue_size allows no more")
            error.retry_after = self.retry_after
            raise error
        if self._waiting:  # an idle model tries; of those before it, one batch runs
            self._batcher.must_make_it(call, max(0, self._waiting - self._max_batch_size))
        self._waiting += 1
        try:
            answer = await self._answer(call)
        finally:
            self._waiting -= 1
        if isinstance(answer, RelayError):
            raise answer
        return answer

    async def _answer(self, call: Call) -> Any:
        """What Ray's batch says; a row that waits for it in vain leaves when its time is over."""
        if call.deadline is None:
            return await self._together(call)
        arrived = time.time()
        try:
            return await asyncio.wait_for(self._together(call), call.deadline - arrived)
        except asyncio.TimeoutError:
            error = DeadlineExceeded(self._ref.name, time.time() - arrived)
            error.retry_after = self.retry_after
            return error

    def enqueue(self, call: Call) -> asyncio.Future[Reply | ReplyStream]:
        return asyncio.ensure_future(self.submit(call))

    async def submit_all(self, calls: Sequence[Call]) -> list[Any]:
        answers = await asyncio.gather(*(self.submit(call) for call in calls), return_exceptions=True)
        return [answer if not isinstance(answer, asyncio.CancelledError) else WorkerDied() for answer in answers]
