"""Workflows as clients use them: a real data plane and its routes, over models that the test writes."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from handlers.loading.workflow_functions import encode_value
from handlers.multipart import PARTS_CONTENT_TYPE, join_parts, split_parts
from serve_app.domain import workflow_graph
from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream
from serve_app.domain.routing_table import RoutingTable
from serve_app.domain.traffic_policy import TrafficPolicy, allocate
from serve_app.domain.workflow_graph import WorkflowGraph
from serve_app.errors import HandlerRejected
from tests.support.workflow_services import build_table, build_workflow, describe_inputs, function_name

Models = dict[str, Callable[[InferenceRequest], Awaitable["InferenceResponse | ResponseStream"]]]


# The order, and what goes from step to step


def test_steps_follow_each_other_and_the_last_one_answers(inference: Callable[..., Any]) -> None:
    w = build_workflow(
        first={"model": "a"}, then={"model": "b", "inputs": "first"}, last={"model": "c", "inputs": "then"}
    )
    app = inference(describe_inputs, build_table(w))
    response = app("POST", "/predictions/w", b"x")
    assert (response.status, response.body) == (200, b"c(body=b(body=a(body=x)))")
    assert response["x-model-version"] == "1.0"
    assert [name.partition(";")[0] for name in response["server-timing"].split(", ")] == [
        "first",
        "then",
        "last",
    ]
    assert {call.request_id for call in app.backend.requests} == {
        f"{response['x-request-id']}/{step}" for step in ("first", "then", "last")
    }
    samples = {(name, labels): value for name, labels, value in app.meters.samples()}
    ok = (("model", "w"), ("status", "ok"), ("step", "then"), ("version", "1.0"))
    assert samples["torchrelay_workflow_steps_total", ok] == 1
    assert samples["torchrelay_workflow_ongoing", (("model", "w"), ("version", "1.0"))] == 0
    assert samples["torchrelay_requests_total", (("model", "w"), ("status", "ok"), ("version", "1.0"))] == 1


@pytest.mark.parametrize(
    "path", ["/predictions/w", "/predictions/w/1.0", "/wfpredict/w", "/v1/models/w:predict"]
)
def test_every_model_route_runs_a_workflow(inference: Callable[..., Any], path: str) -> None:
    app = inference(describe_inputs, build_table(build_workflow(only={"model": "a"})))
    assert app("POST", path, b"x").body == b"a(body=x)"


def test_inputs_by_name_from_the_request_and_from_steps(inference: Callable[..., Any]) -> None:
    w = build_workflow(
        first={"model": "a", "inputs": {"image": "request.data"}},
        last={"model": "b", "inputs": {"x": "first", "y": "request", "z": "request.hint"}},
    )
    form = b"data=1&hint=2"
    response = inference(describe_inputs, build_table(w))(
        "POST", "/predictions/w", form, {"content-type": "application/x-www-form-urlencoded"}
    )
    assert response.body == b"b(x=a(image=1)&y=1&z=2)"


def test_content_types_go_along_and_those_of_the_request_do_not(inference: Callable[..., Any]) -> None:
    async def infer(call: InferenceRequest) -> InferenceResponse:
        if call.model == "a":
            return InferenceResponse(b"[1]", "application/json", headers=(("x-of", "a"),))
        return InferenceResponse(
            json.dumps([[p.name, p.content_type] for p in call.inputs]).encode(), headers=(("x-of", "b"),)
        )

    w = build_workflow(first={"model": "a"}, last={"model": "b", "inputs": "first"})
    app = inference(infer, build_table(w))
    response = app("POST", "/predictions/w", b"{}", {"content-type": "text/plain", "x-user": "ann"})
    assert json.loads(response.body) == [["body", "application/json"]]
    assert response["x-of"] == "b"
    assert all(
        "content-type" not in call.headers and call.headers["x-user"] == "ann"
        for call in app.backend.requests
    )


def test_several_leaves_are_one_object(inference: Callable[..., Any]) -> None:
    async def infer(call: InferenceRequest) -> InferenceResponse:
        return InferenceResponse({"a": b'{"n": 1}', "b": b"text \xc3\xa9", "c": join_parts([(b"1", None), (b"x", None)])}[call.model],  # noqa: E501
                     {"c": PARTS_CONTENT_TYPE}.get(call.model))  # fmt: skip

    w = build_workflow(x={"model": "a"}, y={"model": "b"}, z={"model": "c"})
    response = inference(infer, build_table(w))("POST", "/predictions/w", b"x")
    assert (response["content-type"], json.loads(response.body)) == (
        "application/json",
        {"x": {"n": 1}, "y": "text é", "z": [1, "x"]},
    )


def test_unmergeable_leaves_are_an_error(inference: Callable[..., Any]) -> None:
    async def infer(call: InferenceRequest) -> InferenceResponse:
        return InferenceResponse(b"\xff\xd8" if call.model == "a" else b"1")

    response = inference(infer, build_table(build_workflow(x={"model": "a"}, y={"model": "b"})))(
        "POST", "/predictions/w", b"x"
    )
    assert response.status == 503
    assert b"Step x of workflow w failed: its answer is neither JSON nor text" in response.body


def test_branches_run_side_by_side(inference: Callable[..., Any]) -> None:
    together = asyncio.Event()
    waiting = []

    async def infer(call: InferenceRequest) -> InferenceResponse:
        if call.model in "bc":
            waiting.append(call.model)
            if len(waiting) == 2:
                together.set()
            await asyncio.wait_for(together.wait(), 60)
        return await describe_inputs(call)

    w = build_workflow(
        s={"model": "a"},
        left={"model": "b", "inputs": "s"},
        right={"model": "c", "inputs": "s"},
        end={"model": "d", "inputs": {"left": "left", "right": "right"}},
    )
    response = inference(infer, build_table(w))("POST", "/predictions/w", b"x")
    assert response.body == b"d(left=b(body=a(body=x))&right=c(body=a(body=x)))"


def test_versions_policies_and_priority_hold_for_steps(inference: Callable[..., Any]) -> None:
    versions = Counter()

    async def infer(call: InferenceRequest) -> InferenceResponse:
        versions[call.version] += 1
        assert call.priority == "low"
        return InferenceResponse(b"1")

    weights = TrafficPolicy(
        "weighted", {"1.0": 5000, "2.0": 5000}, allocation=allocate({"1.0": 5000, "2.0": 5000})
    )
    w = build_workflow(each={"model": "a", "each": "request"}, fixed={"model": "b:2.0", "inputs": "each"})
    app = inference(infer, build_table(w, policy=weights))
    seen = Counter()
    app.backend.at = lambda ref, backend=app.backend: seen.update([(ref.name, ref.version)]) or backend
    response = app(
        "POST", "/predictions/w", json.dumps(list(range(20))).encode(), {"x-request-priority": "low"}
    )
    assert response.status == 200
    assert seen["a", "1.0"] + seen["a", "2.0"] == 20 and min(seen["a", "1.0"], seen["a", "2.0"]) >= 8
    assert seen["b", "2.0"] == 1 and len(seen) == 3


def test_workflow_runs_another_workflow(inference: Callable[..., Any]) -> None:
    inner = build_workflow("inner", i={"model": "b"})
    outer = build_workflow("outer", o={"model": "inner"}, last={"model": "a", "inputs": "o"})
    app = inference(describe_inputs, build_table(inner, outer))
    assert app("POST", "/predictions/outer", b"x").body == b"a(body=b(body=x))"

    async def fails(call: InferenceRequest) -> InferenceResponse:
        raise HandlerRejected("no such picture", 422)

    response = inference(fails, build_table(inner, outer))("POST", "/predictions/outer", b"x")
    assert response.status == 422
    assert (
        b"Step o of workflow outer failed: Step i of workflow inner failed: no such picture" in response.body
    )


# Lists


def test_step_runs_for_each_item(inference: Callable[..., Any]) -> None:
    running = most = 0

    async def infer(call: InferenceRequest) -> InferenceResponse:
        nonlocal running, most
        if call.model == "w":
            assert function_name(call) == "cut"
            body, content_type = encode_value([b"\xff1", b"\xff2", b"\xff3", b"\xff4"])
            return InferenceResponse(body, content_type)
        if call.model == "a":
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.01 if call.inputs[0].value == b"\xff1" else 0)
            running -= 1
            return InferenceResponse(call.inputs[0].value[1:] + b"0")
        assert call.inputs[0].content_type == PARTS_CONTENT_TYPE
        return InferenceResponse(b"+".join(value for value, _ in split_parts(call.inputs[0].value)))

    ask = {"model": "a", "each": "cut", "parallel": 2}
    w = build_workflow(cut={"function": "cut"}, ask=ask, add={"model": "b", "inputs": "ask"})
    app = inference(infer, build_table(w))
    response = app("POST", "/predictions/w", b"x")
    assert response.body == b"10+20+30+40"
    assert most == 2
    ids = {call.request_id.partition("/")[2] for call in app.backend.requests}
    assert {"ask/0", "ask/1", "ask/2", "ask/3"} <= ids
    # Where such a step is the answer, it is a list of JSON.
    w = build_workflow(cut={"function": "cut"}, ask={"model": "a", "each": "cut"})
    response = inference(infer, build_table(w))("POST", "/predictions/w", b"x")
    assert (response["content-type"], response.body) == ("application/json", b"[10,20,30,40]")


def test_lists_of_json_go_together_item_by_item_with_what_is_shared(inference: Callable[..., Any]) -> None:
    w = build_workflow(
        pair={"model": "a", "each": {"x": "request.xs", "y": "request.ys"}, "inputs": {"all": "request.k"}},
    )
    form = b'xs=["p","q"]&ys=[1,{"n":2}]&k=7'
    app = inference(describe_inputs, build_table(w))
    response = app("POST", "/predictions/w", form, {"content-type": "application/x-www-form-urlencoded"})
    assert json.loads(response.body) == ["a(x=p&y=1&all=7)", 'a(x=q&y={"n":2}&all=7)']
    assert [p.content_type for p in app.backend.requests[1].inputs] == [
        "text/plain",
        "application/json",
        None,
    ]
    empty = app(
        "POST", "/predictions/w", b"xs=[]&ys=[]&k=1", {"content-type": "application/x-www-form-urlencoded"}
    )
    assert json.loads(empty.body) == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"xs=[1]&ys=[1,2]", "its lists go together item by item, and request.xs has 1, request.ys has 2."),
        (b"xs=1&ys=2", "it runs once for each item of request.xs, which is no list."),
        (b"xs=%ff&ys=2", "it runs once for each item of request.xs, which is no list."),
        (b"ys=[1]", "the request has no part 'xs'; its parts: 'ys'."),
        (
            b"xs=[1,2,3,4]&ys=[1,2,3,4]",
            "it would run 4 times, and inference.max_workflow_items allows 3.",
        ),
    ],
)
def test_invalid_lists_are_refused(inference: Callable[..., Any], body: bytes, words: str) -> None:
    w = build_workflow(pair={"model": "a", "each": {"x": "request.xs", "y": "request.ys"}})
    app = inference(describe_inputs, build_table(w), max_workflow_items=3)
    response = app("POST", "/predictions/w", body, {"content-type": "application/x-www-form-urlencoded"})
    assert response.status == 400
    assert json.loads(response.body)["message"] == f"Step pair of workflow w failed: {words}"


def test_invalid_multipart_body_is_refused(inference: Callable[..., Any]) -> None:
    app = inference(describe_inputs, build_table(build_workflow(s={"model": "a", "each": "request"})))
    for body in (
        b"",
        b"\x00",
        b"\xff\xff\xff\xff[]",
        b"\x05\x00\x00\x00[[1]]",
        b"\x0b\x00\x00\x00[[9, null]]ab",
    ):
        response = app("POST", "/predictions/w", body, {"content-type": PARTS_CONTENT_TYPE})
        assert (response.status, b"Step s of workflow w failed: request: " in response.body) == (400, True), (
            body
        )


# What goes wrong


def test_the_last_step_may_stream_and_one_before_it_is_collected(inference: Callable[..., Any]) -> None:
    closed = []

    async def infer(call: InferenceRequest) -> ResponseStream:
        async def pieces() -> Any:
            try:
                for piece in (call.model.encode(), b"(", call.inputs[0].value, b")"):
                    yield piece
            finally:
                closed.append(call.model)

        return ResponseStream(InferenceResponse(b"", "text/plain", version="1.0"), pieces())

    w = build_workflow(first={"model": "a"}, last={"model": "b", "inputs": "first"})
    app = inference(infer, build_table(w))
    response = app("POST", "/predictions/w", b"x")
    assert response.chunks == [b"b", b"(", b"a(x)", b")", b""]
    assert response["content-type"] == "text/plain"
    assert closed == ["a", "b"]
    samples = {(name, labels): value for name, labels, value in app.meters.samples()}
    assert samples["torchrelay_workflow_ongoing", (("model", "w"), ("version", "1.0"))] == 0


def test_running_request_survives_unregistration(inference: Callable[..., Any]) -> None:
    async def infer(call: InferenceRequest) -> InferenceResponse:
        if call.model == "w__a":
            app.reader.update(RoutingTable(2, {}, startup_complete=True))
        return await describe_inputs(call)

    mine = {"function": "f", "inputs": "first"}
    w = build_workflow(first={"model": "w__a"}, mine=mine, last={"model": "w__b", "inputs": "mine"})
    app = inference(infer, build_table(w, models="w__a w__b"))
    assert app("POST", "/predictions/w", b"x").body == b"w__b(body=w(body=w__a(body=x)))"
    assert app("POST", "/predictions/w", b"x").status == 404


@pytest.mark.parametrize("path", ["/explanations/w", "/v1/models/w:explain"])
def test_a_workflow_explains_nothing(inference: Callable[..., Any], path: str) -> None:
    response = inference(describe_inputs, build_table(build_workflow(s={"model": "a"})))("POST", path, b"x")
    assert response.status == 400
    assert b"w is a workflow, which predicts and does no explain; ask its models" in response.body


@pytest.mark.parametrize("name", ["a", "nobody", ""])
def test_torchserves_route_knows_workflows_alone(inference: Callable[..., Any], name: str) -> None:
    response = inference(describe_inputs, build_table(build_workflow(s={"model": "a"})))(
        "POST", f"/wfpredict/{name}", b"x"
    )
    nowhere = "Requested resource is not found, please refer to API document."
    message = f"Workflow not found: {name}" if name else nowhere
    assert (response.status, json.loads(response.body)["message"]) == (404, message)


# TorchServe's form


def test_torchserves_steps_get_bytes_without_content_types(inference: Callable[..., Any]) -> None:
    async def infer(call: InferenceRequest) -> InferenceResponse:
        if call.model == "w__m":
            return InferenceResponse(b'{"m": 1}', "application/json")
        return InferenceResponse(json.dumps([[p.name, p.content_type] for p in call.inputs]).encode())

    w = WorkflowGraph(
        steps={
            "m": workflow_graph.WorkflowStep(model="w__m"),
            "one": workflow_graph.WorkflowStep(function="one", inputs="m"),
            "two": workflow_graph.WorkflowStep(function="two", inputs={"one": "one", "m": "m"}),
        },
        name="w",
        torchserve={"minWorkers": 1},
    )
    response = inference(infer, build_table(w, models="w__m"))("POST", "/wfpredict/w", b"x")
    assert (response["content-type"], json.loads(response.body)) == (
        "application/json",
        [["one", None], ["m", None]],
    )
