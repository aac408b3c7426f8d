"""What a workflow takes and gives: the ports of its request and of its answer, as its models' signatures say them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from serve_app.graph import ALONE, REQUEST, Graph, Step
from serve_app.signature import ANY, Port, Signature
from serve_app.tensors import OUTPUT

Known = Callable[[str, "str | None"], "Signature | None"]  # what a model is known to take and give

_TEXT = Port(OUTPUT, "BYTES", (1,))  # what is no tensor is answered as


class _Unknown(Exception):
    """Somebody who takes a part of the request does not say as what."""


def signature(graph: Graph, known: Known) -> Signature:
    """That of a call of tensors. A side that is not known whole, or of which models say different things, is empty."""
    return Signature(_inputs(graph, known), _outputs(graph, known))


def _inputs(graph: Graph, known: Known) -> tuple[Port, ...]:
    found: dict[str, Port] = {}
    try:
        for step in graph.steps.values():
            for port in _taken(step, known):
                if found.setdefault(port.name, port) != port:
                    return ()
    except _Unknown:
        return ()
    return tuple(found.values())


def _taken(step: Step, known: Known) -> Iterator[Port]:
    """The parts of the request that go to a step."""
    shared = step.shared
    whole = shared == REQUEST
    named = {} if whole else {ALONE: shared} if isinstance(shared, str) else shared
    asked = {name: part for name, source in {**named, **step.dealt}.items() if (part := _part(source)) is not None}
    if not asked and not whole:
        return
    said = known(*step.asks) if step.model else None
    if said is None:
        raise _Unknown
    ports = {port.name: port for port in said.inputs}
    if whole:
        yield from (port for name, port in ports.items() if name not in step.dealt)
    for name, part in asked.items():
        if not part or name not in ports:
            raise _Unknown
        port = replace(ports[name], name=part)
        # Its slices are asked for one by one, each with an axis of one in front.
        yield replace(port, shape=(ANY, *port.shape[1:])) if name in step.dealt and port.shape else port


def _part(source: str) -> str | None:
    """The part of the request that a source is; empty for all of it, None for a step's answer."""
    first, _, part = source.partition(".")
    return part if first == REQUEST else None


def _outputs(graph: Graph, known: Known) -> tuple[Port, ...]:
    leaves = graph.leaves
    step = graph.steps[leaves[0]]
    if len(leaves) > 1 or step.each or not _of_tensors(graph, step):
        return (_TEXT,)
    said = known(*step.asks)
    return said.outputs if said is not None else ()


def _of_tensors(graph: Graph, step: Step) -> bool:
    """Whether a step is asked for tensors: it is a model, and gets nothing else."""
    if not step.model:
        return False
    before = [graph.steps[source] for _, source in step.sources if _part(source) is None]
    return not (before and graph.torchserve) and all(not one.each and _of_tensors(graph, one) for one in before)
