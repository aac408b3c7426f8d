"""Dynamic batching: which rows run together, cancellation, and shutdown."""

import asyncio
import json
import time

import pytest

from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart
from serve_app.domain.tensors import Tensor
from serve_app.errors import (
    DeadlineExceeded,
    ModelLoading,
    QueueFull,
)
from serve_app.protocols.openinference.metadata import describe_statistics
from serve_app.runtime.batching.batcher import Batcher
from serve_app.telemetry.metrics import Meters
from serve_app.telemetry.metrics_aggregator import MetricsAggregator
from tests.support.batcher_fakes import (
    REF,
    Clock,
    Model,
    bodies,
    create_batcher,
    create_paced_batcher,
    make_request,
    run_in_event_loop,
    start_submits,
    submit_and_gather,
    until,
)


@run_in_event_loop
async def test_idle_models_start_at_once_and_busy_ones_collect():
    model = Model(blocks=True)
    batcher = create_batcher(model.run, max_batch_size=8)
    first = start_submits(batcher, "a")
    assert await model.started_at.get() == ["a"]
    rest = start_submits(batcher, *"bcdef")
    await until(lambda: batcher.pending == 5)
    model.release(2)
    assert bodies(await asyncio.gather(*first, *rest)) == list("abcdef")
    assert model.batches == [["a"], list("bcdef")]
    await batcher.close()


@run_in_event_loop
async def test_rows_of_one_loop_turn_run_together():
    model = Model()
    batcher = create_batcher(model.run, max_batch_size=8)
    assert bodies(await submit_and_gather(batcher, *"abcde")) == list("abcde")
    assert model.batches == [list("abcde")]
    await batcher.close()


@run_in_event_loop
async def test_batches_keep_the_size_limit_and_the_order():
    model = Model()
    batcher = create_batcher(model.run, max_batch_size=4)
    rows = [str(i) for i in range(30)]
    assert bodies(await submit_and_gather(batcher, *rows)) == rows
    assert max(map(len, model.batches)) == 4
    assert [row for batch in model.batches for row in batch] == rows
    await batcher.close()


@run_in_event_loop
async def test_a_full_batch_is_staged_and_still_counts_as_waiting():
    model = Model(blocks=True)
    batcher = create_batcher(model.run, max_batch_size=2, queue_size=5)
    first = start_submits(batcher, "a")
    await model.started_at.get()
    rest = start_submits(batcher, *"bcdef")
    await until(lambda: batcher.pending == 5)
    with pytest.raises(QueueFull):
        await batcher.infer(make_request("g"))
    model.release()
    await first[0]
    # Its successor begins without the loop's help, so the loop need not have seen the first one's end.
    assert await model.started_at.get() == ["b", "c"]
    model.release(3)
    await asyncio.gather(*rest)
    assert model.batches == [["a"], ["b", "c"], ["d", "e"], ["f"]]
    await batcher.close()


@run_in_event_loop
async def test_kinds_are_never_mixed_and_keep_their_order():
    model = Model()
    kinds = []

    def run(requests, emit):
        kinds.append([c.kind for c in requests])
        return model.run(requests, emit)

    batcher = create_batcher(run, max_batch_size=8)
    rows = [
        make_request("a"),
        make_request("b"),
        make_request("c", kind="explain"),
        make_request("d"),
        make_request("e", kind="describe"),
        make_request("f"),
    ]
    assert bodies(await submit_and_gather(batcher, *rows)) == list("abcdef")
    assert kinds == [["predict", "predict"], ["explain"], ["predict"], ["describe"], ["predict"]]
    await batcher.close()


@run_in_event_loop
async def test_max_batch_delay_counts_from_the_first_row():
    clock, model = Clock(), Model()
    batcher = create_batcher(
        model.run, max_batch_size=4, max_batch_delay=100, response_timeout=0, clock=clock, timer=clock.timer
    )
    rows = start_submits(batcher, "a")
    await until(lambda: clock.timers)
    clock.move(0.06)
    rows += start_submits(batcher, "b")
    await until(lambda: batcher.pending == 2)
    clock.move(0.03)
    assert model.batches == []
    clock.move(0.01)
    replies = await asyncio.gather(*rows)
    assert model.batches == [["a", "b"]]
    assert [round(reply.timings.queue, 6) for reply in replies] == [0.1, 0.04]
    await batcher.close()


@run_in_event_loop
async def test_a_full_batch_does_not_wait_for_the_delay():
    clock, model = Clock(), Model()
    batcher = create_batcher(
        model.run, max_batch_size=2, max_batch_delay=100, response_timeout=0, clock=clock, timer=clock.timer
    )
    assert bodies(await submit_and_gather(batcher, "a", "b")) == ["a", "b"]
    assert model.batches == [["a", "b"]]
    await batcher.close()


