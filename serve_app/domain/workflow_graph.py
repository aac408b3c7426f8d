"""Workflow graphs as frozen values and as documents: steps, and the inputs that each of them waits for.

A source, from which a step takes its input, is ``request``, ``request.NAME`` (one part of the request) or a
step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any

from typing_extensions import Required, TypedDict

from serve_app.domain import validation
from serve_app.domain.limits import MAX_PARALLEL_ITEMS as _MAX_PARALLEL
from serve_app.domain.limits import MAX_STEP_RETRIES as _MAX_RETRIES
from serve_app.domain.limits import MAX_WORKFLOW_STEPS as _MAX_STEPS
from serve_app.domain.limits import MAX_WORKFLOW_WORKERS as _MAX_WORKERS
from serve_app.domain.validation import documented
from serve_app.errors import InvalidGraph, InvalidWorkflow

REQUEST = "request"
DEFAULT_INPUT_NAME = "body"  # of an input without a name

_STEP = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class WorkflowStep:
    """A request to a model, or to a function of the workflow's own file.

    ``inputs``: a source, or sources by the names of the step's inputs. ``each``: sources that are lists, by
    name too; the step runs once for each of their items, ``parallel`` at once, and returns a list of the same
    length.
    """

    __pydantic_config__ = validation.STRICT
    model: Annotated[str, documented("NAME or NAME:VERSION")] = ""
    function: str = ""
    # Empty: the request, unless there is ``each``.
    inputs: Annotated[str | Mapping[str, str], documented("A source, or sources by name.")] = ""
    each: Annotated[str | Mapping[str, str], documented("Sources that are lists, by name too.")] = ""
    parallel: Annotated[int, documented("Concurrent items.", minimum=1, maximum=_MAX_PARALLEL)] = 16
    retries: Annotated[int, documented("Retries of an attempt.", minimum=0, maximum=_MAX_RETRIES)] = 0
    timeout_s: Annotated[float | None, documented("An attempt's timeout in seconds.", exclusiveMinimum=0)] = (
        None
    )

    def __post_init__(self) -> None:
        if bool(self.model) == bool(self.function):
            raise ValueError("a step names a model or a function, and one of them only")
        name, colon, version = self.model.partition(":")
        if self.model and (not name or (colon and not version)):
            raise ValueError(f"model is NAME or NAME:VERSION, and is {self.model!r}")
        if self.function and not self.function.isidentifier():
            raise ValueError(f"function is a name of Python's, and is {self.function!r}")
        if not 0 <= self.retries <= _MAX_RETRIES:
            raise ValueError(f"retries is from 0 to {_MAX_RETRIES}, and is {self.retries}")
        if not 1 <= self.parallel <= _MAX_PARALLEL:
            raise ValueError(f"parallel is from 1 to {_MAX_PARALLEL}, and is {self.parallel}")
        _check_timeout(self.timeout_s)

    @property
    def model_and_version(self) -> tuple[str, str | None]:
        """The model's name, and the version where one is named."""
        name, _, version = self.model.partition(":")
        return name, version or None

    @property
    def shared_inputs(self) -> str | Mapping[str, str]:
        """The sources of all inputs that are not lists of items."""
        return self.inputs or ({} if self.each else REQUEST)

    @property
    def item_sources(self) -> Mapping[str, str]:
        """The sources that are lists, by name."""
        return (
            {DEFAULT_INPUT_NAME: self.each} if isinstance(self.each, str) and self.each else self.each or {}
        )

    @property
    def sources(self) -> Iterator[tuple[str, str]]:
        """Every source, behind the key that names it."""
        for key, fields in (("inputs", self.shared_inputs), ("each", self.each)):
            if isinstance(fields, str):
                if fields:
                    yield key, fields
            else:
                yield from ((f"{key}.{name}", source) for name, source in fields.items())


@dataclass(frozen=True)
class WorkflowSource:
    """The document that operators write."""

    __pydantic_config__ = validation.STRICT
    steps: Annotated[Mapping[str, WorkflowStep], documented("By name.")]
    name: Annotated[str, documented("The workflow's name in requests.")] = ""
    version: str = "1.0"
    output: Annotated[str | tuple[str, ...], documented("The returned steps; default: the last ones.")] = ()
    timeout_s: Annotated[float | None, documented("A request's timeout in seconds.", exclusiveMinimum=0)] = (
        None
    )
    workers: Annotated[int, documented("The replicas of its functions.", minimum=1, maximum=_MAX_WORKERS)] = 1

    def __post_init__(self) -> None:
        _check_timeout(self.timeout_s)
        if not 1 <= self.workers <= _MAX_WORKERS:
            raise ValueError(f"workers is from 1 to {_MAX_WORKERS}, and is {self.workers}")


@dataclass(frozen=True)
class WorkflowGraph(WorkflowSource):
    """A validated workflow.

    ``owned`` are the models that were registered with it and are removed with it. ``torchserve`` is the
    description for TorchServe's clients of a workflow in TorchServe's form, whose steps exchange bytes
    without a content type.
    """

    owned: tuple[str, ...] = ()
    torchserve: Mapping[str, Any] = field(default_factory=dict)

    @property
    def functions(self) -> tuple[str, ...]:
        """The functions that its steps call, each once."""
        return tuple(dict.fromkeys(step.function for step in self.steps.values() if step.function))

    @property
    def models(self) -> dict[str, tuple[str, str | None]]:
        """The models of the steps, by step: the name, and the version where one is named."""
        return {name: step.model_and_version for name, step in self.steps.items() if step.model}

    @property
    def leaves(self) -> tuple[str, ...]:
        """The steps whose responses are the workflow's."""
        if self.output:
            return (self.output,) if isinstance(self.output, str) else self.output
        waited_for = {before for step in self.steps.values() for before in _source_steps(step)}
        return tuple(name for name in self.steps if name not in waited_for)

    @property
    def dependencies(self) -> dict[str, frozenset[str]]:
        """The steps whose answers each step needs."""
        return {name: frozenset(_source_steps(step)) for name, step in self.steps.items()}

    @property
    def dag(self) -> str:
        """The successors of each step, in TorchServe's notation."""
        after = {
            name: [other for other, needs in self.dependencies.items() if name in needs]
            for name in self.steps
        }
        return "{" + ", ".join(f"{name}=[{', '.join(steps)}]" for name, steps in after.items() if steps) + "}"


