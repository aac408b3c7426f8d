"""Sequences over a real batcher: order, capacity, expiry and errors."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from serve_app.domain import sequence_ids
from serve_app.domain.model import ModelRef
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart, ResponseStream
from serve_app.domain.sequence_ids import SequenceHeaders
from serve_app.errors import (
    BadRequest,
    DeadlineExceeded,
    HandlerFailed,
    ModelLoading,
    QueueFull,
    ReplicaDied,
    SequenceLost,
    TooManySequences,
)
from serve_app.runtime.batching.batcher import Batcher
from serve_app.runtime.batching.sequence_batcher import SequenceBatcher
from serve_app.runtime.batching.sequence_state import SequenceOptions
from serve_app.telemetry.metrics import Meters
from tests.support.batcher_fakes import Clock, run_in_event_loop, until

REF = ModelRef("m", "1.0")
KEYS = SequenceHeaders("seq", "seq-start", "seq-end")


class Model:
    """Adds up each sequence's numbers; ``batches`` is what it was given.

    ``held``: a batch waits for ``let``.
    """

    def __init__(self, held: bool = False) -> None:
        self.batches: list[list[str]] = []
        self.sums: dict[str, int] = {}
        self._turn = threading.Semaphore(0) if held else None

    def let(self, batches: int = 1) -> None:
        self._turn.release(batches)

    def run(self, requests, emit):
        self.batches.append([c.headers["seq"] for c in requests])
        if self._turn is not None:
            assert self._turn.acquire(timeout=60)
        answers = []
        for i, request in enumerate(requests):
            word, name, headers = request.inputs[0].value.decode(), request.headers["seq"], ()
            if word == "fail":
                answers.append(HandlerFailed("no"))
                continue
            if word == "stream":
                emit(i, InferenceResponse(b"one", headers=headers))
                word = "0"
            if word.startswith("end "):
                headers = (("Seq-End", word[4:].replace("me", name)),)
                word = "0"
            self.sums[name] = self.sums.get(name, 0) + int(word)
            answers.append(InferenceResponse(str(self.sums[name]).encode(), headers=headers, version="1.0"))
        return answers


class Answered(list):
    def __call__(self, name, why) -> None:
        self.append((name, why))


def made(model, meters=None, max_batch_size=4, **settings):
    batcher = Batcher(model.run, REF, meters or Meters(), max_batch_size=max_batch_size, retries=False)
    hooks = {name: settings.pop(name) for name in ("on_end", "clock", "timer") if name in settings}
    options = SequenceOptions(KEYS, **{"max_sequences": 10, "queue_size": 8, "max_idle": 60.0, **settings})
    return SequenceBatcher(batcher, REF, meters or Meters(), "me", options, **hooks)


def make_request(text, name="", start=False, end=False, **more):
    headers = {"seq": name} if name else {}
    headers |= ({"seq-start": "true"} if start else {}) | ({"seq-end": "true"} if end else {})
    return InferenceRequest(
        "m", None, (InputPart("body", str(text).encode()),), headers, request_id=str(text), **more
    )


def of(reply):
    return dict(reply.headers)


@run_in_event_loop
async def test_a_long_name_is_refused():
    sequences = made(Model())
    with pytest.raises(BadRequest, match="seq has 513 characters"):
        await sequences.infer(make_request(3, "x" * 513, start=True))
    assert sequences.open == 0
    await sequences.close()


@run_in_event_loop
async def test_a_request_without_a_name_starts_a_sequence_and_gets_its_name():
    sequences = made(Model())
    first = await sequences.infer(make_request(3))
    name = of(first)["seq"]
    assert sequence_ids.replica_of(name) == "me" and of(first)["seq-start"] == "true"
    second = await sequences.infer(make_request(4, name))
    assert (second.body, of(second)) == (b"7", {"seq": name})
    assert sequences.holds(name) and sequences.open == 1
    await sequences.close()


@run_in_event_loop
async def test_rows_of_a_sequence_run_in_order_and_never_two_in_a_batch():
    model = Model(held=True)
    sequences = made(model)
    rows = [
        asyncio.ensure_future(sequences.infer(make_request(n, name)))
        for n in (1, 2, 3)
        for name in ("a", "b", "c")
    ]
    await until(lambda: sequences.pending == 6)
    model.let(9)
    answers = [reply.body for reply in await asyncio.gather(*rows)]
    assert answers == [b"1"] * 3 + [b"3"] * 3 + [b"6"] * 3
    assert all(len(set(batch)) == len(batch) for batch in model.batches)
    assert len(model.batches[0]) == 3, "rows of different sequences run together"
    await sequences.close()


@run_in_event_loop
async def test_a_stream_ends_before_the_next_row_of_its_sequence_runs_unless_they_may_overlap():
    for overlap in (False, True):
        model = Model(held=True)
        sequences = made(model, overlap=overlap, max_batch_size=1)
        first = asyncio.ensure_future(sequences.infer(make_request("stream", "a")))
        await until(lambda model=model: model.batches == [["a"]])
        second = asyncio.ensure_future(sequences.infer(make_request(5, "a")))
        await until(lambda sequences=sequences: sequences.pending == 1)
        model.let()
        stream = await first
        assert isinstance(stream, ResponseStream) and of(stream.head) == {"seq": "a", "seq-start": "true"}
        if overlap:  # before anybody has read the stream
            model.let()
            assert (await second).body == b"5"
        assert [chunk async for chunk in stream] == [b"one", b"0"]
        if not overlap:
            model.let()
            assert (await second).body == b"5"
        await sequences.close()


@run_in_event_loop
async def test_a_caller_or_a_handler_ends_a_sequence_and_frees_its_place():
    reported, meters = Answered(), Meters()
    sequences = made(Model(), meters, max_sequences=2, on_end=reported)
    name = of(await sequences.infer(make_request(1)))["seq"]
    assert (await sequences.infer(make_request(2, name, end=True))).body == b"3"
    await sequences.infer(make_request(1, "b", start=True))
    assert (await sequences.infer(make_request("end me", "b"))).body == b"1"
    await sequences.infer(make_request(1, "c", start=True))
    await sequences.infer(make_request(1, "d", start=True))
    await sequences.infer(make_request("end c; d", "c"))
    assert reported == [(name, "ended"), ("b", "ended"), ("d", "ended"), ("c", "ended")]
    assert sequences.open == 0
    counted = {name: value for name, labels, value in meters.samples() if "sequences" in name}
    assert counted == {"torchrelay_sequences": 0.0, "torchrelay_sequences_ended_total": 4.0}
    for lost in (name, "b", "c", "d"):
        with pytest.raises(SequenceLost, match="it has ended"):
            await sequences.infer(make_request(1, lost))
    assert of(await sequences.infer(make_request(1, "b", start=True)))["seq-start"] == "true", (
        "its name is good again"
    )
    await sequences.close()


@run_in_event_loop
async def test_rows_behind_the_end_of_the_sequence_get_an_error():
    model = Model(held=True)
    sequences = made(model)
    rows = [
        asyncio.ensure_future(sequences.infer(make_request(1, "a", start=n == 0, end=n == 1)))
        for n in range(3)
    ]
    await until(lambda: sequences.pending == 2)
    model.let(2)
    assert [reply.body for reply in await asyncio.gather(*rows[:2])] == [b"1", b"2"]
    with pytest.raises(SequenceLost, match="it has ended"):
        await rows[2]
    await sequences.close()


@run_in_event_loop
async def test_a_sequence_that_is_idle_for_too_long_ends_and_one_that_is_busy_does_not():
    clock, reported, model = Clock(), Answered(), Model(held=True)
    sequences = made(model, max_idle=5.0, clock=clock, timer=clock.timer, on_end=reported)
    model.let(3)
    await sequences.infer(make_request(1, "own"))
    await sequences.infer(make_request(1, "said", start=True))
    given = of(await sequences.infer(make_request(1)))["seq"]
    clock.move(4.0)
    busy = asyncio.ensure_future(sequences.infer(make_request(1, "said")))
    await until(lambda: len(model.batches) == 4)
    clock.move(2.0)
    assert reported == [("own", "idle"), (given, "idle")]
    model.let(10)
    assert (await busy).body == b"2"
    clock.move(4.9)
    assert sequences.holds("said")
    clock.move(0.2)
    assert reported[2:] == [("said", "idle")]
    with pytest.raises(
        SequenceLost, match=r"Sequence 'said' .*idle for 5 s \(sequenceMaxIdleMSec\).* Begin another"
    ):
        await sequences.infer(make_request(1, "said"))
    with pytest.raises(SequenceLost):
        await sequences.infer(make_request(1, given))
    assert of(await sequences.infer(make_request(1, "own")))["seq-start"] == "true", (
        "who never says so begins by calling"
    )
    await sequences.close()


@run_in_event_loop
async def test_a_sequence_ends_when_its_whole_time_is_over_once_its_row_is_answered():
    clock, reported, model = Clock(), Answered(), Model(held=True)
    sequences = made(model, max_idle=0.0, timeout=10.0, clock=clock, timer=clock.timer, on_end=reported)
    model.let()
    await sequences.infer(make_request(1, "a", start=True))
    clock.move(9.0)
    row = asyncio.ensure_future(sequences.infer(make_request(1, "a")))
    await until(lambda: len(model.batches) == 2)
    clock.move(2.0)
    assert reported == []
    with pytest.raises(SequenceLost, match=r"10 s \(sequenceTimeoutMSec\) are over"):
        await sequences.infer(make_request(1, "a"))
    model.let()
    assert (await row).body == b"2"
    assert reported == [("a", "timeout")]
    await sequences.close()


@run_in_event_loop
async def test_no_more_sequences_are_open_than_a_replica_has_room_for():
    clock = Clock()
    sequences = made(Model(), max_sequences=4, min_sequences=1, max_idle=30.0, clock=clock, timer=clock.timer)
    sequences.set_replicas(2)
    for name in "ab":
        await sequences.infer(make_request(1, name))
        clock.move(10.0)
    with pytest.raises(TooManySequences, match=r"keeps 2 open \(maxNumSequence\)") as refused:
        await sequences.infer(make_request(1))
    assert refused.value.retry_after == 10
    assert (await sequences.infer(make_request(1, "a"))).body == b"2", "those that are open go on"
    await sequences.infer(make_request(1, "b", end=True))
    await sequences.infer(make_request(1, "c"))
    sequences.set_replicas(1)
    await sequences.infer(make_request(1, "d"))
    await sequences.close()


@run_in_event_loop
async def test_so_many_rows_of_a_sequence_wait_and_no_more():
    model = Model(held=True)
    sequences = made(model, queue_size=2)
    rows = [asyncio.ensure_future(sequences.infer(make_request(1, "a"))) for _ in range(3)]
    await until(lambda: sequences.pending == 2)
    with pytest.raises(QueueFull) as refused:
        await sequences.infer(make_request(1, "a"))
    assert "2 rows of 'a' wait" in refused.value.detail and refused.value.retry_after
    other = asyncio.ensure_future(sequences.infer(make_request(1, "b")))
    rows[1].cancel()
    await until(lambda: sequences.pending == 2)  # a place is free, and b's row waits for its batch
    model.let(5)
    assert [(await row).body for row in (rows[0], rows[2], other)] == [b"1", b"2", b"1"]
    await sequences.close()


@run_in_event_loop
async def test_a_row_waits_for_those_before_it_until_its_deadline():
    model = Model(held=True)
    sequences = made(model)
    first = asyncio.ensure_future(sequences.infer(make_request(1, "a")))
    await until(lambda: model.batches)
    with pytest.raises(DeadlineExceeded):
        await sequences.infer(make_request(1, "a", deadline=time.time() + 0.02))
    model.let(2)
    await first
    assert (await sequences.infer(make_request(1, "a"))).body == b"2", "the row that was late never ran"
    await sequences.close()


@run_in_event_loop
async def test_a_row_that_fails_leaves_its_sequence_open_unless_nobody_knows_its_name():
    sequences = made(Model())
    await sequences.infer(make_request(1, "a"))
    with pytest.raises(HandlerFailed):
        await sequences.infer(make_request("fail", "a"))
    assert (await sequences.infer(make_request(1, "a"))).body == b"2"
    with pytest.raises(HandlerFailed):
        await sequences.infer(make_request("fail"))
    assert sequences.open == 1
    await sequences.close()


@run_in_event_loop
async def test_a_sequence_whose_first_row_is_refused_has_not_begun():
    model = Model(held=True)
    sequences = made(model)
    sequences.configure(queue_size=1, max_batch_size=1)
    rows = [asyncio.ensure_future(sequences.infer(make_request(1, "a")))]
    await until(lambda: len(model.batches) == 1)
    rows.append(asyncio.ensure_future(sequences.infer(make_request(1, "b"))))
    await until(lambda: sequences.pending == 1)
    with pytest.raises(QueueFull):
        await sequences.infer(make_request(1, "c"))
    assert sequences.open == 2
    model.let(2)
    await asyncio.gather(*rows)
    await sequences.close()


@run_in_event_loop
async def test_explanations_and_copies_belong_to_no_sequence():
    requested = []

    class Explains(Model):
        def run(self, requests, emit):
            requested.extend(c.kind for c in requests)
            return [InferenceResponse(b"why")] * len(requests)

    sequences = made(Explains())
    assert (await sequences.infer(make_request(1, kind="explain"))).headers == ()
    with pytest.raises(QueueFull) as refused:
        await sequences.infer(make_request(1, "a", priority="shadow"))
    assert "belongs to no sequence" in refused.value.detail
    assert (requested, sequences.open) == (["explain"], 0)
    await sequences.close()


@run_in_event_loop
async def test_a_replica_that_stops_begins_none_and_lets_those_that_are_open_end():
    reported, model = Answered(), Model()
    sequences = made(model, on_end=reported, close_timeout=20.0)
    await sequences.infer(make_request(1, "a", start=True))
    closing = asyncio.ensure_future(sequences.close())
    await asyncio.sleep(0)
    with pytest.raises(ModelLoading):
        await sequences.infer(make_request(1, "b"))
    assert (await sequences.infer(make_request(1, "a", end=True))).body == b"2"
    await closing
    assert reported == [("a", "ended")]

    sequences = made(model, on_end=reported, close_timeout=0.01)
    await sequences.infer(make_request(1, "a", start=True))
    await sequences.close()
    assert reported[1:] == [("a", "stopped")]
    with pytest.raises(SequenceLost, match="its replica was stopped"):
        await sequences.infer(make_request(1, "a"))


@run_in_event_loop
async def test_a_replica_of_no_more_use_tells_everybody():
    model = Model(held=True)
    sequences = made(model)
    rows = [asyncio.ensure_future(sequences.infer(make_request(1, "a"))) for _ in range(2)]
    await until(lambda: len(model.batches) == 1)
    sequences.abandon(ReplicaDied("a rank was lost"), "it is being replaced")
    with pytest.raises(ReplicaDied):
        await rows[0]
    with pytest.raises(SequenceLost):
        await rows[1]
    model.let()
    await sequences.close()


@run_in_event_loop
async def test_calls_that_come_together_are_answered_each_by_itself():
    sequences = made(Model(), max_sequences=1)
    answers = await sequences.infer_all([make_request(1, "a"), make_request(1, "b"), make_request(2, "a")])
    assert [a.body if isinstance(a, InferenceResponse) else type(a) for a in answers] == [
        b"1",
        TooManySequences,
        b"3",
    ]
    await sequences.close()
