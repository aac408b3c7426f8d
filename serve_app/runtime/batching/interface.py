"""The interface that all batchers share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream
from serve_app.errors import ReplicaDied


class RequestBatcher(Protocol):
    """A batcher, as the layers in front of it see it; ``AdmissionControl`` describes the methods."""

    @property
    def pending(self) -> int: ...

    @property
    def ongoing(self) -> int: ...

    @property
    def retry_after(self) -> int: ...

    def configure(
        self,
        *,
        max_batch_size: int,
        max_batch_delay: int | None,
        queue_size: int,
        response_timeout: float,
        retries: bool,
    ) -> None: ...

    async def submit(self, request: InferenceRequest) -> InferenceResponse | ResponseStream: ...

    async def submit_all(self, requests: Sequence[InferenceRequest]) -> list[Any]: ...

    def enqueue(self, request: InferenceRequest) -> asyncio.Future[InferenceResponse | ResponseStream]: ...

    async def close(self) -> None: ...

    def abandon(self, failure: ReplicaDied, rejection_reason: str) -> None: ...
