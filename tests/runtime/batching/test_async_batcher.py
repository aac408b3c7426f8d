"""Asynchronous handlers: a real runner's coroutines behind the real batcher of theirs."""

import asyncio
import json
import threading
import time
from math import ceil

import pytest

from serve_app.domain.model import ModelRef
from serve_app.domain.request import InferenceRequest, InputPart, ResponseStream
from serve_app.errors import (
    DeadlineExceeded,
    HandlerFailed,
    HandlerRejected,
    ModelLoading,
    QueueFull,
    ReplicaDied,
)
from serve_app.runtime.batching.async_batcher import AsyncBatcher
from serve_app.runtime.handler_thread import HandlerThread
from serve_app.telemetry.metrics import Meters

pytestmark = pytest.mark.integration


# An engine: `meet` answers when as many calls are under way as it says; the others do as they say.
ENGINE = """
import asyncio, threading, time
from ts.handler_utils.utils import send_intermediate_predict_response
from torchrelay import PredictionException

class Engine:
    async def check_health(self):
        if self.ill:
            raise RuntimeError(f"it is ill, in {threading.current_thread().name}")

    async def initialize(self, context):
        self.ill = False
        self.waiting = 0
        self.met = asyncio.Event()
        self.cancelled = []
        self.hanging = False
        self.beat = asyncio.get_running_loop().create_task(asyncio.sleep(0))

    async def handle(self, data, context):
        [order] = [row["body"] for row in data]
        name = context.get_request_id(0)
        if "meet" in order:
            self.waiting += 1
            if self.waiting == order["meet"]:
                self.met.set()
            await self.met.wait()
        if "stream" in order:
            context.set_response_content_type(0, "text/plain")
            for word in order["stream"]:
                send_intermediate_predict_response([word], context.request_ids, "ok", 200, context)
                await asyncio.sleep(0)
        if "hang" in order:
            self.hanging = True
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled.append(name)
                raise
        if "block" in order:
            time.sleep(order["block"])
        if "raise" in order:
            raise ValueError(order["raise"])
        if "say" in order:
            raise PredictionException(order["say"], 418)
        context.set_response_header(0, "x-name", name)
        return [name]
"""


def make_request(request_id="", deadline=None, priority="normal", **order):
    body = InputPart("body", json.dumps(order).encode(), "application/json")
    return InferenceRequest("m", inputs=(body,), request_id=request_id, deadline=deadline, priority=priority)


@pytest.fixture
def engine(make_runner):
    """Return a context manager of a batcher that is loaded and warmed up in the handler thread, as in a
    replica.
    """

    class Served:
        def __init__(self, **settings):
            self.settings = settings

        async def __aenter__(self):
            handler_thread = HandlerThread()
            self.runner = make_runner(ENGINE)
            await asyncio.get_running_loop().run_in_executor(handler_thread, self.runner.load)
            await asyncio.get_running_loop().run_in_executor(handler_thread, self.runner.warm_up)
            self.batcher = AsyncBatcher(
                self.runner.run_async,
                self.runner.loop,
                ModelRef("m", "1.0"),
                Meters(),
                handler_thread=handler_thread,
                **self.settings,
            )
            self.batcher.handler = self.runner._handle.__self__
            return self.batcher

        async def __aexit__(self, *_):
            await asyncio.wait_for(self.batcher.close(), 60)
            await asyncio.to_thread(self.batcher.handler_thread.shutdown)

    return Served


async def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def test_calls_are_under_way_together_each_with_a_context_of_its_own(engine):
    async def scenario():
        async with engine() as made:
            replies = await asyncio.gather(*(made.infer(make_request(f"r{i}", meet=20)) for i in range(20)))
            assert [reply.body.decode() for reply in replies] == [f"r{i}" for i in range(20)]
            assert [dict(reply.headers)["x-name"] for reply in replies] == [f"r{i}" for i in range(20)]
            assert all(reply.timings.inference > 0 and reply.timings.batch_size == 1 for reply in replies)
            assert made.pending == 0

    asyncio.run(scenario())


def test_the_handler_runs_in_the_authors_thread(engine):
    async def scenario():
        async with engine() as made:
            before = {thread.name for thread in threading.enumerate()}
            assert "handler" in before
            await made.infer(make_request("r"))
            assert {thread.name for thread in threading.enumerate()} == before

    asyncio.run(scenario())


