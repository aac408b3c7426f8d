"""Rows of similar length run together, and nobody waits for ever."""

import asyncio
import threading
import time

import pytest

from serve_app.domain.model import ModelRef
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart
from serve_app.runtime.batching.batcher import Batcher
from serve_app.runtime.batching.length_bucketing import MAX_PADDING, select_similar
from serve_app.runtime.runner import Runner
from serve_app.telemetry.metrics import Meters

REF = ModelRef("m", "1.0")


def lengths(first, others, size):
    """Return the rows that ``select_similar`` takes, as their positions."""
    taken = select_similar(
        (first, (first, -1)), [(length, (length, i)) for i, length in enumerate(others)], size
    )
    return [length for length, _ in taken], [i for _, i in taken]


def test_the_nearest_are_taken_whichever_side_they_are_on():
    assert lengths(100, [10, 500, 96, 104, 90, 300], 4)[0] == [100, 104, 96, 90]


def test_of_equal_rows_those_in_front_are_taken():
    assert lengths(50, [50, 49, 50, 49, 50], 3)[1] == [-1, 0, 2]
    assert lengths(50, [49, 49, 49], 3)[1] == [-1, 0, 1]


def test_a_batch_ends_where_padding_would_be_too_much():
    assert lengths(100, [8, 9, 10, 11], 8)[0] == [100]
    assert lengths(8, [100, 110, 120], 8)[0] == [8]
    for first in (8, 40, 128):
        rows, _ = lengths(first, list(range(8, 128, 5)), 16)
        assert rows[0] == first and 1 < len(rows) <= 16
        assert 1 - sum(rows) / (len(rows) * max(rows)) <= MAX_PADDING


def test_rows_without_a_length_go_together():
    assert lengths(0, [0, 0], 8)[0] == [0, 0, 0]


def row(length, kind="predict", **fields):
    return InferenceRequest(
        "m", inputs=(InputPart("body", b"x" * length, "text/plain"),), kind=kind, **fields
    )


class Model:
    """Answers each row with its length, a batch for each ``let``; ``batches`` are the lengths that ran
    together.
    """

    def __init__(self):
        self.batches = []
        self._turn = threading.Semaphore(0)
        self._loop = asyncio.get_running_loop()
        self._began = asyncio.Queue()

    def run(self, requests, emit, prepared=()):
        sizes = [len(request.inputs[0].value) for request in requests]
        self._loop.call_soon_threadsafe(self._began.put_nowait, sizes)
        assert self._turn.acquire(timeout=60)
        self.batches.append(sizes)
        return [InferenceResponse(str(size).encode()) for size in sizes]

    async def began(self):
        return await asyncio.wait_for(self._began.get(), 60)

    def let(self, batches=100):
        self._turn.release(batches)


async def waiting(made, model, requests):
    """Return the pending responses of ``requests``, which wait behind a running row."""
    first = asyncio.ensure_future(made.infer(row(1000)))
    await model.began()
    rest = [asyncio.ensure_future(made.infer(request)) for request in requests]
    await asyncio.sleep(0)
    assert made.pending == len(requests)
    return [first, *rest]


async def batches(requests, **settings):
    """Which lengths run together where ``requests`` wait behind a running row."""
    model = Model()
    made = Batcher(model.run, REF, Meters(), **{"bucket_by_length": True, "max_batch_size": 4, **settings})
    answers = await waiting(made, model, requests)
    model.let()
    reported = await asyncio.wait_for(asyncio.gather(*answers), 60)
    assert [reply.body for reply in reported[1:]] == [
        str(len(request.inputs[0].value)).encode() for request in requests
    ]
    await made.close()
    return model.batches[1:]


MIXED = [10, 200, 11, 210, 205, 12, 9, 190, 100]


def test_similar_rows_run_together_and_the_longest_waiting_is_next():
    found = asyncio.run(batches([row(length) for length in MIXED]))
    assert [sorted(batch) for batch in found] == [[9, 10, 11, 12], [190, 200, 205, 210], [100]]


def test_without_it_rows_run_as_they_came():
    assert asyncio.run(batches([row(length) for length in MIXED], bucket_by_length=False)) == [
        MIXED[:4],
        MIXED[4:8],
        MIXED[8:],
    ]


def test_a_row_that_fits_nobody_is_not_passed_over_when_it_is_next():
    found = asyncio.run(batches([row(900), *(row(10) for _ in range(8))]))
    assert found == [[900], [10] * 4, [10] * 4]


def test_a_batch_has_one_kind_of_call():
    requests = [row(10), row(10, "explain"), row(200), row(10, "explain"), row(10)]
    assert asyncio.run(batches(requests)) == [[10, 10], [10, 10], [200]]


def test_the_most_urgent_row_is_in_the_next_batch():
    requests = [row(10), row(11), row(300, priority="high"), row(310, priority="low"), row(12)]
    assert asyncio.run(batches(requests)) == [[300, 310], [10, 11, 12]]


