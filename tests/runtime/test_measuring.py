"""What a handler measures while it runs, and what is measured of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from handlers import metrics
from handlers.metrics import MetricCache, updates
from handlers.metrics.metric import buffer_update
from serve_app.domain.model import ModelSpec
from serve_app.domain.request import InferenceRequest, InputPart
from serve_app.runtime.runner import Runner
from serve_app.settings import RuntimeSettings

pytestmark = pytest.mark.integration


COUNTS = """
class Handler:
    def initialize(self, context):
        context.metrics.add_counter("Loaded", 1)

    {stage} handle(self, data, context):
        {wait}
        for i, row in enumerate(data):
            context.metrics.add_counter("Rows", 1, i)
        if data[0]["body"] == "short":
            return []
        return ["ok"] * len(data)
"""
PLAIN = COUNTS.format(stage="def", wait="pass")
ASYNCHRONOUS = "import asyncio\n" + COUNTS.format(stage="async def", wait="await asyncio.sleep(0.01)")


@pytest.fixture
def measured_length(tmp_path: Path, own_process: None) -> Iterator[Callable[..., Runner]]:
    updates.clear()
    metrics.set_sink(buffer_update)

    def make(code: str, sample: str = "") -> Runner:
        (tmp_path / "handler.py").write_text(code)
        if sample:
            (tmp_path / "samples").mkdir()
            (tmp_path / "samples" / "one.txt").write_text(sample)
        manifest = {"model": {"modelName": "m", "modelVersion": "1.0", "handler": "handler.py"}}
        spec = ModelSpec("m", "1.0", url="m.mar", digest="", archive="", batch_size=2)
        runner = Runner(spec, tmp_path, manifest, RuntimeSettings(), metrics=MetricCache("m"))
        runner.load()
        runner.warm_up()
        return runner

    yield make
    updates.clear()


def make_request(request_id: str, word: str = "word") -> InferenceRequest:
    return InferenceRequest(
        "m", inputs=(InputPart("body", word.encode(), "text/plain"),), request_id=request_id
    )


def result() -> list[tuple[str, float, str]]:
    return [(metric.metric_name, value, request_id) for metric, value, _, request_id in updates]


def nowhere(index: int, chunk: object) -> None:
    raise AssertionError("nothing streams here")


def test_each_row_is_measured_under_its_request_and_the_batch_under_all(
    measured_length: Callable[..., Runner],
) -> None:
    runner = measured_length(PLAIN)
    runner.run([make_request("a"), make_request("b")], nowhere)
    loaded, *rows, whole = result()
    assert loaded[:2] == ("Loaded", 1.0) and len(loaded[2]) == 36
    assert rows == [("Rows", 1.0, "a"), ("Rows", 1.0, "b")]
    assert whole[::2] == ("PredictionTime", "a,b") and 0 <= whole[1] < 1000


def test_a_batch_that_failed_has_no_prediction_time(measured_length: Callable[..., Runner]) -> None:
    runner = measured_length(PLAIN)
    runner.run([make_request("a", "short")], nowhere)
    assert [name for name, _, _ in result()] == ["Loaded", "Rows"]


def test_warming_up_measures_for_nobody(measured_length: Callable[..., Runner]) -> None:
    runner = measured_length(PLAIN, sample="word")
    assert [name for name, _, _ in result()] == ["Loaded"]
    runner.run([make_request("a")], nowhere)
    assert [name for name, _, _ in result()] == ["Loaded", "Rows", "PredictionTime"]


def test_calls_that_run_at_once_keep_their_own_ids(measured_length: Callable[..., Runner]) -> None:
    runner = measured_length(ASYNCHRONOUS)
    assert runner.loop is not None

    async def both() -> None:
        await asyncio.gather(*(runner.run_async([make_request(name)], nowhere) for name in ("a", "b")))

    runner.loop.run_until_complete(both())
    runner.loop.close()
    assert sorted(request_id for name, _, request_id in result() if name == "Rows") == ["a", "b"]
    times = [(request_id, value) for name, value, request_id in result() if name == "PredictionTime"]
    assert sorted(request_id for request_id, _ in times) == ["a", "b"] and all(
        value >= 10 for _, value in times
    )
