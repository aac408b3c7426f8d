"""Continuous batching: rows join and leave between steps, as the handler's criteria say."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from serve_app.domain.model import ModelRef
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart, ResponseStream
from serve_app.domain.sequence_ids import SequenceHeaders
from serve_app.errors import DeadlineExceeded, HandlerFailed, ModelLoading, QueueFull, ResponseTimeout
from serve_app.runtime.batching.continuous_batcher import ContinuousBatcher
from serve_app.runtime.batching.sequence_batcher import SequenceBatcher
from serve_app.runtime.batching.sequence_state import SequenceOptions
from serve_app.telemetry.metrics import Meters
from tests.support.batcher_fakes import Clock, run_in_event_loop, until

pytestmark = pytest.mark.integration


REF = ModelRef("m", "1.0")

# Counts down from what the request says, a number a step: "0" is answered whole, "boom" fails, "raise" fails
# all.
COUNTDOWN = """
import torchrelay

class Handler:
    def initialize(self, context):
        context.cache = {}

    def handle(self, data, context):
        cache, out = context.cache, []
        for i, row in enumerate(data):
            name = context.get_request_id(i)
            if name not in cache:
                word = row["body"]
                assert word != "raise"
                cache[name] = 0 if word == "boom" else int(word)
                cache[name, "boom"] = word == "boom"
                context.set_response_header(i, "x-began", "yes")
            else:
                assert row == {}, "what was said once is not said again"
                cache[name] -= 1
            out.append(str(cache[name]))
        context.stopping_criteria = [self.stop(context, i) for i in range(len(data))]
        return out

    def stop(self, context, i):
        def criterion(said):
            name = context.get_request_id(i)
            if context.cache[name, "boom"]:
                raise ValueError("boom")
            if said == "0":
                del context.cache[name]
                return None if context.get_response_headers(i) else True
            return False
        return criterion
