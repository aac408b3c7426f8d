"""``/v1/messages`` over a data plane: the chat completions that it builds, its responses and its events."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from serve_app.domain.access import AccessTable, KeyGrant
from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream
from serve_app.errors import HandlerRejected, QueueFull
from tests.support.protocol_fakes import CALL, USAGE, read_typed_events, two_versions

COUNTS = {
    "input_tokens": 1,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 4,
    "output_tokens": 2,
}


def completing(message: dict[str, Any], reason: str = "stop", **fields: Any) -> Any:
    async def complete(request: InferenceRequest) -> InferenceResponse:
        choice = {"message": {"role": "assistant", **message}, "finish_reason": reason, **fields}
        body = json.dumps({"choices": [choice], "usage": USAGE}).encode()
        return InferenceResponse(body, version=request.version or "1.0")

    return complete


def streaming(*deltas: dict[str, Any], error: Exception | None = None, **end: Any) -> Any:
    choices = [{"delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"delta": {}, "finish_reason": "stop", **end})
    documents: list[Any] = [{"choices": [choice]} for choice in choices]
    documents.append({"choices": [], "usage": USAGE})

    async def complete(request: InferenceRequest) -> ResponseStream:
        async def chunks() -> AsyncIterator[bytes]:
            for document in documents[:1] if error else documents:
                yield b"data: %b\n\n" % json.dumps(document).encode()
            if error is not None:
                raise error
            yield b"data: [DONE]\n\n"

        return ResponseStream(InferenceResponse(b"", version="1.0"), chunks())

    return complete


def post(app: Any, path: str = "", headers: dict[str, str] | None = None, **body: Any) -> Any:
    app.compares = False  # ids are random
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], **body}
    return app("POST", f"/v1/messages{path}", json.dumps(body).encode(), headers or {})


def read_chat(app: Any) -> Any:
    return json.loads(app.backend.requests[0].inputs[0].value)


def test_a_message_is_answered(inference: Any) -> None:
    app = inference(completing({"content": "Hello"}))
    response = post(
        app,
        headers={"anthropic-version": "2023-06-01"},
        system=[{"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral"}}],
        stop_sequences=["."],
        temperature=0.5,
        top_k=3,
        metadata={"user_id": "me"},
        zz=1,
    )
    assert (response.status, response["x-torchrelay-ignored"]) == (200, "zz"), response.body
    assert response["request-id"] == response["x-request-id"]
    document = json.loads(response.body)
    assert document.pop("id").startswith("msg_")
    assert document == {
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": COUNTS,
    }
    assert read_chat(app) == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}],
        "max_tokens": 9,
        "temperature": 0.5,
        "top_k": 3,
        "stop": ["."],
        "stream": False,
    }
    assert app.backend.requests[0].headers["url_path"] == "v1/chat/completions"


def test_blocks_become_messages(inference: Any) -> None:
    app = inference(completing({"content": "x"}))
    image = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    schema = {"type": "object"}
    response = post(
        app,
        messages=[
            {
                "role": "user",
                "content": [{"type": "text", "text": "A"}, {"type": "image", "source": image}],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "C"},
                    {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "B"}]},
                ],
            },
        ],
        tools=[{"name": "f", "input_schema": schema, "cache_control": None}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    assert response.status == 200, response.body
    function = {"name": "f", "arguments": '{"a":1}'}
    assert read_chat(app) == {
        "model": "m",
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "A"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                ],
            },
            {
                "role": "assistant",
                "content": [],
                "tool_calls": [{"id": "1", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "B"},
            {"role": "user", "content": [{"type": "text", "text": "C"}]},
        ],
        "max_tokens": 9,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "stream": False,
    }


def test_formats_and_named_tools(inference: Any) -> None:
    app = inference(completing({"content": "{}"}))
    schema = {"type": "object"}
    format = {"type": "json_schema", "schema": schema}
    tool_choice = {"type": "tool", "name": "f"}
    assert post(app, output_config={"format": format}, tool_choice=tool_choice).status == 200
    chat = read_chat(app)
    assert chat["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": schema},
    }
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("message", "end", "content", "stop"),
    [
        ({"content": "a"}, {"reason": "length"}, ["text"], ("max_tokens", None)),
        ({"content": "a"}, {"stop_reason": "."}, ["text"], ("stop_sequence", ".")),
        ({"content": "a"}, {"stop_reason": 2}, ["text"], ("end_turn", None)),
        ({"content": ""}, {}, [], ("end_turn", None)),
        ({"content": None, "tool_calls": [CALL]}, {}, ["tool_use"], ("tool_use", None)),
        ({"content": "a", "tool_calls": [CALL]}, {}, ["text", "tool_use"], ("tool_use", None)),
    ],
)
def test_content_and_stop_reason(
    inference: Any, message: dict[str, Any], end: dict[str, Any], content: list[str], stop: Any
) -> None:
    fields = {"reason": "stop", **end}
    document = json.loads(post(inference(completing(message, **fields))).body)
    assert [block["type"] for block in document["content"]] == content
    assert (document["stop_reason"], document["stop_sequence"]) == stop
    if "tool_use" in content:
        assert document["content"][-1] == {"type": "tool_use", "id": "call_1", "name": "f", "input": {"a": 1}}


def test_the_events_of_a_text(inference: Any) -> None:
    app = inference(
        streaming(
            {"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo"}, stop_reason="."
        )
    )
    events = read_typed_events(post(app, stream=True))
    assert [event["type"] for event in events] == [
        *("message_start", "content_block_start", "content_block_delta", "content_block_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert events[1] == {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": ""},
    }
    assert [event["delta"] for event in events[2:4]] == [
        {"type": "text_delta", "text": "Hel"},
        {"type": "text_delta", "text": "lo"},
    ]
    assert events[5]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "."}
    assert events[5]["usage"] == COUNTS
    assert (read_chat(app)["stream"], read_chat(app)["stream_options"]) == (True, {"include_usage": True})


def test_the_events_of_tool_calls(inference: Any) -> None:
    second = {"index": 1, **CALL, "id": "call_2"}
    deltas = [{"content": "a"}, {"tool_calls": [{"index": 0, **CALL}, second]}]
    events = read_typed_events(post(inference(streaming(*deltas, finish_reason="tool_calls")), stream=True))
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [(e["index"], e["content_block"]["type"]) for e in starts] == [
        (0, "text"),
        (1, "tool_use"),
        (2, "tool_use"),
    ]
    assert [e["index"] for e in events if e["type"] == "content_block_stop"] == [0, 1, 2]
    parts = [e["delta"]["partial_json"] for e in events if "partial_json" in e.get("delta", {})]
    assert parts == ['{"a": 1}'] * 2
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_an_error_in_mid_stream_is_an_event(inference: Any) -> None:
    error = HandlerRejected("the loop failed", 503)
    events = read_typed_events(post(inference(streaming({"content": "a"}, error=error)), stream=True))
    assert events[-1] == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "the loop failed"},
    }


def test_tokens_are_counted(inference: Any) -> None:
    async def tokenize(request: InferenceRequest) -> InferenceResponse:
        assert request.headers["url_path"] == "tokenize"
        return InferenceResponse(b'{"count": 7, "tokens": []}', version="1.0")

    app = inference(tokenize)
    response = post(app, "/count_tokens", system="Be brief", tools=[{"name": "f"}])
    assert (response.status, json.loads(response.body)) == (200, {"input_tokens": 7})
    assert response["x-model-version"] == "1.0"
    assert set(read_chat(app)) == {"model", "messages", "tools"}
    for answer in (b"[1]", b"{}", b"x"):

        async def respond(request: InferenceRequest, answer: bytes = answer) -> InferenceResponse:
            return InferenceResponse(answer, version="1.0")

        assert post(inference(respond), "/count_tokens").status == 400


def test_the_key_may_be_in_x_api_key(inference: Any) -> None:
    grants = {sha256(b"good").digest(): KeyGrant(frozenset(("infer",)))}
    app = inference(completing({"content": "a"}), table=replace(two_versions(), access=AccessTable(grants)))
    for headers, status in (
        ({"x-api-key": "good"}, 200),
        ({"authorization": "Bearer good", "x-api-key": "unused"}, 200),
        ({"x-api-key": "bad"}, 401),
        ({}, 401),
    ):
        response = post(app, headers=headers)
        assert response.status == status
        if status == 401:
            assert json.loads(response.body)["error"]["type"] == "authentication_error"
    assert "x-api-key" not in app.backend.requests[0].headers


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_tokens": None}, "max_tokens is required"),
        ({"max_tokens": 0}, "max_tokens is required"),
        ({"messages": []}, "messages is a list"),
        ({"messages": [{"role": "tool", "content": "a"}]}, r"messages\.0\.role"),
        ({"messages": [{"role": "user", "content": []}]}, r"messages\.0\.content"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "the beginning of an answer"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "has id, name"),
        ({"system": 5}, "system is a text"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"stream": 1}, "stream is true or false"),
        ({"tools": {"a": 1}}, "tools is a list"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, r"tools\.0"),
        ({"tool_choice": {"type": "required"}}, "tool_choice"),
        ({"tool_choice": {"type": ["auto"]}}, "tool_choice"),
        ({"container": "c"}, "container is not served"),
        ({"model": 5}, "GET /v1/models"),
    ],
)
def test_invalid_bodies_are_rejected(inference: Any, body: dict[str, Any], message: str) -> None:
    app = inference(completing({"content": "a"}))
    response = post(app, **body)
    document = json.loads(response.body)
    assert (response.status, document["type"], document["error"]["type"]) == (
        400,
        "error",
        "invalid_request_error",
    )
    assert re.search(message, document["error"]["message"]), document
    assert document["request_id"] == response["x-request-id"]
    assert not app.backend.requests


def test_errors_of_the_model(inference: Any) -> None:
    async def reject(request: InferenceRequest) -> InferenceResponse:
        raise QueueFull("m", None)

    response = post(inference(reject))
    assert (response.status, response["retry-after"]) == (503, "1")
    assert json.loads(response.body)["error"]["type"] == "overloaded_error"
    response = post(inference(), model="none")
    assert (response.status, json.loads(response.body)["error"]["type"]) == (404, "not_found_error")
    app = inference()
    app.compares = False
    response = app("GET", "/v1/messages")
    assert (response.status, json.loads(response.body)["error"]["type"]) == (405, "invalid_request_error")
