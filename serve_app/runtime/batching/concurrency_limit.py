"""Limit of the requests that a replica processes at once (maxConcurrentRequests)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from serve_app.domain.model import ModelRef
from serve_app.domain.request import InferenceRequest, InferenceResponse, OnDone, ResponseStream
from serve_app.errors import QuotaExceeded
from serve_app.runtime.batching.interface import FutureBatcher, RequestBatcher


class ConcurrencyLimit(FutureBatcher):
    """A batcher's interface that admits its share of a version's limit, and raises QuotaExceeded beyond it.

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

    async def submit(self, request: InferenceRequest) -> InferenceResponse | ResponseStream:
        if not self._replica_limit:
            return await self._batcher.submit(request)
        return await super().submit(request)

    def enqueue(self, request: InferenceRequest) -> asyncio.Future[InferenceResponse | ResponseStream]:
        if not self._replica_limit or request.priority == "shadow":
            return self._batcher.enqueue(request)
        self._check()
        future = self._batcher.enqueue(request)
        self._active += 1
        future.add_done_callback(self._release_after)
        return future

    def find_submit(self) -> Callable[[InferenceRequest, OnDone], Callable[[], None]]:
        """Return ``submit_nowait``, or the batcher's where there is no limit."""
        return self.submit_nowait if self._replica_limit else self._batcher.submit_nowait

    def submit_nowait(self, request: InferenceRequest, on_done: OnDone) -> Callable[[], None]:
        if not self._replica_limit or request.priority == "shadow":
            return self._batcher.submit_nowait(request, on_done)
        self._check()

        def complete(outcome: InferenceResponse | ResponseStream | Exception) -> None:
            if isinstance(outcome, ResponseStream):
                outcome.add_done_callback(self._release)
            else:
                self._release()
            on_done(outcome)

        withdraw = self._batcher.submit_nowait(request, complete)
        self._active += 1

        def release() -> None:
            withdraw()
            self._release()

        return release

    def _check(self) -> None:
        """Raise QuotaExceeded where no further request may run."""
        if self._active >= self._replica_limit:
            error = QuotaExceeded(self._ref.name, self._ref.version, self._limit)
            error.retry_after = self._batcher.retry_after
            raise error

    def _release_after(self, future: asyncio.Future[InferenceResponse | ResponseStream]) -> None:
        succeeded = not future.cancelled() and future.exception() is None
        if succeeded and isinstance(response := future.result(), ResponseStream):
            response.add_done_callback(self._release)
        else:
            self._release()

    def _release(self) -> None:
        self._active -= 1
