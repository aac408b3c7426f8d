"""Errors of rows and of whole batches, and handlers that hang."""

import asyncio
import threading

import pytest

from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart
from serve_app.errors import (
    BatchSizeMismatch,
    HandlerFailed,
    HandlerOutOfMemory,
    HandlerRejected,
    InvalidInput,
    ModelLoading,
    ReplicaDied,
    UnsupportedOutput,
)
from tests.support.batcher_fakes import (
    Clock,
    Model,
    bodies,
    create_batcher,
    make_request,
    run_in_event_loop,
    start_submits,
    submit_and_gather,
    texts,
    until,
)


@run_in_event_loop
async def test_an_error_of_one_row_leaves_the_others_alone():
    def run(requests, emit):
        return [UnsupportedOutput(t) if t == "b" else InferenceResponse(t.encode()) for t in texts(requests)]

    batcher = create_batcher(run, max_batch_size=4)
    a, b, c = await submit_and_gather(batcher, *"abc")
    assert (a.body, c.body) == (b"a", b"c")
    assert isinstance(b, UnsupportedOutput)
    await batcher.close()


@pytest.mark.parametrize(
    "error", [HandlerFailed, BatchSizeMismatch, HandlerOutOfMemory, lambda text: HandlerRejected(text, 418)]
)
def test_failed_batches_are_retried_in_halves_until_only_the_failing_row_fails(error, caplog):
    @run_in_event_loop
    async def halves():
        model = Model(poison="f", error=error)
        batcher = create_batcher(model.run, max_batch_size=8)
        answers = await submit_and_gather(batcher, *"abcdefgh")
        assert isinstance(answers[5], HandlerFailed)
        assert bodies(answers[:5] + answers[6:]) == list("abcdegh")
        assert model.batches == [list(b) for b in ("abcdefgh", "abcd", "efgh", "ef", "e", "f", "gh")]
        assert [a.timings.batch_size for a in answers if isinstance(a, InferenceResponse)] == [
            4,
            4,
            4,
            4,
            1,
            2,
            2,
        ]
        await batcher.close()

    halves()
    assert "m--1.0: a batch of 8 failed" in caplog.text


HANDLER = """
def handle(data, context):
    if data is None:
        return None
    if any(7 in row["x"] for row in data):
        raise ValueError("seven")
    return [{"y": row["x"]} for row in data]
"""


def test_a_refused_row_does_not_prevent_retries_in_halves(make_runner):
    runner = make_runner(HANDLER, config={"tensors": True})
    runner.load()
    batches = []

    def run(requests, emit):
        batches.append(texts(requests))
        return runner.run(requests, emit)

    @run_in_event_loop
    async def halves():
        batcher = create_batcher(run, max_batch_size=8)
        refused, poison, last_refused = "no JSON", '{"x": [7]}', "{"
        good = [f'{{"x": [{number}]}}' for number in range(5)]
        rows = [refused, *good[:2], poison, *good[2:], last_refused]
        first, *others, last = await submit_and_gather(batcher, *(make_tensors(row) for row in rows))
        assert isinstance(first, InvalidInput) and isinstance(last, InvalidInput)
        failed = others.pop(2)
        assert isinstance(failed, HandlerFailed) and "seven" in failed.detail
        assert all(isinstance(each, InferenceResponse) for each in others)
        assert batches[1] == rows[1:4], "refused rows are not retried"
        batches.clear()
        first, failed = await submit_and_gather(batcher, *map(make_tensors, (refused, poison)))
        assert isinstance(first, InvalidInput) and isinstance(failed, HandlerFailed)
        assert batches == [[refused, poison]], "the only row that the handler received is not retried"
        await batcher.close()

    halves()


def make_tensors(text):
    return InferenceRequest(
        "m", inputs=(InputPart("body", text.encode(), "application/json"),), request_id=text
    )


@run_in_event_loop
async def test_rows_of_a_failed_batch_get_separate_error_objects():
    model = Model(poison="abc")
    batcher = create_batcher(model.run, max_batch_size=4, retries=False)
    errors = await submit_and_gather(batcher, *"abc")
    assert [type(e) for e in errors] == [HandlerFailed] * 3
    assert len({id(e) for e in errors}) == 3
    assert errors[0].detail == "['a', 'b', 'c'] cannot be answered"
    await batcher.close()


