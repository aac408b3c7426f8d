"""Deadlines that cannot be met, and Retry-After."""

import asyncio
import time

import pytest

from serve_app.errors import (
    CannotMeetDeadline,
    DeadlineExceeded,
    QueueFull,
)
from tests.support.batcher_fakes import (
    Model,
    bodies,
    create_batcher,
    create_paced_batcher,
    make_prioritized_request,
    make_request,
    run_in_event_loop,
    start_submits,
    until,
)


@run_in_event_loop
async def test_rows_that_cannot_meet_their_deadline_are_refused_with_the_figures():
    batcher, model, clock = await create_paced_batcher(100.0)
    rows = start_submits(batcher, *"abc")
    await model.started_at.get()
    clock.move(40)
    with pytest.raises(CannotMeetDeadline) as caught:  # 60 s of a, b and c, and its own 100 s
        await batcher.infer(make_request("d", deadline=time.time() + 300))
    error = caught.value
    assert error.reason == "deadline"
    assert error.detail == "about 360 s are needed and 300 s are left"
    assert 60 <= error.retry_after <= 61
    with pytest.raises(CannotMeetDeadline) as caught:
        await batcher.infer(make_request("d", deadline=time.time() + 20))
    assert 340 <= caught.value.retry_after <= 341
    assert batcher.pending == 2
    rows += start_submits(
        batcher,
        make_request("e", deadline=time.time() + 400),
        make_prioritized_request("f", "high", deadline=time.time() + 300),
    )
    model.release(5)
    assert bodies(await asyncio.gather(*rows)) == list("abcef")
    await batcher.close()


@run_in_event_loop
async def test_a_batch_is_one_batch_however_many_rows_it_holds():
    batcher, model, _ = await create_paced_batcher(100.0, max_batch_size=4)
    rows = start_submits(batcher, "a")
    await model.started_at.get()
    rows += start_submits(batcher, *"bcde")
    await until(lambda: batcher.pending == 4)
    with pytest.raises(CannotMeetDeadline, match="about 300 s are needed"):
        await batcher.infer(make_request("f", deadline=time.time() + 290))
    model.release(2)
    await asyncio.gather(*rows)
    await batcher.close()


@run_in_event_loop
async def test_no_row_is_refused_before_the_latency_model_is_ready():
    batcher, model, _ = await create_paced_batcher(100.0, batches=4)
    rows = start_submits(batcher, "a")
    await model.started_at.get()
    rows += start_submits(batcher, make_request("b", deadline=time.time() + 90))
    model.release(2)
    assert bodies(await asyncio.gather(*rows)) == ["a", "b"]
    await batcher.close()


@run_in_event_loop
async def test_idle_models_try_every_row():
    batcher, model, _ = await create_paced_batcher(600.0)
    model.release()
    assert (await batcher.infer(make_request("a", deadline=time.time() + 60))).body == b"a"
    await batcher.close()


@run_in_event_loop
async def test_queue_full_errors_have_retry_after():
    batcher, model, _ = await create_paced_batcher(3.0, queue_size=2)
    rows = start_submits(batcher, "a")
    await model.started_at.get()
    rows += start_submits(batcher, *"bc")
    await until(lambda: batcher.pending == 2)
    with pytest.raises(QueueFull) as caught:
        await batcher.infer(make_request("d"))
    assert caught.value.retry_after == 6
    model.release(3)
    await asyncio.gather(*rows)
    await batcher.close()


@run_in_event_loop
async def test_deadline_errors_have_retry_after():
    batcher, model, clock = await create_paced_batcher(3.0, batches=1)
    rows = start_submits(batcher, *"abc")
    await until(lambda: batcher.pending == 2)
    late = start_submits(batcher, make_request("late", deadline=time.time() + 60))
    await until(lambda: batcher.pending == 3)
    clock.move(60)
    with pytest.raises(DeadlineExceeded) as caught:
        await late[0]
    assert caught.value.retry_after == 6
    model.release(3)
    await asyncio.gather(*rows)
    await batcher.close()


@run_in_event_loop
async def test_groups_of_rows_are_answered_together():
    model = Model(blocks=True)
    batcher = create_batcher(model.run, queue_size=3)
    first = start_submits(batcher, "a")
    await model.started_at.get()
    transfer = asyncio.ensure_future(
        batcher.infer_all([make_request("b"), make_request("c"), make_request("d"), make_request("e")])
    )
    await until(lambda: batcher.pending == 3)
    transfer.cancel()
    await asyncio.wait([transfer])
    assert batcher.pending == 0
    model.release()
    await first[0]
    await batcher.close()
    assert model.batches == [["a"]]