def test_streams_run_beside_each_other(engine):
    async def scenario():
        async with engine() as made:
            streams = await asyncio.gather(
                *(made.infer(make_request(f"r{i}", meet=3, stream=["a", "b"])) for i in range(3))
            )
            for index, stream in enumerate(streams):
                assert isinstance(stream, ResponseStream) and stream.head.content_type == "text/plain"
                assert [chunk async for chunk in stream] == [b"a", b"b", b"r%d" % index]

    asyncio.run(scenario())


def test_errors_are_their_own_calls(engine):
    async def scenario():
        async with engine() as made:
            requests = [
                make_request("a", **{"raise": "wrong"}),
                make_request("b", say="a teapot"),
                make_request("c"),
            ]
            failed, result, well = await asyncio.gather(*map(made.infer, requests), return_exceptions=True)
            assert isinstance(failed, HandlerFailed) and "ValueError: wrong" in failed.detail
            assert isinstance(result, HandlerRejected) and result.code == 418
            assert well.body == b"c"
            [first, second] = await made.infer_all([make_request("d"), make_request("e", say="no")])
            assert first.body == b"d" and isinstance(second, HandlerRejected)

    asyncio.run(scenario())


@pytest.mark.parametrize("way", ["infer", "submit", "stream"])
def test_a_caller_that_leaves_cancels_its_handler(engine, way):
    async def scenario():
        async with engine() as made:
            if way == "stream":
                stream = await made.infer(make_request("gone", stream=["a"], hang=True))
                await until(lambda: made.handler.hanging)
                await stream.aclose()
            else:
                request, outcomes = make_request("gone", hang=True), []
                if way == "submit":
                    cancel = made.submit(request, outcomes.append)
                else:
                    cancel = asyncio.ensure_future(made.infer(request)).cancel
                await until(lambda: made.handler.hanging)
                cancel()
                assert outcomes == []
            await until(lambda: made.handler.cancelled == ["gone"] and made.pending == 0)
            assert (await made.infer(make_request("next"))).body == b"next"

    asyncio.run(scenario())


def test_a_caller_that_leaves_at_once_leaves_nothing_behind(engine):
    async def scenario():
        async with engine() as made:
            for _ in range(20):
                made.submit(make_request("gone", hang=True), pytest.fail)()
                cancel = made.submit(make_request("gone", hang=True), pytest.fail)
                await asyncio.sleep(0)
                cancel()
            await until(lambda: made.pending == 0)

    asyncio.run(scenario())


def test_a_slow_call_is_cancelled_and_the_replica_goes_on(engine, monkeypatch):
    monkeypatch.setattr("serve_app.runtime.batching.async_batcher._PROBE_TIMEOUT_S", 60.0)
    hung = []

    async def scenario():
        async with engine(response_timeout=1.0, on_hung=hung.append) as made:
            slow = asyncio.ensure_future(made.infer(make_request("slow", hang=True)))
            with pytest.raises(ReplicaDied) as caught:
                await slow
            assert "response_timeout (1 s)" in caught.value.detail
            await until(lambda: made.handler.cancelled == ["slow"])
            made.configure(response_timeout=60.0)
            assert (await made.infer(make_request("next"))).body == b"next"
            with pytest.raises(DeadlineExceeded):
                await made.infer(make_request("late", deadline=time.time() + 0.05, hang=True))
            with pytest.raises(DeadlineExceeded):
                await made.infer(make_request("later", deadline=time.time() - 1))

    asyncio.run(scenario())
    assert not hung


@pytest.mark.slow
def test_a_blocked_loop_ends_the_replica(engine, monkeypatch):
    monkeypatch.setattr("serve_app.runtime.batching.async_batcher._PROBE_TIMEOUT_S", 0.2)
    hung = []

    async def scenario():
        async with engine(response_timeout=0.1, on_hung=hung.append) as made:
            blocking = asyncio.ensure_future(made.infer(make_request("blocking", block=4.0)))
            behind = asyncio.ensure_future(made.infer(make_request("behind", meet=2)))
            assert isinstance(
                await asyncio.wait_for(asyncio.gather(blocking, return_exceptions=True), 60), list
            )
            assert isinstance(blocking.exception(), ReplicaDied)
            await asyncio.wait([behind], timeout=60)
            assert isinstance(behind.exception(), ReplicaDied)
            await until(lambda: hung and "time.sleep" in hung[0])
            with pytest.raises(ModelLoading):
                await made.infer(make_request("after"))

    asyncio.run(scenario())


