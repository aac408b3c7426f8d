import asyncio
import dataclasses
import functools
import json
import threading
import time

import pytest

from serve_app.errors import (
    CannotMeetDeadline,
    CountMismatch,
    DeadlineExceeded,
    HandlerFailed,
    HandlerSaid,
    Loading,
    OutOfResources,
    QueueFull,
    UnsupportedOutput,
    WorkerDied,
)
from serve_app.runtime.batcher import Batcher
from serve_app.telemetry.metrics import Meters
from serve_app.types import Call, Input, ModelRef, Reply, ReplyStream

REF = ModelRef("m", "1.0")


def call(text="", **fields):
    return Call("m", inputs=(Input("body", text.encode(), "text/plain"),), request_id=text, **fields)


def texts(calls):
    return [c.inputs[0].value.decode() for c in calls]


class Model:
    """Answers each row with its own text, one batch for each ``let``; ``batches`` is what it was given.

    ``poison`` rows make it raise; ``held`` makes it wait before every batch.
    """

    def __init__(self, poison=(), held=False, error=HandlerFailed):
        self.batches = []
        self.poison = set(poison)
        self.error = error
        self._turn = threading.Semaphore(0) if held else None
        self.began = asyncio.Queue()
        self.loop = asyncio.get_running_loop()

    def let(self, batches=1):
        self._turn.release(batches)

    def run(self, calls, emit):
        self.batches.append(texts(calls))
        self.loop.call_soon_threadsafe(self.began.put_nowait, texts(calls))
        if self._turn is not None:
            assert self._turn.acquire(timeout=60)
        guilty = self.poison & set(texts(calls))
        if guilty:
            return [self.error(f"{sorted(guilty)} cannot be answered")] * len(calls)
        return [Reply(text.encode(), version="1.0") for text in texts(calls)]


def batcher(run, **settings):
    return Batcher(run, REF, settings.pop("meters", Meters()), **settings)


async def gathered(made, *rows):
    return await asyncio.gather(
        *(made.submit(row if isinstance(row, Call) else call(row)) for row in rows), return_exceptions=True
    )


def submitted(made, *rows):
    return [asyncio.ensure_future(made.submit(row if isinstance(row, Call) else call(row))) for row in rows]


async def until(condition):
    async def turn():
        while not condition():
            await asyncio.sleep(0)

    await asyncio.wait_for(turn(), 60)


def bodies(replies):
    return [reply.body.decode() for reply in replies]


def asynchronous(test):
    """Run a test's coroutine on a loop of its own; it has half a minute."""

    @functools.wraps(test)
    def run(**fixtures):
        asyncio.run(asyncio.wait_for(test(**fixtures), 60))

    return run


# Work conservation


@asynchronous
async def test_an_idle_model_starts_at_once_and_a_busy_one_collects():
    model = Model(held=True)
    made = batcher(model.run, max_batch_size=8)
    first = submitted(made, "a")
    assert await model.began.get() == ["a"]
    rest = submitted(made, *"bcdef")
    await until(lambda: made.pending == 5)
    model.let(2)
    assert bodies(await asyncio.gather(*first, *rest)) == list("abcdef")
    assert model.batches == [["a"], list("bcdef")]
    await made.close()


@asynchronous
async def test_what_was_read_in_one_turn_of_the_loop_runs_together():
    model = Model()
    made = batcher(model.run, max_batch_size=8)
    assert bodies(await gathered(made, *"abcde")) == list("abcde")
    assert model.batches == [list("abcde")]
    await made.close()


@asynchronous
async def test_no_batch_is_larger_than_the_limit_and_order_is_kept():
    model = Model()
    made = batcher(model.run, max_batch_size=4)
    rows = [str(i) for i in range(30)]
    assert bodies(await gathered(made, *rows)) == rows
    assert max(map(len, model.batches)) == 4
    assert [row for batch in model.batches for row in batch] == rows
    await made.close()


