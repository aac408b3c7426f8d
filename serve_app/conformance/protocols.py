"""The contracts of protocols: KServe's versions 1 and 2, and OpenAI's chat completions."""

from __future__ import annotations

import json
import math
from typing import Any

from serve_app.conformance.check import (
    ContractCheck,
    ContractViolation,
    ServerUnderTest,
    expect_equal,
    expect_media_type,
    expect_status,
    expect_type,
    read_object,
)

_NO_MODEL = "none-of-this-name"
_BROKEN = b'{"broken'


# KServe, version 1: "Data Plane (V1 Protocol)"


def _v1_ready(server: ServerUnderTest) -> None:
    document = read_object(server.get(f"/v1/models/{server.model}"))
    expect_equal((document.get("name"), document.get("ready")), (server.model, True), "name and ready")


def _v1_predict(count: int) -> Any:
    def check(server: ServerUnderTest) -> None:
        path = f"/v1/models/{server.model}:predict"
        document = read_object(server.post(path, {"instances": [server.instance] * count}))
        predictions = expect_type(document, "predictions", list)
        expect_equal(len(predictions), count, "the number of predictions")

    return check


def _v1_unknown(server: ServerUnderTest) -> None:
    expect_status(server.post(f"/v1/models/{_NO_MODEL}:predict", {"instances": []}), 404)


def _v1_malformed(server: ServerUnderTest) -> None:
    for document in (_BROKEN, {"other": 1}):
        expect_status(server.post(f"/v1/models/{server.model}:predict", document), 400)


KSERVE_V1 = (
    ContractCheck("GET /v1/models/{model} has its name, and ready: true", _v1_ready),
    ContractCheck("POST /v1/models/{model}:predict answers an instance with a prediction", _v1_predict(1)),
    ContractCheck("several instances have a prediction each", _v1_predict(3)),
    ContractCheck("an unknown model is 404", _v1_unknown),
    ContractCheck("malformed JSON, and a body without instances, are 400", _v1_malformed),
)


# KServe, version 2: "Open Inference Protocol"


def _v2_health(server: ServerUnderTest) -> None:
    for path in ("live", "ready"):
        expect_status(server.get(f"/v2/health/{path}"), 200)
    expect_status(server.get(f"/v2/models/{server.model}/ready"), 200)


def _v2_server(server: ServerUnderTest) -> None:
    document = read_object(server.get("/v2"))
    for key, kind in (("name", str), ("version", str), ("extensions", list)):
        expect_type(document, key, kind)


def _v2_model(server: ServerUnderTest) -> None:
    document = read_object(server.get(f"/v2/models/{server.model}"))
    expect_equal(document.get("name"), server.model, "name")
    expect_type(document, "platform", str)
    for key in ("inputs", "outputs"):
        for tensor in expect_type(document, key, list):
            for field, kind in (("name", str), ("datatype", str), ("shape", list)):
                expect_type(tensor, field, kind, f"{key}[]: ")


def _v2_infer(server: ServerUnderTest) -> None:
    document = read_object(server.post(f"/v2/models/{server.model}/infer", _v2_request(server)))
    expect_equal(document.get("model_name"), server.model, "model_name")
    expect_equal(document.get("id"), "conformance-1", "id")
    for tensor in expect_type(document, "outputs", list):
        for field, kind in (("name", str), ("datatype", str), ("shape", list), ("data", list)):
            expect_type(tensor, field, kind, "outputs[]: ")
        size = math.prod(tensor["shape"])
        expect_equal(_count(tensor["data"]), size, f"the number of values of the shape {tensor['shape']}")


def _v2_request(server: ServerUnderTest) -> dict[str, Any]:
    """Return a request: ``instance`` is a list of tensors as the protocol has them, or one text."""
    inputs = server.instance
    if not isinstance(inputs, list):
        text = inputs if isinstance(inputs, str) else json.dumps(inputs)
        inputs = [{"name": "input", "shape": [1], "datatype": "BYTES", "data": [text]}]
    return {"id": "conformance-1", "inputs": inputs}


def _count(data: Any) -> int:
    return sum(map(_count, data)) if isinstance(data, list) else 1


def _v2_errors(server: ServerUnderTest) -> None:
    cases = (
        (f"/v2/models/{_NO_MODEL}/infer", _v2_request(server), (404, 400)),
        (f"/v2/models/{server.model}/infer", _BROKEN, (400, 422)),
        (f"/v2/models/{server.model}/infer", {"id": "1"}, (400, 422)),
    )
    for path, document, statuses in cases:
        expect_type(read_object(server.post(path, document), *statuses), "error", str)


