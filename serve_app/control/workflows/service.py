"""The service that registers workflows with their models, describes them and removes them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from serve_app.control.archive_ingestion import ArchiveIngestor, build_member_spec, build_workflow_spec
from serve_app.control.cancellation import run_to_end
from serve_app.control.cluster_metrics import ClusterMetrics
from serve_app.control.lifecycle_events import EventHistory, EventLog
from serve_app.control.models import ModelService
from serve_app.control.reconcile_loop import ReconcileLoop
from serve_app.control.registry import is_workflow, workflow_versions
from serve_app.control.state import StateStore
from serve_app.control.workflows import registry_changes
from serve_app.domain import validation
from serve_app.domain.access import matches
from serve_app.domain.model import ModelRef, ModelSpec, Registration
from serve_app.domain.urls import redact_url
from serve_app.domain.workflow_graph import WorkflowDocument, WorkflowGraph, WorkflowStep
from serve_app.errors import (
    InvalidWorkflow,
    ModelNotAllowed,
    RelayError,
    WorkflowFailed,
    WorkflowNotFound,
)
from serve_app.model_store.workflow_archive import WorkflowModel
from serve_app.settings import Settings

log = logging.getLogger(__name__)

_DRAIN_TIMEOUT = 300.0  # seconds for which requests of a removed workflow may still run
_DRAIN_CHECK_INTERVAL = 0.1  # seconds between two checks whether they do


class WorkflowService:
    """The operations of ``ControlAPI`` on workflows."""

    def __init__(
        self,
        state: StateStore,
        reconcile_loop: ReconcileLoop,
        models: ModelService,
        metrics: ClusterMetrics,
        ingestor: ArchiveIngestor,
        events: EventLog,
        settings: Settings,
    ) -> None:
        self._state = state
        self._reconcile_loop = reconcile_loop
        self._models = models
        self._metrics = metrics
        self._ingestor = ingestor
        self._events = events
        self._settings = settings
        self._drain_tasks: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        for task in self._drain_tasks:
            task.cancel()

    async def register_workflow(self, registration: Registration, graph: WorkflowGraph | None) -> ModelRef:
        state = self._state
        async with contextlib.AsyncExitStack() as held_archives:
            await held_archives.enter_async_context(self._reconcile_loop.hold_archives())
            registrations: list[Registration] = []
            members: tuple[WorkflowModel, ...] = ()
            if graph is None:
                spec, registrations, members = await run_to_end(
                    asyncio.to_thread(self._ingestor.ingest_workflow, registration)
                )
            else:
                spec = _spec_of_document(registration, graph, self._settings)
            _check_names(spec, registration.allowed_models)
            registry_changes.check_new(state.registry, spec)
            parts = await self._ingest_members(spec, registrations, members, held_archives)
            models = [part for part, _ in parts]
            registry_changes.register(state.registry, spec, models)  # refused before any wait
            await self._check_placement(spec, models)
            while any(self._reconcile_loop.is_draining(part.ref) for part in (spec, *models)):
                await self._reconcile_loop.wait_for_round()
            async with state.exclusive():
                await state.commit_with_status(registry_changes.register(state.registry, spec, models))
        check = self._reconcile_loop.watch_registration(spec.ref)
        if spec.handler:
            parts.append((spec, self._models.open_history(registration)))
        try:
            await self._wait_until_started(spec, parts)
        except WorkflowFailed:
            await self._undo_registration(spec, check)
            raise
        return spec.ref

    async def _check_placement(self, spec: ModelSpec, models: Sequence[ModelSpec]) -> None:
        """Raise WorkflowFailed where the cluster cannot hold a model that the workflow brings."""
        failures = []
        for part in models:
            try:
                await self._models.check_placement(part)
            except RelayError as error:
                failures.append((part.name, error))
        if failures:
            raise _to_error(spec.name, failures)

    async def list_workflows(self) -> list[tuple[str, str]]:
        models = self._state.registry.models
        names = sorted(workflow_versions(self._state.registry))
        return [(name, models[name].versions[models[name].default].url) for name in names]

    async def get_workflow(self, name: str) -> list[WorkflowDocument]:
        record = self._state.registry.models.get(name)
        if record is None or not is_workflow(record):
            raise WorkflowNotFound(name)
        others = sorted(version for version in record.versions if version != record.default)
        await self._metrics.collect()
        return [
            self._to_document(record.versions[version], version == record.default)
            for version in (record.default, *others)
        ]

    async def unregister_workflow(self, name: str, version: str | None) -> None:
        async with self._state.exclusive():
            after, removed = registry_changes.unregister(self._state.registry, name, version)
            for spec in removed:
                self._reconcile_loop.retain(spec)
            try:
                await self._state.commit(after)
            finally:
                self._drain(name, removed)

    def _drain(self, name: str, removed: Sequence[ModelSpec]) -> None:
        """Keep the models of a removed workflow running until its requests in progress have ended."""

        async def drain() -> None:
            versions = [spec.version for spec in removed if spec.name == name]
            deadline = time.monotonic() + _DRAIN_TIMEOUT
            try:
                while time.monotonic() < deadline:
                    await self._metrics.collect()
                    if not sum(self._count_ongoing(name, version) for version in versions):
                        break
                    await asyncio.sleep(_DRAIN_CHECK_INTERVAL)
            finally:
                for spec in removed:
                    self._reconcile_loop.release(spec)

        task = asyncio.create_task(drain())
        self._drain_tasks.add(task)
        task.add_done_callback(self._drain_tasks.discard)

    def _count_ongoing(self, name: str, version: str) -> int:
        return self._metrics.total("torchrelay_workflow_ongoing", model=name, version=version)

    async def _ingest_members(
        self,
        spec: ModelSpec,
        registrations: Sequence[Registration],
        members: Sequence[WorkflowModel],
        held_archives: contextlib.AsyncExitStack,
    ) -> list[tuple[ModelSpec, EventHistory]]:
        """Ingest and install the models that a workflow brings; return each with its event history."""
        parts, failures = [], []
        for registration, member in zip(registrations, members, strict=True):
            history = self._models.open_history(registration)
            try:
                with self._events.record_failure(history):
                    member_spec = await held_archives.enter_async_context(
                        self._models.ingest(registration, history)
                    )
                    model = build_member_spec(member_spec, member)
                    await self._models.install_requirements(model, history)
                parts.append((model, history))
            except RelayError as error:
                failures.append((member.name, error))
        if failures:
            raise _to_error(spec.name, failures)
        return parts

    async def _wait_until_started(
        self, spec: ModelSpec, parts: Sequence[tuple[ModelSpec, EventHistory]]
    ) -> None:
        """Wait until the workers of all parts run. Raises WorkflowFailed."""

        async def wait(part: ModelSpec, history: EventHistory, check: Callable[[], None]) -> None:
            with self._events.record_failure(history):
                await self._models.wait_until_started(history, part, check)

        waits = [wait(*part, self._reconcile_loop.watch_registration(part[0].ref)) for part in parts]
        outcomes = await asyncio.gather(*waits, return_exceptions=True)
        failures = []
        for (part, _), outcome in zip(parts, outcomes):
            if isinstance(outcome, RelayError):
                failures.append((part.name, outcome))
            elif isinstance(outcome, BaseException):
                raise outcome
        if failures:
            raise _to_error(spec.name, failures)

    async def _undo_registration(self, spec: ModelSpec, check: Callable[[], None]) -> None:
        state = self._state
        async with state.exclusive():
            # A policy may send requests to it, or a caller may have removed it, or registered it again.
            try:
                check()
                after, _ = registry_changes.unregister(state.registry, spec.name, spec.version)
                await state.commit_with_status(after)
            except RelayError as error:
                log.warning("%s could not be started, and is not removed: %s", spec.ref.app, error)

    def _to_document(self, spec: ModelSpec, is_default: bool) -> WorkflowDocument:
        """Return a version as JSON: TorchServe's keys, then ours."""
        graph = spec.graph
        assert graph is not None
        torchserve = graph.torchserve or {
            "minWorkers": spec.min_workers,
            "maxWorkers": spec.max_workers,
            "batchSize": spec.batch_size,
            "maxBatchDelay": 0,
            "workflowDag": graph.dag,
        }
        document: WorkflowDocument = {
            "workflowName": spec.name,
            "workflowUrl": redact_url(spec.url),
            **cast(WorkflowDocument, torchserve),
            "workflowVersion": spec.version,
            "defaultVersion": is_default,
            "steps": {name: _step_document(step) for name, step in graph.steps.items()},
            "output": list(graph.leaves),
            "ongoing": self._count_ongoing(spec.name, spec.version),
        }
        if graph.timeout_s is not None:
            document["timeout_s"] = graph.timeout_s
        if spec.handler:
            status = self._reconcile_loop.get_status(spec.ref)
            document["functions"] = {"phase": status.phase, "workers": status.replicas}
        return document