@asynchronous
async def test_a_full_batch_lies_ready_behind_the_running_one_and_still_counts_as_waiting():
    model = Model(held=True)
    made = batcher(model.run, max_batch_size=2, queue_size=5)
    first = submitted(made, "a")
    await model.began.get()
    rest = submitted(made, *"bcdef")
    await until(lambda: made.pending == 5)
    with pytest.raises(QueueFull):
        await made.submit(call("g"))
    model.let()
    await first[0]
    # Its successor begins without the loop's help, so the loop need not have seen the first one's end.
    assert await model.began.get() == ["b", "c"]
    model.let(3)
    await asyncio.gather(*rest)
    assert model.batches == [["a"], ["b", "c"], ["d", "e"], ["f"]]
    await made.close()


@asynchronous
async def test_kinds_are_never_mixed_and_keep_their_order():
    model = Model()
    kinds = []

    def run(calls, emit):
        kinds.append([c.kind for c in calls])
        return model.run(calls, emit)

    made = batcher(run, max_batch_size=8)
    rows = [call("a"), call("b"), call("c", kind="explain"), call("d"), call("e", kind="describe"), call("f")]
    assert bodies(await gathered(made, *rows)) == list("abcdef")
    assert kinds == [["predict", "predict"], ["explain"], ["predict"], ["describe"], ["predict"]]
    await made.close()


class Clock:
    """Time that a test moves: a clock and the timers over it."""

    def __init__(self):
        self.now = 100.0
        self.timers = []

    def __call__(self):
        return self.now

    def timer(self, delay, callback, *args):
        handle = asyncio.TimerHandle(self.now + delay, callback, args, asyncio.get_running_loop())
        self.timers.append(handle)
        return handle

    def move(self, seconds):
        self.now += seconds
        for handle in [t for t in self.timers if t.when() <= self.now + 1e-9]:
            self.timers.remove(handle)
            if not handle.cancelled():
                handle._run()


@asynchronous
async def test_max_batch_delay_counts_from_the_first_row():
    clock, model = Clock(), Model()
    made = batcher(model.run, max_batch_size=4, max_batch_delay=100, response_timeout=0, clock=clock, timer=clock.timer)
    rows = submitted(made, "a")
    await until(lambda: clock.timers)
    clock.move(0.06)
    rows += submitted(made, "b")
    await until(lambda: made.pending == 2)
    clock.move(0.03)
    assert model.batches == []
    clock.move(0.01)
    replies = await asyncio.gather(*rows)
    assert model.batches == [["a", "b"]]
    assert [round(reply.timings.queue, 6) for reply in replies] == [0.1, 0.04]
    await made.close()


@asynchronous
async def test_a_full_batch_does_not_wait_for_the_delay():
    clock, model = Clock(), Model()
    made = batcher(model.run, max_batch_size=2, max_batch_delay=100, response_timeout=0, clock=clock, timer=clock.timer)
    assert bodies(await gathered(made, "a", "b")) == ["a", "b"]
    assert model.batches == [["a", "b"]]
    await made.close()


@asynchronous
async def test_the_delay_of_rows_left_behind_by_a_batch_counts_from_their_own_arrival():
    clock, model = Clock(), Model(held=True)
    made = batcher(model.run, max_batch_size=4, max_batch_delay=100, response_timeout=0, clock=clock, timer=clock.timer)
    first = submitted(made, *"abcd")
    await model.began.get()
    rest = submitted(made, "e")
    await until(lambda: made.pending == 1)
    clock.move(0.07)
    model.let()
    await asyncio.gather(*first)
    await until(lambda: clock.timers)
    assert len(model.batches) == 1
    model.let()
    clock.move(0.03)
    assert (await rest[0]).body == b"e"
    await made.close()


@asynchronous
async def test_limits_change_while_it_runs():
    model = Model()
    made = batcher(model.run, max_batch_size=1, max_batch_delay=60_000)
    assert len(await gathered(made, *"ab")) == 2
    assert model.batches == [["a"], ["b"]]
    made.configure(max_batch_size=8)
    waiting = submitted(made, *"cd")
    await until(lambda: made.pending == 2)
    await asyncio.sleep(0)
    assert len(model.batches) == 2
    made.configure(max_batch_delay=None)
    assert bodies(await asyncio.gather(*waiting)) == ["c", "d"]
    made.configure(queue_size=0)
    with pytest.raises(QueueFull):
        await made.submit(call("e"))
    await made.close()


# Who is not answered


