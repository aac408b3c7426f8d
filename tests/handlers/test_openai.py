"""OpenAI's API at the handler: bodies, objects and events, against a real engine."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import handlers
from handlers import openai
from handlers.context import Context
from handlers.engines.engine import Sampling
from handlers.errors import PredictionException

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]


class Served:
    """The handler on a folder, on a loop of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loop = asyncio.new_event_loop()
        self.entry = handlers.load("llm", folder, {"model": {}})
        self.pieces: list[Any] = []
        self.loop.run_until_complete(self.entry.initialize(self.context("")))

    def context(self, path: str) -> Context:
        engine = {"num_blocks": 32, "page_size": 16, "max_batch_tokens": 64}
        context = Context("poet", str(self.folder), {"model": {}}, model_yaml_config={"engine": engine})
        context.begin(["id"], [{"url_path": path}], [{}], lambda idx, piece: self.pieces.append(piece))
        return context

    def __call__(self, path: str, body: Any = None, **words: Any) -> Any:
        """The answer; what was streamed before it is in ``pieces``, what it is in ``content_type``."""
        self.pieces.clear()
        context = self.context(path)
        rows = self.entry([{"body": words if body is None else body}], context)
        [answer] = self.loop.run_until_complete(asyncio.wait_for(rows, 60))
        self.content_type = context.get_response_content_type(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def events(self, path: str, **words: Any) -> list[dict[str, Any]]:
        """The objects of a stream's events, up to its end."""
        last = self(path, stream=True, **words)
        assert self.content_type == "text/event-stream"
        said = b"".join([*self.pieces, last]).decode().split("\n\n")
        assert said[-2:] == ["data: [DONE]", ""]
        assert all(event.startswith("data: ") for event in said[:-1])
        return [json.loads(event.removeprefix("data: ")) for event in said[:-2]]

    def tokens(self, text: str) -> list[int]:
        return self.entry.instance.tokenizer.encode(text)

    def close(self) -> None:
        self.loop.run_until_complete(self.entry.instance.engine.shutdown())
        self.loop.close()


@pytest.fixture(scope="module")
def model(language_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(language_model, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    settings = folder / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token_id": 300}))  # it never ends early
    made = Served(folder)
    yield made
    assert made.entry.instance.engine.use == 0, "every place is free again"
    made.close()
    torch.set_num_threads(threads)


def test_a_completion(model: Served) -> None:
    own = model("", prompt="Roses are red", max_new_tokens=20)
    said = model(openai.COMPLETIONS, model="m:2", prompt="Roses are red", max_tokens=20, temperature=0)
    assert said["id"].startswith("cmpl-")
    assert isinstance(said.pop("created"), int)
    assert {**said, "id": ""} == {
        "id": "",
        "object": "text_completion",
        "model": "m:2",
        "choices": [{"index": 0, "text": own["text"], "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 13, "completion_tokens": 20, "total_tokens": 33},
    }


def test_a_chat(model: Served) -> None:
    messages = [
        {"role": "developer", "content": "Rhyme."},
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
    ]
    prompt = "[system] Rhyme.\n[user] Hello\n[assistant] "
    own = model(openai.COMPLETIONS, prompt=prompt, max_tokens=20, temperature=0)
    said = model(openai.CHAT, messages=messages, max_completion_tokens=20, temperature=0)
    assert said["id"].startswith("chatcmpl-")
    assert (said["object"], said["model"], said["usage"]) == ("chat.completion", "poet", own["usage"])
    message = {"role": "assistant", "content": own["choices"][0]["text"], "refusal": None}
    assert said["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
    assert model(openai.CHAT, json.dumps({"messages": messages, "max_tokens": 20, "temperature": 0}).encode())[
        "choices"
    ] == said["choices"], "as bytes, and by the old word"


def test_prompts(model: Served) -> None:
    def texts(prompt: Any) -> list[str]:
        said = model(openai.COMPLETIONS, prompt=prompt, max_tokens=8, temperature=0)
        assert [choice["index"] for choice in said["choices"]] == list(range(len(said["choices"])))
        assert said["usage"]["prompt_tokens"] == 5 + 7 * (len(said["choices"]) - 1)
        assert said["usage"]["completion_tokens"] == 8 * len(said["choices"])
        return [choice["text"] for choice in said["choices"]]

    both = texts(["Roses", "Violets"])
    assert texts("Roses") == texts(model.tokens("Roses")) == both[:1]
    assert texts([model.tokens("Roses"), model.tokens("Violets")]) == both
    assert both[0] != both[1]


def test_choices_are_drawn_apart_and_by_their_seed(model: Served) -> None:
    def texts(**words: Any) -> list[str]:
        said = model(openai.COMPLETIONS, prompt=["Roses", "Violets"], max_tokens=20, **words)
        return [choice["text"] for choice in said["choices"]]

    drawn = texts(n=3, seed=5)
    assert len(set(drawn)) == 6
    assert drawn == texts(n=3, seed=5)
    assert drawn[::3] == texts(seed=5), "the first of each prompt is what it would be alone"
    assert drawn != texts(n=3, seed=6)
    assert len(set(texts(n=2, temperature=0))) == 2, "greedily the choices of one prompt are one text"


@pytest.mark.parametrize("path", [openai.COMPLETIONS, openai.CHAT])
def test_a_stream_says_what_the_whole_does(model: Served, path: str) -> None:
    asked: dict[str, Any] = {"messages": HELLO} if path == openai.CHAT else {"prompt": ["Hello", "you"]}
    asked |= {"max_tokens": 40, "temperature": 0, "n": 2}
    whole = model(path, **asked)
    events = model.events(path, **asked, stream_options={"include_usage": True})
    assert {event["id"] for event in events} == {events[0]["id"]}
    *told, last = events
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert all(event["usage"] is None and len(event["choices"]) == 1 for event in told)
    assert {event["object"] for event in events} == {
        "chat.completion.chunk" if path == openai.CHAT else "text_completion"
    }
    for choice in whole["choices"]:
        own = [event["choices"][0] for event in told if event["choices"][0]["index"] == choice["index"]]
        assert [one["finish_reason"] for one in own] == [None] * (len(own) - 1) + ["length"]
        if path == openai.CHAT:
            assert [one["delta"].get("role") for one in own][:2] == ["assistant", None]
            text, expected = "".join(one["delta"].get("content", "") for one in own), choice["message"]["content"]
        else:
            text, expected = "".join(one["text"] for one in own), choice["text"]
        assert text == expected
    assert len(model.pieces) > len(whole["choices"]), "it came in pieces"
    assert all("usage" not in event for event in model.events(path, **asked))


def test_stop(model: Served) -> None:
    asked = {"prompt": "Roses are red", "max_tokens": 40, "temperature": 0}
    whole = model(openai.COMPLETIONS, **asked)["choices"][0]["text"]
    stop = whole[20:23]
    [choice] = model(openai.COMPLETIONS, **asked, stop=["never said", stop])["choices"]
    assert (choice["text"], choice["finish_reason"]) == (whole[: whole.index(stop)], "stop")
    events = model.events(openai.COMPLETIONS, **asked, stop=stop)
    assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_chat(model: Served, stream: bool) -> None:
    asked = {"messages": HELLO, "max_tokens": 12, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    if stream:
        choices = [event["choices"][0] for event in model.events(openai.CHAT, **asked)]
        content = [one for choice in choices if choice["logprobs"] for one in choice["logprobs"]["content"]]
    else:
        content = model(openai.CHAT, **asked)["choices"][0]["logprobs"]["content"]
    assert len(content) == 12
    for one in content:
        assert one["logprob"] == pytest.approx(one["top_logprobs"][0]["logprob"]), "greedily the likeliest"
        assert one["token"] == one["top_logprobs"][0]["token"]
        assert one["logprob"] <= 0 and math.exp(one["logprob"]) >= math.exp(one["top_logprobs"][1]["logprob"])
        assert one["bytes"] is None or bytes(one["bytes"]).decode() == one["token"]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_completion(model: Served, stream: bool) -> None:
    asked = {"prompt": "Roses", "max_tokens": 12, "seed": 3, "logprobs": 1}
    if stream:
        parts = [event["choices"][0]["logprobs"] for event in model.events(openai.COMPLETIONS, **asked)]
        told = {key: [one for part in parts if part for one in part[key]] for key in parts[0]}
    else:
        told = model(openai.COMPLETIONS, **asked)["choices"][0]["logprobs"]
    assert [len(told[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [12] * 4
    assert told["text_offset"] == [len("".join(told["tokens"][:place])) for place in range(12)]
    assert all(len(likeliest) == 1 for likeliest in told["top_logprobs"])
    assert all(chance <= max(one.values()) for chance, one in zip(told["token_logprobs"], told["top_logprobs"]))


def test_echo(model: Served) -> None:
    asked = {"prompt": [model.tokens("Roses"), model.tokens("Violets")], "max_tokens": 8, "temperature": 0}
    plain = model(openai.COMPLETIONS, **asked)
    echoed = model(openai.COMPLETIONS, **asked, echo=True)
    assert [choice["text"] for choice in echoed["choices"]] == [
        prompt + choice["text"] for prompt, choice in zip(("Roses", "Violets"), plain["choices"])
    ]
    events = model.events(openai.COMPLETIONS, **asked, echo=True)
    for index, choice in enumerate(echoed["choices"]):
        said = [event["choices"][0] for event in events]
        assert "".join(one["text"] for one in said if one["index"] == index) == choice["text"]


def test_models(model: Served) -> None:
    said = model(openai.MODELS, body=b"")
    assert said["object"] == "list"
    assert [(one["id"], one["object"]) for one in said["data"]] == [("poet", "model")]


def test_what_changes_nothing_is_taken(model: Served) -> None:
    idle = {"user": "me", "store": False, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": None}
    idle |= {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "metadata": {"a": "b"}}
    assert model(openai.CHAT, messages=HELLO, max_tokens=2, **idle)["usage"]["completion_tokens"] == 2
    chosen = model(openai.COMPLETIONS, prompt="a", max_tokens=2, n=2, best_of=2, suffix=None, logprobs=None)
    assert len(chosen["choices"]) == 2


CALLED = [
    *HELLO,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "2"},
]


@pytest.mark.parametrize(
    ("path", "body", "complaint"),
    [
        ("v1/images", {}, "Unknown API endpoint: v1/images"),
        (openai.CHAT, b"{", "The body is no JSON"),
        (openai.CHAT, b"\xff", "The body is no JSON"),
        (openai.CHAT, [1], "The body is a JSON object"),
        (openai.CHAT, {}, "messages is a list"),
        (openai.CHAT, {"messages": []}, "messages is a list"),
        (openai.CHAT, {"messages": ["hello"]}, "messages[0] has a role, which is one of developer, system, user"),
        (openai.CHAT, {"messages": [*HELLO, {"role": "poet", "content": ""}]}, "messages[1] has a role"),
        (openai.CHAT, {"messages": [{"role": "user"}]}, "messages[0].content is a text"),
        (
            openai.CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content has a part of type 'image_url', and this model reads texts",
        ),
        (openai.CHAT, {"messages": CALLED}, "chat template does not take these messages: no tools here"),
        (openai.CHAT, {"messages": [{**CALLED[1], "tool_calls": [1]}]}, "messages[0].tool_calls are not such"),
        (openai.CHAT, {"messages": HELLO, "max_tokens": 1, "max_completion_tokens": 1}, "is the new name of max_to"),
        (openai.CHAT, {"messages": HELLO, "top_logprobs": 1}, 'top_logprobs goes with "logprobs": true'),
        (openai.CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs is 21; it is a whole"),
        (openai.CHAT, {"messages": HELLO, "logprobs": 1}, "logprobs is 1; it is true or false"),
        (openai.CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, "nothing says how a call stands in this m"),
        (openai.CHAT, {"messages": HELLO, "tools": 5}, "tools is a list of objects"),
        (openai.CHAT, {"messages": HELLO, "tool_choice": "required"}, 'tool_choice is "auto" or "none"'),
        (openai.CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format is not served"),
        (openai.CHAT, {"messages": HELLO, "prompt": "a"}, "'prompt' is not known here: there are logprobs"),
        (openai.CHAT, {"messages": HELLO, "model": 5}, "model is 5; it is a text"),
        (openai.CHAT, {"messages": HELLO, "max_tokens": 999}, "there is room for 256"),
        (openai.COMPLETIONS, {}, "prompt is a text, a list of texts, a list of token ids, or a list of such lists"),
        (openai.COMPLETIONS, {"prompt": []}, "prompt is a text, a list"),
        (openai.COMPLETIONS, {"prompt": ["a", 1]}, "prompt is a text, a list"),
        (openai.COMPLETIONS, {"prompt": [[]]}, "prompt is a text, a list"),
        (openai.COMPLETIONS, {"prompt": ["a", ""]}, "The prompt is empty"),
        (openai.COMPLETIONS, {"prompt": "a", "messages": HELLO}, "'messages' is not known here"),
        (openai.COMPLETIONS, {"prompt": "a", "n": 0}, "n is 0; it is a whole number from 1 to 128"),
        (openai.COMPLETIONS, {"prompt": ["a"] * 65, "n": 2}, "n times the prompts is at most 128"),
        (openai.COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens is 0; it is a whole number from 1"),
        (openai.COMPLETIONS, {"prompt": "a", "max_tokens": 2.5}, "max_tokens is 2.5"),
        (openai.COMPLETIONS, {"prompt": "a", "temperature": 2.1}, "temperature is 2.1; it is a number from 0 to 2"),
        (openai.COMPLETIONS, {"prompt": "a", "temperature": "1"}, "temperature is '1'"),
        (openai.COMPLETIONS, {"prompt": "a", "top_p": True}, "top_p is True"),
        (openai.COMPLETIONS, b'{"prompt": "a", "top_p": NaN}', "top_p is nan"),
        (openai.COMPLETIONS, {"prompt": "a", "seed": 2**63}, "seed is"),
        (openai.COMPLETIONS, {"prompt": "a", "logprobs": 6}, "logprobs is 6; it is a whole number from 0 to 5"),
        (openai.COMPLETIONS, {"prompt": "a", "logprobs": 1, "echo": True}, "echo together with logprobs"),
        (openai.COMPLETIONS, {"prompt": "a", "best_of": 2}, "best_of is not served"),
        (openai.COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix is not served"),
        (openai.COMPLETIONS, {"prompt": "a", "stop": ["x"] * 17}, "stop is a text, or a list of up to 16"),
        (openai.COMPLETIONS, {"prompt": "a", "stream": "yes"}, "stream is 'yes'; it is true or false"),
        (openai.COMPLETIONS, {"prompt": "a", "stream_options": {"include_usage": True}}, 'beside "stream": true'),
        (openai.COMPLETIONS, {"prompt": "a", "stream": True, "stream_options": 1}, "stream_options is an object"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("v1") else "",
)
def test_what_cannot_be_answered(model: Served, path: str, body: Any, complaint: str) -> None:
    with pytest.raises(PredictionException) as refused:
        model(path, body)
    assert refused.value.error_code == (404 if path == "v1/images" else 400)
    assert complaint in refused.value.message
    assert not model.pieces, "and nothing was streamed before"


def test_tool_calls_reach_the_chat_template_as_objects() -> None:
    question = openai.read(openai.CHAT, {"body": {"messages": CALLED}}, Sampling())
    [call] = question.messages[1]["tool_calls"]
    assert call == {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert question.messages[2] == {"role": "tool", "tool_call_id": "1", "content": "2"}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}


def reciter(folder: Path, *words: str) -> Served:
    """A Llama that says these words after ``[assistant]``, each once, because each has its own one in its weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    known = ["[user]", "Hello", "[assistant]", *words, "<end>", "<unknown>"]
    tokens = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="<unknown>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<end>", unk_token="<unknown>")
    tokenizer.chat_template = "{% if tools %}{{ tools[0].function.name }} {% endif %}[user] Hello [assistant]"
    call = {"open": "<call>", "close": "</call>", "content": "json", "repeats": True}
    call["transform"] = {"type": "function", "function": "{content}"}
    fields = {"content": {}, "tool_calls": call}
    tokenizer.response_template = {"start_anchor": "[assistant]", "fields": fields}
    tokenizer.save_pretrained(folder)
    size = 16
    assert len(known) <= size
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size, hidden_size=size, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=256, bos_token_id=None, eos_token_id=known.index("<end>"),
        )  # fmt: skip
    )
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.copy_(10 * torch.eye(size).roll(1, dims=0))  # each word's successor
    model.save_pretrained(folder)
    return Served(folder)


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools(tmp_path: Path, stream: bool) -> None:
    model = reciter(tmp_path, "Sure.", "<call>", '{"name":', '"f",', '"arguments":', '{"a":', '"7"}}', "</call>")
    asked = {"messages": HELLO, "temperature": 0, "tools": [TOOL]}
    if stream:
        choices = [event["choices"][0] for event in model.events(openai.CHAT, **asked)]
        deltas = [choice["delta"] for choice in choices]
        assert [delta.get("content") for delta in deltas] == ["Sure.", None, None]
        [call] = deltas[1]["tool_calls"]
        assert call.pop("index") == 0
        reason = choices[-1]["finish_reason"]
    else:
        said = model(openai.CHAT, **asked)
        [choice] = said["choices"]
        assert choice["message"]["content"].strip() == "Sure."
        [call] = choice["message"]["tool_calls"]
        reason = choice["finish_reason"]
        assert said["usage"]["prompt_tokens"] == 4, "the template was shown the tools"
        text = model(openai.CHAT, **{**asked, "tool_choice": "none"})["choices"][0]["message"]
        assert text["content"].startswith("Sure. <call>") and "tool_calls" not in text
        short = model(openai.CHAT, **asked, max_tokens=5)["choices"][0]
        assert (short["finish_reason"], short["message"].get("tool_calls")) == ("length", None)
    assert reason == "tool_calls"
    assert call.pop("id").startswith("call_")
    assert call["type"] == "function" and call["function"]["name"] == "f"
    assert json.loads(call["function"]["arguments"]) == {"a": 7}, "as the tool's own schema has it"
    model.close()


def test_a_tokenizer_without_a_chat_template(language_model: Path) -> None:
    model = Served(language_model)
    with pytest.raises(PredictionException, match="has no chat template: archive a tokenizer with one, or ask v1/comp"):
        model(openai.CHAT, messages=HELLO)
    assert model(openai.COMPLETIONS, prompt="a", max_tokens=1)["usage"]["total_tokens"] == 2
    model.close()
