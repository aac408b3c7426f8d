"""The interface that all batchers share, with its methods that wait for futures."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from serve_app.domain.request import InferenceRequest, InferenceResponse, OnDone, ResponseStream
from serve_app.errors import RelayError, ReplicaDied


class FutureBatcher(ABC):
    """A base class of batchers, whose callers wait for the futures of ``enqueue``."""

    @abstractmethod
    def enqueue(self, request: InferenceRequest) -> asyncio.Future[InferenceResponse | ResponseStream]:
        """Return the future of the response; cancelling it means that the client disconnected.

        Raises RelayError at once.
        """

    async def submit(self, request: InferenceRequest) -> InferenceResponse | ResponseStream:
        """Return the response to a request; a stream is returned with its first chunk. Raises RelayError."""
        future = self.enqueue(request)
        try:
            return await future
        except asyncio.CancelledError:
            await _discard(future)
            raise

    def submit_nowait(self, request: InferenceRequest, on_done: OnDone) -> Callable[[], None]:
        """Submit a request whose outcome ``on_done`` receives, and return a function that withdraws it.

        ``on_done`` is not called after that. Raises RelayError at once.
        """
        future = self.enqueue(request)
        future.add_done_callback(lambda future: None if future.cancelled() else on_done(_result(future)))

        def withdraw() -> None:
            closing = asyncio.ensure_future(_discard(future))
            _discards.add(closing)
            closing.add_done_callback(_discards.discard)

        return withdraw

    async def submit_all(self, requests: Sequence[InferenceRequest]) -> list[Any]:
        """Return an InferenceResponse, a ResponseStream or a RelayError for each request of one group."""
        outcomes: list[asyncio.Future[Any] | RelayError] = []
        for request in requests:
            try:
                outcomes.append(self.enqueue(request))
            except RelayError as error:
                outcomes.append(error)
        futures = [outcome for outcome in outcomes if isinstance(outcome, asyncio.Future)]
        try:
            if futures:
                await asyncio.wait(futures)
        except asyncio.CancelledError:
            for future in futures:
                await _discard(future)
            raise
        return [_result(outcome) if isinstance(outcome, asyncio.Future) else outcome for outcome in outcomes]


class RequestBatcher(FutureBatcher):
    """A batcher, as the layers in front of it see it."""

    @property
    @abstractmethod
    def pending(self) -> int:
        """Rows that count against the queue size, without shadows."""

    @property
    @abstractmethod
    def ongoing(self) -> int:
        """Rows that wait or run, without shadows."""

    @property
    @abstractmethod
    def retry_after(self) -> int:
        """Seconds, at least 1, after which a client that is refused now may retry."""

    @abstractmethod
    def configure(
        self,
        *,
        max_batch_size: int,
        max_batch_delay: int | None,
        queue_size: int,
        response_timeout: float,
        retries: bool,
    ) -> None:
        """Apply new limits."""

    @abstractmethod
    async def close(self) -> None:
        """Refuse new rows, and answer the admitted ones."""

    @abstractmethod
    def abandon(self, failure: ReplicaDied, rejection_reason: str) -> None:
        """Fail the running rows with ``failure``, and all waiting and later rows with ModelLoading."""


_discards: set[asyncio.Future[None]] = set()  # the event loop keeps only weak references


async def _discard(future: asyncio.Future[Any]) -> None:
    """Cancel a request whose client disconnected, or close the stream that arrived at the same time."""
    if not future.cancel() and not future.cancelled() and future.exception() is None:
        response = future.result()
        if isinstance(response, ResponseStream):
            await response.aclose()


def _result(future: asyncio.Future[Any]) -> Any:
    return ReplicaDied() if future.cancelled() else future.exception() or future.result()