def test_more_calls_than_the_queue_allows_are_refused(engine):
    async def scenario():
        async with engine(queue_size=2) as made:
            first = [asyncio.ensure_future(made.infer(make_request(f"r{i}", meet=3))) for i in range(2)]
            await until(lambda: made.handler.waiting == 2)
            with pytest.raises(QueueFull):
                await made.infer(make_request("third", meet=3))
            made.configure(queue_size=3, max_batch_size=7)
            third = await made.infer(make_request("third", meet=3))
            assert third.body == b"third" and [f.body for f in await asyncio.gather(*first)] == [b"r0", b"r1"]

    asyncio.run(scenario())


def test_a_stopping_replica_answers_what_it_took(engine):
    async def scenario():
        served = engine()
        made = await served.__aenter__()
        waiting = asyncio.ensure_future(made.infer(make_request("last", meet=2)))
        await until(lambda: made.handler.waiting == 1)
        closing = asyncio.ensure_future(made.close())
        await asyncio.sleep(0)
        with pytest.raises(ModelLoading):
            await made.infer(make_request("more"))
        served.runner.loop.call_soon_threadsafe(made.handler.met.set)
        assert (await waiting).body == b"last"
        await asyncio.wait_for(closing, 60)
        await asyncio.to_thread(made.handler_thread.shutdown)

    asyncio.run(scenario())


def test_shadows_are_begun_only_beside_nobody_and_count_nowhere(engine):
    async def scenario():
        async with engine(queue_size=1) as made:
            shadows = [
                asyncio.ensure_future(made.infer(make_request(f"s{i}", meet=17, priority="shadow")))
                for i in range(16)
            ]
            await until(lambda: made.handler.waiting == 16)
            assert made.pending == 0
            with pytest.raises(QueueFull) as caught:
                await made.infer(make_request("s16", priority="shadow"))
            assert caught.value.detail == "16 shadows are under way"
            live = asyncio.ensure_future(made.infer(make_request("live", hang=True)))
            await until(lambda: made.handler.hanging)
            with pytest.raises(QueueFull) as caught:
                await made.infer(make_request("s16", priority="shadow"))
            assert caught.value.detail == "shadows are begun only while no other call is under way"
            live.cancel()
            await until(lambda: made.pending == 0)
            await made.infer(make_request("last", meet=17))
            assert len(await asyncio.gather(*shadows)) == 16

    asyncio.run(scenario())


def test_a_refusal_says_when_a_place_will_be_free(engine):
    async def scenario():
        async with engine(queue_size=1) as made:
            slow = await made.infer(make_request("slow", block=1.1))
            live = asyncio.ensure_future(made.infer(make_request("live", hang=True)))
            await until(lambda: made.handler.hanging)
            with pytest.raises(QueueFull) as caught:
                await made.infer(make_request("more"))
            assert caught.value.retry_after == ceil(slow.timings.inference) > 1
            live.cancel()

    asyncio.run(scenario())


def test_abandoned_rows_are_cancelled_at_once(engine):
    async def scenario():
        async with engine() as made:
            requested = make_request("streams", stream=["a"], hang=True)
            stream = aiter(await made.infer(requested))
            assert await stream.__anext__() == b"a"
            live = asyncio.ensure_future(made.infer(make_request("live", hang=True)))
            await until(lambda: made.pending == 2)
            made.abandon(ReplicaDied("a rank is lost"), "its replica is being replaced")
            for waits in (live, stream.__anext__()):
                with pytest.raises(ReplicaDied) as caught:
                    await waits
                assert caught.value.args == ("a rank is lost",)
            with pytest.raises(ModelLoading):
                await made.infer(make_request("next"))
            assert made.pending == 0

    asyncio.run(scenario())


def test_a_handler_says_in_its_own_thread_that_it_is_not_well(engine):
    async def scenario():
        served = engine()
        async with served as made:
            await served.runner.check_health()
            made.handler.ill = True
            with pytest.raises(RuntimeError, match="it is ill, in handler"):
                await served.runner.check_health()

    asyncio.run(scenario())
