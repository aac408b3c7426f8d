"""What a workflow takes and gives, of graphs over models that say so, and some that do not."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app import ends, graph
from serve_app.signature import Port, Signature

X, Y = Port("x", "FP32", (-1, 4)), Port("y", "INT64", (-1,))
TEXT = Port("output-0", "BYTES", (1,))
SIGNED = {
    "a": Signature((X,), (Y,)),
    "b": Signature((Y,), (Port("z", "BOOL"),)),
    "both": Signature((X, Port("n", "INT8", (1,))), (X,)),
    "other": Signature((Port("x", "FP64", (-1, 4)),)),
}


def ports(torchserve: bool = False, output: Any = (), **steps: dict) -> tuple[list[Port], list[Port]]:
    made = graph.read({"name": "w", "steps": steps, "output": output})
    if torchserve:
        made = graph.Graph(**{**vars(made), "torchserve": {"form": "it"}})
    found = ends.signature(made, lambda model, version: SIGNED.get(model) if version is None else None)
    return list(found.inputs), list(found.outputs)


def a(**said: Any) -> dict:
    return {"model": "a", **said}


@pytest.mark.parametrize(
    ("steps", "inputs", "outputs"),
    [
        ({"only": a()}, [X], [Y]),
        ({"only": a(), "last": {"model": "b", "inputs": "only"}}, [X], [Port("z", "BOOL")]),
        ({"only": a(inputs={"x": "request.image"})}, [Port("image", "FP32", (-1, 4))], [Y]),
        ({"only": a(each={"x": "request.images"})}, [Port("images", "FP32", (-1, 4))], [TEXT]),
        ({"only": {"model": "both", "inputs": "request", "each": {"n": "request.ns"}}}, None, [TEXT]),
        ({"one": a(), "two": {"model": "b"}}, [X, Y], [TEXT]),  # two ends are one document
        ({"one": a(), "two": {"model": "both"}}, [X, Port("n", "INT8", (1,))], [TEXT]),
        ({"one": a(), "two": {"model": "other"}}, [], [TEXT]),  # two say different things of x
        ({"one": a(), "f": {"function": "f", "inputs": "one"}}, [X], [TEXT]),
        ({"f": {"function": "f"}, "one": a(inputs="f")}, [], [TEXT]),  # a function's answer is no tensor
        ({"one": a(each="request.x"), "two": {"model": "b", "inputs": "one"}}, [], [TEXT]),
        ({"only": a(inputs={"x": "request"})}, [], [Y]),  # whatever the first part is called
        ({"only": a(inputs={"nothing": "request.x"})}, [], [Y]),
        ({"only": {"model": "unsigned"}}, [], []),
        ({"only": {"model": "a:2.0"}}, [], []),
        ({"only": {"model": "other"}}, [Port("x", "FP64", (-1, 4))], []),
    ],
)
def test_ends(steps: dict, inputs: list[Port] | None, outputs: list[Port]) -> None:
    if inputs is None:
        inputs = [X, Port("ns", "INT8", (-1,))]
    assert ports(**steps) == (inputs, outputs)


def test_the_output_that_is_named() -> None:
    steps = {"one": a(), "two": {"model": "b", "inputs": "one"}}
    assert ports(output=["one", "two"], **steps) == ([X], [TEXT])


def test_torchserves_form_hands_on_bytes() -> None:
    steps = {"one": a(), "two": {"model": "b", "inputs": "one"}}
    assert ports(torchserve=True, **steps) == ([X], [TEXT])
    assert ports(torchserve=True, one=a()) == ([X], [Y])