@asynchronous
async def test_a_full_queue_refuses_at_once_and_says_who():
    model = Model(held=True)
    made = batcher(model.run, queue_size=2)
    rows = submitted(made, "a")
    await model.began.get()
    rows += submitted(made, "b", "c")
    await until(lambda: made.pending == 2)
    with pytest.raises(QueueFull) as caught:
        await made.submit(call("d", version="1.0"))
    assert caught.value.args[:2] == ("m", "1.0")
    assert "2 rows wait" in caught.value.detail
    model.let(3)
    assert bodies(await asyncio.gather(*rows)) == ["a", "b", "c"]
    await made.close()


@asynchronous
async def test_a_row_whose_caller_left_makes_room_and_does_not_run():
    model = Model(held=True)
    made = batcher(model.run, max_batch_size=2, queue_size=3)
    first = submitted(made, "a")
    await model.began.get()
    b, c, d = submitted(made, *"bcd")
    await until(lambda: made.pending == 3)  # b and c lie ready as a full batch, d waits
    d.cancel()
    b.cancel()
    await asyncio.wait([b, d])
    assert made.pending == 1
    e = submitted(made, "e")
    model.let(3)
    assert bodies(await asyncio.gather(*first, c, *e)) == ["a", "c", "e"]
    assert model.batches == [["a"], ["c"], ["e"]]
    await made.close()


@asynchronous
async def test_a_caller_that_leaves_in_mid_batch_takes_nobody_along():
    model = Model(held=True)
    made = batcher(model.run, max_batch_size=2)
    a, b = submitted(made, "a", "b")
    await model.began.get()
    a.cancel()
    model.let()
    assert (await b).body == b"b"
    assert a.cancelled()
    await made.close()


@asynchronous
async def test_a_deadline_ends_the_wait_when_it_passes_and_the_row_does_not_run():
    model = Model(held=True)
    made = batcher(model.run)
    first = submitted(made, "a")
    await model.began.get()
    late = submitted(made, call("late", deadline=time.time() + 0.02))
    with pytest.raises(DeadlineExceeded, match="model m"):
        await late[0]  # while the model is still busy
    assert made.pending == 0
    model.let()
    await first[0]
    assert model.batches == [["a"]]
    await made.close()


@asynchronous
async def test_a_row_that_is_late_already_does_not_run():
    model = Model()
    made = batcher(model.run, max_batch_size=4)
    late, fine = await gathered(made, call("late", deadline=time.time() - 1), call("fine", deadline=time.time() + 100))
    assert isinstance(late, DeadlineExceeded)
    assert fine.body == b"fine"
    assert model.batches == [["fine"]]
    await made.close()


# Priorities


def prioritized(text, priority, **fields):
    return call(text, priority=priority, **fields)


@asynchronous
async def test_urgent_rows_go_first_and_those_of_one_priority_as_they_came():
    model = Model(held=True)
    made = batcher(model.run, max_batch_size=2)
    first = submitted(made, "a")
    await model.began.get()
    kinds = {"l": "low", "n": "normal", "h": "high"}
    rows = submitted(made, *(prioritized(text, kinds[text[0]]) for text in ("l1", "l2", "h0")))
    await until(lambda: made.pending == 3)  # two of them lie ready behind the running batch: what is ready stays
    rows += submitted(made, *(prioritized(text, kinds[text[0]]) for text in ("l3", "n1", "h1", "n2", "h2", "l4")))
    await until(lambda: made.pending == 9)
    model.let(6)
    await asyncio.gather(*first, *rows)
    assert model.batches == [["a"], ["h0", "l1"], ["h1", "h2"], ["n1", "n2"], ["l2", "l3"], ["l4"]]
    await made.close()


@asynchronous
async def test_nobody_starves():
    clock, model = Clock(), Model(held=True)
    made = batcher(model.run, response_timeout=0, clock=clock, timer=clock.timer)
    rows = submitted(made, "a", "b")
    await model.began.get()  # b lies ready
    rows += submitted(made, prioritized("low", "low"))
    for i in range(10):
        clock.move(0.5)
        rows += submitted(made, prioritized(f"h{i}", "high"))
        await until(lambda i=i: made.pending >= 3)
        model.let()
        await model.began.get()
    order = [text for batch in model.batches for text in batch]
    assert "low" in order, "3 s of patience were over"
    model.let(10)
    await asyncio.gather(*rows)
    await made.close()


