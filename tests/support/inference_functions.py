"""Inference functions and retry settings for tests of the clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from serve_app import errors
from serve_app.client import Retries
from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream

ClientFactory = Callable[..., Any]


def without_retry_after(error: errors.RelayError) -> errors.RelayError:
    """Return the same error without a Retry-After."""
    error.retry_after = None
    return error


def quick_retries(**options: Any) -> Retries:
    return Retries(initial_delay=0.001, **options)


def failing(*failures: Exception, then: bytes = b"done") -> Any:
    """Return an inference function that raises each of ``failures`` once and then responds."""
    left = list(failures)

    async def infer(request: InferenceRequest) -> InferenceResponse:
        if left:
            raise left.pop(0)
        return InferenceResponse(then)

    return infer


def streaming(*parts: bytes, failure: Exception | None = None) -> Any:
    """Return an inference function that streams ``parts`` and then raises ``failure``."""

    async def infer(request: InferenceRequest) -> ResponseStream:
        async def chunks() -> AsyncIterator[bytes]:
            for part in parts:
                yield part
            if failure is not None:
                raise failure

        return ResponseStream(InferenceResponse(b"", version="1.0"), chunks())

    return infer


async def stalled_stream(request: InferenceRequest) -> ResponseStream:
    """Stream one chunk, and no further one for a minute."""

    async def chunks() -> AsyncIterator[bytes]:
        yield b"one"
        await asyncio.sleep(60)

    return ResponseStream(InferenceResponse(b"", version="1.0"), chunks())
