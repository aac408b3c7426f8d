"""What the control plane asks of workflows: registered with what comes with them, described, and removed whole."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any

from serve_app import documents
from serve_app.control import registry as change
from serve_app.control.admission import Admission
from serve_app.control.board import Board
from serve_app.control.events import Events, Story
from serve_app.control.specs import member_spec, workflow_spec
from serve_app.deployments.ledger import Ledger
from serve_app.deployments.registrar import Registrar
from serve_app.deployments.rounds import Rounds
from serve_app.errors import (
    InUse,
    InvalidWorkflow,
    NotYet,
    RelayError,
    WorkflowFailed,
    WorkflowNotFound,
    WrongModel,
)
from serve_app.graph import Graph, Step
from serve_app.settings import Settings
from serve_app.store.war import Member
from serve_app.telemetry.metrics import Sum
from serve_app.types import ModelRef, ModelSpec, Registration, matches

log = logging.getLogger("torchrelay.workflows")

_DRAIN = 300.0  # seconds for which the calls of a removed workflow may still go on
_LOOK = 0.1  # seconds between two looks whether they do


class Workflows:
    """The part of ``controlplane.Keeper`` that is about workflows."""

    def __init__(
        self,
        ledger: Ledger,
        rounds: Rounds,
        registrar: Registrar,
        events: Events,
        admission: Admission,
        board: Board,
        total: Sum,
        settings: Settings,
    ) -> None:
        self._ledger = ledger
        self._rounds = rounds
        self._registrar = registrar
        self._events = events
        self._admission = admission
        self._board = board
        self._total = total
        self._settings = settings
        self._drains: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        for task in self._drains:
            task.cancel()

    async def register_workflow(self, registration: Registration, graph: Graph | None) -> ModelRef:
        ledger = self._ledger
        async with contextlib.AsyncExitStack() as kept:
            await kept.enter_async_context(self._rounds.archives_kept())
            asked: list[Registration] = []
            members: tuple[Member, ...] = ()
            if graph is None:
                spec, asked, members = await asyncio.to_thread(self._admission.admit_workflow, registration)
            else:
                spec = _of_document(registration, graph, self._settings)
            _check_names(spec, registration.within)
            change.is_new_workflow(ledger.registry, spec)
            parts = await self._members(spec, asked, members, kept)
            models = [part for part, _ in parts]
            change.register_workflow(ledger.registry, spec, models)  # refused before anything is waited for
            while any(self._rounds.leaving(part.ref) for part in (spec, *models)):
                await self._rounds.next()
            async with ledger.writing:
                with contextlib.suppress(NotYet):
                    await ledger.commit(change.register_workflow(ledger.registry, spec, models))
        if spec.handler:
            parts.append((spec, self._registrar.story(registration)))
        try:
            await self._started(spec, parts)
        except WorkflowFailed:
            await self._take_back(spec)
            raise
        return spec.ref

    async def workflows(self) -> list[tuple[str, str]]:
        registry = self._ledger.registry
        return [(name, registry.models[name].versions[registry.models[name].default].url) for name in _names(registry)]

    async def workflow(self, name: str) -> list[dict[str, Any]]:
        record = self._ledger.registry.models.get(name)
        if record is None or not change.is_workflow(record):
            raise WorkflowNotFound(name)
        others = sorted(version for version in record.versions if version != record.default)
        await self._board.collect(1.0, self._rounds.alive)
        return [
            self._described(record.versions[version], version == record.default)
            for version in (record.default, *others)
        ]

    async def unregister_workflow(self, name: str, version: str | None) -> None:
        async with self._ledger.writing:
            after, gone = change.unregister_workflow(self._ledger.registry, name, version)
            for spec in gone:
                self._rounds.linger(spec)
            try:
                await self._ledger.commit(after)
            finally:
                self._drain(name, gone)

    def _drain(self, name: str, gone: Sequence[ModelSpec]) -> None:
        """Let what a workflow's steps ask stay until the calls that had begun have ended."""

        async def drain() -> None:
            versions = [spec.version for spec in gone if spec.name == name]
            until = time.monotonic() + _DRAIN
            try:
                while time.monotonic() < until:
                    await self._board.collect(1.0, self._rounds.alive)
                    if not sum(self._ongoing(name, version) for version in versions):
                        break
                    await asyncio.sleep(_LOOK)
            finally:
                for spec in gone:
                    self._rounds.let_go(spec)

        task = asyncio.create_task(drain())
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)

    def _ongoing(self, name: str, version: str) -> int:
        return int(self._total.total("torchrelay_workflow_ongoing", model=name, version=version))

    async def _members(
        self,
        spec: ModelSpec,
        asked: Sequence[Registration],
        members: Sequence[Member],
        kept: contextlib.AsyncExitStack,
    ) -> list[tuple[ModelSpec, Story]]:
        """The models that come with a workflow, their archives admitted and installed, each with its story."""
        made, failures = [], []
        for registration, member in zip(asked, members, strict=True):
            story = self._registrar.story(registration)
            try:
                with self._events.told(story):
                    admitted = await kept.enter_async_context(self._registrar.admitted(registration, story))
                    model = member_spec(admitted, member)
                    await self._registrar.install(model, story)
                made.append((model, story))
            except RelayError as error:
                failures.append((member.name, error))
        if failures:
            raise _failed(spec.name, failures)
        return made

    async def _started(self, spec: ModelSpec, parts: Sequence[tuple[ModelSpec, Story]]) -> None:
        """Wait until the workers of all parts run. Raises WorkflowFailed."""

        async def one(part: ModelSpec, story: Story) -> None:
            with self._events.told(story):
                await self._registrar.started(story, part)

        outcomes = await asyncio.gather(*(one(*part) for part in parts), return_exceptions=True)
        failures = []
        for (part, _), outcome in zip(parts, outcomes):
            if isinstance(outcome, RelayError):
                failures.append((part.name, outcome))
            elif isinstance(outcome, BaseException):
                raise outcome
        if failures:
            raise _failed(spec.name, failures)

    async def _take_back(self, spec: ModelSpec) -> None:
        async with self._ledger.writing:
            with contextlib.suppress(InUse, WorkflowNotFound):  # somebody deals calls to it by now, or has removed it
                after, gone = change.unregister_workflow(self._ledger.registry, spec.name, spec.version)
                with contextlib.suppress(NotYet):
                    await self._ledger.commit(after)
                for part in gone:
                    self._rounds.let_go(part)

    def _described(self, spec: ModelSpec, default: bool) -> dict[str, Any]:
        """A version in TorchServe's words, and then in ours."""
        graph = spec.graph
        assert graph is not None
        said: dict[str, Any] = {"workflowName": spec.name, "workflowUrl": spec.url}
        said |= graph.torchserve or {
            "minWorkers": spec.min_workers,
            "maxWorkers": spec.max_workers,
            "batchSize": spec.batch_size,
            "maxBatchDelay": 0,
            "workflowDag": graph.dag,
        }
        said |= {
            "workflowVersion": spec.version,
            "defaultVersion": default,
            "steps": {name: _written(step) for name, step in graph.steps.items()},
            "output": list(graph.leaves),
            "ongoing": self._ongoing(spec.name, spec.version),
        }
        if graph.timeout_s is not None:
            said["timeout_s"] = graph.timeout_s
        if spec.handler:
            status = self._rounds.status(spec.ref)
            said["functions"] = {"phase": status.phase, "workers": status.replicas}
        return said


