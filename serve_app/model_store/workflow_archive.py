"""Workflow archives, ``.war``: what ``WAR-INF/MANIFEST.json`` and the specification in it say, read and
checked.

The specification is TorchServe's (``models`` and ``dag``), whose models come with the workflow, or ours
(``steps``, see workflow_graph.py), which calls registered models.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_app.domain import validation, workflow_graph
from serve_app.domain.workflow_graph import WorkflowGraph, WorkflowStep
from serve_app.errors import InvalidArchive, InvalidGraph, InvalidWorkflow
from serve_app.model_store.archive import find_inside, find_syntax_error, read_document

MANIFEST = "WAR-INF/MANIFEST.json"
_REBUILD = "rebuild the archive with torchrelay workflow archive"

# The keys of models in TorchServe's specification, with its defaults; all are numbers.
_DEFAULTS = {
    "min-workers": 1,
    "max-workers": 1,
    "batch-size": 1,
    "max-batch-delay": 50,
    "retry-attempts": 1,
    "timeout-ms": 10000,
}
_FROM_ZERO = ("retry-attempts",)


@dataclass(frozen=True)
class WorkflowModel:
    """A model that is registered with a workflow; ``max_batch_delay`` is in milliseconds."""

    name: str
    url: str
    min_workers: int
    max_workers: int
    batch_size: int
    max_batch_delay: int


@dataclass(frozen=True)
class WorkflowArchive:
    """A checked workflow archive; ``file`` has its functions, and is empty where there are none."""

    graph: WorkflowGraph
    members: tuple[WorkflowModel, ...]
    file: str


def read(directory: Path, archive: str, name: str | None = None) -> WorkflowArchive:
    """Return the workflow in an unpacked archive, with ``name`` or its own name.

    Raises InvalidWorkflow and InvalidGraph.

    ``archive`` is its file name, for messages.
    """
    raw_settings = _manifest(directory, archive)
    name = name or raw_settings["workflowName"]
    where = f"{archive}/{raw_settings['specFile']}"
    file = _file(directory, raw_settings["specFile"], archive)
    specification = parse(_read(file, archive, raw_settings["specFile"]), where)
    handler = raw_settings.get("handler") or ""
    graph, members = build_graph(name, specification, where)
    check_handler(_file(directory, handler, archive) if handler else None, graph, where)
    return WorkflowArchive(graph, members, handler if graph.functions else "")


def parse(text: bytes | str, where: str) -> dict[str, Any]:
    """Parse a specification in YAML or JSON. Raises InvalidWorkflow."""
    try:
        return validation.parse_yaml(text)
    except validation.DocumentError as error:
        raise InvalidWorkflow(where, str(error)) from None


def build_graph(
    name: str, specification: Mapping[str, Any], where: str
) -> tuple[WorkflowGraph, tuple[WorkflowModel, ...]]:
    """Return the graph of a specification of either form, and its models."""
    if "dag" in specification:
        return _build_torchserve_graph(name, specification, where)
    return workflow_graph.with_name(workflow_graph.read(specification, where), name), ()


def _manifest(directory: Path, archive: str) -> dict[str, str]:
    try:
        raw = json.loads(_read(directory / MANIFEST, archive, MANIFEST))
    except FileNotFoundError:
        raise InvalidWorkflow(archive, f"has no {MANIFEST}; {_REBUILD}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidWorkflow(archive, f"{MANIFEST} is not JSON ({error}); {_REBUILD}") from None
    raw_settings = raw.get("workflow") if isinstance(raw, dict) else None
    if not isinstance(raw_settings, dict):
        raise InvalidWorkflow(archive, f'{MANIFEST} has no object "workflow"; {_REBUILD}')
    for key, needed in (("workflowName", True), ("specFile", True), ("handler", False)):
        value = raw_settings.get(key)
        if not (isinstance(value, str) and value) and (needed or value is not None):
            raise InvalidWorkflow(archive, f'{MANIFEST}: "{key}" is {value!r} and must be text; {_REBUILD}')
    return raw_settings


def _read(path: Path, archive: str, name: str) -> bytes:
    try:
        return read_document(path, archive, name)
    except InvalidArchive as error:
        raise InvalidWorkflow(*error.args) from None


def _file(directory: Path, name: str, archive: str) -> Path:
    path = find_inside(directory, name)
    if path is None or not path.is_file():
        raise InvalidWorkflow(archive, f"{name!r} is named but not in the archive; {_REBUILD}")
    return path


def check_handler(file: Path | None, graph: WorkflowGraph, where: str) -> None:
    """Raise InvalidWorkflow where the file does not compile, or has not the functions that steps call."""
    if file is None:
        if graph.functions:
            functions = ", ".join(graph.functions)
            raise InvalidWorkflow(
                where,
                f"its steps call {functions}, and the archive has no file of functions; "
                "add it with --handler",
            )
        return
    if problem := find_syntax_error(file):
        raise InvalidWorkflow(where, f"{file.name}{problem}; correct the file")
    names = _defined_names(ast.parse(file.read_bytes(), file.name))
    for name, step in graph.steps.items():
        if step.function and names is not None and step.function not in names:
            near = validation.did_you_mean(step.function, names)
            remedy = (
                f"did you mean {near!r}?" if near else "define it there, or register a model of that name"
            )
            what = "no model of the specification and " if graph.torchserve else ""
            raise InvalidWorkflow(
                where, f"{name}: {step.function!r} is {what}no function in {file.name}; {remedy}"
            )


def _defined_names(module: ast.Module) -> set[str] | None:
    """Return the names that a module defines; None where they are known only at run time."""
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            if any(alias.name == "*" for alias in node.names):
                return None
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return names


# TorchServe's form


def _build_torchserve_graph(
    name: str, specification: Mapping[str, Any], where: str
) -> tuple[WorkflowGraph, tuple[WorkflowModel, ...]]:
    models, dag = specification.get("models") or {}, specification["dag"]
    if not isinstance(models, Mapping):
        raise InvalidWorkflow(where, f"models: it must be a mapping, and is {models!r}")
    shared = _DEFAULTS | _numbers(models, "models", where)
    own = {key: value for key, value in models.items() if key not in _DEFAULTS}
    settings = {
        str(model): _settings(raw_settings, shared, f"models.{model}", where)
        for model, raw_settings in own.items()
    }
    edges = _edges(dag, where)
    nodes = list(dict.fromkeys([*edges, *(follower for after in edges.values() for follower in after)]))
    before: dict[str, list[str]] = {node: [n for n in edges if node in edges[n]] for node in nodes}
    starts = [node for node in nodes if not before[node]]
    if len(starts) > 1:
        raise InvalidGraph(where, f"DAG should have only one start node, and has {', '.join(starts)}")
    steps = {}
    for node in nodes:
        raw_settings = settings.get(node, shared)
        steps[node] = _step(
            where,
            node,
            **({"model": f"{name}__{node}"} if node in settings else {"function": node}),
            inputs=_inputs(before[node]),
            retries=raw_settings["retry-attempts"],
            timeout_s=raw_settings["timeout-ms"] / 1000,
        )
    if unused := [model for model in settings if model not in steps]:
        raise InvalidWorkflow(where, f"models.{unused[0]} is not in the dag; add it there, or remove it")
    description = {
        "minWorkers": shared["min-workers"],
        "maxWorkers": shared["max-workers"],
        "batchSize": shared["batch-size"],
        "maxBatchDelay": shared["max-batch-delay"],
        "workflowDag": _java(dag),
    }
    owned = tuple(f"{name}__{model}" for model in settings)
    graph = WorkflowGraph(steps=steps, name=name, owned=owned, torchserve=description)
    return workflow_graph.validate(graph, where), tuple(
        WorkflowModel(
            f"{name}__{m}",
            own[m]["url"],
            s["min-workers"],
            s["max-workers"],
            s["batch-size"],
            s["max-batch-delay"],
        )
        for m, s in settings.items()
    )


def _step(where: str, node: str, **fields: Any) -> WorkflowStep:
    try:
        return WorkflowStep(**fields)
    except ValueError as error:
        raise InvalidWorkflow(where, f"dag.{node}: {error}") from None


def _inputs(before: list[str]) -> str | dict[str, str]:
    """Return the inputs of a node: one response is the ``body``, several have their nodes' names."""
    if not before:
        return workflow_graph.REQUEST
    return before[0] if len(before) == 1 else {node: node for node in before}