@asynchronous
async def test_a_slow_model_has_one_batch_ready_so_that_urgent_rows_can_overtake():
    clock, model = Clock(), Model(held=True)
    made = batcher(model.run, response_timeout=0, clock=clock, timer=clock.timer)
    rows = submitted(made, "warm")
    await model.began.get()
    clock.move(0.05)
    model.let()
    await rows[0]
    rows = submitted(made, *"abcde")
    await until(lambda: made.pending == 4)
    rows += submitted(made, prioritized("urgent", "high"))
    model.let(6)
    await asyncio.gather(*rows)
    assert model.batches == [["warm"], ["a"], ["b"], ["urgent"], ["c"], ["d"], ["e"]]
    await made.close()


@asynchronous
async def test_in_a_full_queue_a_more_urgent_row_takes_the_place_of_the_newest_of_the_least_urgent():
    model = Model(held=True)
    made = batcher(model.run, max_batch_size=4, queue_size=3)
    first = submitted(made, "a")
    await model.began.get()
    low1, low2, normal = submitted(made, prioritized("l1", "low"), prioritized("l2", "low"), "n")
    await until(lambda: made.pending == 3)
    with pytest.raises(QueueFull):
        await made.submit(prioritized("l3", "low"))
    more = submitted(made, "n2")
    with pytest.raises(QueueFull) as caught:
        await low2
    assert "a more urgent one came" in caught.value.detail
    assert made.pending == 3
    more += submitted(made, prioritized("h1", "high"), prioritized("h2", "high"), prioritized("h3", "high"))
    for refused in (low1, more[0], normal):
        with pytest.raises(QueueFull):
            await refused
    with pytest.raises(QueueFull):
        await made.submit(prioritized("h4", "high"))
    model.let(2)
    assert bodies(await asyncio.gather(*first, *more[1:])) == ["a", "h1", "h2", "h3"]
    assert model.batches == [["a"], ["h1", "h2", "h3"]]
    await made.close()


@asynchronous
async def test_shadows_run_when_nobody_else_waits_and_in_batches_of_their_own():
    model = Model(held=True)
    made = batcher(model.run, max_batch_size=4)
    rows = submitted(made, "a")
    await model.began.get()
    rows += submitted(made, prioritized("s1", "shadow"), "b", prioritized("s2", "shadow"))
    await until(lambda: made.pending == 1)
    await asyncio.sleep(0)
    assert made.pending == 1, "shadows count nowhere"
    model.let()
    assert await model.began.get() == ["b"]
    rows += submitted(made, "c")
    await until(lambda: made.pending == 1)
    model.let()
    assert await model.began.get() == ["c"]
    model.let(2)
    assert bodies(await asyncio.gather(*rows)) == ["a", "s1", "b", "s2", "c"]
    assert model.batches == [["a"], ["b"], ["c"], ["s1", "s2"]]
    await made.close()


@asynchronous
async def test_shadows_have_a_bound_of_their_own_and_leave_by_their_deadline_or_at_the_end():
    model = Model(held=True)
    made = batcher(model.run, queue_size=1)
    first = submitted(made, "a")
    await model.began.get()
    late = submitted(made, prioritized("late", "shadow", deadline=time.time() + 0.5))
    shadows = submitted(made, *(prioritized(str(i), "shadow") for i in range(14)))
    shadows += submitted(made, prioritized("another kind", "shadow", kind="explain"))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match='Model "m"') as caught:
        await made.submit(prioritized("one too many", "shadow"))
    assert caught.value.detail == "16 shadows wait"
    first += submitted(made, "b")  # a caller finds its place all the same
    with pytest.raises(DeadlineExceeded):
        await late[0]
    shadows[0].cancel()
    closing = asyncio.ensure_future(made.close())
    for shadow in shadows[1:]:
        with pytest.raises(Loading):
            await shadow
    model.let(2)
    assert bodies(await asyncio.gather(*first)) == ["a", "b"]
    await closing
    assert model.batches == [["a"], ["b"]]


@asynchronous
async def test_an_idle_model_runs_a_shadow_at_once():
    model = Model()
    made = batcher(model.run, max_batch_delay=60_000)
    assert (await made.submit(prioritized("s", "shadow"))).body == b"s"
    await made.close()