KSERVE_V2 = (
    ContractCheck("the server and the model are live and ready", _v2_health),
    ContractCheck("GET /v2 has name, version and extensions", _v2_server),
    ContractCheck("GET /v2/models/{model} describes the model's tensors", _v2_model),
    ContractCheck("POST /v2/models/{model}/infer answers with tensors, and the request's id", _v2_infer),
    ContractCheck("errors are JSON with error: an unknown model, malformed JSON, no inputs", _v2_errors),
)


# OpenAI: "API Reference", chat completions


def _openai_models(server: ServerUnderTest) -> None:
    document = read_object(server.get("/v1/models"))
    expect_equal(document.get("object"), "list", "object")
    models = expect_type(document, "data", list)
    expect_equal(server.model in [model.get("id") for model in models], True, "whether the model is listed")
    for model in models:
        expect_equal(model.get("object"), "model", "data[].object")
        expect_type(model, "created", int, "data[]: ")


def _chat(server: ServerUnderTest, **fields: Any) -> dict[str, Any]:
    content = server.instance if isinstance(server.instance, str) else json.dumps(server.instance)
    messages = [{"role": "user", "content": content}]
    return {"model": server.model, "messages": messages, "max_tokens": 4, "temperature": 0, **fields}


def _openai_chat(server: ServerUnderTest) -> None:
    document = read_object(server.post("/v1/chat/completions", _chat(server)))
    expect_equal(document.get("object"), "chat.completion", "object")
    for key, kind in (("id", str), ("created", int), ("model", str)):
        expect_type(document, key, kind)
    [choice] = _expect_choices(document, 1)
    message = expect_type(choice, "message", dict)
    expect_equal(message.get("role"), "assistant", "message.role")
    expect_type(message, "content", str, "message.")
    expect_equal(choice.get("finish_reason") in ("stop", "length"), True, "whether finish_reason is known")
    usage = expect_type(document, "usage", dict)
    total = usage.get("prompt_tokens", 0) + usage.get("completion_tokens", 0)
    expect_equal(usage.get("total_tokens"), total, "usage.total_tokens")


def _openai_length(server: ServerUnderTest) -> None:
    document = read_object(server.post("/v1/chat/completions", _chat(server, max_tokens=1)))
    [choice] = _expect_choices(document, 1)
    expect_equal(document["usage"]["completion_tokens"], 1, "usage.completion_tokens")
    expect_equal(choice.get("finish_reason"), "length", "finish_reason")


def _openai_stream(server: ServerUnderTest) -> None:
    whole = read_object(server.post("/v1/chat/completions", _chat(server)))
    response = server.post("/v1/chat/completions", _chat(server, stream=True))
    expect_status(response, 200)
    expect_media_type(response, "text/event-stream")
    lines = [line for line in response.text.splitlines() if line]
    if not all(line.startswith("data:") for line in lines) or not lines:
        raise ContractViolation(f"a line of the stream is {lines[:1]!r:.200}; expected data: …")
    events = [line.removeprefix("data:").strip() for line in lines]
    expect_equal(events[-1], "[DONE]", "the last event")
    text, reasons = "", []
    for chunk in map(json.loads, events[:-1]):
        expect_equal(chunk.get("object"), "chat.completion.chunk", "object")
        for choice in expect_type(chunk, "choices", list):
            text += choice.get("delta", {}).get("content") or ""
            reasons += [choice["finish_reason"]] if choice.get("finish_reason") else []
    expect_equal(len(reasons), 1, "the number of finish_reason")
    expect_equal(text, whole["choices"][0]["message"]["content"], "the streamed text")


def _openai_errors(server: ServerUnderTest) -> None:
    cases = (
        (_chat(server, model=_NO_MODEL), (404,)),
        ({"model": server.model}, (400, 422)),
        (_chat(server, temperature="hot"), (400, 422)),
        (_BROKEN, (400, 422)),
    )
    for document, statuses in cases:
        error = expect_type(
            read_object(server.post("/v1/chat/completions", document), *statuses), "error", dict
        )
        expect_type(error, "message", str, "error.")
        expect_type(error, "type", str, "error.")


def _expect_choices(document: dict[str, Any], count: int) -> list[dict[str, Any]]:
    choices = expect_type(document, "choices", list)
    expect_equal(len(choices), count, "the number of choices")
    return choices


OPENAI = (
    ContractCheck("GET /v1/models lists the model", _openai_models),
    ContractCheck("POST /v1/chat/completions answers with a choice and the usage", _openai_chat),
    ContractCheck("max_tokens limits the text, with finish_reason length", _openai_length),
    ContractCheck("with stream, events make the same text and end with [DONE]", _openai_stream),
    ContractCheck("errors are JSON with error.message and error.type", _openai_errors),
)
