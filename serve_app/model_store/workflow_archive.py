"""Workflow archives, ``.war``: what ``WAR-INF/MANIFEST.json`` and the specification in it say, read and checked.

The specification is TorchServe's (``models`` and ``dag``), whose models come with the workflow, or ours (``steps``, see
graph.py), which asks models that are registered.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_app import documents, graph
from serve_app.errors import InvalidGraph, InvalidWorkflow
from serve_app.graph import Graph, Step

MANIFEST = "WAR-INF/MANIFEST.json"
_REBUILD = "rebuild the archive with torchrelay workflow archive"

# What TorchServe's specification says of models, with its defaults; all are numbers.
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
class Member:
    """A model that is registered with a workflow; ``max_batch_delay`` is in milliseconds."""

    name: str
    url: str
    min_workers: int
    max_workers: int
    batch_size: int
    max_batch_delay: int


@dataclass(frozen=True)
class War:
    """A workflow archive that was checked: ``file`` has its functions, and is empty where it has none."""

    graph: Graph
    members: tuple[Member, ...]
    file: str


def read(directory: Path, archive: str, name: str | None = None) -> War:
    """The workflow in an unpacked archive, under ``name`` or its own. Raises InvalidWorkflow and InvalidGraph.

    ``archive`` is its file name, for messages.
    """
    said = _manifest(directory, archive)
    name = name or said["workflowName"]
    where = f"{archive}/{said['specFile']}"
    specification = parse(_file(directory, said["specFile"], archive).read_bytes(), where)
    handler = said.get("handler") or ""
    found, members = graph_of(name, specification, where)
    check_handler(_file(directory, handler, archive) if handler else None, found, where)
    return War(found, members, handler if found.functions else "")


def parse(text: bytes | str, where: str) -> dict[str, Any]:
    """A specification's YAML, or JSON. Raises InvalidWorkflow."""
    try:
        said = documents.from_yaml(text)
    except documents.Misread as error:
        raise InvalidWorkflow(where, str(error)) from None
    return said


def graph_of(name: str, specification: Mapping[str, Any], where: str) -> tuple[Graph, tuple[Member, ...]]:
    """The graph of a specification of either form, and the models that come with it."""
    if "dag" in specification:
        return _of_torchserve(name, specification, where)
    return graph.with_name(graph.read(specification, where), name), ()