# Deadlines that cannot be met, and when to come again


async def paced(seconds, batches=5, **settings):
    """A batcher, its held model and its clock, after some batches of one row that took so long."""
    clock, model = Clock(), Model(held=True)
    made = batcher(model.run, response_timeout=0, clock=clock, timer=clock.timer, **settings)
    for _ in range(batches):
        row = submitted(made, "warm")
        await model.began.get()
        clock.move(seconds)
        model.let()
        await row[0]
        await asyncio.sleep(0)
    model.batches.clear()
    return made, model, clock


@asynchronous
async def test_a_row_that_cannot_make_it_is_refused_at_once_with_the_figures():
    made, model, clock = await paced(1.0)
    rows = submitted(made, *"abc")
    await model.began.get()
    clock.move(0.4)
    with pytest.raises(CannotMeetDeadline) as caught:  # 0.6 s of a, b and c, and its own second
        await made.submit(call("d", deadline=time.time() + 3.0))
    error = caught.value
    assert error.reason == "deadline"
    assert error.detail == "about 3.6 s are needed and 3 s are left"
    assert error.retry_after == 1
    with pytest.raises(CannotMeetDeadline) as caught:
        await made.submit(call("d", deadline=time.time() + 0.2))
    assert caught.value.retry_after == 4
    assert made.pending == 2
    rows += submitted(made, call("e", deadline=time.time() + 4.0), prioritized("f", "high", deadline=time.time() + 3.0))
    model.let(5)
    assert bodies(await asyncio.gather(*rows)) == list("abcef")
    await made.close()


@asynchronous
async def test_a_batch_is_one_batch_however_many_rows_it_holds():
    made, model, _ = await paced(1.0, max_batch_size=4)
    rows = submitted(made, "a")
    await model.began.get()
    rows += submitted(made, *"bcde")
    await until(lambda: made.pending == 4)
    with pytest.raises(CannotMeetDeadline, match="about 3 s are needed"):
        await made.submit(call("f", deadline=time.time() + 2.9))
    model.let(2)
    await asyncio.gather(*rows)
    await made.close()


@asynchronous
async def test_at_start_nothing_is_refused_for_nothing_is_known():
    made, model, _ = await paced(1.0, batches=4)
    rows = submitted(made, "a")
    await model.began.get()
    rows += submitted(made, call("b", deadline=time.time() + 0.9))
    model.let(2)
    assert bodies(await asyncio.gather(*rows)) == ["a", "b"]
    await made.close()


@asynchronous
async def test_an_idle_model_tries_whatever_it_was_like_before():
    made, model, _ = await paced(60.0)
    model.let()
    assert (await made.submit(call("a", deadline=time.time() + 5.0))).body == b"a"
    await made.close()


@asynchronous
async def test_a_full_queue_says_when_its_rows_will_have_been_answered():
    made, model, _ = await paced(3.0, queue_size=2)
    rows = submitted(made, "a")
    await model.began.get()
    rows += submitted(made, *"bc")
    await until(lambda: made.pending == 2)
    with pytest.raises(QueueFull) as caught:
        await made.submit(call("d"))
    assert caught.value.retry_after == 6
    model.let(3)
    await asyncio.gather(*rows)
    await made.close()


@asynchronous
async def test_a_row_whose_time_is_over_is_told_when_to_come_again():
    made, model, clock = await paced(3.0, batches=1)
    rows = submitted(made, *"abc")
    await until(lambda: made.pending == 2)
    late = submitted(made, call("late", deadline=time.time() + 1.0))
    await until(lambda: made.pending == 3)
    clock.move(1.1)
    with pytest.raises(DeadlineExceeded) as caught:
        await late[0]
    assert caught.value.retry_after == 6
    model.let(3)
    await asyncio.gather(*rows)
    await made.close()


@asynchronous
async def test_rows_that_came_together_leave_together():
    model = Model(held=True)
    made = batcher(model.run, queue_size=3)
    first = submitted(made, "a")
    await model.began.get()
    hop = asyncio.ensure_future(made.submit_all([call("b"), call("c"), call("d"), call("e")]))
    await until(lambda: made.pending == 3)
    hop.cancel()
    await asyncio.wait([hop])
    assert made.pending == 0
    model.let()
    await first[0]
    await made.close()
    assert model.batches == [["a"]]


