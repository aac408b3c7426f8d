"""Backends: the callback of a request, the future around it, and the task behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from serve_app.domain.request import (
    Cancel,
    InferenceRequest,
    InferenceResponse,
    OnDone,
    Outcome,
    ResponseStream,
)
from serve_app.errors import BadRequest, ReplicaDied
from serve_app.runtime.backends import Backend, TaskBackend

REQUEST = InferenceRequest("m")
Scenario = Callable[[], Coroutine[Any, Any, None]]


class Chunks(AsyncIterator[bytes]):
    """The chunks of a stream, which records that it was closed."""

    def __init__(self) -> None:
        self.is_closed = False

    async def __anext__(self) -> bytes:
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.is_closed = True


class ManualBackend(Backend):
    """A backend whose requests the test completes."""

    def __init__(self) -> None:
        self.callbacks: list[OnDone] = []
        self.withdrawn = 0

    def submit(self, request: InferenceRequest, on_done: OnDone) -> Cancel:
        if request.model == "refused":
            raise BadRequest("no")
        self.callbacks.append(on_done)

        def cancel() -> None:
            self.withdrawn += 1

        return cancel


def run(scenario: Scenario) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_task_passes_its_response_or_its_error() -> None:
    async def scenario() -> None:
        async def answer(request: InferenceRequest) -> InferenceResponse:
            if request.model == "bad":
                raise BadRequest("no")
            return InferenceResponse(b"x")

        backend = TaskBackend(answer)
        assert (await backend.infer(REQUEST)).body == b"x"  # type: ignore[union-attr]
        with pytest.raises(BadRequest):
            await backend.infer(InferenceRequest("bad"))
        first, second = await backend.infer_all([REQUEST, InferenceRequest("bad")])
        assert isinstance(first, InferenceResponse) and isinstance(second, BadRequest)

    run(scenario)


def test_a_task_that_something_else_cancels_is_a_lost_replica() -> None:
    async def scenario() -> None:
        async def answer(request: InferenceRequest) -> InferenceResponse:
            raise asyncio.CancelledError

        with pytest.raises(ReplicaDied):
            await TaskBackend(answer).infer(REQUEST)

    run(scenario)


@pytest.mark.parametrize("turns", [0, 1])
def test_a_withdrawn_task_passes_nothing(turns: int) -> None:
    async def scenario() -> None:
        begun, ended = [], []

        async def answer(request: InferenceRequest) -> InferenceResponse:
            begun.append(request)
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(request)
            return InferenceResponse(b"")

        cancel = TaskBackend(answer).submit(REQUEST, pytest.fail)
        for _ in range(turns):
            await asyncio.sleep(0)
        cancel()
        cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(begun) == len(ended) == turns

    run(scenario)


def test_a_stream_that_arrives_with_the_withdrawal_is_closed() -> None:
    async def scenario() -> None:
        chunks = Chunks()
        cancels: list[Cancel] = []

        async def answer(request: InferenceRequest) -> ResponseStream:
            # The task ends in this turn of the loop; its callback runs in the next one.
            asyncio.get_running_loop().call_soon(cancels[0])
            return ResponseStream(InferenceResponse(b""), chunks)

        cancels.append(TaskBackend(answer).submit(REQUEST, pytest.fail))
        while not chunks.is_closed:
            await asyncio.sleep(0)

    run(scenario)


def test_a_cancelled_caller_withdraws_its_request() -> None:
    async def scenario() -> None:
        backend, chunks = ManualBackend(), Chunks()
        waiting = asyncio.ensure_future(backend.infer(REQUEST))
        await asyncio.sleep(0)
        waiting.cancel()
        backend.callbacks[0](ResponseStream(InferenceResponse(b""), chunks))  # at the same time
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert backend.withdrawn == 1
        while not chunks.is_closed:
            await asyncio.sleep(0)

    run(scenario)


def test_a_cancelled_caller_closes_the_stream_that_it_has() -> None:
    async def scenario() -> None:
        backend, chunks = ManualBackend(), Chunks()
        waiting = asyncio.ensure_future(backend.infer(REQUEST))
        await asyncio.sleep(0)
        backend.callbacks[0](ResponseStream(InferenceResponse(b""), chunks))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert chunks.is_closed

    run(scenario)


def test_a_cancelled_group_withdraws_every_request() -> None:
    async def scenario() -> None:
        backend, chunks = ManualBackend(), Chunks()
        requests = [REQUEST, InferenceRequest("refused"), REQUEST, REQUEST]
        waiting = asyncio.ensure_future(backend.infer_all(requests))
        await asyncio.sleep(0)
        backend.callbacks[0](ResponseStream(InferenceResponse(b""), chunks))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert backend.withdrawn == 3 and chunks.is_closed

    run(scenario)


def test_a_refused_request_of_a_group_fails_alone() -> None:
    async def scenario() -> None:
        backend = ManualBackend()
        waiting = asyncio.ensure_future(backend.infer_all([InferenceRequest("refused"), REQUEST]))
        await asyncio.sleep(0)
        backend.callbacks[0](InferenceResponse(b"x"))
        outcomes: list[Outcome] = await waiting
        assert isinstance(outcomes[0], BadRequest) and isinstance(outcomes[1], InferenceResponse)
        assert await backend.infer_all([]) == []

    run(scenario)
