"""Workflows as callers meet them: a real data plane and its doors, over models that the test writes."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from handlers.functions import HEADER, part
from handlers.parts import PARTS, join, split
from serve_app import graph, signature, tensors
from serve_app.errors import HandlerFailed, HandlerSaid, NoWorker, QueueFull, WorkerDied
from serve_app.graph import Graph
from serve_app.policy import Policy, allocate
from serve_app.proto import open_inference_grpc_pb2 as oip
from serve_app.proto.inference_pb2 import PredictionsRequest
from serve_app.proto.inference_pb2_grpc import InferenceAPIsServiceStub
from serve_app.proto.open_inference_grpc_pb2_grpc import GRPCInferenceServiceStub
from serve_app.types import Call, ModelRow, Reply, ReplyStream, Table, VersionRow

Models = dict[str, Callable[[Call], Awaitable["Reply | ReplyStream"]]]


def table(*graphs: Graph, models: str = "a b c d", policy: Policy | None = None) -> Table:
    """Models of two versions each, and workflows."""
    rows = {v: VersionRow(v, "ready", 1) for v in ("1.0", "2.0")}
    known = {name: ModelRow("1.0", rows, policy or Policy()) for name in models.split()}
    for made in graphs:
        row = VersionRow(
            made.version, "ready", 1, graph=made, client_timeout=round(1000 * made.timeout_s) if made.timeout_s else 0
        )
        known[made.name] = ModelRow(made.version, {made.version: row})
    return Table(1, known, settled=True)


def made(name: str = "w", **said: Any) -> Graph:
    """A workflow of these steps; what is no mapping is a key of its own."""
    steps = {key: value for key, value in said.items() if isinstance(value, dict)}
    return graph.read({"name": name, "steps": steps, **{k: v for k, v in said.items() if k not in steps}})


def text(call: Call) -> str:
    """What a call asks, input by input."""
    return "&".join(f"{part.name}={part.value.decode()}" for part in call.inputs)


async def said(call: Call) -> Reply:
    """A model that tells what it was asked, in brackets after its name."""
    return Reply(f"{call.model}({text(call)})".encode(), version=call.version or "1.0")


def function(call: Call) -> str:
    return call.headers[HEADER]


# The order, and what goes from step to step


def test_steps_follow_each_other_and_the_last_one_answers(inference: Callable[..., Any]) -> None:
    w = made(first={"model": "a"}, then={"model": "b", "inputs": "first"}, last={"model": "c", "inputs": "then"})
    app = inference(said, table(w))
    answer = app("POST", "/predictions/w", b"x")
    assert (answer.status, answer.body) == (200, b"c(body=b(body=a(body=x)))")
    assert answer["x-model-version"] == "1.0"
    assert [name.partition(";")[0] for name in answer["server-timing"].split(", ")] == ["first", "then", "last"]
    assert {call.request_id for call in app.target.calls} == {
        f"{answer['x-request-id']}/{step}" for step in ("first", "then", "last")
    }
    samples = {(name, labels): value for name, labels, value in app.meters.samples()}
    ok = (("model", "w"), ("status", "ok"), ("step", "then"), ("version", "1.0"))
    assert samples["torchrelay_workflow_steps_total", ok] == 1
    assert samples["torchrelay_workflow_ongoing", (("model", "w"), ("version", "1.0"))] == 0
    assert samples["torchrelay_requests_total", (("model", "w"), ("status", "ok"), ("version", "1.0"))] == 1


@pytest.mark.parametrize("path", ["/predictions/w", "/predictions/w/1.0", "/wfpredict/w", "/v1/models/w:predict"])
def test_every_route_of_models_asks_a_workflow(inference: Callable[..., Any], path: str) -> None:
    app = inference(said, table(made(only={"model": "a"})))
    assert app("POST", path, b"x").body == b"a(body=x)"


def test_inputs_by_name_from_the_request_and_from_steps(inference: Callable[..., Any]) -> None:
    w = made(
        first={"model": "a", "inputs": {"image": "request.data"}},
        last={"model": "b", "inputs": {"x": "first", "y": "request", "z": "request.hint"}},
    )
    form = b"data=1&hint=2"
    answer = inference(said, table(w))(
        "POST", "/predictions/w", form, {"content-type": "application/x-www-form-urlencoded"}
    )
    assert answer.body == b"b(x=a(image=1)&y=1&z=2)"


def test_content_types_go_along_and_those_of_the_request_do_not(inference: Callable[..., Any]) -> None:
    async def infer(call: Call) -> Reply:
        if call.model == "a":
            return Reply(b"[1]", "application/json", headers=(("x-of", "a"),))
        return Reply(json.dumps([[p.name, p.content_type] for p in call.inputs]).encode(), headers=(("x-of", "b"),))

    w = made(first={"model": "a"}, last={"model": "b", "inputs": "first"})
    app = inference(infer, table(w))
    answer = app("POST", "/predictions/w", b"{}", {"content-type": "text/plain", "x-user": "ann"})
    assert json.loads(answer.body) == [["body", "application/json"]]
    assert answer["x-of"] == "b"
    assert all("content-type" not in call.headers and call.headers["x-user"] == "ann" for call in app.target.calls)


def test_several_leaves_are_one_object(inference: Callable[..., Any]) -> None:
    async def infer(call: Call) -> Reply:
        return Reply({"a": b'{"n": 1}', "b": b"text \xc3\xa9", "c": join([(b"1", None), (b"x", None)])}[call.model],
                     {"c": PARTS}.get(call.model))  # fmt: skip

    w = made(x={"model": "a"}, y={"model": "b"}, z={"model": "c"})
    answer = inference(infer, table(w))("POST", "/predictions/w", b"x")
    assert (answer["content-type"], json.loads(answer.body)) == (
        "application/json",
        {"x": {"n": 1}, "y": "text é", "z": [1, "x"]},
    )


def test_leaves_that_cannot_be_one_object_are_told(inference: Callable[..., Any]) -> None:
    async def infer(call: Call) -> Reply:
        return Reply(b"\xff\xd8" if call.model == "a" else b"1")

    answer = inference(infer, table(made(x={"model": "a"}, y={"model": "b"})))("POST", "/predictions/w", b"x")
    assert answer.status == 503
    assert b"Step x of workflow w failed: its answer is neither JSON nor text" in answer.body


def test_branches_run_side_by_side(inference: Callable[..., Any]) -> None:
    together = asyncio.Event()
    waiting = []

    async def infer(call: Call) -> Reply:
        if call.model in "bc":
            waiting.append(call.model)
            if len(waiting) == 2:
                together.set()
            await asyncio.wait_for(together.wait(), 60)
        return await said(call)

    w = made(
        s={"model": "a"},
        left={"model": "b", "inputs": "s"},
        right={"model": "c", "inputs": "s"},
        end={"model": "d", "inputs": {"left": "left", "right": "right"}},
    )
    answer = inference(infer, table(w))("POST", "/predictions/w", b"x")
    assert answer.body == b"d(left=b(body=a(body=x))&right=c(body=a(body=x)))"


def test_versions_policies_and_priority_hold_for_steps(inference: Callable[..., Any]) -> None:
    versions = Counter()

    async def infer(call: Call) -> Reply:
        versions[call.version] += 1
        assert call.priority == "low"
        return Reply(b"1")

    weights = Policy("weighted", {"1.0": 5000, "2.0": 5000}, allocation=allocate({"1.0": 5000, "2.0": 5000}))
    w = made(each={"model": "a", "each": "request"}, fixed={"model": "b:2.0", "inputs": "each"})
    app = inference(infer, table(w, policy=weights))
    seen = Counter()
    app.target.at = lambda ref, target=app.target: seen.update([(ref.name, ref.version)]) or target
    answer = app("POST", "/predictions/w", json.dumps(list(range(20))).encode(), {"x-request-priority": "low"})
    assert answer.status == 200
    assert seen["a", "1.0"] + seen["a", "2.0"] == 20 and min(seen["a", "1.0"], seen["a", "2.0"]) >= 8
    assert seen["b", "2.0"] == 1 and len(seen) == 3


def test_a_workflow_asks_another(inference: Callable[..., Any]) -> None:
    inner = made("inner", i={"model": "b"})
    outer = made("outer", o={"model": "inner"}, last={"model": "a", "inputs": "o"})
    app = inference(said, table(inner, outer))
    assert app("POST", "/predictions/outer", b"x").body == b"a(body=b(body=x))"

    async def fails(call: Call) -> Reply:
        raise HandlerSaid("no such picture", 422)

    answer = inference(fails, table(inner, outer))("POST", "/predictions/outer", b"x")
    assert answer.status == 422
    assert b"Step o of workflow outer failed: Step i of workflow inner failed: no such picture" in answer.body


# Lists


def test_a_step_is_asked_for_each_item(inference: Callable[..., Any]) -> None:
    running = most = 0

    async def infer(call: Call) -> Reply:
        nonlocal running, most
        if call.model == "w":
            assert function(call) == "cut"
            body, content_type = part([b"\xff1", b"\xff2", b"\xff3", b"\xff4"])
            return Reply(body, content_type)
        if call.model == "a":
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.01 if call.inputs[0].value == b"\xff1" else 0)
            running -= 1
            return Reply(call.inputs[0].value[1:] + b"0")
        assert call.inputs[0].content_type == PARTS
        return Reply(b"+".join(value for value, _ in split(call.inputs[0].value)))

    ask = {"model": "a", "each": "cut", "parallel": 2}
    w = made(cut={"function": "cut"}, ask=ask, add={"model": "b", "inputs": "ask"})
    app = inference(infer, table(w))
    answer = app("POST", "/predictions/w", b"x")
    assert answer.body == b"10+20+30+40"
    assert most == 2
    ids = {call.request_id.partition("/")[2] for call in app.target.calls}
    assert {"ask/0", "ask/1", "ask/2", "ask/3"} <= ids
    # Where such a step is the answer, it is a list of JSON.
    w = made(cut={"function": "cut"}, ask={"model": "a", "each": "cut"})
    answer = inference(infer, table(w))("POST", "/predictions/w", b"x")
    assert (answer["content-type"], answer.body) == ("application/json", b"[10,20,30,40]")


def test_lists_of_json_go_together_item_by_item_with_what_is_shared(inference: Callable[..., Any]) -> None:
    w = made(
        pair={"model": "a", "each": {"x": "request.xs", "y": "request.ys"}, "inputs": {"all": "request.k"}},
    )
    form = b'xs=["p","q"]&ys=[1,{"n":2}]&k=7'
    app = inference(said, table(w))
    answer = app("POST", "/predictions/w", form, {"content-type": "application/x-www-form-urlencoded"})
    assert json.loads(answer.body) == ["a(x=p&y=1&all=7)", 'a(x=q&y={"n":2}&all=7)']
    assert [p.content_type for p in app.target.calls[1].inputs] == ["text/plain", "application/json", None]
    empty = app("POST", "/predictions/w", b"xs=[]&ys=[]&k=1", {"content-type": "application/x-www-form-urlencoded"})
    assert json.loads(empty.body) == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"xs=[1]&ys=[1,2]", "its lists go together item by item, and request.xs has 1, request.ys has 2."),
        (b"xs=1&ys=2", "it is asked for each item of request.xs, which is no list."),
        (b"xs=%ff&ys=2", "it is asked for each item of request.xs, which is no list."),
        (b"ys=[1]", "the request has no part 'xs'; its parts: 'ys'."),
        (b"xs=[1,2,3,4]&ys=[1,2,3,4]", "it would be asked 4 times, and inference.max_workflow_items allows 3."),
    ],
)
def test_lists_that_are_none(inference: Callable[..., Any], body: bytes, words: str) -> None:
    w = made(pair={"model": "a", "each": {"x": "request.xs", "y": "request.ys"}})
    app = inference(said, table(w), max_workflow_items=3)
    answer = app("POST", "/predictions/w", body, {"content-type": "application/x-www-form-urlencoded"})
    assert answer.status == 400
    assert json.loads(answer.body)["message"] == f"Step pair of workflow w failed: {words}"


def test_a_body_that_says_it_is_parts_and_is_none(inference: Callable[..., Any]) -> None:
    app = inference(said, table(made(s={"model": "a", "each": "request"})))
    for body in (b"", b"\x00", b"\xff\xff\xff\xff[]", b"\x05\x00\x00\x00[[1]]", b"\x0b\x00\x00\x00[[9, null]]ab"):
        answer = app("POST", "/predictions/w", body, {"content-type": PARTS})
        assert (answer.status, b"Step s of workflow w failed: request: " in answer.body) == (400, True), body


# What goes wrong


@pytest.mark.parametrize(
    ("error", "status", "words", "reason"),
    [
        (HandlerFailed("Traceback"), 503, "Prediction failed", "handler_failed"),
        (HandlerSaid("too dark", 422), 422, "too dark", "handler_said"),
        (QueueFull("b", None, ""), 503, 'Model "b" has no worker', "queue_full"),
        (WorkerDied("gone"), 503, "Worker died.", "worker_died"),
        (NoWorker("b", None, ""), 503, 'Model "b" has no worker', "no_replica"),
    ],
)
def test_a_step_that_fails_is_named_and_ends_the_others(
    inference: Callable[..., Any], error: Exception, status: int, words: str, reason: str
) -> None:
    ended = []

    async def infer(call: Call) -> Reply:
        if call.model == "b":
            raise error
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append(call.model)
            raise
        return Reply(b"")

    w = made(slow={"model": "a"}, list={"model": "c", "each": "request"}, bad={"model": "b"})
    app = inference(infer, table(w))
    answer = app("POST", "/predictions/w", b"[1,2]")
    assert answer.status == status
    message = json.loads(answer.body)["message"]
    assert message.startswith(f"Step bad of workflow w failed: {words}")
    assert answer["x-torchrelay-reason"] == reason
    assert Counter(ended) <= Counter({"a": 1, "c": 2})
    named = app("POST", "/wfpredict/w", b"[1,2]")
    assert named.status == 500
    assert json.loads(named.body) == {
        "code": 500,
        "type": "InternalServerException",
        "message": "Error executing bad",
        "detail": message,
    }


def test_an_answer_with_a_status_that_says_no_fails_the_step(inference: Callable[..., Any]) -> None:
    async def infer(call: Call) -> Reply:
        return Reply(b"not today", status=403)

    answer = inference(infer, table(made(s={"model": "a"})))("POST", "/predictions/w", b"x")
    assert (answer.status, json.loads(answer.body)["message"]) == (403, "Step s of workflow w failed: not today")


def test_a_retry_helps_and_a_refusal_is_not_repeated(inference: Callable[..., Any]) -> None:
    tries = Counter()

    async def infer(call: Call) -> Reply:
        tries[call.model] += 1
        if call.model == "b":
            raise HandlerSaid("never", 400)
        if tries[call.model] < 3:
            raise WorkerDied("again")
        return Reply(b"at last")

    app = inference(infer, table(made(s={"model": "a", "retries": 2}), made("n", s={"model": "b", "retries": 2})))
    assert app("POST", "/predictions/w", b"x").body == b"at last"
    assert app("POST", "/predictions/n", b"x").status == 400
    assert tries == {"a": 3, "b": 1}
    tries.clear()
    app = inference(infer, table(made(s={"model": "a", "retries": 1})))
    assert app("POST", "/predictions/w", b"x").status == 503
    assert tries == {"a": 2}


def test_a_step_has_its_own_time_and_the_call_the_rest(inference: Callable[..., Any]) -> None:
    left = {}

    async def infer(call: Call) -> Reply:
        left[call.request_id.partition("/")[2]] = call.deadline and call.deadline - time.time()
        if call.model == "b" and call.deadline:
            await asyncio.sleep(30)
        return Reply(b"1")

    w = made(quick={"model": "a", "timeout_s": 2}, last={"model": "a", "inputs": "quick"}, timeout_s=5)
    inference(infer, table(w))("POST", "/predictions/w", b"x")
    assert 1 < left["quick"] <= 2 and 4 < left["last"] <= 5
    inference(infer, table(w))("POST", "/predictions/w", b"x", {"x-request-timeout-seconds": "1"})
    assert 0 < left["quick"] <= 1 and 0 < left["last"] <= 1

    w = made(slow={"model": "b", "timeout_s": 0.05, "retries": 1})
    began = time.monotonic()
    answer = inference(infer, table(w))("POST", "/predictions/w", b"x")
    assert (answer.status, answer["x-torchrelay-reason"]) == (504, "deadline")
    assert b"Step slow of workflow w failed: The deadline of this request passed before model b" in answer.body
    assert time.monotonic() - began < 25
    answer = inference(infer, table(made(slow={"model": "b"}, timeout_s=0.05)))("POST", "/predictions/w", b"x")
    assert (answer.status, answer["x-torchrelay-reason"]) == (504, "client_timeout")


def test_a_caller_that_leaves_ends_every_branch(inference: Callable[..., Any]) -> None:
    began, ended = asyncio.Event(), []

    async def infer(call: Call) -> Reply:
        if call.model == "c":
            began.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(call.model)
        return Reply(b"")

    w = made(x={"model": "a"}, y={"model": "b"}, z={"model": "c", "each": "request"})
    app = inference(infer, table(w))

    async def leave() -> None:
        scope = {
            "type": "http", "method": "POST", "path": "/predictions/w", "query_string": b"", "headers": [],
            "http_version": "1.1",
        }  # fmt: skip
        messages = [{"type": "http.request", "body": b"[1,2,3]"}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await began.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            raise AssertionError("nobody is there")

        task = asyncio.ensure_future(app.app(scope, receive, send))
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 60)
        assert Counter(ended) == {"a": 1, "b": 1, "c": 3}

    asyncio.run(leave())
    samples = {(name, labels): value for name, labels, value in app.meters.samples()}
    assert samples["torchrelay_workflow_ongoing", (("model", "w"), ("version", "1.0"))] == 0


def test_the_last_step_may_stream_and_one_before_it_is_collected(inference: Callable[..., Any]) -> None:
    closed = []

    async def infer(call: Call) -> ReplyStream:
        async def pieces() -> Any:
            try:
                for piece in (call.model.encode(), b"(", call.inputs[0].value, b")"):
                    yield piece
            finally:
                closed.append(call.model)

        return ReplyStream(Reply(b"", "text/plain", version="1.0"), pieces())

    w = made(first={"model": "a"}, last={"model": "b", "inputs": "first"})
    app = inference(infer, table(w))
    answer = app("POST", "/predictions/w", b"x")
    assert answer.pieces == [b"b", b"(", b"a(x)", b")", b""]
    assert answer["content-type"] == "text/plain"
    assert closed == ["a", "b"]
    samples = {(name, labels): value for name, labels, value in app.meters.samples()}
    assert samples["torchrelay_workflow_ongoing", (("model", "w"), ("version", "1.0"))] == 0


def test_a_call_goes_on_while_its_workflow_is_removed(inference: Callable[..., Any]) -> None:
    async def infer(call: Call) -> Reply:
        if call.model == "w__a":
            app.reader.put(Table(2, {}, settled=True))
        return await said(call)

    mine = {"function": "f", "inputs": "first"}
    w = made(first={"model": "w__a"}, mine=mine, last={"model": "w__b", "inputs": "mine"})
    app = inference(infer, table(w, models="w__a w__b"))
    assert app("POST", "/predictions/w", b"x").body == b"w__b(body=w(body=w__a(body=x)))"
    assert app("POST", "/predictions/w", b"x").status == 404


@pytest.mark.parametrize("path", ["/explanations/w", "/v1/models/w:explain"])
def test_a_workflow_explains_nothing(inference: Callable[..., Any], path: str) -> None:
    answer = inference(said, table(made(s={"model": "a"})))("POST", path, b"x")
    assert answer.status == 400
    assert b"w is a workflow, which predicts and does no explain; ask its models" in answer.body


@pytest.mark.parametrize("name", ["a", "nobody", ""])
def test_torchserves_route_knows_workflows_alone(inference: Callable[..., Any], name: str) -> None:
    answer = inference(said, table(made(s={"model": "a"})))("POST", f"/wfpredict/{name}", b"x")
    nowhere = "Requested resource is not found, please refer to API document."
    message = f"Workflow not found: {name}" if name else nowhere
    assert (answer.status, json.loads(answer.body)["message"]) == (404, message)


# Tensors, as the Open Inference Protocol has them


def infer_request(**arrays: Any) -> bytes:
    given = [tensors.of(name, value) for name, value in arrays.items()]
    inputs = [
        {"name": t.name, "datatype": t.datatype, "shape": list(t.shape), "data": json.loads(t.json())}
        for t in given
    ]
    return json.dumps({"inputs": inputs}).encode()


async def doubled(call: Call) -> Reply:
    """A model that answers each tensor with its double; a function that tells its inputs as they came."""
    if call.kind == "predict":
        return Reply(json.dumps([[p.name, p.value.decode("latin-1"), p.content_type] for p in call.inputs]).encode())
    given = [tensors.received(p.name, p.value, p.content_type) for p in call.inputs]
    return Reply(tensors.pack([tensors.of(t.name, t.array() * 2) for t in given]), tensors.PACKED, version="1.0")


def test_tensors_go_from_model_to_model_as_tensors(inference: Callable[..., Any]) -> None:
    w = made(first={"model": "a"}, last={"model": "b", "inputs": "first"})
    app = inference(doubled, table(w))
    answer = app("POST", "/v2/models/w/infer", infer_request(x=np.float32([[1, 2]]), y=np.int64([3])))
    assert answer.status == 200, answer.body
    said = {output["name"]: output for output in json.loads(answer.body)["outputs"]}
    assert said["x"]["data"] == [4.0, 8.0] and said["x"]["shape"] == [1, 2] and said["y"]["data"] == [12]
    assert [call.kind for call in app.target.calls] == ["tensors", "tensors"]


def test_a_function_gets_tensors_as_plain_values(inference: Callable[..., Any]) -> None:
    mine = {"function": "f", "inputs": {"n": "first", "text": "request.text", "texts": "request.texts"}}
    w = made(first={"model": "a", "inputs": {"x": "request.x"}}, mine=mine)
    texts = {"text": np.array([b"one"], object), "texts": np.array([b"p", b"q"], object)}
    body = infer_request(x=np.float32([[1, 2], [3, 4]]), **texts)
    answer = inference(doubled, table(w))("POST", "/v2/models/w/infer", body)
    [output] = json.loads(answer.body)["outputs"]
    assert output["datatype"] == "BYTES"  # what is no tensor becomes one of text
    n, text, several = json.loads(output["data"][0])
    assert n == ["n", "[[2.0,4.0],[6.0,8.0]]", "application/json"]
    assert text == ["text", "one", None]
    assert several[2] == PARTS and [value for value, _ in split(several[1].encode())] == [b"p", b"q"]


def test_a_tensors_slices_are_asked_for_one_by_one(inference: Callable[..., Any]) -> None:
    w = made(each={"model": "a", "each": {"x": "request.x"}}, gather={"function": "g", "inputs": {"all": "each"}})
    app = inference(doubled, table(w))
    assert app("POST", "/v2/models/w/infer", infer_request(x=np.float32([[1, 2], [3, 4]]))).status == 200
    first, second, gather = sorted(app.target.calls, key=lambda call: call.request_id)
    assert [call.inputs[0].content_type for call in (first, second)] == ["application/x-tensor;FP32;1,2"] * 2
    found = [json.loads(value) for value, _ in split(gather.inputs[0].value)]
    assert found == [{"x": [[2.0, 4.0]]}, {"x": [[6.0, 8.0]]}]


def test_several_tensors_are_not_one_value(inference: Callable[..., Any]) -> None:
    w = made(first={"model": "a"}, last={"model": "b", "inputs": {"x": "first"}})
    answer = inference(doubled, table(w))("POST", "/v2/models/w/infer", infer_request(x=[1], y=[2]))
    assert answer.status == 400
    assert b"Step last of workflow w failed: first gave 2 tensors (x, y), and one is wanted" in answer.body


def signed(w: Graph) -> Table:
    """A table whose models take and give one tensor, x."""
    known = table(w)
    x = signature.read({"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]})
    x = replace(x, outputs=x.inputs)
    models = {name: row for name, row in known.models.items() if name != "w"}
    for name, row in models.items():
        models[name] = replace(row, versions={v: replace(r, signature=x) for v, r in row.versions.items()})
    return replace(known, models={**models, "w": known.models["w"]})


def test_metadata_are_those_of_its_ends(inference: Callable[..., Any]) -> None:
    w = made(first={"model": "a", "inputs": {"x": "request.picture"}}, last={"model": "b", "inputs": "first"})
    app = inference(doubled, signed(w))
    metadata = json.loads(app("GET", "/v2/models/w").body)
    port = {"datatype": "FP32", "shape": [-1, 2]}
    assert metadata["inputs"] == [{"name": "picture", **port}]
    assert metadata["outputs"] == [{"name": "x", **port}]
    asked = np.float32([[1, 2]])
    sent = {"inference-header-content-length": "0"}  # the one input, as it is
    answer = app("POST", "/v2/models/w/infer", asked.tobytes(), sent)
    assert answer.body[int(answer["inference-header-content-length"]) :] == (asked * 4).tobytes()
    assert json.loads(app("GET", "/v2/models/w/config").body)["input"][0]["name"] == "picture"


# The other ways in


async def by_name(call: Call) -> Reply:
    """A model that tells what it was asked, and by which name OpenAI's clients would have asked it."""
    said = {"choices": [{"text": f"{call.model}:{text(call)}"}], "path": call.headers.get("url_path", "")}
    return Reply(json.dumps(said).encode(), "application/json", version="1.0")


