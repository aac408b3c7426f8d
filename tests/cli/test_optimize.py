"""`torchrelay optimize`: an archive in, its variants timed, and the best of them as an archive that loads."""

from __future__ import annotations

import io
import json
import re
import sys
import textwrap
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from parts import make_archive
from typer.testing import CliRunner

import handlers
from handlers.context import Context
from handlers.variants import VARIANTS
from serve_app.cli import optimize
from serve_app.cli.app import app

MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(32, 1024)
        self.second = torch.nn.Linear(1024, 1024)
        self.last = torch.nn.Linear(1024, 4)

    def forward(self, x):
        return self.last(torch.relu(self.second(torch.relu(self.first(x)))))
"""
HANDLER = """
from handlers.base import BaseHandler

class Handler(BaseHandler):
    pass
"""
ROWS = torch.randn(3, 32, generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(autouse=True)
def process(tmp_path: Path) -> Iterator[None]:
    """Loading a handler is for its own process: what it leaves in this one is taken back."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    torch.manual_seed(3)
    shapes = {"first": (32, 1024), "second": (1024, 1024), "last": (1024, 4)}
    net = torch.nn.ModuleDict({name: torch.nn.Linear(*shape) for name, shape in shapes.items()})
    written = io.BytesIO()
    torch.save(net.state_dict(), written)
    samples = {f"samples/{index}.json": json.dumps(row) for index, row in enumerate(ROWS)}
    files = {"model.py": MODEL, "weights.pth": written.getvalue(), **samples}
    path = make_archive(tmp_path, "net", HANDLER, files=files, config={"batchSize": 4, "greeting": "kept"})
    return _with(path, "MAR-INF/MANIFEST.json", {"modelFile": "model.py", "serializedFile": "weights.pth"})


def _with(path: Path, name: str, more: dict[str, Any]) -> Path:
    with zipfile.ZipFile(path) as old:
        held = {entry: old.read(entry) for entry in old.namelist()}
    manifest = json.loads(held[name])
    manifest["model"] |= more
    with zipfile.ZipFile(path, "w") as new:
        for entry, content in (held | {name: json.dumps(manifest).encode()}).items():
            new.writestr(entry, content)
    return path


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["optimize", *words, "--threads", "1"], env={"COLUMNS": "120"})


def answers(archive: Path, into: Path) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """The archive's manifest and configuration, and what it makes of ROWS."""
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(into)
    manifest = json.loads((into / "MAR-INF/MANIFEST.json").read_text())
    config = yaml.safe_load((into / manifest["model"]["configFile"]).read_text())
    entry = handlers.load("handler.py", into, manifest)
    context = Context("net", str(into), manifest, batch_size=4, model_yaml_config=config)
    entry.initialize(context)
    context.begin([""] * 3, [{}] * 3, [{"body": {}}] * 3, None)
    return manifest, config, entry([{"body": row} for row in ROWS], context)


def test_the_names_are_those_of_the_variants() -> None:
    assert list(VARIANTS) == list(optimize.VARIANTS)  # the command line imports no torch


def test_the_fastest_within_the_tolerance_is_the_next_version(archive: Path, tmp_path: Path) -> None:
    done = run(str(archive), "--output", str(tmp_path), "--try", "int8", "--rounds", "3")
    assert done.exit_code == 0, done.output
    for word in ("plain", "int8", "batch 1", "batch 4", "3 samples, 1 threads", "net-1.1.mar: net 1.1, int8"):
        assert word in done.output, done.output
    manifest, config, optimised = answers(tmp_path / "net-1.1.mar", tmp_path / "new")
    assert manifest["model"]["modelVersion"] == "1.1"
    gate = {"samples": "accuracy-samples.pt", "rtol": 0.01, "atol": 0.01}
    assert config == {"batchSize": 4, "greeting": "kept", "optimize": {"quantize": "int8"}, "accuracy": gate}
    plain = answers(archive, tmp_path / "old")[2]
    assert optimised != plain and optimised == [pytest.approx(row, abs=0.02) for row in plain]
    again = run(str(archive), "--output", str(tmp_path), "--try", "int8")
    assert again.exit_code == 1 and "is there already; name another version with --version" in again.output


def test_a_graph_takes_the_place_of_the_class(archive: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    words = ("--try", "onnx,onnx-int8", "--rounds", "2", "--version", "2.0-graph", "--rtol", "0.05", "--atol", "0.05")
    done = run(str(archive), "--output", str(tmp_path), *words)
    assert done.exit_code == 0, done.output
    manifest, config, optimised = answers(tmp_path / "net-2.0-graph.mar", tmp_path / "new")
    assert manifest["model"]["serializedFile"] == "model.onnx" and "modelFile" not in manifest["model"]
    assert not (tmp_path / "new/weights.pth").exists() and "optimize" not in config
    assert optimised == [pytest.approx(row, abs=0.05) for row in answers(archive, tmp_path / "old")[2]]


def test_a_handler_that_loads_its_own_model_is_not_taken_for_a_fast_one(archive: Path, tmp_path: Path) -> None:
    handler = """
        from handlers.base import BaseHandler
        from model import Net

        class Handler(BaseHandler):
            def initialize(self, context):
                self.context, self.device = context, None
                self.model = Net().eval()
    """
    stubborn = tmp_path / "stubborn"
    answers(archive, stubborn)
    (stubborn / "handler.py").write_text(textwrap.dedent(handler))
    words = ("--try", "int8,bfloat16", "--rounds", "1")
    done = run(str(stubborn), "--output", str(tmp_path), *words)
    assert done.exit_code == 0 and "no archive is written" in done.output, done.output
    assert done.output.count("the handler loads its model by itself") == 2


def test_nothing_is_written_where_nothing_is_within(archive: Path, tmp_path: Path) -> None:
    words = ("--try", "int8", "--rtol", "0", "--atol", "1e-7", "--rounds", "1")
    done = run(str(archive), "--output", str(tmp_path), *words)
    assert done.exit_code == 0, done.output
    assert "no archive is written" in done.output and re.search(r"^int8 .* no *$", done.output, re.MULTILINE)
    assert [path.name for path in tmp_path.glob("*.mar")] == [archive.name]


def test_what_cannot_be_tried_is_said(archive: Path, tmp_path: Path) -> None:
    function = make_archive(tmp_path, "function", "def handle(data, context):\n    return data", files={"x.json": "1"})
    bare = make_archive(tmp_path, "bare", textwrap.dedent(HANDLER))
    for words, wanted in (
        ((str(tmp_path / "gone.mar"),), "There is no archive"),
        ((str(archive), "--try", "int4"), "There is no variant 'int4'; there are plain, bfloat16"),
        ((str(archive), "--output", str(tmp_path / "gone")), "make it, or name another one with --output"),
        ((str(bare),), "no sample requests to try it with. Give some with --sample FILE"),
        ((str(archive), "--sample", "gone.json"), "There is no sample gone.json"),
        ((str(function), "--sample", str(tmp_path / "x.json")), "only a handler that extends"),
    ):
        (tmp_path / "x.json").write_text("1")
        done = run(*words, *(() if "--output" in words else ("--output", str(tmp_path))))
        assert done.exit_code == 1 and wanted in " ".join(done.output.split()), done.output


@pytest.mark.parametrize(("version", "following"), [("1.0", "1.1"), ("2", "3"), ("1.9", "1.10"), ("rc", "rc.1")])
def test_the_version_after(version: str, following: str) -> None:
    assert optimize._next(version) == following
