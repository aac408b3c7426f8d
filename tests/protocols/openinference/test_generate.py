"""Text generation over HTTP."""

from __future__ import annotations

import json
from typing import Any

import httpx
import orjson
import pytest

from handlers.engines import openai
from handlers.engines.engine import SamplingParams
from handlers.errors import PredictionException
from serve_app.protocols.openinference import generate


def complete(data: list, context: Any) -> list:
    """Answer completions like the handler llm."""
    assert context.get_request_header(0, "url_path") == "v1/completions"
    body = data[0]["body"]
    message = [f"{body['prompt']} ", "and ", "so on"][: body["max_tokens"]]
    if not body["stream"]:
        return [{"choices": [{"text": "".join(message), "finish_reason": "length"}]}]
    context.set_response_content_type(0, "text/event-stream")
    for word in message:
        context.emit(
            0, b"data: " + orjson.dumps({"choices": [{"text": word, "finish_reason": None}]}) + b"\n\n"
        )
    if body.get("seed") == 13:
        return [PredictionException("the engine is gone", 503)]
    return [b'data: {"choices": [{"text": "", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n']


def parse_events(response: httpx.Response) -> list[dict]:
    assert response.headers["content-type"] == "text/event-stream"
    return [json.loads(event.removeprefix("data: ")) for event in response.text.split("\n\n") if event]


def test_generate_returns_text_and_details(send_request: Any, models: Any) -> None:
    models.add("llm", complete)
    body = {"id": "7", "text_input": "once", "parameters": {"max_tokens": 2, "details": True}}
    response = send_request("POST", "/v2/models/llm/generate", body)
    assert response.json() == {
        "text_output": "once and ",
        "model_name": "llm",
        "model_version": "1.0",
        "id": "7",
        "details": {"finish_reason": "length"},
    }
    assert (
        send_request("POST", "/v2/models/llm/versions/1.0/generate", {"text_input": "a"}).json()[
            "text_output"
        ]
        == "a and so on"
    )


def test_generate_stream_sends_chunks(send_request: Any, models: Any) -> None:
    models.add("llm", complete)
    events = parse_events(
        send_request(
            "POST", "/v2/models/llm/generate_stream", {"text_input": "a", "parameters": {"details": True}}
        )
    )
    assert "".join(event["text_output"] for event in events) == "a and so on"
    assert events[-1]["details"] == {"finish_reason": "eos_token"}
    assert all(event["model_name"] == "llm" for event in events)


def test_an_error_in_mid_stream_is_an_event(send_request: Any, models: Any) -> None:
    models.add("llm", complete)
    events = parse_events(
        send_request(
            "POST", "/v2/models/llm/generate_stream", {"text_input": "a", "parameters": {"seed": 13}}
        )
    )
    assert events[-1] == {"error": "the engine is gone"}


@pytest.mark.parametrize(
    ("model", "body", "status", "message"),
    [
        ("llm", {}, 422, "text_input"),
        ("llm", {"text_input": "x", "parameters": 1}, 422, "parameters"),
        ("llm", b"{", 422, "not JSON"),
        ("plain", {"text_input": "x"}, 424, "Prediction failed"),
        ("lists", {"text_input": "x"}, 501, "generates no text"),
        ("missing", {"text_input": "x"}, 404, "Model not found"),
    ],
)
def test_invalid_requests_and_models_are_rejected(
    send_request: Any, models: Any, model: str, body: Any, status: int, message: str
) -> None:
    models.add("llm", complete)
    models.add("lists", lambda data, context: [[1, 2]])
    response = send_request("POST", f"/v2/models/{model}/generate", body)
    assert response.status_code == status
    assert message in response.json()["error"]


def test_the_handler_llm_parses_generate_requests() -> None:
    parameters = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 7, "stop": ["."], "details": True}
    request = generate.parse_request(
        "llm", None, {"text_input": "once", "parameters": parameters}, stream=True
    )
    [body] = generate.build_request(request, "id", {}).inputs
    completion = openai.parse_request(
        generate.COMPLETIONS_PATH, {"body": json.loads(body.value)}, SamplingParams()
    )
    assert (completion.prompts, completion.max_new_tokens, completion.stops) == (("once",), 7, (".",))
    assert completion.stream
    assert completion.sampling.temperature == 0.5
