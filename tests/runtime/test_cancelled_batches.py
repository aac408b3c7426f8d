"""Batches whose callers have all left: the handler reads ``cancelled``, and returns early."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve_app.domain.request import InferenceRequest, InputPart, ResponseStream
from serve_app.errors import DeadlineExceeded
from serve_app.runtime.batching.batcher import Batcher
from serve_app.telemetry.metrics import Meters
from tests.support.batcher_fakes import REF, Clock, run_in_event_loop, until

pytestmark = pytest.mark.integration

# Writes which rows have left whenever that changes, and returns once all have, or ``gate`` exists.
PATIENT = """
import json, os, time
def handle(data, context):
    if data is None:
        return None
    [folder] = {row["body"]["folder"] for row in data}
    if data[0]["body"].get("streams"):
        context.emit(0, "first ")
    before = None
    while True:
        cancelled = context.cancelled  # before the rows, which may leave meanwhile
        seen = [[context.row(i).cancelled or cancelled for i in range(len(data))], cancelled]
        if seen != before:
            before = seen
            with open(f"{folder}/seen", "a") as file:
                file.write(json.dumps(seen) + "\\n")
        if cancelled or os.path.exists(f"{folder}/gate"):
            return ["whole"] * len(data)
        time.sleep(0.001)
"""


class Handler:
    """A handler behind a batcher, and the states of its callers that it has recorded."""

    def __init__(self, load_runner: Callable[..., Any], folder: Path) -> None:
        self._folder = folder
        self.clock = Clock()
        runner = load_runner(PATIENT)
        self.batcher = Batcher(
            runner.run,
            REF,
            Meters(),
            max_batch_size=4,
            response_timeout=0,
            clock=self.clock,
            timer=self.clock.timer,
        )

    def start(self, id: str, deadline: float | None = None, **options: Any) -> asyncio.Future[Any]:
        body = json.dumps({"folder": str(self._folder), **options}).encode()
        part = InputPart("body", body, "application/json")
        request = InferenceRequest("m", inputs=(part,), request_id=id, deadline=deadline)
        return asyncio.ensure_future(self.batcher.infer(request))

    @property
    def seen(self) -> list[Any]:
        with contextlib.suppress(FileNotFoundError):
            return [json.loads(line) for line in (self._folder / "seen").read_text().splitlines()]
        return []

    async def wait_until_seen(self, *left: bool) -> None:
        await until(lambda: self.seen and self.seen[-1][0] == list(left))

    def open_gate(self) -> None:
        (self._folder / "gate").touch()


@pytest.fixture
def handler(load_runner: Callable[..., Any], tmp_path: Path) -> Callable[[], Handler]:
    return lambda: Handler(load_runner, tmp_path)


def run(test: Callable[[], Any]) -> None:
    run_in_event_loop(test)()


def test_a_batch_is_cancelled_once_all_its_callers_have_left(handler: Callable[[], Handler]) -> None:
    async def main() -> None:
        served = handler()
        first, second = served.start("a"), served.start("b")
        await served.wait_until_seen(False, False)
        first.cancel()
        await served.wait_until_seen(True, False)
        second.cancel()
        await until(lambda: not served.batcher.ongoing and not served.batcher._in_flight)
        assert served.seen[0] == [[False, False], False]
        assert [[True, False], False] in served.seen
        assert served.seen[-1] == [[True, True], True]
        served.open_gate()
        assert (await served.start("c")).body == b"whole"
        await served.batcher.close()

    run(main)


def test_a_caller_whose_deadline_has_passed_has_left(handler: Callable[[], Handler]) -> None:
    async def main() -> None:
        served = handler()
        row = served.start("a", deadline=time.time() + 60)
        await served.wait_until_seen(False)
        served.clock.move(60)
        with pytest.raises(DeadlineExceeded):
            await row
        await served.wait_until_seen(True)
        await served.batcher.close()

    run(main)


def test_a_stream_that_is_read_keeps_its_batch_running(handler: Callable[[], Handler]) -> None:
    async def main() -> None:
        served = handler()
        response = await served.start("a", streams=True)
        assert isinstance(response, ResponseStream)
        assert await response.__aiter__().__anext__() == b"first "
        assert not any(left for _, left in served.seen)
        await response.aclose()
        await served.wait_until_seen(True)
        await served.batcher.close()

    run(main)


def test_an_early_return_does_not_shorten_the_estimate_of_a_batch(handler: Callable[[], Handler]) -> None:
    async def main() -> None:
        served = handler()
        only = served.start("a")
        await served.wait_until_seen(False)
        only.cancel()
        await served.wait_until_seen(True)
        await served.batcher.close()
        assert not served.batcher._latency_model.is_ready

    run(main)


def test_rows_that_are_refused_do_not_keep_a_batch_running(
    load_runner: Callable[..., Any],
) -> None:
    handler = """
def handle(data, context):
    return None if data is None else [str(context.cancelled)] * len(data)
"""
    signature = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1]}], "outputs": []}
    runner = load_runner(handler, config={"tensors": True, "signature": signature})

    class Output:
        def __call__(self, index: int, chunk: Any) -> None:
            raise AssertionError("nothing streams here")

        def has_left(self, index: int) -> bool:
            return index == 1

    wrong, right = (InputPart("body", body, "application/json") for body in (b"{", b'{"x": [1]}'))
    requests = [InferenceRequest("m", inputs=(part,)) for part in (wrong, right)]
    assert runner.run(requests, Output())[1].body == b"True"
    assert runner.run(requests, lambda index, chunk: None)[1].body == b"False"