@run_in_event_loop
async def test_max_batch_delay_of_remaining_rows_counts_from_their_arrival():
    clock, model = Clock(), Model(blocks=True)
    batcher = create_batcher(
        model.run, max_batch_size=4, max_batch_delay=100, response_timeout=0, clock=clock, timer=clock.timer
    )
    first = start_submits(batcher, *"abcd")
    await model.started_at.get()
    rest = start_submits(batcher, "e")
    await until(lambda: batcher.pending == 1)
    clock.move(0.07)
    model.release()
    await asyncio.gather(*first)
    await until(lambda: clock.timers)
    assert len(model.batches) == 1
    model.release()
    clock.move(0.03)
    assert (await rest[0]).body == b"e"
    await batcher.close()


@run_in_event_loop
async def test_limits_change_while_it_runs():
    model = Model()
    batcher = create_batcher(model.run, max_batch_size=1, max_batch_delay=60_000)
    assert len(await submit_and_gather(batcher, *"ab")) == 2
    assert model.batches == [["a"], ["b"]]
    batcher.configure(max_batch_size=8)
    waiting = start_submits(batcher, *"cd")
    await until(lambda: batcher.pending == 2)
    await asyncio.sleep(0)
    assert len(model.batches) == 2
    batcher.configure(max_batch_delay=None)
    assert bodies(await asyncio.gather(*waiting)) == ["c", "d"]
    batcher.configure(queue_size=0)
    with pytest.raises(QueueFull):
        await batcher.infer(make_request("e"))
    await batcher.close()


@run_in_event_loop
async def test_a_full_queue_refuses_at_once_and_names_the_model():
    model = Model(blocks=True)
    batcher = create_batcher(model.run, queue_size=2)
    rows = start_submits(batcher, "a")
    await model.started_at.get()
    rows += start_submits(batcher, "b", "c")
    await until(lambda: batcher.pending == 2)
    with pytest.raises(QueueFull) as caught:
        await batcher.infer(make_request("d", version="1.0"))
    assert caught.value.args[:2] == ("m", "1.0")
    assert "2 rows wait" in caught.value.detail
    model.release(3)
    assert bodies(await asyncio.gather(*rows)) == ["a", "b", "c"]
    await batcher.close()


@run_in_event_loop
async def test_rows_of_disconnected_clients_free_their_place_and_do_not_run():
    model = Model(blocks=True)
    batcher = create_batcher(model.run, max_batch_size=2, queue_size=3)
    first = start_submits(batcher, "a")
    await model.started_at.get()
    b, c, d = start_submits(batcher, *"bcd")
    await until(lambda: batcher.pending == 3)  # b and c lie ready as a full batch, d waits
    d.cancel()
    b.cancel()
    await asyncio.wait([b, d])
    assert batcher.pending == 1
    e = start_submits(batcher, "e")
    model.release(3)
    assert bodies(await asyncio.gather(*first, c, *e)) == ["a", "c", "e"]
    assert model.batches == [["a"], ["c"], ["e"]]
    await batcher.close()


@run_in_event_loop
async def test_a_disconnect_during_a_batch_leaves_other_rows_alone():
    model = Model(blocks=True)
    batcher = create_batcher(model.run, max_batch_size=2)
    a, b = start_submits(batcher, "a", "b")
    await model.started_at.get()
    a.cancel()
    model.release()
    assert (await b).body == b"b"
    assert a.cancelled()
    await batcher.close()


@run_in_event_loop
async def test_expired_rows_fail_at_their_deadline_and_do_not_run():
    model = Model(blocks=True)
    batcher = create_batcher(model.run)
    first = start_submits(batcher, "a")
    await model.started_at.get()
    late = start_submits(batcher, make_request("late", deadline=time.time() + 0.02))
    with pytest.raises(DeadlineExceeded, match="model m"):
        await late[0]  # while the model is still busy
    assert batcher.pending == 0
    model.release()
    await first[0]
    assert model.batches == [["a"]]
    await batcher.close()


@run_in_event_loop
async def test_rows_that_arrive_expired_do_not_run():
    model = Model()
    batcher = create_batcher(model.run, max_batch_size=4)
    late, fine = await submit_and_gather(
        batcher,
        make_request("late", deadline=time.time() - 1),
        make_request("fine", deadline=time.time() + 100),
    )
    assert isinstance(late, DeadlineExceeded)
    assert fine.body == b"fine"
    assert model.batches == [["fine"]]
    await batcher.close()


