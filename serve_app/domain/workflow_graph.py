"""A workflow's graph as frozen values and as the document that people write: steps, and what each of them waits for.

A source, from which a step takes its input, is ``request``, ``request.NAME`` (one part of the request) or a step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from serve_app import documents
from serve_app.errors import InvalidGraph, InvalidWorkflow

REQUEST = "request"
ALONE = "body"  # what an input is called that nobody named

_STEP = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
_MOST_STEPS = 200
_MOST_RETRIES = 20
_MOST_PARALLEL = 1000
_MOST_WORKERS = 1000


@dataclass(frozen=True)
class Step:
    """A question to a model or to a function of the workflow's own file.

    ``inputs``: a source, or sources by the names under which the step gets them. ``each``: sources that are lists, by
    name too; the step is asked once for each of their items, ``parallel`` at once, and answers with a list as long.
    """

    __pydantic_config__ = documents.STRICT
    model: str = ""  # NAME, or NAME:VERSION
    function: str = ""
    inputs: str | Mapping[str, str] = ""  # empty: the request, unless each says something
    each: str | Mapping[str, str] = ""
    parallel: int = 16
    retries: int = 0  # after the first attempt
    timeout_s: float | None = None  # of one attempt

    def __post_init__(self) -> None:
        if bool(self.model) == bool(self.function):
            raise ValueError("a step names a model or a function, and one of them only")
        name, colon, version = self.model.partition(":")
        if self.model and (not name or (colon and not version)):
            raise ValueError(f"model is NAME or NAME:VERSION, and is {self.model!r}")
        if self.function and not self.function.isidentifier():
            raise ValueError(f"function is a name of Python's, and is {self.function!r}")
        if not 0 <= self.retries <= _MOST_RETRIES:
            raise ValueError(f"retries is from 0 to {_MOST_RETRIES}, and is {self.retries}")
        if not 1 <= self.parallel <= _MOST_PARALLEL:
            raise ValueError(f"parallel is from 1 to {_MOST_PARALLEL}, and is {self.parallel}")
        _seconds(self.timeout_s)

    @property
    def asks(self) -> tuple[str, str | None]:
        """The model's name, and the version where one is named."""
        name, _, version = self.model.partition(":")
        return name, version or None

    @property
    def shared(self) -> str | Mapping[str, str]:
        """Where its inputs come from, but for those of which each item is asked for by itself."""
        return self.inputs or ({} if self.each else REQUEST)

    @property
    def dealt(self) -> Mapping[str, str]:
        """The sources that are lists, by name."""
        return {ALONE: self.each} if isinstance(self.each, str) and self.each else self.each or {}

    @property
    def sources(self) -> Iterator[tuple[str, str]]:
        """Every source, behind the key that names it."""
        for key, said in (("inputs", self.shared), ("each", self.each)):
            if isinstance(said, str):
                if said:
                    yield key, said
            else:
                yield from ((f"{key}.{name}", source) for name, source in said.items())


@dataclass(frozen=True)
class _Document:
    """What people write."""

    __pydantic_config__ = documents.STRICT
    steps: Mapping[str, Step]
    name: str = ""
    version: str = "1.0"
    output: str | tuple[str, ...] = ()  # empty: the steps for which no other waits
    timeout_s: float | None = None  # of a call
    workers: int = 1  # replicas of its functions

    def __post_init__(self) -> None:
        _seconds(self.timeout_s)
        if not 1 <= self.workers <= _MOST_WORKERS:
            raise ValueError(f"workers is from 1 to {_MOST_WORKERS}, and is {self.workers}")


@dataclass(frozen=True)
class Graph(_Document):
    """A workflow that was checked.

    ``owned`` are the models that were registered with it and go with it. ``torchserve`` is what a TorchServe's client
    reads of a workflow of TorchServe's form, whose steps get and give bytes without a content type.
    """

    owned: tuple[str, ...] = ()
    torchserve: Mapping[str, Any] = field(default_factory=dict)

    @property
    def functions(self) -> tuple[str, ...]:
        """The functions that its steps call, each once."""
        return tuple(dict.fromkeys(step.function for step in self.steps.values() if step.function))

    @property
    def models(self) -> dict[str, tuple[str, str | None]]:
        """What is asked of models, by step: the name, and the version where one is named."""
        return {name: step.asks for name, step in self.steps.items() if step.model}

    @property
    def leaves(self) -> tuple[str, ...]:
        """The steps whose answers are the workflow's."""
        if self.output:
            return (self.output,) if isinstance(self.output, str) else self.output
        waited_for = {before for step in self.steps.values() for before in _steps_of(step)}
        return tuple(name for name in self.steps if name not in waited_for)

    @property
    def waits(self) -> dict[str, frozenset[str]]:
        """The steps whose answers each step needs."""
        return {name: frozenset(_steps_of(step)) for name, step in self.steps.items()}

    @property
    def dag(self) -> str:
        """Which steps follow each one, written as TorchServe writes it."""
        after = {name: [other for other, needs in self.waits.items() if name in needs] for name in self.steps}
        return "{" + ", ".join(f"{name}=[{', '.join(steps)}]" for name, steps in after.items() if steps) + "}"

    def __contains__(self, model: str) -> bool:
        """Whether one of its steps asks this model."""
        return any(name == model for name, _ in self.models.values())