def _edges(dag: Any, where: str) -> dict[str, list[str]]:
    if not isinstance(dag, Mapping) or not dag:
        raise InvalidWorkflow(where, "dag: it must be a mapping of nodes to lists of nodes")
    edges = {}
    for node, after in dag.items():
        after = [after] if isinstance(after, str) else after or []
        if not isinstance(after, list) or not all(isinstance(f, str) or f is None for f in after):
            raise InvalidWorkflow(where, f"dag.{node}: it must be a list of nodes, and is {after!r}")
        edges[str(node)] = [follower for follower in after if follower and follower.strip()]
    return edges


def _settings(raw_settings: Any, shared: Mapping[str, int], place: str, where: str) -> dict[str, int]:
    url = raw_settings.get("url") if isinstance(raw_settings, Mapping) else None
    if not isinstance(url, str) or not url:
        raise InvalidWorkflow(where, f"{place}: it must be a mapping with a url")
    known = {*_DEFAULTS, "url"}
    for key in raw_settings:
        if key not in known:
            near = validation.did_you_mean(str(key), known)
            hint = f"did you mean {near!r}?" if near else f"known keys: {', '.join(sorted(known))}"
            raise InvalidWorkflow(where, f"{place}: unknown key {key!r}; {hint}")
    own = {**shared, **_numbers(raw_settings, place, where)}
    own["max-workers"] = max(own["max-workers"], own["min-workers"])
    return own


def _numbers(values: Mapping[str, Any], place: str, where: str) -> dict[str, int]:
    """Return the settings of ``_DEFAULTS`` that are in ``values``. Raises InvalidWorkflow."""
    numbers = {key: values[key] for key in _DEFAULTS if key in values}
    for key, value in numbers.items():
        minimum = 0 if key in _FROM_ZERO else 1
        if type(value) is not int or value < minimum:
            problem = f"it must be a whole number from {minimum}, and is {value!r}"
            raise InvalidWorkflow(where, f"{place}.{key}: {problem}")
    return numbers


def _java(value: Any) -> str:
    """Return a value in Java's text form, in which TorchServe describes a dag."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}={_java(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_java, value)) + "]"
    return "null" if value is None else str(value)
