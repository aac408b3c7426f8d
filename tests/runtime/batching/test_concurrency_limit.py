"""No more calls at once than a version's limit, whichever way they come."""

import asyncio
import threading

import pytest

from serve_app.domain.model import ModelRef
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart, ResponseStream
from serve_app.errors import QuotaExceeded
from serve_app.runtime.batching.admission_control import ConcurrencyLimit
from serve_app.runtime.batching.batcher import Batcher
from serve_app.telemetry.metrics import Meters

REF = ModelRef("m", "1.0")


def make_request(text, **fields):
    return InferenceRequest("m", inputs=(InputPart("body", text.encode()),), **fields)


class Model:
    """Holds every batch until it is let; ``s…`` streams two pieces and its answer."""

    def __init__(self):
        self.turn = threading.Semaphore(0)

    def run(self, requests, emit):
        assert self.turn.acquire(timeout=60)
        for i, each in enumerate(requests):
            if each.inputs[0].value.startswith(b"s"):
                emit(i, InferenceResponse(b"piece"))
        return [InferenceResponse(each.inputs[0].value) for each in requests]


@pytest.fixture
def served():
    """``served(scenario, limit, replicas)`` runs scenario(quota, model), and ends what it began."""

    def run(scenario, limit, replicas=1):
        async def main():
            model = Model()
            batcher = Batcher(model.run, REF, Meters(), max_batch_size=1)
            quota = ConcurrencyLimit(batcher, REF)
            quota.set_limit(limit, replicas)
            await scenario(quota, model)
            model.turn.release(100)
            await batcher.close()

        asyncio.run(asyncio.wait_for(main(), 60))

    return run


async def refused(quota):
    with pytest.raises(QuotaExceeded) as caught:
        await quota.infer(make_request("x"))
    return caught.value


def test_the_share_is_full_until_a_call_has_its_answer(served):
    async def scenario(quota, model):
        tasks = [asyncio.ensure_future(quota.infer(make_request(t))) for t in "ab"]
        await asyncio.sleep(0)
        error = await refused(quota)
        assert (error.args, error.reason, error.retry_after) == (("m", "1.0", 5), "quota_exceeded", 1)
        with pytest.raises(QuotaExceeded):
            quota.submit(make_request("x"), pytest.fail)
        model.turn.release()
        await tasks[0]
        cancel = quota.submit(make_request("c"), pytest.fail)
        await refused(quota)
        cancel()  # its caller left
        cancel()
        await asyncio.sleep(0)
        tasks.append(asyncio.ensure_future(quota.infer(make_request("d"))))
        await asyncio.sleep(0)
        await refused(quota)
        model.turn.release(3)
        assert [(await task).body for task in tasks] == [b"a", b"b", b"d"]

    served(scenario, limit=5, replicas=2)


def test_every_replica_lets_at_least_one_through(served):
    async def scenario(quota, model):
        task = asyncio.ensure_future(quota.infer(make_request("a")))
        await asyncio.sleep(0)
        await refused(quota)
        quota.set_limit(0, 8)  # no limit any more
        more = asyncio.ensure_future(quota.infer(make_request("b")))
        model.turn.release(2)
        assert [(await each).body for each in (task, more)] == [b"a", b"b"]

    served(scenario, limit=3, replicas=8)


@pytest.mark.parametrize("way", ["infer", "infer_all"])
@pytest.mark.parametrize("ends", ["read", "closed"])
def test_a_stream_counts_until_it_ends(served, way, ends):
    async def scenario(quota, model):
        model.turn.release()
        if way == "infer_all":
            [stream] = await quota.infer_all([make_request("s")])
        else:
            stream = await quota.infer(make_request("s"))
        assert isinstance(stream, ResponseStream)
        await refused(quota)
        if ends == "read":
            assert [chunk async for chunk in stream] == [b"piece", b"s"]
        else:
            await stream.aclose()
            await stream.aclose()
        model.turn.release()
        assert (await quota.infer(make_request("a"))).body == b"a"

    served(scenario, limit=1)


def test_of_rows_that_came_together_those_over_the_limit_are_refused_alone(served):
    async def scenario(quota, model):
        model.turn.release(3)
        rows = [
            make_request("a"),
            make_request("b"),
            make_request("mirror", priority="shadow"),
            make_request("c"),
        ]
        a, b, mirror, c = await quota.infer_all(rows)
        assert (a.body, b.body, mirror.body) == (b"a", b"b", b"mirror")
        assert isinstance(c, QuotaExceeded)
        task = asyncio.ensure_future(quota.infer_all([make_request("a"), make_request("b")]))
        await asyncio.sleep(0)
        await refused(quota)
        task.cancel()
        await asyncio.wait([task])
        model.turn.release(3)
        assert (await quota.infer(make_request("a"))).body == b"a"

    served(scenario, limit=2)