def test_openais_clients_ask_a_workflow(inference: Callable[..., Any]) -> None:
    w = made(look={"model": "a", "inputs": {"seen": "request"}}, write={"model": "b", "inputs": {"found": "look"}})
    app = inference(by_name, table(w))
    asked = b'{"model": "w", "prompt": "x"}'
    answer = app("POST", "/v1/completions", asked)
    assert (answer.status, answer["content-type"], answer["x-model-version"]) == (200, "application/json", "1.0")
    said = json.loads(answer.body)
    assert said["path"] == "v1/completions"
    found = json.loads(said["choices"][0]["text"].removeprefix("b:found="))
    assert found["choices"][0]["text"] == f"a:seen={asked.decode()}"
    assert "w" in [one["id"] for one in json.loads(app("GET", "/v1/models").body)["data"]]


def test_openais_clients_hear_which_step_failed(inference: Callable[..., Any]) -> None:
    async def infer(call: Call) -> Reply:
        if call.model == "b":
            raise HandlerSaid("too long", 422)
        return Reply(b"{}", version="1.0")

    w = made(first={"model": "a"}, last={"model": "b", "inputs": "first"})
    answer = inference(infer, table(w))("POST", "/v1/completions", b'{"model": "w"}')
    assert (answer.status, answer["x-torchrelay-step"]) == (422, "last")
    assert "Step last of workflow w failed: too long" in json.loads(answer.body)["error"]["message"]