# Whose error it is


@asynchronous
async def test_one_rows_error_is_that_rows_alone():
    def run(calls, emit):
        return [UnsupportedOutput(t) if t == "b" else Reply(t.encode()) for t in texts(calls)]

    made = batcher(run, max_batch_size=4)
    a, b, c = await gathered(made, *"abc")
    assert (a.body, c.body) == (b"a", b"c")
    assert isinstance(b, UnsupportedOutput)
    await made.close()


@pytest.mark.parametrize("error", [HandlerFailed, CountMismatch, OutOfResources, lambda text: HandlerSaid(text, 418)])
def test_a_failed_batch_runs_again_in_halves_so_that_only_the_guilty_row_fails(error, caplog):
    @asynchronous
    async def halves():
        model = Model(poison="f", error=error)
        made = batcher(model.run, max_batch_size=8)
        answers = await gathered(made, *"abcdefgh")
        assert isinstance(answers[5], HandlerFailed)
        assert bodies(answers[:5] + answers[6:]) == list("abcdegh")
        assert model.batches == [list(b) for b in ("abcdefgh", "abcd", "efgh", "ef", "e", "f", "gh")]
        assert [a.timings.batch_size for a in answers if isinstance(a, Reply)] == [4, 4, 4, 4, 1, 2, 2]
        await made.close()

    halves()
    assert "m--1.0: a batch of 8 failed" in caplog.text


@asynchronous
async def test_every_row_of_a_hopeless_batch_gets_its_own_error_object():
    model = Model(poison="abc")
    made = batcher(model.run, max_batch_size=4, retries=False)
    errors = await gathered(made, *"abc")
    assert [type(e) for e in errors] == [HandlerFailed] * 3
    assert len({id(e) for e in errors}) == 3
    assert errors[0].detail == "['a', 'b', 'c'] cannot be answered"
    await made.close()


@asynchronous
async def test_without_retries_the_batch_fails_whole_and_ran_once():
    model = Model(poison="b")
    made = batcher(model.run, max_batch_size=4, retries=False)
    assert [type(e) for e in await gathered(made, *"abcd")] == [HandlerFailed] * 4
    assert model.batches == [list("abcd")]
    await made.close()


@asynchronous
async def test_a_batch_too_large_for_the_memory_runs_in_parts_that_fit():
    def run(calls, emit):
        if len(calls) > 2:
            return [OutOfResources("MemoryError")] * len(calls)
        return [Reply(t.encode()) for t in texts(calls)]

    made = batcher(run, max_batch_size=8)
    assert bodies(await gathered(made, *"abcdefgh")) == list("abcdefgh")
    await made.close()


@asynchronous
async def test_a_row_whose_caller_left_is_not_run_again():
    model = Model(poison="a", held=True)
    made = batcher(model.run, max_batch_size=2)
    a, b = submitted(made, "a", "b")
    await model.began.get()
    a.cancel()
    await asyncio.wait([a])
    model.let(2)
    assert (await b).body == b"b"
    assert model.batches == [["a", "b"], ["b"]]
    await made.close()


@asynchronous
async def test_a_run_that_raises_loses_no_row():
    def run(calls, emit):
        raise SystemExit("whatever")

    made = batcher(run)
    with pytest.raises(HandlerFailed) as caught:
        await made.submit(call("a"))
    assert "SystemExit: whatever" in caught.value.detail
    await made.close()


# Streams


@asynchronous
async def test_pieces_come_one_by_one_in_order_and_the_returned_value_is_the_last():
    gate = threading.Semaphore(0)

    def run(calls, emit):
        emit(0, Reply(b"0", "text/x", 206, "Partly", (("a", "b"),), "1.0"))
        for i in range(1, 5):
            emit(0, b"%d" % i)
        assert gate.acquire(timeout=60)
        return [Reply(b"last", "text/y", 500)]

    made = batcher(run)
    stream = await made.submit(call("a"))
    assert isinstance(stream, ReplyStream)
    head = dataclasses.replace(stream.head, timings=None)
    assert head == Reply(b"", "text/x", 206, "Partly", (("a", "b"),), "1.0", timings=None)
    assert stream.head.timings.batch_size == 1
    pieces = []
    async for piece in stream:
        pieces.append(piece)
        if piece == b"4":
            gate.release()
    assert pieces == [b"0", b"1", b"2", b"3", b"4", b"last"]
    await made.close()