@run_in_event_loop
async def test_close_answers_admitted_rows_and_refuses_more():
    model = Model(blocks=True)
    batcher = create_batcher(model.run, max_batch_size=4, max_batch_delay=60_000)
    rows = start_submits(batcher, *"abcdef")
    await until(lambda: len(model.batches) == 1)
    closing = asyncio.ensure_future(batcher.close())
    await asyncio.sleep(0)
    with pytest.raises(ModelLoading) as caught:
        await batcher.infer(make_request("g"))
    assert "stopping" in caught.value.detail
    model.release(2)
    assert bodies(await asyncio.gather(*rows)) == list("abcdef")
    await closing
    await batcher.close()


@run_in_event_loop
async def test_responses_of_long_batches_are_sent_once_the_next_batch_runs():
    batcher, model, _ = await create_paced_batcher(1.0)
    reported = []
    rows = start_submits(batcher, *"ab")
    for row, name in zip(rows, "ab"):
        row.add_done_callback(lambda _, name=name: reported.append(name))
    await model.started_at.get()
    model.release(2)  # b has nothing behind it and is told at once, before a's moment is over
    await batcher.close()
    assert [row.done() for row in rows] == [True, True]
    assert bodies(await asyncio.gather(*rows)) == ["a", "b"]
    await asyncio.sleep(0)  # the callbacks of a done future run afterwards
    assert reported == ["b", "a"]


@run_in_event_loop
async def test_timings_are_in_every_response_and_in_the_metrics():
    clock, meters = Clock(), Meters()
    model = Model(blocks=True)
    batcher = create_batcher(
        model.run, max_batch_size=2, response_timeout=0, clock=clock, timer=clock.timer, meters=meters
    )
    rows = start_submits(batcher, "a")
    await model.started_at.get()
    rows += start_submits(batcher, "b", "c")
    await until(lambda: batcher.pending == 2)
    clock.move(0.5)
    model.release()
    await model.started_at.get()
    clock.move(0.25)
    model.release()
    a, b, _ = await asyncio.gather(*rows)
    assert (a.timings.queue, a.timings.inference, a.timings.batch_size) == (0, 0.5, 1)
    assert (b.timings.queue, b.timings.inference, b.timings.batch_size) == (0.5, 0.25, 2)
    await batcher.close()
    await asyncio.sleep(0)
    figures = {name: value for name, labels, value in meters.samples() if dict(labels).get("le") is None}
    assert figures["torchrelay_batch_size_count"] == 2
    assert figures["torchrelay_batch_size_sum"] == 3
    assert figures["torchrelay_inference_seconds_sum"] == 0.75
    assert figures["torchrelay_queue_seconds_count"] == 3
    assert figures["torchrelay_queue_seconds_sum"] == 1.0
    assert figures["torchrelay_queue_depth"] == 0


def test_a_batch_of_n_equals_n_singles(make_runner):
    runner = make_runner(
        """
import torch

def handle(data, context):
    if data is None:
        torch.manual_seed(3)
        context.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        for weight in context.model.parameters():
            weight.data = (weight.data * 16).round()  # whole numbers: sums are exact in any order
        return
    with torch.inference_mode():
        return context.model(torch.tensor([row["body"] for row in data], dtype=torch.float32)).tolist()
""",
        batch_size=8,
    )
    rows = [
        InferenceRequest(
            "m", inputs=(InputPart("body", json.dumps([i, -i, i % 3, 1]).encode(), "application/json"),)
        )
        for i in range(8)
    ]

    @run_in_event_loop
    async def both():
        batcher = Batcher(runner.run, REF, Meters(), max_batch_size=8)
        await asyncio.wrap_future(batcher.handler_thread.submit(runner.load))
        together = await submit_and_gather(batcher, *rows)
        alone = [await batcher.infer(row) for row in rows]
        assert {reply.timings.batch_size for reply in together} == {8}
        assert {reply.timings.batch_size for reply in alone} == {1}
        assert bodies(together) == bodies(alone)
        assert len(set(bodies(alone))) == 8
        await batcher.close()

    both()


@run_in_event_loop
async def test_statistics_count_the_rows_of_tensors_and_not_their_requests():
    meters, total = Meters(), MetricsAggregator()
    batcher = create_batcher(lambda requests, emit: [InferenceResponse(b"")] * len(requests), meters=meters)
    tensor = Tensor("x", "FP32", (2, 3), bytes(24))
    parts = (InputPart(*tensor.to_part()),)
    for _ in range(4):
        meters.request(REF.name, REF.version, "ok", 0.1)
        await batcher.infer(InferenceRequest("m", inputs=parts, kind="tensors"))
    await batcher.close()
    await asyncio.sleep(0)  # metrics are recorded after the responses
    total.put("a", meters.report())
    [version] = describe_statistics(total.version_stats())["model_stats"]
    assert (version["inference_count"], version["execution_count"]) == (8, 4)
    assert [batch["batch_size"] for batch in version["batch_stats"]] == [2]
    assert version["inference_stats"]["success"]["count"] == 4
