"""Priorities and shadows in the batcher."""

import asyncio
import time

import pytest

from serve_app.errors import (
    DeadlineExceeded,
    ModelLoading,
    QueueFull,
)
from tests.support.batcher_fakes import (
    Clock,
    Model,
    bodies,
    create_batcher,
    make_prioritized_request,
    run_in_event_loop,
    start_submits,
    until,
)


@run_in_event_loop
async def test_higher_priorities_run_first_and_each_priority_is_first_in_first_out():
    model = Model(blocks=True)
    batcher = create_batcher(model.run, max_batch_size=2)
    first = start_submits(batcher, "a")
    await model.started_at.get()
    kinds = {"l": "low", "n": "normal", "h": "high"}
    rows = start_submits(
        batcher, *(make_prioritized_request(text, kinds[text[0]]) for text in ("l1", "l2", "h0"))
    )
    await until(
        lambda: batcher.pending == 3
    )  # two of them lie ready behind the running batch: what is ready stays
    rows += start_submits(
        batcher,
        *(make_prioritized_request(text, kinds[text[0]]) for text in ("l3", "n1", "h1", "n2", "h2", "l4")),
    )
    await until(lambda: batcher.pending == 9)
    model.release(6)
    await asyncio.gather(*first, *rows)
    assert model.batches == [["a"], ["h0", "l1"], ["h1", "h2"], ["n1", "n2"], ["l2", "l3"], ["l4"]]
    await batcher.close()


@run_in_event_loop
async def test_low_priorities_do_not_starve():
    clock, model = Clock(), Model(blocks=True)
    batcher = create_batcher(model.run, response_timeout=0, clock=clock, timer=clock.timer)
    rows = start_submits(batcher, "a", "b")
    await model.started_at.get()  # b lies ready
    rows += start_submits(batcher, make_prioritized_request("low", "low"))
    for i in range(10):
        clock.move(0.5)
        rows += start_submits(batcher, make_prioritized_request(f"h{i}", "high"))
        await until(lambda i=i: batcher.pending >= 3)
        model.release()
        await model.started_at.get()
    order = [text for batch in model.batches for text in batch]
    assert "low" in order, "3 s of patience were over"
    model.release(10)
    await asyncio.gather(*rows)
    await batcher.close()


@run_in_event_loop
async def test_slow_models_stage_one_batch_so_that_high_priorities_can_overtake():
    clock, model = Clock(), Model(blocks=True)
    batcher = create_batcher(model.run, response_timeout=0, clock=clock, timer=clock.timer)
    rows = start_submits(batcher, "warm")
    await model.started_at.get()
    clock.move(0.05)
    model.release()
    await rows[0]
    rows = start_submits(batcher, *"abcde")
    await until(lambda: batcher.pending == 4)
    rows += start_submits(batcher, make_prioritized_request("urgent", "high"))
    model.release(6)
    await asyncio.gather(*rows)
    assert model.batches == [["warm"], ["a"], ["b"], ["urgent"], ["c"], ["d"], ["e"]]
    await batcher.close()


@run_in_event_loop
async def test_in_a_full_queue_higher_priorities_replace_the_newest_row_of_the_lowest():
    model = Model(blocks=True)
    batcher = create_batcher(model.run, max_batch_size=4, queue_size=3)
    first = start_submits(batcher, "a")
    await model.started_at.get()
    low1, low2, normal = start_submits(
        batcher, make_prioritized_request("l1", "low"), make_prioritized_request("l2", "low"), "n"
    )
    await until(lambda: batcher.pending == 3)
    with pytest.raises(QueueFull):
        await batcher.infer(make_prioritized_request("l3", "low"))
    more = start_submits(batcher, "n2")
    with pytest.raises(QueueFull) as caught:
        await low2
    assert "a more urgent one came" in caught.value.detail
    assert batcher.pending == 3
    more += start_submits(
        batcher,
        make_prioritized_request("h1", "high"),
        make_prioritized_request("h2", "high"),
        make_prioritized_request("h3", "high"),
    )
    for refused in (low1, more[0], normal):
        with pytest.raises(QueueFull):
            await refused
    with pytest.raises(QueueFull):
        await batcher.infer(make_prioritized_request("h4", "high"))
    model.release(2)
    assert bodies(await asyncio.gather(*first, *more[1:])) == ["a", "h1", "h2", "h3"]
    assert model.batches == [["a"], ["h1", "h2", "h3"]]
    await batcher.close()


@run_in_event_loop
async def test_shadows_run_alone_when_no_other_row_waits():
    model = Model(blocks=True)
    batcher = create_batcher(model.run, max_batch_size=4)
    rows = start_submits(batcher, "a")
    await model.started_at.get()
    rows += start_submits(
        batcher, make_prioritized_request("s1", "shadow"), "b", make_prioritized_request("s2", "shadow")
    )
    await until(lambda: batcher.pending == 1)
    await asyncio.sleep(0)
    assert batcher.pending == 1, "shadows count nowhere"
    model.release()
    assert await model.started_at.get() == ["b"]
    rows += start_submits(batcher, "c")
    await until(lambda: batcher.pending == 1)
    model.release()
    assert await model.started_at.get() == ["c"]
    model.release(2)
    assert bodies(await asyncio.gather(*rows)) == ["a", "s1", "b", "s2", "c"]
    assert model.batches == [["a"], ["b"], ["c"], ["s1", "s2"]]
    await batcher.close()


@run_in_event_loop
async def test_shadows_have_their_own_limit_and_end_at_their_deadline_or_at_shutdown():
    clock, model = Clock(), Model(blocks=True)
    batcher = create_batcher(model.run, queue_size=1, clock=clock, timer=clock.timer)
    first = start_submits(batcher, "a")
    await model.started_at.get()
    late = start_submits(batcher, make_prioritized_request("late", "shadow", deadline=time.time() + 60))
    shadows = start_submits(batcher, *(make_prioritized_request(str(i), "shadow") for i in range(14)))
    shadows += start_submits(batcher, make_prioritized_request("another kind", "shadow", kind="explain"))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match='Model "m"') as caught:
        await batcher.infer(make_prioritized_request("one too many", "shadow"))
    assert caught.value.detail == "16 shadows wait"
    first += start_submits(batcher, "b")  # a caller finds its place all the same
    clock.move(60)
    with pytest.raises(DeadlineExceeded):
        await late[0]
    shadows[0].cancel()
    closing = asyncio.ensure_future(batcher.close())
    for shadow in shadows[1:]:
        with pytest.raises(ModelLoading):
            await shadow
    model.release(2)
    assert bodies(await asyncio.gather(*first)) == ["a", "b"]
    await closing
    assert model.batches == [["a"], ["b"]]


@run_in_event_loop
async def test_an_idle_model_runs_a_shadow_at_once():
    model = Model()
    batcher = create_batcher(model.run, max_batch_delay=60_000)
    assert (await batcher.infer(make_prioritized_request("s", "shadow"))).body == b"s"
    await batcher.close()