@asynchronous
async def test_rows_of_one_batch_stream_beside_each_other():
    def run(calls, emit):
        for i, text in enumerate(texts(calls)):
            if text != "plain":
                emit(i, Reply(text.encode()))
        for i, text in enumerate(texts(calls)):
            if text != "plain":
                emit(i, text.encode() * 2)
        return [Reply(text.encode() * 3) for text in texts(calls)]

    made = batcher(run, max_batch_size=4)
    a, plain, b = await gathered(made, "a", "plain", "b")
    assert [piece async for piece in a] == [b"a", b"aa", b"aaa"]
    assert [piece async for piece in b] == [b"b", b"bb", b"bbb"]
    assert plain.body == b"plain" * 3
    await made.close()


@asynchronous
async def test_an_error_after_the_first_piece_is_raised_by_the_iterator_and_the_row_is_not_run_again():
    runs = []

    def run(calls, emit):
        runs.append(texts(calls))
        if "s" in texts(calls):
            emit(texts(calls).index("s"), Reply(b"piece"))
            return [HandlerFailed("in mid-stream")] * len(calls)
        return [Reply(t.encode()) for t in texts(calls)]

    made = batcher(run, max_batch_size=4)
    a, stream, b = await gathered(made, "a", "s", "b")
    assert bodies([a, b]) == ["a", "b"]
    seen = []
    with pytest.raises(HandlerFailed, match="Prediction failed"):
        async for piece in stream:
            seen.append(piece)
    assert seen == [b"piece"]
    assert runs == [["a", "s", "b"], ["a"], ["b"]]
    await made.close()


@asynchronous
async def test_closing_a_stream_early_harms_neither_the_batch_nor_the_next():
    gate = threading.Semaphore(0)

    def run(calls, emit):
        emit(0, Reply(b"first"))
        assert gate.acquire(timeout=60)
        emit(0, b"second")
        return [Reply(b"last")] * len(calls)

    made = batcher(run, max_batch_size=2)
    left, other = submitted(made, "a", "b")
    stream = await left
    async for piece in stream:
        assert piece == b"first"
        break
    await stream.aclose()
    assert [piece async for piece in stream] == []
    gate.release(2)
    assert (await other).body == b"last"
    assert isinstance(await made.submit(call("c")), ReplyStream)
    await made.close()


@asynchronous
async def test_a_stream_whose_reader_is_cancelled_can_be_closed():
    gate = threading.Semaphore(0)

    def run(calls, emit):
        emit(0, Reply(b"first"))
        assert gate.acquire(timeout=60)
        return [Reply(b"last")]

    made = batcher(run)
    stream = await made.submit(call("a"))

    async def read():
        return [piece async for piece in stream]

    reader = asyncio.ensure_future(read())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.wait([reader])
    await stream.aclose()
    gate.release()
    await made.close()


# A handler that hangs


@asynchronous
async def test_a_hanging_handler_is_given_up_told_and_ignored(caplog):
    gate, model = threading.Event(), Model()

    def stuck_in_here(calls, emit):
        model.batches.append(texts(calls))
        if "stream" in texts(calls):
            emit(1, Reply(b"piece"))
        gate.wait(60)
        return [Reply(b"too late")] * len(calls)

    hung = []
    made = batcher(
        stuck_in_here,
        max_batch_size=2,
        response_timeout=0.5,
        queue_size=10,
        on_hung=lambda why: hung.append(made.pending),
    )
    running = submitted(made, "a", "stream")
    await until(lambda: model.batches)
    waiting = submitted(made, "b", "c", "d")
    with pytest.raises(WorkerDied) as caught:
        await running[0]
    assert caught.value.detail == "the handler gave no answer within response_timeout (0.5 s)"
    stream = await running[1]
    assert await stream.__aiter__().__anext__() == b"piece"
    with pytest.raises(WorkerDied):
        await stream.__aiter__().__anext__()
    for row in waiting:
        with pytest.raises(Loading) as refused:
            await row
        assert refused.value.detail == "its replica hangs and is being replaced"
    with pytest.raises(Loading):
        await made.submit(call("e"))
    assert hung == [0]
    assert "stuck_in_here" in caplog.text
    gate.set()
    await made.close()
    await asyncio.sleep(0.01)
    assert hung == [0]