def read(document: Any, where: str = "the workflow") -> Graph:
    """The graph of a document as people write it. Raises InvalidWorkflow and InvalidGraph, with place and cure."""
    if not isinstance(document, Mapping) or not isinstance(document.get("steps"), Mapping):
        raise InvalidWorkflow(where, 'is no workflow: it has no mapping "steps" of names to steps')
    try:
        said = documents.read(_Document, document)
    except documents.Misread as error:
        raise InvalidWorkflow(where, str(error)) from None
    graph = Graph(**{key: getattr(said, key) for key in _Document.__dataclass_fields__})
    return checked(graph, where)


def checked(graph: Graph, where: str) -> Graph:
    """The graph, whose steps wait for steps that there are, and not for each other, and all lead to its answer."""
    if not 0 < len(graph.steps) <= _MOST_STEPS:
        count = len(graph.steps)
        raise InvalidWorkflow(where, f"steps: it has {count} of them, and from 1 to {_MOST_STEPS} are allowed")
    for name, step in graph.steps.items():
        if not _STEP.fullmatch(name) or name == REQUEST:
            raise InvalidWorkflow(
                where, f"steps.{name}: a step's name has letters, digits, _ and -, and is not {REQUEST!r}"
            )
        for key, source in step.sources:
            _check_source(graph, source, f"steps.{name}.{key}", where)
        if not isinstance(step.inputs, str) and (twice := step.inputs.keys() & step.dealt.keys()):
            raise InvalidWorkflow(where, f"steps.{name}: inputs and each both name {min(twice)!r}; call one otherwise")
    if circle := _circle(graph.waits):
        raise InvalidGraph(where, f"its steps wait for each other: {' → '.join(circle)}; take one of these inputs out")
    for leaf in graph.leaves:
        if leaf not in graph.steps:
            raise InvalidWorkflow(where, f"output names {leaf!r}, {_no_step(leaf, graph.steps)}")
    useless = graph.steps.keys() - _leading_to(graph.leaves, graph.waits)
    if useless:
        step = next(name for name in graph.steps if name in useless)
        raise InvalidGraph(where, f"steps.{step}: nothing uses its answer; name it in output, or take it out")
    return graph


def with_name(graph: Graph, name: str) -> Graph:
    """The graph under another name."""
    return replace(graph, name=name)


def order(graph: Graph) -> list[str]:
    """The steps, each after those that it waits for."""
    done: dict[str, None] = {}
    waits = graph.waits
    while len(done) < len(waits):
        done.update(dict.fromkeys(name for name, needs in waits.items() if needs <= done.keys()))
    return list(done)


def _check_source(graph: Graph, source: str, place: str, where: str) -> None:
    first, dot, part = source.partition(".")
    if first == REQUEST:
        if dot and not part:
            raise InvalidWorkflow(where, f"{place}: {source!r} names no part of the request; write {REQUEST}.NAME")
    elif source not in graph.steps:
        raise InvalidWorkflow(where, f"{place} names {source!r}, {_no_step(source, [*graph.steps, REQUEST])}")


def _no_step(name: str, known: Iterable[str]) -> str:
    near = documents.near_miss(name, known)
    return "which is no step" + (f"; did you mean {near!r}?" if near else f"; there are {', '.join(known)}")


def _steps_of(step: Step) -> list[str]:
    return [source for _, source in step.sources if source.partition(".")[0] != REQUEST]


def _leading_to(leaves: Iterable[str], waits: Mapping[str, Iterable[str]]) -> set[str]:
    found: set[str] = set()
    pending = list(leaves)
    while pending:
        if (name := pending.pop()) not in found:
            found.add(name)
            pending.extend(waits[name])
    return found


def _circle(waits: Mapping[str, frozenset[str]]) -> list[str]:
    """Steps that wait for each other, in the order in which answers would have to come; empty where there are none."""
    left = dict(waits)
    while free := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in free:
            del left[name]
    if not left:
        return []
    path = [min(left)]
    while path[-1] not in path[:-1]:
        path.append(min(left[path[-1]] & left.keys()))
    return path[path.index(path[-1]) :][::-1]


def _seconds(limit: float | None) -> None:
    if limit is not None and not 0 < limit < math.inf:
        raise ValueError(f"timeout_s is a number of seconds above 0, and is {limit:g}")
