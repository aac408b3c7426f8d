"""The handlers of the guides and the recipes of examples/02_custom_handler run."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import handlers
from handlers.context import Context, Row
from handlers.envelopes import ENVELOPES
from handlers.metrics import MetricCache, updates

ROOT = Path(__file__).parents[2]
GUIDES = "".join(
    (ROOT / f"docs/guides/{name}.md").read_text() for name in ("handlers", "sequences", "sharding")
)
RECIPES = ROOT / "examples/02_custom_handler/recipes"
SOURCES = {
    **dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", GUIDES, re.DOTALL)),
    **{path.stem: path.read_text() for path in RECIPES.glob("*.py")},
}


def test_the_guide_names_every_handler() -> None:
    names = {*handlers.HANDLERS} - {"vllm_handler", "trt_llm_handler"}  # in the guide of the migration
    assert names <= set(re.findall(r"\w+", GUIDES)), names - set(re.findall(r"\w+", GUIDES))
    assert set(ENVELOPES) <= set(re.findall(r"\w+", GUIDES))


MODEL = """
import torch

class Net(torch.nn.Module):
    def forward(self, x):
        return x if x.dim() == 2 else x.mean(dim=(2, 3))
"""
PHOTOGRAPH = [[[channel] * 8] * 8 for channel in (0.0, 2.0, 1.0)]  # a tensor already
# Each file of the guide: the bodies of a batch, and the values returned for them.
FILES: dict[str, tuple[list[Any], list[Any]]] = {
    "lengths": (["four", ""], [4, 0]),
    "spam": (["win a prize", "hello"], [{"spam": True}, {"spam": False}]),
    "greeter": (["world"], ["Hello, world"]),
    "digits": ([[0.1, 0.7, 0.2]], [{"digit": 1}]),
    "likeliest": ([PHOTOGRAPH], [{"1": pytest.approx(0.6652, abs=1e-4)}]),
    "peaks": ([[0.5, 3.0], [4.0, 0.0]], [3.0, 4.0]),
    "sums": (["[1, 2]", b"[3]"], [3, 3]),
    "words": ([""], ["three"]),
    "engine": (["hello"], ["a model says hello"]),
    "described": ([[1.0, 2.0]], [[1.0, 2.0]]),
    "reasons": ([[1.0, 2.0]], [[1.0, 2.0]]),
    "squares": ([3, 4], [9, 16]),
    "sentences": (["of three words", "one"], [0, 2]),
    "total": (["one", "three"], [3, 8]),
    "countdown": (["3", "1"], [3, 1]),
    "whoami": ([""], [[os.getpid()]]),
}
INTERMEDIATE_VALUES = {"words": ["one ", "two "]}


@pytest.fixture(scope="module", autouse=True)
def rank() -> Iterator[None]:
    """Make a process group of one process, for the handler that uses one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def run_file(archive, begin):  # type: ignore[no-untyped-def]
    """Return ``run(name, bodies, **headers)``, which runs one file of the guide on a batch."""

    def run(name: str, bodies: list[Any], **headers: str) -> tuple[list[Any], list[Any]]:
        directory = archive(model=MODEL, **{name: SOURCES[name]})
        manifest = {"model": {"modelFile": "model.py"}}
        entry = handlers.load(f"{name}.py", directory, manifest)
        context = Context(name, str(directory), manifest)
        sent: list[Any] = []
        rows = [{"body": body} for body in bodies]

        async def answers() -> Any:
            awaitable = entry.initialize(context)
            if awaitable is not None:
                await awaitable
            begin(context, len(rows), emit=lambda idx, value: sent.append(value), **headers)
            return await entry(rows, context) if entry.is_async else entry(rows, context)

        return asyncio.run(answers()), sent

    return run


def test_every_file_of_the_guide_is_tested() -> None:
    assert set(SOURCES) == {*FILES, "reader", "lines", "norms", "try_handler"}


@pytest.mark.parametrize("name", FILES)
def test_handlers_of_the_guide_run(run_file, name: str) -> None:  # type: ignore[no-untyped-def]
    bodies, answers = FILES[name]
    assert run_file(name, bodies) == (answers, INTERMEDIATE_VALUES.get(name, []))


def test_explanations_and_descriptions_of_the_guide_run(run_file) -> None:  # type: ignore[no-untyped-def]
    assert run_file("reasons", [[1.0, 2.0]], explain="True")[0] == [{"largest": 1, "target": 0}]
    assert run_file("described", [[1.0]], describe="True")[0] == [
        {"input": "two numbers", "output": "two numbers"}
    ]
    [nine, error] = run_file("squares", [3, "three"])[0]
    assert nine == 9 and (error.message, error.error_code) == ("'three' is no number", 422)


def test_a_prepared_row_is_used(run_file) -> None:  # type: ignore[no-untyped-def]
    scope: dict[str, Any] = {}
    exec(SOURCES["sums"], scope)
    row = Row({"body": "not read again"})
    row.prepared = [4, 5]
    assert scope["Sums"]().handle([row], None) == [9]


def test_the_guides_envelope_runs() -> None:
    scope: dict[str, Any] = {}
    exec(SOURCES["lines"], scope)
    envelope = scope["Lines"](lambda data, context: [[len(word) for word in row] for row in data])
    assert envelope.handle([{"body": "one three"}, {"body": "a"}], None) == ["3 5", "1"]


def test_micro_batches_run(archive, begin) -> None:  # type: ignore[no-untyped-def]
    stages = {"preprocess": 2, "inference": 1, "postprocess": 2}
    config = {"micro_batching": {"micro_batch_size": 4, "parallelism": stages}}
    directory, manifest = archive(model=MODEL), {"model": {"modelFile": "model.py"}}
    entry = handlers.load("base_handler", directory, manifest)
    context = Context("m", str(directory), manifest, model_yaml_config=config)
    entry.initialize(context)
    rows = [{"body": [float(index)]} for index in range(16)]
    assert entry(rows, begin(context, 16)) == [[float(index)] for index in range(16)]
    assert entry.handle.micro_batch_size == 4 and entry.handle.parallelism["preprocess"] == 2
    entry.handle.shutdown()


def test_the_guides_metrics_are_recorded(archive, begin) -> None:  # type: ignore[no-untyped-def]
    directory = archive(reader=SOURCES["reader"])
    entry = handlers.load("reader.py", directory, {})
    context = Context("reader", str(directory), {}, metrics=MetricCache("reader"))
    entry.initialize(context)
    updates.clear()
    assert entry([{"body": "word"}], begin(context)) == ["read"]
    assert [(metric.metric_name, value, values) for metric, value, values, _ in updates] == [
        ("WordsRead", 1.0, ("reader", "Model")),
        ("WordsOfAShelf", 1.0, ("top", "reader", "Model")),
        ("WordLength", 4.0, ("top",)),
    ]


def test_the_guides_script_without_a_server_runs(tmp_path: Path) -> None:
    script = ROOT / "examples/02_custom_handler/recipes/try_handler.py"
    result = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert result.stdout.strip() == "['Hello, world']"
