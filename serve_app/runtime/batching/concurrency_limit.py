"""Limit of the requests that a replica processes at once (maxConcurrentRequests)."""

from __future__ import annotations

from serve_app.domain.model import ModelRef
from serve_app.domain.request import Cancel, InferenceRequest, OnDone, Outcome, ResponseStream
from serve_app.errors import QuotaExceeded, RelayError
from serve_app.runtime.backends import Backend
from serve_app.runtime.batching.interface import RequestBatcher


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
