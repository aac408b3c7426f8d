"""The interface that all batchers share."""

from __future__ import annotations

from abc import abstractmethod

from serve_app.errors import ReplicaDied
from serve_app.runtime.backends import Backend


class RequestBatcher(Backend):
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
