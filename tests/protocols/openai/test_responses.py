"""``/v1/responses`` over a data plane: the chat completions that it builds, its responses and its events."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream
from serve_app.errors import HandlerRejected
from tests.support.protocol_fakes import CALL, USAGE, read_typed_events


def completing(message: dict[str, Any], reason: str = "stop") -> Any:
    async def complete(request: InferenceRequest) -> InferenceResponse:
        choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
        body = json.dumps({"choices": [choice], "usage": USAGE}).encode()
        return InferenceResponse(body, version=request.version or "1.0")

    return complete


def streaming(*deltas: dict[str, Any], reason: str = "stop", error: Exception | None = None) -> Any:
    """Return a backend of a stream whose chunks end in the middle of events."""
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": reason})
    documents: list[Any] = [{"choices": [choice]} for choice in choices]
    documents.append({"choices": [], "usage": USAGE})
    text = b"".join(b"data: %b\n\n" % json.dumps(document).encode() for document in documents)
    text += b"data: [DONE]\n\n"

    async def complete(request: InferenceRequest) -> ResponseStream:
        async def chunks() -> AsyncIterator[bytes]:
            for start in range(0, len(text) // 2 if error else len(text), 25):
                yield text[start : start + 25]
            if error is not None:
                raise error

        return ResponseStream(InferenceResponse(b"", version="1.0"), chunks())

    return complete


def post(app: Any, **body: Any) -> Any:
    app.compares = False  # ids are random
    return app("POST", "/v1/responses", json.dumps({"model": "m", "input": "Hi", **body}).encode())


def read_events(response: Any) -> list[dict[str, Any]]:
    events = read_typed_events(response)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_a_text_is_answered(inference: Any) -> None:
    app = inference(completing({"content": "Hello"}))
    response = post(app, instructions="Be brief", max_output_tokens=9, temperature=0.5, user="me", zz=1)
    assert (response.status, response["x-torchrelay-ignored"], response["x-model-version"]) == (
        200,
        "zz",
        "1.0",
    )
    document = json.loads(response.body)
    [item] = document["output"]
    assert item["content"] == [
        {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
    ] and (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert (document["object"], document["status"], document["model"]) == ("response", "completed", "m")
    assert document["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 7,
    }
    [request] = app.backend.requests
    assert request.headers["url_path"] == "v1/chat/completions"
    assert json.loads(request.inputs[0].value) == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}],
        "max_completion_tokens": 9,
        "temperature": 0.5,
        "stream": False,
    }


def test_items_become_messages(inference: Any) -> None:
    app = inference(completing({"content": "x"}))
    items = [
        {"role": "developer", "content": "A"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "B"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "C"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "D"},
    ]
    schema = {"type": "object"}
    response = post(
        app,
        input=items,
        text={"format": {"type": "json_schema", "name": "n", "schema": schema}},
        tools=[{"type": "function", "name": "f", "parameters": schema, "strict": None}],
        tool_choice={"type": "function", "name": "f"},
        include=["message.output_text.logprobs"],
    )
    assert response.status == 200, response.body
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for id, name in (("1", "f"), ("2", "g"))
    ]
    assert json.loads(app.backend.requests[0].inputs[0].value) == {
        "model": "m",
        "messages": [
            {"role": "developer", "content": "A"},
            {"role": "user", "content": [{"type": "text", "text": "B"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "C"}], "tool_calls": calls},
            {"role": "tool", "tool_call_id": "1", "content": "D"},
        ],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "logprobs": True,
        "top_logprobs": 0,
        "stream": False,
    }


def test_tool_calls_are_items(inference: Any) -> None:
    response = post(inference(completing({"content": None, "tool_calls": [CALL]}, "tool_calls")))
    [item] = json.loads(response.body)["output"]
    assert item.pop("id").startswith("fc_")
    assert item == {
        "type": "function_call",
        "status": "completed",
        "call_id": "call_1",
        "name": "f",
        "arguments": '{"a": 1}',
    }


def test_the_events_of_a_text(inference: Any) -> None:
    app = inference(streaming({"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo"}))
    events = read_events(post(app, stream=True))
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.delta", "output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert [event["delta"] for event in events if "delta" in event] == ["Hel", "lo"]
    assert events[2]["item"]["content"] == [] and events[3]["part"]["text"] == ""
    assert events[6]["text"] == events[7]["part"]["text"] == "Hello"
    response = events[-1]["response"]
    assert response["output"] == [events[8]["item"]]
    assert (response["status"], response["usage"]["total_tokens"]) == ("completed", 7)
    assert events[0]["response"]["id"] == response["id"]
    chat = json.loads(app.backend.requests[0].inputs[0].value)
    assert (chat["stream"], chat["stream_options"]) == (True, {"include_usage": True})


def test_the_events_of_tool_calls(inference: Any) -> None:
    second = {"index": 1, **CALL, "id": "call_2"}
    rest = {"index": 1, "function": {"arguments": " "}}
    deltas = [{"content": "a"}, {"tool_calls": [{"index": 0, **CALL}, second]}, {"tool_calls": [rest]}]
    events = read_events(post(inference(streaming(*deltas, reason="tool_calls")), stream=True))
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["message", "function_call", "function_call"]
    assert [(item["call_id"], item["arguments"]) for item in done[1:]] == [
        ("call_1", '{"a": 1}'),
        ("call_2", '{"a": 1} '),
    ]
    assert events[-1]["response"]["output"] == done
    arguments = [e for e in events if e["type"] == "response.function_call_arguments.done"]
    assert [(e["output_index"], e["name"]) for e in arguments] == [(1, "f"), (2, "f")]


def test_an_ended_text_is_incomplete(inference: Any) -> None:
    events = read_events(post(inference(streaming({"content": "a"}, reason="length")), stream=True))
    assert events[-1]["type"] == "response.incomplete"
    whole = json.loads(post(inference(completing({"content": "a"}, "length"))).body)
    for response in (events[-1]["response"], whole):
        assert (response["status"], response["incomplete_details"]) == (
            "incomplete",
            {"reason": "max_output_tokens"},
        )
        assert response["output"][0]["status"] == "incomplete"


def test_an_empty_text_is_an_item(inference: Any) -> None:
    events = read_events(post(inference(streaming()), stream=True))
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""


def test_a_stream_may_come_as_a_whole(inference: Any) -> None:
    async def complete(request: InferenceRequest) -> InferenceResponse:
        stream = await streaming({"content": "a"})(request)
        return InferenceResponse(b"".join([chunk async for chunk in stream]), version="1.0")

    events = read_events(post(inference(complete), stream=True))
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "a"


def test_an_error_in_mid_stream_is_an_event(inference: Any) -> None:
    error = HandlerRejected("the loop failed", 503)
    events = read_events(post(inference(streaming({"content": "a"}, error=error)), stream=True))
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "the loop failed"}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"input": None}, "input", "a list of items"),
        ({"input": []}, "input", "a list of items"),
        ({"input": [5]}, "input", r"input\[0\] is an object"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input", "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input", "input_file"),
        ({"input": [{"role": "user"}]}, "input", r"input\[0\]\.content is a text"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input", "call_id"),
        ({"instructions": 5}, "instructions", "a text"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps no responses"),
        ({"conversation": "c"}, "conversation", "keeps no responses"),
        ({"store": True}, "store", "keeps no responses"),
        ({"background": True}, "background", "leave it out"),
        ({"truncation": "auto"}, "truncation", "shorten input"),
        ({"tools": [{"type": "web_search"}]}, "tools", r"tools\[0\]"),
        ({"tools": {}}, "tools", "is a list"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice", "required"),
        ({"include": ["file_search_call.results"]}, "include", "there are"),
        ({"text": 5}, "text", "an object"),
        ({"stream": 1}, "stream", "true or false"),
        ({"messages": []}, "messages", "not served"),
        ({"model": 5}, "model", "GET /v1/models"),
    ],
)
def test_invalid_bodies_name_the_field(
    inference: Any, body: dict[str, Any], param: str, message: str
) -> None:
    app = inference(completing({"content": "a"}))
    response = post(app, **body)
    error = json.loads(response.body)["error"]
    assert (response.status, error["param"]) == (400, param)
    assert re.search(message, error["message"]), error["message"]
    assert not app.backend.requests


@pytest.mark.parametrize("answer", [b"[0.5]", b"{}", b'{"choices": []}', b"text", b'data: {"a": 1}\n\n'])
@pytest.mark.parametrize("stream", [False, True])
def test_a_model_without_chats_is_rejected(inference: Any, answer: bytes, stream: bool) -> None:
    async def respond(request: InferenceRequest) -> InferenceResponse:
        return InferenceResponse(answer, version="1.0")

    response = post(inference(respond), stream=stream)
    error = json.loads(response.body)["error"]
    assert (response.status, error["param"]) == (400, "model")
    assert "answers no chat completion" in error["message"]