"""


def make_request(text, name="", **more):
    return InferenceRequest(
        "m",
        None,
        (InputPart("body", str(text).encode(), "text/plain"),),
        request_id=name or str(text),
        **more,
    )


@pytest.fixture
def counted(make_runner):
    """Return a batcher over the handler above, and the rows of each step; a step waits for ``turn`` where one
    is given.
    """

    def make(turn=None, **settings):
        runner = make_runner(COUNTDOWN, continuous_batching=True, batch_size=4)
        steps = []

        def run(requests, emit):
            steps.append([c.request_id for c in requests])
            assert turn is None or turn.acquire(timeout=60)
            return runner.run(requests, emit)

        meters = settings.pop("meters", Meters())
        batcher = ContinuousBatcher(run, REF, meters, **{"max_batch_size": 4, **settings})
        batcher.handler_thread.submit(runner.load).result(60)
        return batcher, steps

    return make


async def chunks(answer):
    return (
        [chunk.decode() async for chunk in answer]
        if isinstance(answer, ResponseStream)
        else answer.body.decode()
    )


@run_in_event_loop
async def test_a_row_stays_until_its_criterion_says_so(counted):
    meters = Meters()
    batcher, steps = counted(meters=meters)
    answers = await asyncio.gather(*(batcher.infer(make_request(n)) for n in (3, 0, 1)))
    assert [type(answer) for answer in answers] == [ResponseStream, InferenceResponse, ResponseStream]
    assert answers[0].head.headers == (("x-began", "yes"),) and answers[0].head.timings.batch_size == 3
    assert await asyncio.gather(*map(chunks, answers)) == [["3", "2", "1", "0"], "0", ["1", "0"]]
    assert steps == [["3", "0", "1"], ["3", "1"], ["3"], ["3"]]
    assert batcher.pending == batcher.ongoing == 0
    samples = {name: value for name, labels, value in meters.samples()}
    assert samples["torchrelay_batch_size_count"] == 4 and samples["torchrelay_queue_seconds_count"] == 3
    await batcher.close()


@run_in_event_loop
async def test_rows_join_between_two_steps_as_far_as_there_is_room(counted):
    turn = threading.Semaphore(0)
    batcher, steps = counted(turn, max_batch_size=2)
    first = asyncio.ensure_future(batcher.infer(make_request(2, "a")))
    await until(lambda: steps)
    others = [asyncio.ensure_future(batcher.infer(make_request(1, name))) for name in "bc"]
    await until(lambda: batcher.pending == 2)
    assert batcher.ongoing == 3
    turn.release(20)
    assert [await chunks(await row) for row in (first, *others)] == [["2", "1", "0"], ["1", "0"], ["1", "0"]]
    assert steps == [["a"], ["a", "b"], ["a", "b"], ["c"], ["c"]]
    await batcher.close()


@run_in_event_loop
async def test_a_caller_that_leaves_frees_its_place(counted):
    turn = threading.Semaphore(0)
    batcher, steps = counted(turn, max_batch_size=1)
    stream = asyncio.ensure_future(batcher.infer(make_request(1000, "a")))
    await until(lambda: steps)
    waits = asyncio.ensure_future(batcher.infer(make_request(0, "b")))
    gone = asyncio.ensure_future(batcher.infer(make_request(0, "gone")))
    await until(lambda: batcher.pending == 2)
    gone.cancel()
    await until(lambda: batcher.pending == 1)
    turn.release()
    await (await stream).aclose()
    turn.release(2)
    assert (await waits).body == b"0"
    assert steps[-1] == ["b"] and ["gone"] not in steps and len(steps) <= 3
    await batcher.close()


@run_in_event_loop
async def test_a_deadline_ends_a_row_in_mid_stream_and_one_that_waits(counted):
    turn, clock = threading.Semaphore(0), Clock()
    batcher, steps = counted(turn, max_batch_size=1, response_timeout=0, clock=clock, timer=clock.timer)
    row = asyncio.ensure_future(batcher.infer(make_request(1000, "a", deadline=time.time() + 200)))
    await until(lambda: steps)
    turn.release()
    stream = await row
    waiting = asyncio.ensure_future(batcher.infer(make_request(0, "b", deadline=time.time() + 100)))
    await until(lambda: batcher.pending == 1)
    clock.move(100)
    with pytest.raises(DeadlineExceeded):
        await waiting
    clock.move(100)
    with pytest.raises(DeadlineExceeded):
        await chunks(stream)
    turn.release(5)
    await batcher.close()


@run_in_event_loop
async def test_a_criterion_that_raises_fails_its_row_and_a_handler_that_does_all_of_them(counted):
    batcher, _ = counted()
    good, bad = await asyncio.gather(
        *(batcher.infer(make_request(n)) for n in (1, "boom")), return_exceptions=True
    )
    assert isinstance(bad, HandlerFailed) and "ValueError: boom" in bad.detail
    assert await chunks(good) == ["1", "0"]
    long = await batcher.infer(make_request(10**9, "long"))
    with pytest.raises(HandlerFailed):
        await batcher.infer(make_request("raise"))
    with pytest.raises(HandlerFailed):
        await chunks(long)
    assert (await batcher.infer(make_request(0))).body == b"0", "the next step is not theirs"
    await batcher.close()


@run_in_event_loop
async def test_kinds_do_not_mix_and_a_full_queue_refuses(counted):
    turn = threading.Semaphore(0)
    batcher, steps = counted(turn, queue_size=1)
    first = asyncio.ensure_future(batcher.infer(make_request(1, "a")))
    await until(lambda: steps)
    second = asyncio.ensure_future(batcher.infer(make_request(0, "why", kind="explain")))
    await until(lambda: batcher.pending == 1)
    with pytest.raises(QueueFull) as refused:
        await batcher.infer(make_request(0, "b"))
    assert refused.value.retry_after >= 1
    urgent = asyncio.ensure_future(batcher.infer(make_request(0, "urgent", priority="high")))
    with pytest.raises(QueueFull):
        await second
    turn.release(9)
    assert await chunks(await first) == ["1", "0"] and (await urgent).body == b"0"
    third = asyncio.ensure_future(batcher.infer(make_request(2, "a2")))
    await until(lambda: steps[-1] == ["a2"])
    assert (await batcher.infer(make_request(0, "why", kind="explain"))).body == b"0"
    assert await chunks(await third) == ["2", "1", "0"]
    assert ["why"] in steps
    await batcher.close()


@run_in_event_loop
async def test_copies_for_a_shadow_wait_until_nobody_else_is_there(counted):
    turn = threading.Semaphore(0)
    batcher, steps = counted(turn)
    first = asyncio.ensure_future(batcher.infer(make_request(1, "a")))
    await until(lambda: steps)
    copy = asyncio.ensure_future(batcher.infer(make_request(0, "copy", priority="shadow")))
    await asyncio.sleep(0)
    assert batcher.pending == 0
    turn.release(9)
    await chunks(await first)
    assert (await copy).body == b"0"
    assert steps == [["a"], ["a"], ["copy"]]
    await batcher.close()


@run_in_event_loop
async def test_a_handler_that_does_not_come_back_is_given_up(counted):
    turn = threading.Semaphore(0)
    hung = []
    batcher, _ = counted(turn, max_batch_size=1, response_timeout=0.05, on_hung=hung.append)
    rows = [asyncio.ensure_future(batcher.infer(make_request(1, name))) for name in "ab"]
    with pytest.raises(ResponseTimeout):
        await rows[0]
    with pytest.raises(ModelLoading):
        await rows[1]
    with pytest.raises(ModelLoading):
        await batcher.infer(make_request(1))
    assert len(hung) == 1 and "response_timeout (0.05 s)" in hung[0]
    turn.release(9)


@run_in_event_loop
async def test_close_lets_streams_come_to_their_end(counted):
    turn = threading.Semaphore(0)
    batcher, steps = counted(turn)
    first = asyncio.ensure_future(batcher.infer(make_request(2)))
    await until(lambda: steps)
    closing = asyncio.ensure_future(batcher.close())
    await asyncio.sleep(0)
    with pytest.raises(ModelLoading):
        await batcher.infer(make_request(1))
    turn.release(9)
    assert await chunks(await first) == ["2", "1", "0"]
    await closing


@run_in_event_loop
async def test_rows_for_a_stream_of_the_same_sequence_join_it(counted):
    """The way to cancel: a second call of the sequence meets the first one's stream in the handler."""
    turn = threading.Semaphore(0)
    batcher, steps = counted(turn, max_batch_size=2)
    keys = SequenceHeaders("seq", "seq-start", "seq-end")
    sequences = SequenceBatcher(
        batcher, REF, Meters(), "me", SequenceOptions(keys, queue_size=4, max_idle=60, overlap=True)
    )
    first = asyncio.ensure_future(sequences.infer(make_request(2, "a", headers={"seq": "s"})))
    await until(lambda: steps)
    others = [
        asyncio.ensure_future(sequences.infer(make_request(0, name, headers={"seq": "s"}))) for name in "bc"
    ]
    turn.release()
    stream = await first
    turn.release(9)
    assert [reply.body for reply in await asyncio.gather(*others)] == [b"0", b"0"]
    assert await chunks(stream) == ["2", "1", "0"]
    assert steps == [["a"], ["a", "b"], ["a", "c"]], "one new row of a sequence at each step"
    await sequences.close()


def test_samples_run_until_they_stop(make_runner):
    runner = make_runner(
        COUNTDOWN
        + "\n    def sequence_ended(self, name, why):\n        ENDED.append((name, why))\nENDED = []\n",
        {"samples/a.txt": "3"},
        continuous_batching=True,
        sequence_batching=True,
        batch_size=2,
    )
    runner.load()
    runner.warm_up()
    ended = type(runner._handle.__self__).sequence_ended.__globals__["ENDED"]
    assert ended == [("warm-up-0", "ended"), ("warm-up-0", "ended"), ("warm-up-1", "ended")]
    cache = runner._context.cache
    assert not [name for name in cache if isinstance(name, str)], "each came to its end"


def test_what_a_handler_raises_at_the_end_of_a_sequence_is_logged(make_runner, caplog):
    runner = make_runner(
        "import torchrelay\n\nclass Handler:\n"
        "    def handle(self, data, context):\n        return [1] * len(data)\n"
        "    def sequence_ended(self, name, why):\n        raise KeyError(name)\n"
    )
    runner.load()
    assert runner.handles_sequence_end
    runner.sequence_ended("s", "idle")
    assert "sequence_ended('s', 'idle') failed" in caplog.text and "KeyError: 's'" in caplog.text
