"""The signature of a workflow: the ports of its request and response, derived from its models' signatures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from serve_app.domain.signature import ANY, Signature, TensorSpec
from serve_app.domain.tensors import DEFAULT_OUTPUT_NAME
from serve_app.domain.workflow_graph import DEFAULT_INPUT_NAME, REQUEST, WorkflowGraph, WorkflowStep

SignatureLookup = Callable[[str, "str | None"], "Signature | None"]  # what a model is known to take and give

_TEXT = TensorSpec(DEFAULT_OUTPUT_NAME, "BYTES", (1,))  # what is no tensor is answered as


class _UnknownSignature(Exception):
    """A step that takes a part of the request and has no signature for it."""


def derive_signature(graph: WorkflowGraph, known: SignatureLookup) -> Signature:
    """Return the signature for requests of tensors.

    A side is empty if it is not completely known, or if models contradict each other.
    """
    return Signature(_inputs(graph, known), _outputs(graph, known))


def _inputs(graph: WorkflowGraph, known: SignatureLookup) -> tuple[TensorSpec, ...]:
    found: dict[str, TensorSpec] = {}
    try:
        for step in graph.steps.values():
            for port in _taken(step, known):
                if found.setdefault(port.name, port) != port:
                    return ()
    except _UnknownSignature:
        return ()
    return tuple(found.values())


def _taken(step: WorkflowStep, known: SignatureLookup) -> Iterator[TensorSpec]:
    """Yield the parts of the request that a step takes."""
    shared = step.shared_inputs
    whole = shared == REQUEST
    named = {} if whole else {DEFAULT_INPUT_NAME: shared} if isinstance(shared, str) else shared
    parts = {
        name: part
        for name, source in {**named, **step.item_sources}.items()
        if (part := _part(source)) is not None
    }
    if not parts and not whole:
        return
    model_signature = known(*step.model_and_version) if step.model else None
    if model_signature is None:
        raise _UnknownSignature
    ports = {port.name: port for port in model_signature.inputs}
    if whole:
        yield from (port for name, port in ports.items() if name not in step.item_sources)
    for name, part in parts.items():
        if not part or name not in ports:
            raise _UnknownSignature
        port = replace(ports[name], name=part)
        # Its slices are requested one by one, each with a first axis of length one.
        yield (
            replace(port, shape=(ANY, *port.shape[1:])) if name in step.item_sources and port.shape else port
        )


def _part(source: str) -> str | None:
    """Return the part of the request in a source; empty for all of it, None for a step's response."""
    first, _, part = source.partition(".")
    return part if first == REQUEST else None


def _outputs(graph: WorkflowGraph, known: SignatureLookup) -> tuple[TensorSpec, ...]:
    leaves = graph.leaves
    step = graph.steps[leaves[0]]
    if len(leaves) > 1 or step.each or not _of_tensors(graph, step):
        return (_TEXT,)
    model_signature = known(*step.model_and_version)
    return model_signature.outputs if model_signature is not None else ()


def _of_tensors(graph: WorkflowGraph, step: WorkflowStep) -> bool:
    """Return whether a step gets tensors: it is a model, and all its inputs are tensors."""
    if not step.model:
        return False
    before = [graph.steps[source] for _, source in step.sources if _part(source) is None]
    return not (before and graph.torchserve) and all(
        not one.each and _of_tensors(graph, one) for one in before
    )