def test_grpc_asks_a_workflow(over_grpc: Callable[..., Any]) -> None:
    w = made(first={"model": "a", "inputs": {"x": "request.data"}}, last={"model": "b", "inputs": "first"})
    server = over_grpc(said, table(w))
    asked = PredictionsRequest(model_name="w", input={"data": b"1"})
    answer = InferenceAPIsServiceStub(server.channel).Predictions(asked, timeout=60)
    assert answer.prediction == b"b(body=a(x=1))"


def test_tensors_by_grpc_go_through_a_workflow(over_grpc: Callable[..., Any]) -> None:
    w = made(first={"model": "a"}, last={"model": "b", "inputs": "first"})
    stub = GRPCInferenceServiceStub(over_grpc(doubled, signed(w)).channel)
    metadata = stub.ModelMetadata(oip.ModelMetadataRequest(name="w"), timeout=60)
    assert [(port.name, port.datatype, list(port.shape)) for port in metadata.inputs] == [("x", "FP32", [-1, 2])]
    array = np.float32([[1, 2]])
    asked = oip.ModelInferRequest(model_name="w", raw_input_contents=[array.tobytes()])
    asked.inputs.add(name="x", datatype="FP32", shape=array.shape)
    answer = stub.ModelInfer(asked, timeout=60)
    assert answer.raw_output_contents[0] == (array * 4).tobytes()
    asked.inputs[0].name = "y"
    with pytest.raises(grpc.RpcError) as refused:
        stub.ModelInfer(asked, timeout=60)
    assert "Step first of workflow w failed: There is no input 'y'" in refused.value.details()


# TorchServe's form


def test_torchserves_steps_get_bytes_without_content_types(inference: Callable[..., Any]) -> None:
    async def infer(call: Call) -> Reply:
        if call.model == "w__m":
            return Reply(b'{"m": 1}', "application/json")
        return Reply(json.dumps([[p.name, p.content_type] for p in call.inputs]).encode())

    w = Graph(
        steps={
            "m": graph.Step(model="w__m"),
            "one": graph.Step(function="one", inputs="m"),
            "two": graph.Step(function="two", inputs={"one": "one", "m": "m"}),
        },
        name="w",
        torchserve={"minWorkers": 1},
    )
    answer = inference(infer, table(w, models="w__m"))("POST", "/wfpredict/w", b"x")
    assert (answer["content-type"], json.loads(answer.body)) == ("application/json", [["one", None], ["m", None]])