class FunctionsStatus(TypedDict):
    """The workers of a workflow's functions."""

    phase: str
    workers: int


class WorkflowDocument(TypedDict, total=False):
    """A version of a workflow: TorchServe's fields, then ours."""

    workflowName: Required[str]
    workflowUrl: Required[Annotated[str, documented("Of its archive; empty without one.")]]
    minWorkers: int
    maxWorkers: int
    batchSize: int
    maxBatchDelay: int
    workflowDag: Annotated[str, documented("The successors of each step.")]
    workflowVersion: Required[str]
    defaultVersion: Required[Annotated[bool, documented("Whether requests without a version run this one.")]]
    steps: Required[dict[str, WorkflowStep]]
    output: Required[list[str]]
    ongoing: Required[Annotated[int, documented("Requests in progress.", minimum=0)]]
    timeout_s: float
    functions: FunctionsStatus


def read(document: Any, where: str = "the workflow") -> WorkflowGraph:
    """Parse the graph in a document.

    Raises InvalidWorkflow and InvalidGraph, with place and remedy.
    """
    if not isinstance(document, Mapping) or not isinstance(document.get("steps"), Mapping):
        raise InvalidWorkflow(where, 'is no workflow: it has no mapping "steps" of names to steps')
    try:
        fields = validation.read(WorkflowSource, document)
    except validation.DocumentError as error:
        raise InvalidWorkflow(where, str(error)) from None
    graph = WorkflowGraph(**vars(fields))
    return validate(graph, where)


def validate(graph: WorkflowGraph, where: str) -> WorkflowGraph:
    """Return the graph if its sources exist, it has no cycle, and every step contributes to its response."""
    if not 0 < len(graph.steps) <= _MAX_STEPS:
        count = len(graph.steps)
        raise InvalidWorkflow(where, f"steps: it has {count} of them, and from 1 to {_MAX_STEPS} are allowed")
    for name, step in graph.steps.items():
        if not _STEP.fullmatch(name) or name == REQUEST:
            raise InvalidWorkflow(
                where, f"steps.{name}: a step's name has letters, digits, _ and -, and is not {REQUEST!r}"
            )
        for key, source in step.sources:
            _check_source(graph, source, f"steps.{name}.{key}", where)
        if not isinstance(step.inputs, str) and (twice := step.inputs.keys() & step.item_sources.keys()):
            raise InvalidWorkflow(
                where, f"steps.{name}: inputs and each both name {min(twice)!r}; call one otherwise"
            )
    if circle := _find_cycle(graph.dependencies):
        raise InvalidGraph(
            where, f"its steps wait for each other: {' → '.join(circle)}; take one of these inputs out"
        )
    for leaf in graph.leaves:
        if leaf not in graph.steps:
            raise InvalidWorkflow(
                where, f"output names {leaf!r}, {_describe_unknown_step(leaf, graph.steps)}"
            )
    useless = graph.steps.keys() - _ancestors(graph.leaves, graph.dependencies)
    if useless:
        unused = next(name for name in graph.steps if name in useless)
        raise InvalidGraph(
            where, f"steps.{unused}: nothing uses its answer; name it in output, or take it out"
        )
    return graph


def with_name(graph: WorkflowGraph, name: str) -> WorkflowGraph:
    """Return the graph under another name."""
    return replace(graph, name=name)


def _check_source(graph: WorkflowGraph, source: str, place: str, where: str) -> None:
    first, dot, part = source.partition(".")
    if first == REQUEST:
        if dot and not part:
            raise InvalidWorkflow(
                where, f"{place}: {source!r} names no part of the request; write {REQUEST}.NAME"
            )
    elif source not in graph.steps:
        raise InvalidWorkflow(
            where, f"{place} names {source!r}, {_describe_unknown_step(source, [*graph.steps, REQUEST])}"
        )


def _describe_unknown_step(name: str, known: Iterable[str]) -> str:
    near = validation.did_you_mean(name, known)
    return "which is no step" + (f"; did you mean {near!r}?" if near else f"; there are {', '.join(known)}")


def _source_steps(step: WorkflowStep) -> list[str]:
    return [source for _, source in step.sources if source.partition(".")[0] != REQUEST]


def _ancestors(leaves: Iterable[str], waits: Mapping[str, Iterable[str]]) -> set[str]:
    found: set[str] = set()
    pending = list(leaves)
    while pending:
        if (name := pending.pop()) not in found:
            found.add(name)
            pending.extend(waits[name])
    return found


def _find_cycle(waits: Mapping[str, Iterable[str]]) -> list[str]:
    """Return steps that wait for each other, in the order of execution; empty where there is no cycle."""
    try:
        TopologicalSorter(waits).prepare()
    except CycleError as error:
        cycle = error.args[1][1:]
        start = cycle.index(min(cycle))
        return [*cycle[start:], *cycle[: start + 1]]
    return []


def _check_timeout(limit: float | None) -> None:
    if limit is not None and not 0 < limit < math.inf:
        raise ValueError(f"timeout_s is a number of seconds above 0, and is {limit:g}")