def test_shadows_run_when_nobody_else_waits():
    requests = [row(200, priority="shadow"), row(10), row(11, priority="shadow"), row(12)]

    async def case():
        model = Model()
        made = Batcher(model.run, REF, Meters(), bucket_by_length=True, max_batch_size=4)
        first = asyncio.ensure_future(made.infer(row(1000)))
        await model.began()
        rest = [asyncio.ensure_future(made.infer(request)) for request in requests]
        await asyncio.sleep(0)
        model.let()
        await asyncio.wait_for(asyncio.gather(first, *rest), 60)
        await made.close()
        return model.batches[1:]

    assert asyncio.run(case()) == [[10, 12], [200, 11]]


def test_the_next_batch_is_chosen_when_it_can_run_but_for_a_full_window():
    async def case():
        model = Model()
        made = Batcher(model.run, REF, Meters(), bucket_by_length=True, max_batch_size=2)
        answers = await waiting(
            made, model, [row(10), *(row(300) for _ in range(14))]
        )  # one short of the window
        answers.append(
            asyncio.ensure_future(made.infer(row(11)))
        )  # the window is full: a batch lies ready now
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        answers.append(asyncio.ensure_future(made.infer(row(10))))  # too late for it
        await asyncio.sleep(0)
        model.let()
        await asyncio.wait_for(asyncio.gather(*answers), 60)
        await made.close()
        return model.batches

    ran = asyncio.run(case())
    assert ran[1] == [10, 11] and ran[-1] == [10]

    async def late():
        model = Model()
        made = Batcher(model.run, REF, Meters(), bucket_by_length=True, max_batch_size=2)
        answers = await waiting(made, model, [row(10), row(300), row(300)])
        answers.append(
            asyncio.ensure_future(made.infer(row(10)))
        )  # two batches' rows wait, and it is not too late
        await asyncio.sleep(0)
        model.let()
        await asyncio.wait_for(asyncio.gather(*answers), 60)
        await made.close()
        return model.batches[1:]

    assert asyncio.run(late()) == [[10, 10], [300, 300]]


def test_who_left_and_whose_deadline_passed_is_in_no_batch():
    async def case():
        model = Model()
        made = Batcher(model.run, REF, Meters(), bucket_by_length=True, max_batch_size=4)
        first, gone, stays = await waiting(made, model, [row(10), row(12)])
        late = asyncio.ensure_future(made.infer(row(11, deadline=time.time() + 0.5)))
        gone.cancel()
        await asyncio.wait({late}, timeout=60)
        assert type(late.exception()).__name__ == "DeadlineExceeded"
        model.let()
        await asyncio.wait_for(asyncio.gather(first, stays), 60)
        await made.close()
        return model.batches[1:]

    assert asyncio.run(case()) == [[12]]


def test_a_new_batch_size_moves_the_window():
    async def case():
        model = Model()
        made = Batcher(model.run, REF, Meters(), bucket_by_length=True, max_batch_size=1)
        answers = await waiting(made, model, [row(10), row(300), row(11), row(310)])
        made.configure(max_batch_size=2)
        model.let()
        await asyncio.wait_for(asyncio.gather(*answers), 60)
        await made.close()
        return model.batches[1:]

    assert asyncio.run(case()) == [[10, 11], [300, 310]]


HANDLER = """
from handlers.context import Row

class Words:
    def length(self, row: Row):
        return len(row["body"].split())

    def handle(self, data, context):
        longest = max(len(row["body"].split()) for row in data)
        return [f"{len(row['body'].split())} of {longest}" for row in data]
"""


def words(count, letters=1):
    return InferenceRequest(
        "m", inputs=(InputPart("body", " ".join(["w" * letters] * count).encode(), "text/plain"),)
    )


def test_a_handler_measures_its_rows_in_other_threads(make_runner):
    runner = make_runner(HANDLER, bucket_by_length=True)
    runner.load()
    assert runner.prepare is not None
    assert runner.prepare(words(3)).result(60).length == 3
    assert (
        runner.prepare(InferenceRequest("m", inputs=(InputPart("body", b"[1]", "application/json"),)))
        .result(60)
        .length
        is None
    )

    async def case():
        running, held = threading.Event(), threading.Event()

        def run(requests, emit, prepared):
            running.set()
            assert held.wait(60)
            return runner.run(requests, emit, prepared)

        made = Batcher(run, REF, Meters(), prepare=runner.prepare, bucket_by_length=True, max_batch_size=2)
        answers = [asyncio.ensure_future(made.infer(words(1)))]
        await asyncio.to_thread(running.wait, 60)
        # In bytes the first is like the third; in words, like the second.
        answers += [
            asyncio.ensure_future(made.infer(request)) for request in (words(9, 10), words(10), words(2, 50))
        ]
        await asyncio.sleep(0)
        while any(one.measured_length is None for one in made._queue):
            await asyncio.sleep(0)
        held.set()
        reported = [reply.body for reply in await asyncio.wait_for(asyncio.gather(*answers), 60)]
        await made.close()
        return reported

    assert asyncio.run(case()) == [b"1 of 1", b"9 of 10", b"10 of 10", b"2 of 2"]


@pytest.mark.parametrize("requested", [False, True])
def test_only_who_asks_for_buckets_is_measured(make_runner, requested):
    runner: Runner = make_runner(HANDLER, bucket_by_length=requested)
    runner.load()
    assert (runner.prepare is not None) is requested