@asynchronous
async def test_the_watch_follows_the_batch_that_runs_not_the_one_it_was_set_for():
    clock, model = Clock(), Model(held=True)
    hung = []
    made = batcher(model.run, response_timeout=10, clock=clock, timer=clock.timer, on_hung=lambda why: hung.append(1))
    rows = submitted(made, "a", "b")
    await model.began.get()
    clock.move(9)
    model.let()
    await rows[0]
    await model.began.get()
    clock.move(9)  # 18 s since the watch was set, 9 since this batch began
    assert hung == []
    clock.move(1)
    assert hung == [1]
    with pytest.raises(WorkerDied):
        await rows[1]
    model.let()
    await made.close()


@pytest.mark.parametrize("timeout", [0, -1])
def test_without_a_response_timeout_nothing_is_watched(timeout):
    @asynchronous
    async def none():
        clock, model = Clock(), Model(held=True)
        made = batcher(model.run, response_timeout=timeout, clock=clock, timer=clock.timer)
        row = submitted(made, "a")
        await model.began.get()
        assert clock.timers == []
        model.let()
        assert (await row[0]).body == b"a"
        await made.close()

    none()


# The end, and the figures


@asynchronous
async def test_close_answers_what_was_taken_and_refuses_more():
    model = Model(held=True)
    made = batcher(model.run, max_batch_size=4, max_batch_delay=60_000)
    rows = submitted(made, *"abcdef")
    await until(lambda: len(model.batches) == 1)
    closing = asyncio.ensure_future(made.close())
    await asyncio.sleep(0)
    with pytest.raises(Loading) as caught:
        await made.submit(call("g"))
    assert "stopping" in caught.value.detail
    model.let(2)
    assert bodies(await asyncio.gather(*rows)) == list("abcdef")
    await closing
    await made.close()


@asynchronous
async def test_answers_of_a_long_batch_leave_when_the_next_has_begun_and_the_end_waits_for_them():
    made, model, _ = await paced(1.0)
    told = []
    rows = submitted(made, *"ab")
    for row, name in zip(rows, "ab"):
        row.add_done_callback(lambda _, name=name: told.append(name))
    await model.began.get()
    model.let(2)  # b has nothing behind it and is told at once, before a's moment is over
    await made.close()
    assert [row.done() for row in rows] == [True, True]
    assert bodies(await asyncio.gather(*rows)) == ["a", "b"]
    assert told == ["b", "a"]


@asynchronous
async def test_timings_are_on_every_reply_and_in_the_meters():
    clock, meters = Clock(), Meters()
    model = Model(held=True)
    made = batcher(model.run, max_batch_size=2, response_timeout=0, clock=clock, timer=clock.timer, meters=meters)
    rows = submitted(made, "a")
    await model.began.get()
    rows += submitted(made, "b", "c")
    await until(lambda: made.pending == 2)
    clock.move(0.5)
    model.let()
    await model.began.get()
    clock.move(0.25)
    model.let()
    a, b, c = await asyncio.gather(*rows)
    assert (a.timings.queue, a.timings.inference, a.timings.batch_size) == (0, 0.5, 1)
    assert (b.timings.queue, b.timings.inference, b.timings.batch_size) == (0.5, 0.25, 2)
    await made.close()
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
        Call("m", inputs=(Input("body", json.dumps([i, -i, i % 3, 1]).encode(), "application/json"),)) for i in range(8)
    ]

    @asynchronous
    async def both():
        made = Batcher(runner.run, REF, Meters(), max_batch_size=8)
        await asyncio.wrap_future(made.author.submit(runner.load))
        together = await gathered(made, *rows)
        alone = [await made.submit(row) for row in rows]
        assert {reply.timings.batch_size for reply in together} == {8}
        assert {reply.timings.batch_size for reply in alone} == {1}
        assert bodies(together) == bodies(alone)
        assert len(set(bodies(alone))) == 8
        await made.close()

    both()
