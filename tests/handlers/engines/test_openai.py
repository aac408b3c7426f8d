"""Tests of OpenAI's API in the handler: bodies, objects and events, with a real engine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from handlers.engines import openai
from handlers.engines.engine import SamplingParams
from handlers.errors import PredictionException
from handlers.ignored_fields import format_ignored
from tests.support.served_llm import HELLO, TOOL_CALL_MESSAGES, ServedModel, serve_copy

pytestmark = pytest.mark.integration


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="module")
def model(
    one_thread: None, language_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedModel]:
    # Without a reachable stop token, completions never end early.
    with serve_copy(language_model, tmp_path_factory.mktemp("chat"), TEMPLATE, eos_token_id=300) as model:
        yield model


def test_a_completion(model: ServedModel) -> None:
    native = model("", prompt="Roses are red", max_new_tokens=20)
    response = model(openai.COMPLETIONS, model="m:2", prompt="Roses are red", max_tokens=20, temperature=0)
    assert response["id"].startswith("cmpl-")
    assert isinstance(response.pop("created"), int)
    assert {**response, "id": ""} == {
        "id": "",
        "object": "text_completion",
        "model": "m:2",
        "choices": [{"index": 0, "text": native["text"], "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 13,
            "completion_tokens": 20,
            "total_tokens": 33,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_a_chat(model: ServedModel) -> None:
    messages = [
        {"role": "developer", "content": "Rhyme."},
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
    ]
    prompt = "[system] Rhyme.\n[user] Hello\n[assistant] "
    native = model(openai.COMPLETIONS, prompt=prompt, max_tokens=20, temperature=0)
    response = model(openai.CHAT, messages=messages, max_completion_tokens=20, temperature=0)
    assert response["id"].startswith("chatcmpl-")
    assert (response["object"], response["model"], response["usage"]) == (
        "chat.completion",
        "poet",
        {**native["usage"], "prompt_tokens_details": {"cached_tokens": 32}},  # from the completion
    )
    message = {"role": "assistant", "content": native["choices"][0]["text"], "refusal": None}
    assert response["choices"] == [
        {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
    ]
    assert (
        model(openai.CHAT, json.dumps({"messages": messages, "max_tokens": 20, "temperature": 0}).encode())[
            "choices"
        ]
        == response["choices"]
    ), "as bytes, and with the old name of the limit"


def test_usage_counts_the_cached_tokens_of_each_prompt(model: ServedModel) -> None:
    prompts = ["a" * 40, "b" * 70]
    for cached in (0, 32 + 64):  # whole pages of 16 tokens
        usage = model(openai.COMPLETIONS, prompt=prompts, max_tokens=2, n=2)["usage"]
        assert usage["prompt_tokens"] == 110
        assert usage["prompt_tokens_details"] == {"cached_tokens": cached}


def test_prompts_are_texts_or_token_ids(model: ServedModel) -> None:
    def texts(prompt: Any) -> list[str]:
        response = model(openai.COMPLETIONS, prompt=prompt, max_tokens=8, temperature=0)
        assert [choice["index"] for choice in response["choices"]] == list(range(len(response["choices"])))
        assert response["usage"]["prompt_tokens"] == 5 + 7 * (len(response["choices"]) - 1)
        assert response["usage"]["completion_tokens"] == 8 * len(response["choices"])
        return [choice["text"] for choice in response["choices"]]

    both = texts(["Roses", "Violets"])
    assert texts("Roses") == texts(model.tokens("Roses")) == both[:1]
    assert texts([model.tokens("Roses"), model.tokens("Violets")]) == both
    assert both[0] != both[1]


def test_choices_differ_and_follow_their_seed(model: ServedModel) -> None:
    def texts(**fields: Any) -> list[str]:
        response = model(openai.COMPLETIONS, prompt=["Roses", "Violets"], max_tokens=20, **fields)
        return [choice["text"] for choice in response["choices"]]

    drawn = texts(n=3, seed=5)
    assert len(set(drawn)) == 6
    assert drawn == texts(n=3, seed=5)
    assert drawn[::3] == texts(seed=5), "the first of each prompt is what it would be alone"
    assert drawn != texts(n=3, seed=6)
    assert len(set(texts(n=2, temperature=0))) == 2, "greedily the choices of one prompt are one text"


@pytest.mark.parametrize("path", [openai.COMPLETIONS, openai.CHAT])
def test_a_stream_has_the_text_of_the_object(model: ServedModel, path: str) -> None:
    params: dict[str, Any] = {"messages": HELLO} if path == openai.CHAT else {"prompt": ["Hello", "you"]}
    params |= {"max_tokens": 40, "temperature": 0, "n": 2}
    model(path, **params)  # so that both others find its prompt in the cache
    complete = model(path, **params)
    events = model.events(path, **params, stream_options={"include_usage": True})
    assert {event["id"] for event in events} == {events[0]["id"]}
    *chunks, last = events
    assert (last["choices"], last["usage"]) == ([], complete["usage"])
    assert all(event["usage"] is None and len(event["choices"]) == 1 for event in chunks)
    assert {event["object"] for event in events} == {
        "chat.completion.chunk" if path == openai.CHAT else "text_completion"
    }
    for choice in complete["choices"]:
        streamed = [
            event["choices"][0] for event in chunks if event["choices"][0]["index"] == choice["index"]
        ]
        assert [piece["finish_reason"] for piece in streamed] == [None] * (len(streamed) - 1) + ["length"]
        if path == openai.CHAT:
            assert [piece["delta"].get("role") for piece in streamed][:2] == ["assistant", None]
            text, expected = (
                "".join(piece["delta"].get("content", "") for piece in streamed),
                choice["message"]["content"],
            )
        else:
            text, expected = "".join(piece["text"] for piece in streamed), choice["text"]
        assert text == expected
    assert len(model.chunks) > len(complete["choices"]), "the text was streamed in several chunks"
    assert all("usage" not in event for event in model.events(path, **params))


def test_stop_strings_end_a_choice(model: ServedModel) -> None:
    params = {"prompt": "Roses are red", "max_tokens": 40, "temperature": 0}
    complete = model(openai.COMPLETIONS, **params)["choices"][0]["text"]
    stop = complete[20:23]
    [choice] = model(openai.COMPLETIONS, **params, stop=["never generated", stop])["choices"]
    assert (choice["text"], choice["finish_reason"]) == (complete[: complete.index(stop)], "stop")
    events = model.events(openai.COMPLETIONS, **params, stop=stop)
    assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_chat(model: ServedModel, stream: bool) -> None:
    params = {"messages": HELLO, "max_tokens": 12, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    if stream:
        choices = [event["choices"][0] for event in model.events(openai.CHAT, **params)]
        content = [
            entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]
        ]
    else:
        content = model(openai.CHAT, **params)["choices"][0]["logprobs"]["content"]
    assert len(content) == 12
    for entry in content:
        assert entry["logprob"] == pytest.approx(entry["top_logprobs"][0]["logprob"]), (
            "greedy decoding takes the most likely"
        )
        assert entry["token"] == entry["top_logprobs"][0]["token"]
        assert entry["logprob"] <= 0 and math.exp(entry["logprob"]) >= math.exp(
            entry["top_logprobs"][1]["logprob"]
        )
        assert entry["bytes"] is None or bytes(entry["bytes"]).decode() == entry["token"]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_completion(model: ServedModel, stream: bool) -> None:
    params = {"prompt": "Roses", "max_tokens": 12, "seed": 3, "logprobs": 1}
    if stream:
        parts = [event["choices"][0]["logprobs"] for event in model.events(openai.COMPLETIONS, **params)]
        logprobs = {key: [value for part in parts if part for value in part[key]] for key in parts[0]}
    else:
        logprobs = model(openai.COMPLETIONS, **params)["choices"][0]["logprobs"]
    assert [len(logprobs[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [
        12
    ] * 4
    assert logprobs["text_offset"] == [len("".join(logprobs["tokens"][:index])) for index in range(12)]
    assert all(len(top) == 1 for top in logprobs["top_logprobs"])
    assert all(
        value <= max(top.values()) for value, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"])
    )


def test_echo_returns_the_prompt(model: ServedModel) -> None:
    params = {"prompt": [model.tokens("Roses"), model.tokens("Violets")], "max_tokens": 8, "temperature": 0}
    plain = model(openai.COMPLETIONS, **params)
    echoed = model(openai.COMPLETIONS, **params, echo=True)
    assert [choice["text"] for choice in echoed["choices"]] == [
        prompt + choice["text"] for prompt, choice in zip(("Roses", "Violets"), plain["choices"])
    ]
    events = model.events(openai.COMPLETIONS, **params, echo=True)
    for index, choice in enumerate(echoed["choices"]):
        response = [event["choices"][0] for event in events]
        assert "".join(event["text"] for event in response if event["index"] == index) == choice["text"]


def test_the_model_is_listed(model: ServedModel) -> None:
    response = model(openai.MODELS, body=b"")
    assert response["object"] == "list"
    assert [(entry["id"], entry["object"]) for entry in response["data"]] == [("poet", "model")]


def test_fields_without_effect_are_accepted(model: ServedModel) -> None:
    ignored = {
        "user": "me",
        "store": False,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "repetition_penalty": 1,
    }
    ignored |= {
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "metadata": {"a": "b"},
    }
    assert model(openai.CHAT, messages=HELLO, max_tokens=2, **ignored)["usage"]["completion_tokens"] == 2
    chosen = model(openai.COMPLETIONS, prompt="a", max_tokens=2, n=2, best_of=2, suffix=None, logprobs=None)
    assert len(chosen["choices"]) == 2


def test_unknown_fields_are_named_and_template_variables_reach_the_template() -> None:
    body = {
        "messages": [
            *HELLO,
            *(
                {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": arguments}}]}
                for arguments in ("", None, "{}", {})
            ),
            {"role": "function", "name": "now", "content": "12:00", "opts": {}},
        ],
        "chat_template_kwargs": {"enable_thinking": False},
        "stop_token_ids": [],
        "min_p": 0.0,
        "zzz": 1,
        "a_field": None,
        "another": {},
    }
    request = openai.parse_request(openai.CHAT, {"body": body}, SamplingParams())
    assert request.ignored == ("another", "zzz")
    assert format_ignored(request.ignored) == "another, zzz"
    hostile = ("a\r\nset-cookie: b", "größe", *(f"f{number}" for number in range(25)))
    assert format_ignored(hostile) == ", ".join(f"f{number}" for number in range(20)) + ", 7 others"
    assert request.template_variables == {"enable_thinking": False}
    calls = [message["tool_calls"][0]["function"]["arguments"] for message in request.messages[1:5]]
    assert calls == [{}] * 4
    assert request.messages[-1] == {"role": "tool", "name": "now", "content": "12:00"}
    for wrong in ({"min_p": 0.1}, {"chat_template_kwargs": 3}, {"chat_template_kwargs": {"tokenize": True}}):
        with pytest.raises(PredictionException):
            openai.parse_request(openai.CHAT, {"body": {"messages": HELLO, **wrong}}, SamplingParams())


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("v1/images", {}, "Unknown API endpoint: v1/images"),
        (openai.CHAT, b"{", "The body is no JSON"),
        (openai.CHAT, b"\xff", "The body is no JSON"),
        (openai.CHAT, [1], "The body is a JSON object"),
        (openai.CHAT, {}, "messages is a list"),
        (openai.CHAT, {"messages": []}, "messages is a list"),
        (
            openai.CHAT,
            {"messages": ["hello"]},
            "messages[0] has a role, which is one of developer, system, user",
        ),
        (openai.CHAT, {"messages": [*HELLO, {"role": "poet", "content": ""}]}, "messages[1] has a role"),
        (openai.CHAT, {"messages": [{"role": "user"}]}, "messages[0].content is a text"),
        (
            openai.CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content has a part of type 'image_url', and this model reads texts",
        ),
        (
            openai.CHAT,
            {"messages": TOOL_CALL_MESSAGES},
            "chat template does not take these messages: no tools here",
        ),
        (
            openai.CHAT,
            {"messages": [{**TOOL_CALL_MESSAGES[1], "tool_calls": [1]}]},
            "messages[0].tool_calls are not such",
        ),
        (
            openai.CHAT,
            {"messages": HELLO, "max_tokens": 1, "max_completion_tokens": 1},
            "is the new name of max_to",
        ),
        (openai.CHAT, {"messages": HELLO, "top_logprobs": 1}, 'top_logprobs goes with "logprobs": true'),
        (
            openai.CHAT,
            {"messages": HELLO, "logprobs": True, "top_logprobs": 21},
            "top_logprobs is 21; it is a whole",
        ),
        (openai.CHAT, {"messages": HELLO, "logprobs": 1}, "logprobs is 1; it is true or false"),
        (
            openai.CHAT,
            {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]},
            "this model has no format for tool calls",
        ),
        (openai.CHAT, {"messages": HELLO, "tools": 5}, "tools is a list of objects"),
        (
            openai.CHAT,
            {"messages": HELLO, "parallel_tool_calls": 1},
            "parallel_tool_calls is 1; it is true or",
        ),
        (
            openai.CHAT,
            {"messages": HELLO, "presence_penalty": 2.1},
            "presence_penalty is 2.1; it is a number",
        ),
        (
            openai.CHAT,
            {"messages": HELLO, "frequency_penalty": "1"},
            "frequency_penalty is '1'; it is a numbe",
        ),
        (
            openai.CHAT,
            {"messages": HELLO, "repetition_penalty": 0},
            "repetition_penalty is 0; it is a number ",
        ),
        (
            openai.CHAT,
            {"messages": HELLO, "logit_bias": [5]},
            "logit_bias is an object of up to 1024 token ids",
        ),
        (openai.CHAT, {"messages": HELLO, "logit_bias": {"a": 1}}, "logit_bias has 'a': 1; it is a token id"),
        (openai.CHAT, {"messages": HELLO, "logit_bias": {"5": 101}}, "a number from -100 to 100"),
        (
            openai.CHAT,
            {"messages": HELLO, "logit_bias": {"999": 1}},
            "logit_bias: 999 is no token of this mod",
        ),
        (openai.CHAT, {"messages": HELLO, "prompt": "a"}, "'prompt' is not known here: there are chat"),
        (openai.CHAT, {"messages": HELLO, "model": 5}, "model is 5; it is a text"),
        (openai.CHAT, {"messages": HELLO, "max_tokens": 999}, "the limit is 256"),
        (
            openai.COMPLETIONS,
            {},
            "prompt is a text, a list of texts, a list of token ids, or a list of such lists",
        ),
        (openai.COMPLETIONS, {"prompt": []}, "prompt is a text, a list"),
        (openai.COMPLETIONS, {"prompt": ["a", 1]}, "prompt is a text, a list"),
        (openai.COMPLETIONS, {"prompt": [[]]}, "prompt is a text, a list"),
        (openai.COMPLETIONS, {"prompt": ["a", ""]}, "The prompt is empty"),
        (openai.COMPLETIONS, {"prompt": "a", "messages": HELLO}, "'messages' is not known here"),
        (openai.COMPLETIONS, {"prompt": "a", "n": 0}, "n is 0; it is a whole number from 1 to 128"),
        (openai.COMPLETIONS, {"prompt": ["a"] * 65, "n": 2}, "n times the prompts is at most 128"),
        (
            openai.COMPLETIONS,
            {"prompt": "a", "max_tokens": 0},
            "max_tokens is 0; it is a whole number from 1",
        ),
        (openai.COMPLETIONS, {"prompt": "a", "max_tokens": 2.5}, "max_tokens is 2.5"),
        (
            openai.COMPLETIONS,
            {"prompt": "a", "temperature": 2.1},
            "temperature is 2.1; it is a number from 0 to 2",
        ),
        (openai.COMPLETIONS, {"prompt": "a", "temperature": "1"}, "temperature is '1'"),
        (openai.COMPLETIONS, {"prompt": "a", "top_p": True}, "top_p is True"),
        (openai.COMPLETIONS, b'{"prompt": "a", "top_p": NaN}', "top_p is nan"),
        (openai.COMPLETIONS, {"prompt": "a", "seed": 2**63}, "seed is"),
        (
            openai.COMPLETIONS,
            {"prompt": "a", "logprobs": 6},
            "logprobs is 6; it is a whole number from 0 to 5",
        ),
        (
            openai.COMPLETIONS,
            {"prompt": "a", "logprobs": 1, "echo": True, "n": 2},
            "echo together with logprobs goes with n: 1",
        ),
        (
            openai.COMPLETIONS,
            {"prompt": "a", "max_tokens": 0},
            "max_tokens is 0; it is a whole number from 1",
        ),
        (openai.COMPLETIONS, {"prompt": "a", "best_of": 2}, "best_of is not served"),
        (openai.COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix is not served"),
        (openai.COMPLETIONS, {"prompt": "a", "stop": ["x"] * 17}, "stop is a text, or a list of up to 16"),
        (openai.COMPLETIONS, {"prompt": "a", "stream": "yes"}, "stream is 'yes'; it is true or false"),
        (
            openai.COMPLETIONS,
            {"prompt": "a", "stream_options": {"include_usage": True}},
            'beside "stream": true',
        ),
        (
            openai.COMPLETIONS,
            {"prompt": "a", "stream": True, "stream_options": 1},
            "stream_options is an object",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("v1") else "",
)
def test_invalid_requests_are_rejected(model: ServedModel, path: str, body: Any, message: str) -> None:
    with pytest.raises(PredictionException) as raised:
        model(path, body)
    assert raised.value.error_code == (404 if path == "v1/images" else 400)
    assert message in raised.value.message
    assert not model.chunks, "nothing was streamed before the error"


def test_a_chat_needs_a_chat_template(language_model: Path) -> None:
    model = ServedModel(language_model)
    with pytest.raises(
        PredictionException, match="has no chat template: archive a tokenizer with one, or use v1/comp"
    ):
        model(openai.CHAT, messages=HELLO)
    assert model(openai.COMPLETIONS, prompt="a", max_tokens=1)["usage"]["total_tokens"] == 2
    model.close()
