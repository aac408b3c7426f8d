"""Documents of workflows: valid ones, and the errors of invalid ones."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from serve_app.domain import validation, workflow_graph
from serve_app.domain.workflow_graph import WorkflowGraph
from serve_app.errors import InvalidGraph, InvalidWorkflow

READING = {
    "name": "reading",
    "version": "2.0",
    "timeout_s": 5,
    "steps": {
        "detect": {"model": "detector:1.0", "timeout_s": 1, "retries": 2},
        "crop": {"function": "crop", "inputs": {"image": "request", "boxes": "detect"}},
        "read": {"model": "reader", "each": "crop", "parallel": 4},
        "turned": {"model": "turner", "each": {"line": "crop"}},
        "join": {"function": "join", "inputs": {"lines": "read", "turned": "turned"}},
    },
}


def test_a_document_is_read() -> None:
    read = workflow_graph.read(READING)
    assert (read.name, read.version, read.timeout_s, read.workers) == ("reading", "2.0", 5, 1)
    assert read.models == {
        "detect": ("detector", "1.0"),
        "read": ("reader", None),
        "turned": ("turner", None),
    }
    assert read.functions == ("crop", "join")
    assert read.leaves == ("join",)
    assert read.dependencies["join"] == {"read", "turned"}
    assert read.steps["detect"].shared_inputs == "request" and read.steps["read"].shared_inputs == {}
    assert read.steps["read"].item_sources == {"body": "crop"} and read.steps["turned"].item_sources == {
        "line": "crop"
    }
    assert read.dag == "{detect=[crop], crop=[read, turned], read=[join], turned=[join]}"


def test_it_outlives_json_and_pickle() -> None:
    read = workflow_graph.read(READING)
    assert validation.read(WorkflowGraph, validation.write(read)) == read
    assert pickle.loads(pickle.dumps(read)) == read


@pytest.mark.parametrize(
    ("output", "leaves"),
    [({}, ("a", "b")), ({"output": "b"}, None), ({"output": ["b", "a"]}, ("b", "a"))],
)
def test_the_output_is_what_nobody_waits_for_or_what_is_named(
    output: Any, leaves: tuple[str, ...] | None
) -> None:
    document = {"steps": {"a": {"model": "m"}, "b": {"model": "m"}}, **output}
    if leaves is None:
        with pytest.raises(
            InvalidGraph, match=r"steps\.a: nothing uses its answer; name it in output, or take it out"
        ):
            workflow_graph.read(document)
    else:
        assert workflow_graph.read(document).leaves == leaves


def steps(**result: Any) -> dict[str, Any]:
    return {"steps": {name: {"model": "m", **step} for name, step in result.items()}}


WRONG: list[tuple[Any, type[InvalidWorkflow], str]] = [
    (None, InvalidWorkflow, 'here: is no workflow: it has no mapping "steps"'),
    ({"steps": []}, InvalidWorkflow, 'it has no mapping "steps"'),
    ({"steps": {}}, InvalidWorkflow, "it has 0 of them, and from 1 to 200"),
    ({**steps(a={}), "outputs": "a"}, InvalidWorkflow, "unknown key 'outputs'; did you mean 'output'?"),
    ({**steps(a={}), "owned": ["x"]}, InvalidWorkflow, "unknown key 'owned'"),
    ({**steps(a={}), "version": 1.0}, InvalidWorkflow, "version: .*put it in quotes"),
    ({**steps(a={}), "workers": 0}, InvalidWorkflow, "workers is from 1 to 1000, and is 0"),
    ({**steps(a={}), "output": "c"}, InvalidWorkflow, "output names 'c', which is no step"),
    (steps(a={"retry": 1}), InvalidWorkflow, "unknown key 'steps.a.retry'; did you mean 'retries'?"),
    (steps(a={"retries": -1}), InvalidWorkflow, "steps.a: retries is from 0 to 20, and is -1"),
    (
        steps(a={"timeout_s": 0}),
        InvalidWorkflow,
        "steps.a: timeout_s is a number of seconds above 0, and is 0",
    ),
    (steps(a={"timeout_s": float("nan")}), InvalidWorkflow, "timeout_s is a number of seconds above 0"),
    (steps(a={"parallel": 0}), InvalidWorkflow, "parallel is from 1 to 1000"),
    (
        steps(a={"function": "f"}),
        InvalidWorkflow,
        "steps.a: a step names a model or a function, and one of them only",
    ),
    ({"steps": {"a": {}}}, InvalidWorkflow, "a step names a model or a function"),
    ({"steps": {"a": {"model": "m:"}}}, InvalidWorkflow, "model is NAME or NAME:VERSION, and is 'm:'"),
    ({"steps": {"a": {"function": "no-name"}}}, InvalidWorkflow, "function is a name of Python's"),
    ({"steps": {"request": {"model": "m"}}}, InvalidWorkflow, "steps.request: a step's name has letters"),
    ({"steps": {"a.b": {"model": "m"}}}, InvalidWorkflow, "steps.a.b: a step's name has letters"),
    (
        steps(a={"inputs": "request."}),
        InvalidWorkflow,
        "steps.a.inputs: 'request.' names no part of the request",
    ),
    (
        steps(detect={}, b={"inputs": {"x": "detekt"}}),
        InvalidWorkflow,
        "steps.b.inputs.x names 'detekt', which is no step; did you mean 'detect'?",
    ),
    (
        steps(a={}, b={"each": "c"}),
        InvalidWorkflow,
        "steps.b.each names 'c', which is no step; there are a, b, request",
    ),
    (
        steps(a={}, b={"each": {"x": "a"}, "inputs": {"x": "request"}}),
        InvalidWorkflow,
        "steps.b: inputs and each both name 'x'",
    ),
    (
        steps(a={"inputs": "a"}),
        InvalidGraph,
        "its steps wait for each other: a → a; take one of these inputs out",
    ),
    (
        steps(
            z={}, a={"inputs": {"x": "c", "y": "z"}}, b={"inputs": "a"}, c={"inputs": "b"}, d={"inputs": "c"}
        ),
        InvalidGraph,
        "its steps wait for each other: a → b → c → a",
    ),
]


@pytest.mark.parametrize(("document", "kind", "words"), WRONG, ids=[words for *_, words in WRONG])
def test_errors_name_the_place(document: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(InvalidWorkflow, match=words.replace("(", r"\(")) as raised:
        workflow_graph.read(document, "here")
    assert type(raised.value) is kind
    assert str(raised.value).startswith("here: ")
