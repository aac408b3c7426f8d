"""Workflow archives, made and read; TorchServe's specification as a graph."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.errors import InvalidGraph, InvalidWorkflow
from serve_app.model_store import workflow_archive
from serve_app.model_store.archiver import ArchiverError
from serve_app.model_store.workflow_archive import WorkflowModel, build_graph, read
from serve_app.model_store.workflow_archiver import WorkflowArchiveRecipe, make

PUBLISHED = """
models:
    min-workers: 1
    max-workers: 4
    batch-size: 3
    max-batch-delay : 5000
    retry-attempts : 3
    timeout-ms : 5000
    m1:
       url : model1.mar
       min-workers: 1
       max-workers: 2
       batch-size: 4
    m2:
       url : model2.mar
dag:
  pre_processing: [m1, m2]
  m1: [aggregate]
  m2: [aggregate]
"""
FUNCTIONS = "from json import loads as aggregate\n\ndef pre_processing(data, context):\n    return data\n"


def test_torchserves_specification_is_a_graph() -> None:
    graph, members = build_graph("wf", yaml.safe_load(PUBLISHED), "spec.yaml")
    assert members == (
        WorkflowModel("wf__m1", "model1.mar", 1, 2, 4, 5000),
        WorkflowModel("wf__m2", "model2.mar", 1, 4, 3, 5000),
    )
    assert graph.name == "wf" and graph.owned == ("wf__m1", "wf__m2")
    assert graph.functions == ("pre_processing", "aggregate")
    assert graph.leaves == ("aggregate",)
    steps = graph.steps
    assert [steps[name].shared_inputs for name in ("pre_processing", "m1")] == ["request", "pre_processing"]
    assert steps["aggregate"].inputs == {"m1": "m1", "m2": "m2"}
    assert (steps["m1"].model, steps["m1"].retries, steps["m1"].timeout_s) == ("wf__m1", 3, 5.0)
    assert graph.torchserve == {
        "minWorkers": 1,
        "maxWorkers": 4,
        "batchSize": 3,
        "maxBatchDelay": 5000,
        "workflowDag": "{pre_processing=[m1, m2], m1=[aggregate], m2=[aggregate]}",
    }


def test_the_defaults_are_torchserves() -> None:
    specification = {"models": {"m": {"url": "m.mar"}}, "dag": {"m": ["f"], "f": None, "g": []}}
    with pytest.raises(InvalidGraph, match="DAG should have only one start node, and has m, g"):
        build_graph("wf", specification, "spec.yaml")
    del specification["dag"]["g"]
    graph, members = build_graph("wf", specification, "spec.yaml")
    assert members == (WorkflowModel("wf__m", "m.mar", 1, 1, 1, 50),)
    assert (graph.steps["f"].retries, graph.steps["f"].timeout_s) == (1, 10.0)
    assert graph.torchserve["workflowDag"] == "{m=[f], f=null}"


@pytest.mark.parametrize(
    ("specification", "words"),
    [
        ({"dag": {}}, "dag: it must be a mapping of nodes to lists of nodes"),
        ({"dag": {"a": {"b": 1}}}, "dag.a: it must be a list of nodes, and is {'b': 1}"),
        ({"dag": {"a": ["a"]}}, "its steps wait for each other: a → a"),
        ({"dag": {"s": ["a"], "a": ["b"], "b": ["a"]}}, "its steps wait for each other: a → b → a"),
        ({"dag": {"f": []}, "models": []}, None),
        ({"dag": {"f": []}, "models": [1]}, "models: it must be a mapping"),
        ({"dag": {"f": []}, "models": {"m": {"url": "m.mar"}}}, "models.m is not in the dag"),
        ({"dag": {"m": []}, "models": {"m": {}}}, "models.m: it must be a mapping with a url"),
        ({"dag": {"m": []}, "models": {"m": {"url": "m", "retries": 1}}}, "models.m: unknown key 'retries'"),
        ({"dag": {"m": []}, "models": {"m": {"url": "m", "batch_size": 1}}}, "did you mean 'batch-size'?"),
        (
            {"dag": {"m": []}, "models": {"batch-size": 0}},
            "models.batch-size: it must be a whole number from 1",
        ),
        (
            {"dag": {"m": []}, "models": {"m": {"url": "m", "timeout-ms": "1"}}},
            "m.timeout-ms: it must be a whole",
        ),
        ({"dag": {"two words": []}}, "dag.two words: function is a name of Python's"),
        ({"dag": {"request": []}}, "steps.request: a step's name has letters"),
        ({"steps": {"a": {"model": "m", "inputs": "b"}}}, "steps.a.inputs names 'b', which is no step"),
        ({}, 'it has no mapping "steps"'),
    ],
)
def test_errors_name_the_place(specification: dict[str, Any], words: str | None) -> None:
    if words is None:
        assert build_graph("wf", specification, "spec.yaml")[1] == ()
        return
    with pytest.raises(InvalidWorkflow) as raised:
        build_graph("wf", specification, "spec.yaml")
    assert str(raised.value).startswith("spec.yaml: ") and words in str(raised.value)


def recipe(
    folder: Path, specification: str = PUBLISHED, functions: str | None = FUNCTIONS, **result: Any
) -> WorkflowArchiveRecipe:
    (folder / "spec.yaml").write_text(specification)
    if functions is not None:
        (folder / "functions.py").write_text(functions)
    handler = str(folder / "functions.py") if functions is not None else None
    return WorkflowArchiveRecipe("wf", str(folder / "spec.yaml"), handler, export_path=str(folder), **result)


def unpacked(archive: Path) -> Path:
    folder = archive.with_suffix("")
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(folder)
    return folder


def test_an_archive_is_made_and_read(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("x")
    made = make(recipe(tmp_path, extra_files=str(tmp_path / "words.txt")))
    assert (made.path, len(made.files)) == (tmp_path / "wf.war", 3)
    folder = unpacked(made.path)
    assert (folder / "words.txt").read_text() == "x"
    manifest = json.loads((folder / "WAR-INF/MANIFEST.json").read_text())
    assert manifest["workflow"] == {"workflowName": "wf", "specFile": "spec.yaml", "handler": "functions.py"}
    assert {"createdOn", "archiverVersion"} <= manifest.keys()
    found = read(folder, "wf.war")
    assert (found.graph.name, found.file, len(found.members)) == ("wf", "functions.py", 2)
    other = read(folder, "wf.war", "other")
    assert (other.graph.name, other.members[0].name) == ("other", "other__m1")


def test_our_form_in_an_archive(tmp_path: Path) -> None:
    document = "steps:\n  cut: {function: cut}\n  ask: {model: 'm:2.0', each: cut}\n"
    folder = unpacked(make(recipe(tmp_path, document, "def cut(body):\n    return [body]\n")).path)
    found = read(folder, "wf.war")
    assert (
        found.members == () and found.graph.models == {"ask": ("m", "2.0")} and found.graph.torchserve == {}
    )


@pytest.mark.parametrize(
    ("specification", "functions", "words"),
    [
        (
            PUBLISHED,
            None,
            "its steps call pre_processing, aggregate, and the archive has no file of functions",
        ),
        (PUBLISHED, "def pre_procesing(data, context): ...\naggregate = 1", "did you mean 'pre_procesing'?"),
        (PUBLISHED, "def f(:", "functions.py, line 1"),
        (PUBLISHED, "x = '\0'", "functions.py"),
        ("steps: {a: {function: f}}", "g = 1", "a: 'f' is no function in functions.py; define it there"),
        ("steps: [", None, "spec.yaml: line 1"),
        ("- 1", None, "line 1: holds a list and must be a mapping"),
    ],
)
def test_an_archive_that_no_server_would_take_is_not_made(
    tmp_path: Path, specification: str, functions: str | None, words: str
) -> None:
    with pytest.raises(ArchiverError) as raised:
        make(recipe(tmp_path, specification, functions))
    assert words in str(raised.value)
    assert not list(tmp_path.glob("*.war*")) and not list(tmp_path.glob(".wf*"))


def test_names_that_only_running_would_tell(tmp_path: Path) -> None:
    assert make(recipe(tmp_path, functions="from steps import *")).path.is_file()


def test_an_archive_that_is_there_stays_unless_it_is_forced(tmp_path: Path) -> None:
    make(recipe(tmp_path))
    with pytest.raises(ArchiverError, match=r"already exists\.\nPlease specify --force/-f option"):
        make(recipe(tmp_path))
    assert make(recipe(tmp_path, force=True)).warnings == (f"Overwriting {tmp_path / 'wf.war'} ...",)
    with pytest.raises(ArchiverError, match=r"--extra-files no.txt is missing"):
        make(recipe(tmp_path, force=True, extra_files="no.txt"))


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (None, "has no WAR-INF/MANIFEST.json"),
        ("{", "WAR-INF/MANIFEST.json is not JSON"),
        ("[]", 'has no object "workflow"'),
        ('{"workflow": {"specFile": "s.yaml"}}', '"workflowName" is None and must be text'),
        ('{"workflow": {"workflowName": "w", "specFile": 3}}', '"specFile" is 3 and must be text'),
        (
            '{"workflow": {"workflowName": "w", "specFile": "s.yaml", "handler": []}}',
            '"handler" is [] and must be',
        ),
        (
            '{"workflow": {"workflowName": "w", "specFile": "gone.yaml"}}',
            "'gone.yaml' is named but not in the archive",
        ),
        (
            '{"workflow": {"workflowName": "w", "specFile": "../s.yaml"}}',
            "'../s.yaml' is named but not in the archive",
        ),
        (
            '{"workflow": {"workflowName": "w", "specFile": "s.yaml", "handler": "h.py"}}',
            "'h.py' is named but not in",
        ),
    ],
)
def test_a_manifest_that_is_none(tmp_path: Path, manifest: str | None, words: str) -> None:
    folder = tmp_path / "unpacked"
    folder.mkdir()
    (tmp_path / "s.yaml").write_text("steps: {a: {model: m}}")
    (folder / "s.yaml").write_text("steps: {a: {model: m}}")
    if manifest is not None:
        (folder / "WAR-INF").mkdir()
        (folder / workflow_archive.MANIFEST).write_text(manifest)
    with pytest.raises(InvalidWorkflow) as raised:
        read(folder, "wf.war")
    assert words in str(raised.value) and str(raised.value).startswith("wf.war: ")
