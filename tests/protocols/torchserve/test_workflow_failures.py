"""Workflow executions that fail, time out or are cancelled."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from serve_app.domain.request import InferenceRequest, InferenceResponse
from serve_app.errors import HandlerFailed, HandlerRejected, NoReplica, QueueFull, ReplicaDied
from tests.support.workflow_services import build_table, build_workflow


@pytest.mark.parametrize(
    ("error", "status", "words", "reason"),
    [
        (HandlerFailed("Traceback"), 503, "Prediction failed", "handler_failed"),
        (HandlerRejected("too dark", 422), 422, "too dark", "handler_rejected"),
        (QueueFull("b", None, ""), 503, 'Model "b" has no worker', "queue_full"),
        (ReplicaDied("gone"), 503, "Worker died.", "replica_died"),
        (NoReplica("b", None, ""), 503, 'Model "b" has no worker', "no_replica"),
    ],
)
def test_a_step_that_fails_is_named_and_ends_the_others(
    inference: Callable[..., Any], error: Exception, status: int, words: str, reason: str
) -> None:
    ended = []

    async def infer(call: InferenceRequest) -> InferenceResponse:
        if call.model == "b":
            raise error
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append(call.model)
            raise
        return InferenceResponse(b"")

    w = build_workflow(slow={"model": "a"}, list={"model": "c", "each": "request"}, bad={"model": "b"})
    app = inference(infer, build_table(w))
    response = app("POST", "/predictions/w", b"[1,2]")
    assert response.status == status
    message = json.loads(response.body)["message"]
    assert message.startswith(f"Step bad of workflow w failed: {words}")
    assert response["x-torchrelay-reason"] == reason
    assert Counter(ended) <= Counter({"a": 1, "c": 2})
    named = app("POST", "/wfpredict/w", b"[1,2]")
    assert named.status == 500
    assert json.loads(named.body) == {
        "code": 500,
        "type": "InternalServerException",
        "message": "Error executing bad",
        "detail": message,
    }


def test_error_status_of_a_response_fails_the_step(inference: Callable[..., Any]) -> None:
    async def infer(call: InferenceRequest) -> InferenceResponse:
        return InferenceResponse(b"not today", status=403)

    response = inference(infer, build_table(build_workflow(s={"model": "a"})))("POST", "/predictions/w", b"x")
    assert (response.status, json.loads(response.body)["message"]) == (
        403,
        "Step s of workflow w failed: not today",
    )


def test_a_retry_helps_and_a_refusal_is_not_repeated(inference: Callable[..., Any]) -> None:
    tries = Counter()

    async def infer(call: InferenceRequest) -> InferenceResponse:
        tries[call.model] += 1
        if call.model == "b":
            raise HandlerRejected("never", 400)
        if tries[call.model] < 3:
            raise ReplicaDied("again")
        return InferenceResponse(b"at last")

    app = inference(
        infer,
        build_table(
            build_workflow(s={"model": "a", "retries": 2}),
            build_workflow("n", s={"model": "b", "retries": 2}),
        ),
    )
    assert app("POST", "/predictions/w", b"x").body == b"at last"
    assert app("POST", "/predictions/n", b"x").status == 400
    assert tries == {"a": 3, "b": 1}
    tries.clear()
    app = inference(infer, build_table(build_workflow(s={"model": "a", "retries": 1})))
    assert app("POST", "/predictions/w", b"x").status == 503
    assert tries == {"a": 2}


def test_a_step_has_its_own_time_and_the_call_the_rest(inference: Callable[..., Any]) -> None:
    left = {}

    async def infer(call: InferenceRequest) -> InferenceResponse:
        left[call.request_id.partition("/")[2]] = call.deadline and call.deadline - time.time()
        if call.model == "b" and call.deadline:
            await asyncio.sleep(30)
        return InferenceResponse(b"1")

    w = build_workflow(
        quick={"model": "a", "timeout_s": 200}, last={"model": "a", "inputs": "quick"}, timeout_s=500
    )
    inference(infer, build_table(w))("POST", "/predictions/w", b"x")
    assert 100 < left["quick"] <= 200 and 400 < left["last"] <= 500
    inference(infer, build_table(w))("POST", "/predictions/w", b"x", {"x-request-timeout-seconds": "100"})
    assert 0 < left["quick"] <= 100 and 0 < left["last"] <= 100

    w = build_workflow(slow={"model": "b", "timeout_s": 0.05, "retries": 1})
    began = time.monotonic()
    response = inference(infer, build_table(w))("POST", "/predictions/w", b"x")
    assert (response.status, response["x-torchrelay-reason"]) == (504, "deadline")
    assert (
        b"Step slow of workflow w failed: The deadline of this request passed before model b" in response.body
    )
    assert time.monotonic() - began < 25
    response = inference(infer, build_table(build_workflow(slow={"model": "b"}, timeout_s=0.05)))(
        "POST", "/predictions/w", b"x"
    )
    assert (response.status, response["x-torchrelay-reason"]) == (504, "client_timeout")


def test_disconnect_cancels_every_branch(inference: Callable[..., Any]) -> None:
    began, ended = asyncio.Event(), []

    async def infer(call: InferenceRequest) -> InferenceResponse:
        if call.model == "c":
            began.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(call.model)
        return InferenceResponse(b"")

    w = build_workflow(x={"model": "a"}, y={"model": "b"}, z={"model": "c", "each": "request"})
    app = inference(infer, build_table(w))

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
        while len(ended) < 5:  # in the next turns of the event loop
            await asyncio.sleep(0)
        assert Counter(ended) == {"a": 1, "b": 1, "c": 3}

    asyncio.run(leave())
    samples = {(name, labels): value for name, labels, value in app.meters.samples()}
    assert samples["torchrelay_workflow_ongoing", (("model", "w"), ("version", "1.0"))] == 0