@run_in_event_loop
async def test_without_retries_the_batch_fails_whole_and_ran_once():
    model = Model(poison="b")
    batcher = create_batcher(model.run, max_batch_size=4, retries=False)
    assert [type(e) for e in await submit_and_gather(batcher, *"abcd")] == [HandlerFailed] * 4
    assert model.batches == [list("abcd")]
    await batcher.close()


@run_in_event_loop
async def test_batches_too_large_for_the_memory_run_in_parts():
    def run(requests, emit):
        if len(requests) > 2:
            return [HandlerOutOfMemory("MemoryError")] * len(requests)
        return [InferenceResponse(t.encode()) for t in texts(requests)]

    batcher = create_batcher(run, max_batch_size=8)
    assert bodies(await submit_and_gather(batcher, *"abcdefgh")) == list("abcdefgh")
    await batcher.close()


@run_in_event_loop
async def test_rows_of_disconnected_clients_are_not_retried():
    model = Model(poison="a", blocks=True)
    batcher = create_batcher(model.run, max_batch_size=2)
    a, b = start_submits(batcher, "a", "b")
    await model.started_at.get()
    a.cancel()
    await asyncio.wait([a])
    model.release(2)
    assert (await b).body == b"b"
    assert model.batches == [["a", "b"], ["b"]]
    await batcher.close()


@run_in_event_loop
async def test_a_run_that_raises_loses_no_row():
    def run(requests, emit):
        raise SystemExit("whatever")

    batcher = create_batcher(run)
    with pytest.raises(HandlerFailed) as caught:
        await batcher.infer(make_request("a"))
    assert "SystemExit: whatever" in caught.value.detail
    await batcher.close()


@run_in_event_loop
async def test_hanging_handlers_are_abandoned_and_reported(caplog):
    gate, model = threading.Event(), Model()

    def stuck_in_here(requests, emit):
        model.batches.append(texts(requests))
        if "stream" in texts(requests):
            emit(1, InferenceResponse(b"piece"))
        gate.wait(60)
        return [InferenceResponse(b"too late")] * len(requests)

    hung = []
    batcher = create_batcher(
        stuck_in_here,
        max_batch_size=2,
        response_timeout=0.5,
        queue_size=10,
        on_hung=lambda why: hung.append(batcher.pending),
    )
    running = start_submits(batcher, "a", "stream")
    await until(lambda: model.batches)
    waiting = start_submits(batcher, "b", "c", "d")
    with pytest.raises(ReplicaDied) as caught:
        await running[0]
    assert caught.value.detail == "the handler gave no answer within response_timeout (0.5 s)"
    stream = await running[1]
    assert await stream.__aiter__().__anext__() == b"piece"
    with pytest.raises(ReplicaDied):
        await stream.__aiter__().__anext__()
    for row in waiting:
        with pytest.raises(ModelLoading) as refused:
            await row
        assert refused.value.detail == "its replica hangs and is being replaced"
    with pytest.raises(ModelLoading):
        await batcher.infer(make_request("e"))
    assert hung == [0]
    assert "stuck_in_here" in caplog.text
    gate.set()
    await batcher.close()
    await asyncio.sleep(0.01)
    assert hung == [0]


@run_in_event_loop
async def test_the_watchdog_follows_the_running_batch():
    clock, model = Clock(), Model(blocks=True)
    hung = []
    batcher = create_batcher(
        model.run, response_timeout=10, clock=clock, timer=clock.timer, on_hung=lambda why: hung.append(1)
    )
    rows = start_submits(batcher, "a", "b")
    await model.started_at.get()
    clock.move(9)
    model.release()
    await rows[0]
    await model.started_at.get()
    clock.move(9)  # 18 s since the watch was set, 9 since this batch began
    assert hung == []
    clock.move(1)
    assert hung == [1]
    with pytest.raises(ReplicaDied):
        await rows[1]
    model.release()
    await batcher.close()


@pytest.mark.parametrize("timeout", [0, -1])
def test_without_response_timeout_there_is_no_watchdog(timeout):
    @run_in_event_loop
    async def none():
        clock, model = Clock(), Model(blocks=True)
        batcher = create_batcher(model.run, response_timeout=timeout, clock=clock, timer=clock.timer)
        row = start_submits(batcher, "a")
        await model.started_at.get()
        assert clock.timers == []
        model.release()
        assert (await row[0]).body == b"a"
        await batcher.close()

    none()
