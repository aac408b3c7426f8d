"""Workflows in the registry: pure functions that add and remove one with its models."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from serve_app.control import conflicts, registry_changes
from serve_app.control.registry import Registry, is_workflow, workflow_versions
from serve_app.domain import validation
from serve_app.domain.model import ModelSpec
from serve_app.errors import (
    Conflict,
    InvalidGraph,
    InvalidWorkflow,
    VersionNotFound,
    WorkflowExists,
    WorkflowNotFound,
)


def register(registry: Registry, spec: ModelSpec, models: Iterable[ModelSpec] = ()) -> Registry:
    """Add a workflow, or another version of it, and the models that it brings: all, or none.

    Raises WorkflowExists, InvalidWorkflow where a step calls a model that does not exist, InvalidGraph where
    workflows would call each other in a cycle, and whatever ``registry_changes.register`` raises.
    """
    assert spec.graph is not None
    check_new(registry, spec)
    for model in models:
        registry = registry_changes.register(registry, model)
    for step, (name, version) in spec.graph.models.items():
        _check_step(registry, spec, step, name, version)
    return registry_changes.register(registry, spec)


def _check_step(registry: Registry, spec: ModelSpec, step: str, name: str, version: str | None) -> None:
    place = f"steps.{step}.model"
    if name == spec.name:
        raise InvalidGraph(f"Workflow {spec.name}", f"{place}: it calls itself; name a model")
    record = registry.models.get(name)
    if record is None:
        near = validation.did_you_mean(name, registry.models)
        hint = f"did you mean {near!r}?" if near else "register it first: POST /models?url=..."
        raise InvalidWorkflow(f"Workflow {spec.name}", f"{place}: there is no model {name!r}; {hint}")
    if version is not None and version not in record.versions:
        existing = ", ".join(sorted(record.versions))
        raise InvalidWorkflow(
            f"Workflow {spec.name}", f"{place}: model {name} has no version {version!r}; it has {existing}"
        )
    if path := _call_path(registry, name, spec.name):
        cycle = " → ".join([spec.name, *path])
        raise InvalidGraph(f"Workflow {spec.name}", f"{place}: workflows would call each other: {cycle}")


def check_new(registry: Registry, spec: ModelSpec) -> None:
    """Raise WorkflowExists for a workflow that exists. TorchServe's form has a single version."""
    assert spec.graph is not None
    record = registry.models.get(spec.name)
    if (
        record is not None
        and is_workflow(record)
        and (spec.graph.torchserve or spec.version in record.versions)
    ):
        raise WorkflowExists(spec.name, "" if spec.graph.torchserve else spec.version)


def unregister(registry: Registry, name: str, version: str | None) -> tuple[Registry, list[ModelSpec]]:
    """Remove a workflow (with ``version``: that one of several); return the removed specs too.

    Raises WorkflowNotFound, VersionNotFound, and Conflict where another workflow, an experiment or a rollout
    needs it.
    """
    record = registry.models.get(name)
    if record is None or not is_workflow(record):
        raise WorkflowNotFound(name)
    if version is not None and version not in record.versions:
        raise VersionNotFound(name, version)
    if version is not None and len(record.versions) > 1:
        spec = record.versions[version]
        remaining = registry_changes.remaining_versions(registry, spec)
        if conflict := conflicts.with_workflows(name, remaining, workflow_versions(registry)):
            raise Conflict(f"Version {version} of workflow {name} cannot be removed: {conflict}")
        return registry_changes.remove_version(registry, spec)[0], [spec]
    removed: list[ModelSpec] = []
    graphs = [spec.graph for spec in record.versions.values() if spec.graph is not None]
    for model in [name, *(owned for graph in graphs for owned in graph.owned)]:
        removed += registry.models[model].versions.values()
        registry = registry_changes.remove_model(registry, model)
    for spec in removed:
        if conflict := conflicts.with_workflows(spec.name, (), workflow_versions(registry)):
            raise Conflict(f"Workflow {name} cannot be removed: {spec.name} is needed, {conflict}")
    return registry, removed


def _call_path(registry: Registry, start: str, end: str) -> list[str]:
    """Return a path from one workflow to another along the models that they call; empty without one."""
    record = registry.models.get(start)
    if start == end:
        return [end]
    graphs = [spec.graph for spec in record.versions.values() if spec.graph is not None] if record else []
    called = chain.from_iterable(graph.models.values() for graph in graphs)
    return next(([start, *path] for name, _ in called if (path := _call_path(registry, name, end))), [])
