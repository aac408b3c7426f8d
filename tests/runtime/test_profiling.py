"""What ``profile:`` writes: a trace that opens, of the first batches after warm-up, and nothing
afterwards.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve_app.domain.model import ModelSpec
from serve_app.domain.request import InferenceRequest, InputPart
from serve_app.errors import HandlerFailed, StartFailed
from serve_app.runtime.runner import Runner
from serve_app.settings import RuntimeSettings

pytestmark = pytest.mark.integration


LINEAR = """
import torch
from handlers.base import BaseHandler

class Linear(BaseHandler):
    def initialize(self, context):
        self.context, self.device, self.model = context, torch.device("cpu"), torch.nn.Linear(2, 3)

    def inference(self, data):
        if data[0, 0] < 0:
            raise ValueError("negative")
        return super().inference(data)
"""
ENGINE = """
import asyncio
import torch

class Engine:
    async def initialize(self, context):
        self.model = torch.nn.Linear(2, 3)

    async def handle(self, data, context):
        await asyncio.sleep(0)
        with torch.inference_mode():
            return [self.model(torch.tensor(row["body"])).tolist() for row in data]
"""


@pytest.fixture
def runner(tmp_path: Path, own_process: None) -> Callable[..., Runner]:
    """``runner(code, **config)``: loaded and warm, its traces in ``tmp_path/logs/profiles``."""

    def make(code: str, **config: Any) -> Runner:
        archive = tmp_path / "archive"
        (archive / "samples").mkdir(parents=True, exist_ok=True)
        (archive / "handler.py").write_text(code)
        (archive / "samples" / "one.json").write_text("[0.5, 0.5]")
        manifest = {"model": {"modelName": "m", "modelVersion": "1.0", "handler": "handler.py"}}
        spec = ModelSpec("m", "1.0", url="m.mar", digest="", archive="", handler="handler.py", config=config)
        made = Runner(spec, archive, manifest, RuntimeSettings(), profiles=tmp_path / "logs" / "profiles")
        made.load()
        made.warm_up()
        return made

    return make


def make_request(*numbers: float) -> InferenceRequest:
    return InferenceRequest(
        "m", inputs=(InputPart("body", json.dumps(numbers).encode(), "application/json"),), request_id="id"
    )


def ask(runner: Runner, *numbers: float) -> Any:
    [answer] = runner.run([make_request(*numbers)], lambda *_: None)
    return answer


def format_traceback(directory: Path, count: int = 1) -> dict[str, Any]:
    """Return the newest of ``count`` traces, once they are written."""
    deadline = time.monotonic() + 30
    while len(found := sorted(directory.glob("logs/profiles/[!.]*"))) < count:
        assert time.monotonic() < deadline, list(directory.rglob("*"))
        time.sleep(0.01)
    assert len(found) == count
    with gzip.open(max(found, key=lambda file: file.stat().st_mtime_ns)) as file:
        return json.load(file)


def named(format_traceback: dict[str, Any], *names: str) -> list[str]:
    """Which of these spans the trace has, in their order."""
    spans = [
        event
        for event in format_traceback["traceEvents"]
        if event.get("ph") == "X" and event["name"] in names
    ]
    assert all({"ts", "dur", "pid", "tid", "cat"} <= set(span) for span in spans)
    return [span["name"] for span in sorted(spans, key=lambda span: span["ts"])]


def test_the_first_batches_after_warm_up_are_traced(
    runner: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    made = runner(LINEAR, profile={"active": 2})
    assert not list(tmp_path.glob("logs/profiles/*")), "a sample is no batch"
    ask(made, 1, 2)
    assert isinstance(ask(made, -1, 2), HandlerFailed)
    ask(made, 1, 2)
    written = format_traceback(tmp_path)
    stages = ["preprocess", "inference", "postprocess"]
    assert named(written, "batch 1", "batch 2", "batch 3", *stages) == [
        "batch 1",
        *stages,
        "batch 2",
        *stages[:2],
    ]
    assert named(written, "aten::linear") == ["aten::linear"], "the second batch failed before it"
    [file] = tmp_path.glob("logs/profiles/*")
    assert file.name.startswith("m--1.0-") and file.name.endswith(".json.gz")
    deadline = time.monotonic() + 60
    while f"The trace of 2 batches is in {file}" not in caplog.text:
        assert time.monotonic() < deadline, caplog.text
        time.sleep(0.01)
    for _ in range(4):
        ask(made, 1, 2)
    assert list(tmp_path.glob("logs/profiles/*")) == [file]


def test_an_asynchronous_handler(runner: Any, tmp_path: Path) -> None:
    made = runner(ENGINE, profile=True)

    async def together() -> list[Any]:
        return await asyncio.gather(
            *(made.run_async([make_request(1.0, 2.0)], lambda *_: None) for _ in range(5))
        )

    answers = made.loop.run_until_complete(together())
    made.loop.close()
    assert all(len(json.loads(reply.body)) == 3 for [reply] in answers)
    assert "aten::linear" in named(format_traceback(tmp_path), "aten::linear")


def test_the_newest_ten_traces_are_kept(runner: Any, tmp_path: Path) -> None:
    directory = tmp_path / "logs" / "profiles"
    directory.mkdir(parents=True)
    old = [directory / f"m--1.0-2020010{day}T000000-{day}.json.gz" for day in range(1, 10)]
    others = directory / "other--1.0-20200101T000000-1.json.gz"
    for file in [*old, directory / "m--1.0-20200110T000000-1.json.gz", others]:
        file.touch()
    ask(runner(LINEAR, profile={"active": 1}), 1, 2)
    deadline = time.monotonic() + 30
    while old[0].exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(list(directory.glob("m--*"))) == 10 and others.exists()


def test_without_it_nothing_stands_between(runner: Any, tmp_path: Path) -> None:
    made = runner(LINEAR)
    ask(made, 1, 2)
    assert not (tmp_path / "logs").exists()


def test_where_torchserve_s_variable_traces_already(
    runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ENABLE_TORCH_PROFILER", "TRUE")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = runner(LINEAR, profile=True)
    assert "ENABLE_TORCH_PROFILER traces each batch" in caplog.text
    for _ in range(3):
        ask(made, 1, 2)
    assert not (tmp_path / "logs").exists()
    assert len(list((tmp_path / "pytorch_profiler" / "m").iterdir())) > 3


@pytest.mark.parametrize(
    "requested", ["yes", 5, {"active": 0}, {"active": 101}, {"activ": 3}, {"active": True}]
)
def test_invalid_options(runner: Any, requested: Any) -> None:
    with pytest.raises(StartFailed) as refused:
        runner(LINEAR, profile=requested)
    assert "must be true, false or {active: BATCHES}, from 1 to 100" in refused.value.detail