def _spec_of_document(registration: Registration, graph: WorkflowGraph, settings: Settings) -> ModelSpec:
    if graph.functions:
        raise InvalidWorkflow(
            f"Workflow {graph.name}",
            f"its steps call {', '.join(graph.functions)}, and a document brings no functions; "
            "pack it with their file: torchrelay workflow archive",
        )
    return build_workflow_spec(registration, graph, settings)


def _check_names(spec: ModelSpec, allowed_models: tuple[str, ...]) -> None:
    """Raise ModelNotAllowed where the workflow or a model of its steps is not among the allowed models."""
    assert spec.graph is not None
    for name in (spec.name, *(model for model, _ in spec.graph.models.values())):
        if not matches(name, allowed_models):
            raise ModelNotAllowed(name)


def _to_error(name: str, failures: Sequence[tuple[str, RelayError]]) -> WorkflowFailed:
    message = ", ".join(
        f"Workflow Node {node} failed to register. Details: {error}" for node, error in failures
    )
    details = (getattr(error, "detail", "") for _, error in failures)
    return WorkflowFailed(name, message, "\n".join(filter(None, details)))


def _step_document(step: WorkflowStep) -> Any:
    """Return a step as in its document, without the keys that have their default."""
    default = validation.write(WorkflowStep(model="m"))
    return {key: value for key, value in validation.write(step).items() if value != default[key]}
