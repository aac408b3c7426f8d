"""Rows that are prepared in other threads while the model is busy: a real runner behind a real batcher."""

import asyncio
import json

import pytest

from serve_app.domain.model import ModelRef
from serve_app.domain.request import InferenceRequest, InputPart
from serve_app.errors import HandlerFailed, HandlerRejected, QueueFull
from serve_app.runtime.batching.batcher import Batcher
from serve_app.telemetry.metrics import Meters

# `prepare_row` of a row begins only when the test's file says so; `handle` tells who prepared which row.
HANDLER = """
import threading
from torchrelay import PredictionException

class Doubling:
    def initialize(self, context):
        self.gate = threading.Event()
        self.busy = threading.Event()
        self.prepared_while_busy = threading.Event()

    def prepare_row(self, row):
        number = row["body"]
        if self.busy.is_set():
            self.prepared_while_busy.set()
        if number == "wrong":
            raise PredictionException("not a number", 400)
        if number == "broken":
            raise ValueError("broken")
        return threading.current_thread().name, number * 2

    def handle(self, data, context):
        if data[0]["body"] == "hold":
            self.busy.set()
            assert self.prepared_while_busy.wait(60)
            return ["held"] * len(data)
        answers = []
        for row in data:
            made = row.prepared
            if made is None:
                try:
                    made = self.prepare_row(row)
                except Exception as error:
                    made = error
            if isinstance(made, PredictionException):
                answers.append(made)
                continue
            if isinstance(made, Exception):
                raise made
            thread, number = made
            answers.append({"by": thread.partition("_")[0], "number": number, "row": dict(row)})
        return answers
"""


def make_request(value, **fields):
    return InferenceRequest(
        "m", inputs=(InputPart("body", json.dumps(value).encode(), "application/json"),), **fields
    )


@pytest.fixture
def served(make_runner):
    def make(**settings):
        runner = make_runner(HANDLER)
        runner.load()
        made = Batcher(runner.run, ModelRef("m", "1.0"), Meters(), prepare=runner.prepare, **settings)
        made.handler = runner._handle.__self__
        return made

    return make


async def hold(made):
    """Run until another row was prepared beside this batch."""
    held = asyncio.ensure_future(made.infer(make_request("hold")))
    assert await asyncio.to_thread(made.handler.busy.wait, 60)
    return held


def answer(reply):
    return json.loads(reply.body)


def test_a_handler_that_prepares_nothing_has_no_threads_for_it(make_runner):
    runner = make_runner("def handle(data, context):\n    return data")
    runner.load()
    assert runner.prepare is None


def test_rows_are_prepared_while_the_batch_before_them_runs(served):
    async def scenario():
        made = served(max_batch_size=2)
        holding = await hold(made)
        behind = [asyncio.ensure_future(made.infer(make_request(number))) for number in (1, 2, 3)]
        assert (await holding).body == b"held"
        assert [answer(reply)["number"] for reply in await asyncio.gather(*behind)] == [2, 4, 6]
        assert answer(behind[0].result())["by"] == "prepare"
        assert answer(behind[0].result())["row"] == {"body": 1}

    asyncio.run(scenario())


def test_a_row_that_cannot_be_prepared_fails_alone(served):
    async def scenario():
        made = served(max_batch_size=4)
        rows = [made.infer(make_request(value)) for value in (1, "wrong", 3, "broken")]
        first, wrong, third, broken = await asyncio.gather(*rows, return_exceptions=True)
        assert answer(first)["number"] == 2 and answer(third)["number"] == 6
        assert isinstance(wrong, HandlerRejected) and wrong.code == 400
        assert isinstance(broken, HandlerFailed) and "ValueError: broken" in broken.detail

    asyncio.run(scenario())


def test_no_more_rows_are_prepared_than_the_next_two_batches_take(served):
    async def scenario():
        future = []
        made = served(max_batch_size=2, queue_size=50)
        prepare = made._prepare
        made._prepare = lambda request: future.append(request) or prepare(request)
        rows = [asyncio.ensure_future(made.infer(make_request(number))) for number in range(20)]
        await asyncio.sleep(0)
        assert len(future) == 4
        assert [answer(reply)["number"] for reply in await asyncio.gather(*rows)] == [
            2 * n for n in range(20)
        ]
        assert len(future) <= 20

    asyncio.run(scenario())


def test_a_caller_that_leaves_takes_its_row_out(served):
    async def scenario():
        made = served(max_batch_size=1)
        holding = await hold(made)
        leaving = asyncio.ensure_future(made.infer(make_request(1)))
        await asyncio.sleep(0)
        leaving.cancel()
        staying = asyncio.ensure_future(made.infer(make_request(2)))
        await holding
        assert answer(await staying)["number"] == 4
        assert made.pending == 0

    asyncio.run(scenario())


def test_with_tickets_a_busy_model_takes_no_row(served):
    async def scenario():
        made = served(max_batch_size=1, use_job_ticket=True)
        holding = await hold(made)
        with pytest.raises(QueueFull, match="no worker"):
            await made.infer(make_request(1))
        made._prepare(make_request(1))  # lets the held batch go
        await holding
        assert answer(await made.infer(make_request(1)))["number"] == 2

    asyncio.run(scenario())