def _of_document(registration: Registration, graph: Graph, settings: Settings) -> ModelSpec:
    if graph.functions:
        raise InvalidWorkflow(
            f"Workflow {graph.name}",
            f"its steps call {', '.join(graph.functions)}, and a document brings no functions; "
            "pack it with their file: torchrelay workflow archive",
        )
    return workflow_spec(registration, graph, settings)


def _check_names(spec: ModelSpec, within: tuple[str, ...]) -> None:
    """Whoever may register it may also have each of its models asked. Raises WrongModel."""
    assert spec.graph is not None
    for name in (spec.name, *(model for model, _ in spec.graph.models.values())):
        if not matches(name, within):
            raise WrongModel(name)


def _failed(name: str, failures: Sequence[tuple[str, RelayError]]) -> WorkflowFailed:
    told = ", ".join(f"Workflow Node {node} failed to register. Details: {error}" for node, error in failures)
    details = (getattr(error, "detail", "") for _, error in failures)
    return WorkflowFailed(name, told, "\n".join(filter(None, details)))


def _written(step: Step) -> dict[str, Any]:
    """A step as its document would have it, without what it leaves to the defaults."""
    default = documents.write(Step(model="m"))
    return {key: value for key, value in documents.write(step).items() if value != default[key]}


def _names(registry: change.Registry) -> list[str]:
    return sorted(change.workflows(registry))