def _manifest(directory: Path, archive: str) -> dict[str, str]:
    try:
        raw = json.loads((directory / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise InvalidWorkflow(archive, f"has no {MANIFEST}; {_REBUILD}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidWorkflow(archive, f"{MANIFEST} is not JSON ({error}); {_REBUILD}") from None
    said = raw.get("workflow") if isinstance(raw, dict) else None
    if not isinstance(said, dict):
        raise InvalidWorkflow(archive, f'{MANIFEST} has no object "workflow"; {_REBUILD}')
    for key, needed in (("workflowName", True), ("specFile", True), ("handler", False)):
        value = said.get(key)
        if not (isinstance(value, str) and value) and (needed or value is not None):
            raise InvalidWorkflow(archive, f'{MANIFEST}: "{key}" is {value!r} and must be text; {_REBUILD}')
    return said


def _file(directory: Path, name: str, archive: str) -> Path:
    home = directory.resolve()
    try:
        path = (home / name).resolve()
        if home in path.parents and path.is_file():
            return path
    except (OSError, RuntimeError, ValueError):
        pass
    raise InvalidWorkflow(archive, f"{name!r} is named but not in the archive; {_REBUILD}")


def check_handler(file: Path | None, found: Graph, where: str) -> None:
    """Raise InvalidWorkflow where the file does not compile, or has not the functions that steps call."""
    if file is None:
        if found.functions:
            told = ", ".join(found.functions)
            raise InvalidWorkflow(where, f"its steps call {told}, and no file of them is there; pack it: --handler")
        return
    try:
        module = ast.parse(file.read_bytes(), file.name)
        compile(module, file.name, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise InvalidWorkflow(where, f"{file.name}, line {error.lineno}: {error.msg}; mend the file") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise InvalidWorkflow(where, f"{file.name} is not Python ({error}); mend the file") from None
    names = _names(module)
    for name, step in found.steps.items():
        if step.function and names is not None and step.function not in names:
            near = documents.near_miss(step.function, names)
            cure = f"did you mean {near!r}?" if near else "define it there, or register a model of that name"
            what = "no model of the specification and " if found.torchserve else ""
            raise InvalidWorkflow(where, f"{name}: {step.function!r} is {what}no function in {file.name}; {cure}")


def _names(module: ast.Module) -> set[str] | None:
    """What a file defines at its top; None where only running it would tell."""
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


def _of_torchserve(name: str, specification: Mapping[str, Any], where: str) -> tuple[Graph, tuple[Member, ...]]:
    models, dag = specification.get("models") or {}, specification["dag"]
    if not isinstance(models, Mapping):
        raise InvalidWorkflow(where, f"models: it must be a mapping, and is {models!r}")
    shared = {**_DEFAULTS, **{key: _number(models, key, "models", where) for key in _DEFAULTS if key in models}}
    own = {key: value for key, value in models.items() if key not in _DEFAULTS}
    settings = {str(model): _settings(said, shared, f"models.{model}", where) for model, said in own.items()}
    edges = _edges(dag, where)
    nodes = list(dict.fromkeys([*edges, *(follower for after in edges.values() for follower in after)]))
    before: dict[str, list[str]] = {node: [n for n in edges if node in edges[n]] for node in nodes}
    starts = [node for node in nodes if not before[node]]
    if len(starts) > 1:
        raise InvalidGraph(where, f"DAG should have only one start node, and has {', '.join(starts)}")
    steps = {}
    for node in nodes:
        said = settings.get(node, shared)
        steps[node] = _step(
            where,
            node,
            **({"model": f"{name}__{node}"} if node in settings else {"function": node}),
            inputs=_inputs(before[node]),
            retries=said["retry-attempts"],
            timeout_s=said["timeout-ms"] / 1000,
        )
    if unused := [model for model in settings if model not in steps]:
        raise InvalidWorkflow(where, f"models.{unused[0]} stands in no place of the dag; put it there, or take it out")
    told = {
        "minWorkers": shared["min-workers"],
        "maxWorkers": shared["max-workers"],
        "batchSize": shared["batch-size"],
        "maxBatchDelay": shared["max-batch-delay"],
        "workflowDag": _java(dag),
    }
    owned = tuple(f"{name}__{model}" for model in settings)
    made = Graph(steps=steps, name=name, owned=owned, torchserve=told)
    return graph.checked(made, where), tuple(
        Member(f"{name}__{m}", own[m]["url"], s["min-workers"], s["max-workers"], s["batch-size"], s["max-batch-delay"])
        for m, s in settings.items()
    )


def _step(where: str, node: str, **said: Any) -> Step:
    try:
        return Step(**said)
    except ValueError as error:
        raise InvalidWorkflow(where, f"dag.{node}: {error}") from None


def _inputs(before: list[str]) -> str | dict[str, str]:
    """One answer is the ``body``, several stand under their nodes' names."""
    if not before:
        return graph.REQUEST
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


def _settings(said: Any, shared: Mapping[str, int], place: str, where: str) -> dict[str, int]:
    if not isinstance(said, Mapping) or not isinstance(said.get("url"), str) or not said["url"]:
        raise InvalidWorkflow(where, f"{place}: it must be a mapping with a url")
    known = {*_DEFAULTS, "url"}
    for key in said:
        if key not in known:
            near = documents.near_miss(str(key), known)
            hint = f"did you mean {near!r}?" if near else f"known here: {', '.join(sorted(known))}"
            raise InvalidWorkflow(where, f"{place}: unknown key {key!r}; {hint}")
    own = {**shared, **{key: _number(said, key, place, where) for key in _DEFAULTS if key in said}}
    if own["max-workers"] < own["min-workers"]:
        own["max-workers"] = own["min-workers"]
    return own


def _number(said: Mapping[str, Any], key: str, place: str, where: str) -> int:
    value, least = said[key], 0 if key in _FROM_ZERO else 1
    if type(value) is not int or value < least:
        raise InvalidWorkflow(where, f"{place}.{key}: it must be a whole number from {least}, and is {value!r}")
    return value


def _java(value: Any) -> str:
    """A mapping as Java prints it, which is how TorchServe describes a dag."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}={_java(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_java, value)) + "]"
    return "null" if value is None else str(value)
