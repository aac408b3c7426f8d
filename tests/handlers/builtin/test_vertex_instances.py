"""Instances of Vertex AI's containers of vLLM, behind the envelope ``vertex``."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import handlers
from handlers.context import Context
from handlers.errors import PredictionException
from tests.support.requirements import needs_no_package

pytestmark = [pytest.mark.integration, needs_no_package("vllm")]

CHAT = {"@requestFormat": "chatCompletions", "messages": [{"role": "user", "content": "Once"}]}
GREEDY = {"max_tokens": 6, "temperature": 0}
Ask = Callable[..., list[Any]]


def open_handler(name: str, folder: Path, config: dict[str, Any]) -> tuple[Any, Ask, Callable[[], None]]:
    """Return a loaded handler, a function that sends one batch of bodies to it, and one that ends it."""
    loop = asyncio.new_event_loop()
    manifest = {"model": {"handler": name, "modelName": "m"}} if config else {}
    entry = handlers.load(name, folder, manifest)
    context = Context("m", str(folder), manifest, model_yaml_config=config)
    loop.run_until_complete(entry.initialize(context))
    entry.instance.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    envelope = handlers.load_envelope("vertex")(entry)

    def ask(*bodies: Any, path: str = "") -> list[Any]:
        count = len(bodies)
        headers = [{"url_path": path} if path else {}] * count
        context.begin([f"{index}" for index in range(count)], headers, [{}] * count, lambda *_: None)
        answers = loop.run_until_complete(envelope.handle([{"body": body} for body in bodies], context))
        ask.content_type = context.get_response_content_type(0)  # type: ignore[attr-defined]
        return answers

    def close() -> None:
        loop.run_until_complete(entry.instance.engine.shutdown())
        loop.close()

    return entry.instance, ask, close


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.hf_folders import save_byte_llama

    folder = tmp_path_factory.mktemp("archive")
    shutil.copytree(save_byte_llama(tmp_path_factory.mktemp("byte_llama")), folder / "model")
    return folder


@pytest.fixture(scope="module", params=["llm", "vllm_handler", "trt_llm_handler"])
def ask(request: pytest.FixtureRequest, folder: Path) -> Iterator[Ask]:
    config: dict[str, Any] = {
        "vllm_handler": {"handler": {"model_path": "model", "vllm_engine_config": {"max_model_len": 100}}},
        "trt_llm_handler": {"handler": {"tokenizer_dir": "model", "engine_dir": "model"}},
    }.get(request.param, {})
    instance, send, close = open_handler(request.param, folder if config else folder / "model", config)
    send.handler = instance  # type: ignore[attr-defined]
    yield send
    close()


def predictions(response: Any) -> Any:
    if isinstance(response, Exception):
        raise response
    document = json.loads(response) if isinstance(response, str) else response
    return document["predictions"]


def test_raw_response_selects_the_text_alone(ask: Ask) -> None:
    prompt = {"prompt": " Once", **GREEDY}
    raw, labelled, of_all = ask(
        {"instances": [{**prompt, "raw_response": True}]},
        {"instances": [{**prompt, "raw_response": False}]},
        {"instances": [{"prompt": " Once"}, " Once"], "parameters": {**GREEDY, "raw_response": True}},
    )
    [text] = predictions(raw)
    assert isinstance(text, str) and text
    assert predictions(labelled) == [f"Prompt:\nOnce\nOutput:\n{text}"]
    assert predictions(of_all) == [text, text]


def test_a_single_chat_is_answered_by_its_completion(ask: Ask) -> None:
    single, several = ask(
        {"instances": [{**CHAT, "max_tokens": 6}], "parameters": {"temperature": 0, "max_tokens": 2}},
        {"instances": [{**CHAT, **GREEDY}, {**CHAT, **GREEDY, "max_tokens": 1}]},
    )
    completion = predictions(single)
    assert completion["object"] == "chat.completion" and completion["usage"]["completion_tokens"] == 6
    first, second = predictions(several)
    assert first["choices"] == completion["choices"]
    assert second["usage"]["completion_tokens"] == 1


def test_chats_and_prompts_may_be_mixed(ask: Ask) -> None:
    [response] = ask({"instances": [{**CHAT, **GREEDY}, {"prompt": "Once", "raw_response": True, **GREEDY}]})
    completion, text = predictions(response)
    assert text == completion["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("instance", "message"),
    [
        ({"@requestFormat": "other", "prompt": "a"}, "@requestFormat is 'other'; it is chatCompletions"),
        ({"@requestFormat": "chatCompletions", "prompt": "a"}, "prompt"),
        ({**CHAT, "stream": True}, "stream: the predictions of instances are one document"),
        ({"prompt": "a", "raw_response": "yes"}, "raw_response is 'yes'; it is true or false"),
        ({"prompt": "a", "top_k": 1, "parameters": {"top_k": 2}}, "top_k is given twice"),
        ({"prompt": "a", "parameters": 3}, "parameters is an object"),
        ({"raw_response": True}, "There is no prompt"),
    ],
)
def test_an_invalid_instance_is_an_error_of_its_request_alone(ask: Ask, instance: Any, message: str) -> None:
    error, other = ask({"instances": [instance]}, {"instances": [{"prompt": "Once", **GREEDY}]})
    with pytest.raises(PredictionException, match=message) as caught:
        predictions(error)
    assert caught.value.error_code == 400
    assert len(predictions(other)) == 1


@pytest.mark.parametrize("encode", [bytes, dict])
def test_a_body_with_messages_is_a_chat_without_its_route(ask: Ask, encode: type) -> None:
    body = {"messages": CHAT["messages"], **GREEDY}
    [expected] = ask(body, path="v1/chat/completions")
    sent = json.dumps(body).encode() if encode is bytes else body
    [response] = ask(sent)
    assert response["choices"] == expected["choices"]
    assert ask.content_type == "application/json"  # type: ignore[attr-defined]
    [stream] = ask({**body, "stream": True})
    assert stream.endswith(b"data: [DONE]\n\n")
    assert ask.content_type == "text/event-stream"  # type: ignore[attr-defined]
    [instance] = ask({"instances": [body]})
    assert predictions(instance)[0]["choices"] == expected["choices"]
    [error] = ask(b'{"messages": [')
    assert isinstance(error, PredictionException) and error.error_code == 400


def test_bodies_without_instances_keep_their_format(ask: Ask) -> None:
    body = {"messages": CHAT["messages"], **GREEDY}
    [response] = ask(body, path="v1/chat/completions")
    assert response["object"] == "chat.completion"
