"""What every batcher does with the calls that come to it, whatever runs them."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from serve_app.domain.model import ModelRef
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart
from serve_app.errors import DeadlineExceeded, ModelLoading, ResponseTimeout
from serve_app.runtime.batching.async_batcher import AsyncBatcher
from serve_app.runtime.batching.batcher import Batcher
from serve_app.runtime.batching.continuous_batcher import ContinuousBatcher
from serve_app.runtime.handler_thread import HandlerThread
from serve_app.telemetry.metrics import Meters
from tests.support.batcher_fakes import until

REF = ModelRef("m", "1.0")


def make_request(name: str, **more) -> InferenceRequest:
    return InferenceRequest("m", None, (InputPart("body", b"x", "text/plain"),), request_id=name, **more)


class Model:
    """Answers with the row's name when ``turn`` lets it; a row "stream" says something before."""

    def __init__(self) -> None:
        self.turn = threading.Semaphore(0)
        self.runs: list[list[str]] = []

    def run(self, requests, emit) -> list[InferenceResponse]:
        self.runs.append([request.request_id for request in requests])
        for i, requested in enumerate(requests):
            if requested.request_id == "stream":
                emit(i, InferenceResponse(b"first"))
        assert self.turn.acquire(timeout=60)
        return [InferenceResponse(request.request_id.encode()) for request in requests]

    async def run_async(self, requests, emit) -> list[InferenceResponse]:
        self.runs.append([requests[0].request_id])
        if requests[0].request_id == "stream":
            emit(0, InferenceResponse(b"first"))
        while not self.turn.acquire(blocking=False):
            await asyncio.sleep(0)
        return [InferenceResponse(requests[0].request_id.encode())]


def queued(kind, model: Model, **limits):
    return kind(model.run, REF, Meters(), **limits)


def concurrent(model: Model, **limits) -> AsyncBatcher:
    return AsyncBatcher(
        model.run_async, asyncio.new_event_loop(), REF, Meters(), handler_thread=HandlerThread(), **limits
    )


EVERY = pytest.mark.parametrize(
    "make",
    [
        lambda *a, **k: queued(Batcher, *a, **k),
        lambda *a, **k: queued(ContinuousBatcher, *a, **k),
        concurrent,
    ],
    ids=["batches", "continuous", "concurrent"],
)
QUEUED = pytest.mark.parametrize("kind", [Batcher, ContinuousBatcher])


@EVERY
def test_calls_that_came_together_are_answered_each_by_its_own(make) -> None:
    async def scenario() -> None:
        model = Model()
        model.turn.release(9)
        batcher = make(model)
        late = make_request("late", deadline=time.time() - 1)
        first, second, third = await batcher.infer_all([make_request("a"), late, make_request("b")])
        assert (first.body, third.body) == (b"a", b"b") and isinstance(second, DeadlineExceeded)
        assert await batcher.infer_all([]) == []
        await batcher.close()
        [refused] = await batcher.infer_all([make_request("c")])
        assert isinstance(refused, ModelLoading) and "its replica is stopping" in str(refused.args)

    asyncio.run(scenario())


@EVERY
def test_who_leaves_with_all_his_calls_leaves_nothing_behind(make) -> None:
    """Also a stream that began, which nobody will read any more."""

    async def scenario() -> None:
        model = Model()
        batcher = make(model)
        together = asyncio.ensure_future(
            batcher.infer_all([make_request("stream"), make_request("a"), make_request("b")])
        )
        await until(lambda: model.runs)
        together.cancel()
        with pytest.raises(asyncio.CancelledError):
            await together
        model.turn.release(9)
        await until(lambda: batcher.ongoing == 0)
        assert (await batcher.infer(make_request("next"))).body == b"next"
        await asyncio.wait_for(batcher.close(), 60)

    asyncio.run(scenario())


@EVERY
def test_who_is_too_late_hears_when_to_come_again(make) -> None:
    async def scenario() -> None:
        model = Model()
        batcher = make(model)
        requested = [asyncio.ensure_future(batcher.infer(make_request("a")))]
        await until(lambda: model.runs)
        with pytest.raises(DeadlineExceeded) as caught:
            await batcher.infer(make_request("late", deadline=time.time() + 0.02))
        assert caught.value.__dict__["retry_after"] >= 1
        model.turn.release(9)
        await asyncio.gather(*requested)
        await batcher.close()

    asyncio.run(scenario())


@QUEUED
def test_a_new_time_limit_holds_for_what_runs_already(kind) -> None:
    async def scenario() -> None:
        model, hung = Model(), []
        batcher = queued(kind, model, response_timeout=1000, on_hung=hung.append)
        waits = asyncio.ensure_future(batcher.infer(make_request("a")))
        await until(lambda: model.runs)
        batcher.configure(response_timeout=0.01)
        with pytest.raises(ResponseTimeout):
            await asyncio.wait_for(waits, 60)
        assert len(hung) == 1 and "response_timeout (0.01 s)" in hung[0]
        model.turn.release()

    asyncio.run(scenario())


@QUEUED
def test_shadows_are_let_in_as_far_as_two_batches_go(kind) -> None:
    async def scenario() -> None:
        model = Model()
        batcher = queued(kind, model, max_batch_size=20)
        live = asyncio.ensure_future(batcher.infer(make_request("a")))
        await until(lambda: model.runs)
        copies = [
            asyncio.ensure_future(batcher.infer(make_request("copy", priority="shadow"))) for _ in range(41)
        ]
        await until(lambda: copies[40].done())
        assert "40 shadows wait" in copies[40].exception().detail and not any(
            copy.done() for copy in copies[:40]
        )
        closing = asyncio.ensure_future(batcher.close())
        for refused in await asyncio.gather(*copies[:40], return_exceptions=True):
            assert isinstance(refused, ModelLoading)
        model.turn.release()
        assert (await live).body == b"a"
        await closing

    asyncio.run(scenario())
