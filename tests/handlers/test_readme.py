"""The guide says what is there, and its code runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import handlers
from handlers.context import Context
from handlers.metrics import MetricCache, updates

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "handlers" / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)


def block(start: str) -> str:
    [found] = [code for code in BLOCKS if code.startswith(start) or f"\n{start}" in code]
    return found


def test_every_handler_and_everything_on_the_context_is_in_it() -> None:
    context = Context("m", "/m", {})
    begun = {"begin", "emit", "request_processor", "stopping_criteria", "cl_socket"}  # not for everyday use
    public = {name for name in dir(context) if not name.startswith("_")} - begun
    named = set(re.findall(r"\w+", GUIDE))
    assert public <= named, public - named
    assert set(handlers.HANDLERS) <= named
    assert set(context.system_properties) <= named


def test_its_handlers_run_as_it_says(archive, begin, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    directory = archive(
        greeter=block("class Greeter"),
        function=block("def handle(data, context):\n    if data is None:\n        return\n    return"),
        streaming=block("from handlers.intermediate"),
        digits=block("from handlers.base"),
        model="import torch\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        return x",
    )
    sent: list[object] = []
    manifest = {"model": {"modelFile": "model.py"}}
    for name, body, answer in (
        ("greeter", "world", "Hello, world"),
        ("function", "four", 4),
        ("streaming", "", "three"),
        ("digits", [0.1, 0.7, 0.2], {"digit": 1}),
    ):
        entry = handlers.load(f"{name}.py", directory, manifest)
        context = Context(name, str(directory), manifest)
        entry.initialize(context)
        assert entry([{"body": body}], begin(context, emit=lambda idx, value: sent.append(value))) == [answer], name
    assert sent == ["one ", "two "]


def test_its_metrics_are_measured(archive, begin) -> None:  # type: ignore[no-untyped-def]
    directory = archive(reader=block("class Reader"))
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
    public = {name for name in dir(MetricCache) if name.startswith(("add_", "get_"))}
    assert public <= set(re.findall(r"\w+", GUIDE))


def test_a_handler_is_tried_without_a_server(tmp_path: Path) -> None:
    (tmp_path / "my_model").mkdir()
    (tmp_path / "my_model" / "handler.py").write_text(block("class Greeter"))
    code = f"import sys; sys.path.append({str(ROOT)!r})\n" + block("directory = Path")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert result.stdout.strip() == "['Hello, world']"
