"""What a workflow takes and gives, of graphs over models that say so, and some that do not."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.dataplane import workflow_signature
from serve_app.domain import workflow_graph
from serve_app.domain.signature import Signature, TensorSpec

X, Y = TensorSpec("x", "FP32", (-1, 4)), TensorSpec("y", "INT64", (-1,))
TEXT = TensorSpec("output-0", "BYTES", (1,))
SIGNED = {
    "a": Signature((X,), (Y,)),
    "b": Signature((Y,), (TensorSpec("z", "BOOL"),)),
    "both": Signature((X, TensorSpec("n", "INT8", (1,))), (X,)),
    "other": Signature((TensorSpec("x", "FP64", (-1, 4)),)),
}


def ports(
    torchserve: bool = False, output: Any = (), **steps: dict
) -> tuple[list[TensorSpec], list[TensorSpec]]:
    made = workflow_graph.read({"name": "w", "steps": steps, "output": output})
    if torchserve:
        made = workflow_graph.WorkflowGraph(**{**vars(made), "torchserve": {"form": "it"}})
    found = workflow_signature.derive_signature(
        made, lambda model, version: SIGNED.get(model) if version is None else None
    )
    return list(found.inputs), list(found.outputs)


def a(**result: Any) -> dict:
    return {"model": "a", **result}


@pytest.mark.parametrize(
    ("steps", "inputs", "outputs"),
    [
        ({"only": a()}, [X], [Y]),
        ({"only": a(), "last": {"model": "b", "inputs": "only"}}, [X], [TensorSpec("z", "BOOL")]),
        ({"only": a(inputs={"x": "request.image"})}, [TensorSpec("image", "FP32", (-1, 4))], [Y]),
        ({"only": a(each={"x": "request.images"})}, [TensorSpec("images", "FP32", (-1, 4))], [TEXT]),
        ({"only": {"model": "both", "inputs": "request", "each": {"n": "request.ns"}}}, None, [TEXT]),
        ({"one": a(), "two": {"model": "b"}}, [X, Y], [TEXT]),  # two ends are one document
        ({"one": a(), "two": {"model": "both"}}, [X, TensorSpec("n", "INT8", (1,))], [TEXT]),
        ({"one": a(), "two": {"model": "other"}}, [], [TEXT]),  # two say different things of x
        ({"one": a(), "f": {"function": "f", "inputs": "one"}}, [X], [TEXT]),
        ({"f": {"function": "f"}, "one": a(inputs="f")}, [], [TEXT]),  # a function's answer is no tensor
        ({"one": a(each="request.x"), "two": {"model": "b", "inputs": "one"}}, [], [TEXT]),
        ({"only": a(inputs={"x": "request"})}, [], [Y]),  # whatever the first part is called
        ({"only": a(inputs={"nothing": "request.x"})}, [], [Y]),
        ({"only": {"model": "unsigned"}}, [], []),
        ({"only": {"model": "a:2.0"}}, [], []),
        ({"only": {"model": "other"}}, [TensorSpec("x", "FP64", (-1, 4))], []),
    ],
)
def test_ends(steps: dict, inputs: list[TensorSpec] | None, outputs: list[TensorSpec]) -> None:
    if inputs is None:
        inputs = [X, TensorSpec("ns", "INT8", (-1,))]
    assert ports(**steps) == (inputs, outputs)


def test_the_output_that_is_named() -> None:
    steps = {"one": a(), "two": {"model": "b", "inputs": "one"}}
    assert ports(output=["one", "two"], **steps) == ([X], [TEXT])


def test_torchserves_form_hands_on_bytes() -> None:
    steps = {"one": a(), "two": {"model": "b", "inputs": "one"}}
    assert ports(torchserve=True, **steps) == ([X], [TEXT])
    assert ports(torchserve=True, one=a()) == ([X], [Y])
