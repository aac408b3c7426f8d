"""Streamed responses of the batcher."""

import asyncio
import dataclasses
import threading

import pytest

from serve_app.domain.request import InferenceResponse, ResponseStream
from serve_app.errors import (
    HandlerFailed,
)
from tests.support.batcher_fakes import (
    bodies,
    create_batcher,
    make_request,
    run_in_event_loop,
    start_submits,
    submit_and_gather,
    texts,
)


@run_in_event_loop
async def test_chunks_arrive_in_order_and_the_return_value_is_the_last():
    gate = threading.Semaphore(0)

    def run(requests, emit):
        emit(0, InferenceResponse(b"0", "text/x", 206, "Partly", (("a", "b"),), "1.0"))
        for i in range(1, 5):
            emit(0, b"%d" % i)
        assert gate.acquire(timeout=60)
        return [InferenceResponse(b"last", "text/y", 500)]

    batcher = create_batcher(run)
    stream = await batcher.infer(make_request("a"))
    assert isinstance(stream, ResponseStream)
    head = dataclasses.replace(stream.head, timings=None)
    assert head == InferenceResponse(b"", "text/x", 206, "Partly", (("a", "b"),), "1.0", timings=None)
    assert stream.head.timings.batch_size == 1
    pieces = []
    async for chunk in stream:
        pieces.append(chunk)
        if chunk == b"4":
            gate.release()
    assert pieces == [b"0", b"1", b"2", b"3", b"4", b"last"]
    await batcher.close()


@run_in_event_loop
async def test_rows_of_one_batch_stream_concurrently():
    def run(requests, emit):
        for i, text in enumerate(texts(requests)):
            if text != "plain":
                emit(i, InferenceResponse(text.encode()))
        for i, text in enumerate(texts(requests)):
            if text != "plain":
                emit(i, text.encode() * 2)
        return [InferenceResponse(text.encode() * 3) for text in texts(requests)]

    batcher = create_batcher(run, max_batch_size=4)
    a, plain, b = await submit_and_gather(batcher, "a", "plain", "b")
    assert [chunk async for chunk in a] == [b"a", b"aa", b"aaa"]
    assert [chunk async for chunk in b] == [b"b", b"bb", b"bbb"]
    assert plain.body == b"plain" * 3
    await batcher.close()


@run_in_event_loop
async def test_errors_after_the_first_chunk_are_raised_by_the_iterator_without_retry():
    runs = []

    def run(requests, emit):
        runs.append(texts(requests))
        if "s" in texts(requests):
            emit(texts(requests).index("s"), InferenceResponse(b"piece"))
            return [HandlerFailed("in mid-stream")] * len(requests)
        return [InferenceResponse(t.encode()) for t in texts(requests)]

    batcher = create_batcher(run, max_batch_size=4)
    a, stream, b = await submit_and_gather(batcher, "a", "s", "b")
    assert bodies([a, b]) == ["a", "b"]
    seen = []
    with pytest.raises(HandlerFailed, match="Prediction failed"):
        async for chunk in stream:
            seen.append(chunk)
    assert seen == [b"piece"]
    assert runs == [["a", "s", "b"], ["a"], ["b"]]
    await batcher.close()


@run_in_event_loop
async def test_closing_a_stream_early_leaves_the_batch_and_later_ones_alone():
    gate = threading.Semaphore(0)

    def run(requests, emit):
        emit(0, InferenceResponse(b"first"))
        assert gate.acquire(timeout=60)
        emit(0, b"second")
        return [InferenceResponse(b"last")] * len(requests)

    batcher = create_batcher(run, max_batch_size=2)
    left, other = start_submits(batcher, "a", "b")
    stream = await left
    async for chunk in stream:
        assert chunk == b"first"
        break
    await stream.aclose()
    assert [chunk async for chunk in stream] == []
    gate.release(2)
    assert (await other).body == b"last"
    assert isinstance(await batcher.infer(make_request("c")), ResponseStream)
    await batcher.close()


@run_in_event_loop
async def test_a_stream_whose_reader_is_cancelled_can_be_closed():
    gate = threading.Semaphore(0)

    def run(requests, emit):
        emit(0, InferenceResponse(b"first"))
        assert gate.acquire(timeout=60)
        return [InferenceResponse(b"last")]

    batcher = create_batcher(run)
    stream = await batcher.infer(make_request("a"))

    async def read():
        return [chunk async for chunk in stream]

    reader = asyncio.ensure_future(read())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.wait([reader])
    await stream.aclose()
    gate.release()
    await batcher.close()


@run_in_event_loop
async def test_the_end_of_a_batch_does_not_overtake_its_chunks():
    """The loop runs late: an earlier batch's end waits for it when the chunks of the next one come."""
    started, ended = threading.Event(), threading.Event()

    def run(requests, emit):
        text = texts(requests)[0]
        if text == "first":
            assert started.wait(60)
        if text == "stream":
            emit(0, InferenceResponse(b"1"))
            emit(0, b"2")
        if text == "last":
            ended.set()
        return [InferenceResponse(text.encode())]

    batcher = create_batcher(run)
    assert (await batcher.infer(make_request("warm-up"))).body == b"warm-up"
    batcher._max_staged = 64  # short batches are staged behind the first
    rows = start_submits(batcher, "first", "stream", "last")
    await asyncio.sleep(0.01)
    started.set()
    assert ended.wait(60)  # while the loop is busy
    first, stream, last = await asyncio.gather(*rows)
    assert (first.body, last.body) == (b"first", b"last")
    assert [chunk async for chunk in stream] == [b"1", b"2", b"stream"]
    await batcher.close()
