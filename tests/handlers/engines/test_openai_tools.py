"""Tests of tool calls in OpenAI's chat completions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from handlers.engines import openai
from handlers.engines.engine import SamplingParams
from handlers.errors import PredictionException
from tests.support.served_llm import HELLO, TOOL_CALL_MESSAGES, ServedModel

pytestmark = pytest.mark.integration


def test_tool_calls_reach_the_chat_template_as_objects() -> None:
    request = openai.parse_request(openai.CHAT, {"body": {"messages": TOOL_CALL_MESSAGES}}, SamplingParams())
    [call] = request.messages[1]["tool_calls"]
    assert call == {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert request.messages[2] == {"role": "tool", "tool_call_id": "1", "content": "2"}


TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}},
}


def make_reciting_model(folder: Path, *words: str) -> ServedModel:
    """Return a Llama that generates ``words`` after ``[assistant]``: its weights map each to the next."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = ["[user]", "Hello", "[assistant]", *words, "<end>", "<unknown>"]
    tokens = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unknown>")
    )
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<end>", unk_token="<unknown>")
    tokenizer.chat_template = "{% if tools %}{{ tools[0].function.name }} {% endif %}[user] Hello [assistant]"
    call = {"open": "<call>", "close": "</call>", "content": "json", "repeats": True}
    call["transform"] = {"type": "function", "function": "{content}"}
    fields = {"content": {}, "tool_calls": call}
    tokenizer.response_template = {"start_anchor": "[assistant]", "fields": fields}
    tokenizer.save_pretrained(folder)
    size = 16
    assert len(vocabulary) <= size
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size,
            hidden_size=size,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=256,
            bos_token_id=None,
            eos_token_id=vocabulary.index("<end>"),
        )
    )
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.copy_(10 * torch.eye(size).roll(1, dims=0))  # each word's successor
    model.save_pretrained(folder)
    return ServedModel(folder)


def test_hermes_calls_need_no_response_template(tmp_path: Path) -> None:
    call = ("<tool_call>", '{"name":', '"f",', '"arguments":', '{"a":', '"7"}}', "</tool_call>")
    model = make_reciting_model(tmp_path, "Sure.", *call)
    tokenizer = model.entry.instance.tokenizer
    tokenizer.response_template = None
    tokenizer.chat_template += "{# <tool_call> #}"
    [choice] = model(openai.CHAT, messages=HELLO, temperature=0, tools=[TOOL])["choices"]
    [made] = choice["message"]["tool_calls"]
    assert (choice["message"]["content"].strip(), choice["finish_reason"]) == ("Sure.", "tool_calls")
    assert made["function"]["name"] == "f" and json.loads(made["function"]["arguments"]) == {"a": 7}
    tokenizer.chat_template += "{# <function= #}"
    with pytest.raises(PredictionException, match="this model has no format for tool calls"):
        model(openai.CHAT, messages=HELLO, tools=[TOOL])
    model.close()


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_are_returned(tmp_path: Path, stream: bool) -> None:
    model = make_reciting_model(
        tmp_path, "Sure.", "<call>", '{"name":', '"f",', '"arguments":', '{"a":', '"7"}}', "</call>"
    )
    params = {"messages": HELLO, "temperature": 0, "tools": [TOOL]}
    if stream:
        choices = [event["choices"][0] for event in model.events(openai.CHAT, **params)]
        deltas = [choice["delta"] for choice in choices]
        assert [delta.get("content") for delta in deltas] == ["Sure.", None, None]
        [call] = deltas[1]["tool_calls"]
        assert call.pop("index") == 0
        reason = choices[-1]["finish_reason"]
    else:
        response = model(openai.CHAT, **params)
        [choice] = response["choices"]
        assert choice["message"]["content"].strip() == "Sure."
        [call] = choice["message"]["tool_calls"]
        reason = choice["finish_reason"]
        assert response["usage"]["prompt_tokens"] == 4, "the template received the tools"
        text = model(openai.CHAT, **{**params, "tool_choice": "none"})["choices"][0]["message"]
        assert text["content"].startswith("Sure. <call>") and "tool_calls" not in text
        short = model(openai.CHAT, **params, max_tokens=5)["choices"][0]
        assert (short["finish_reason"], short["message"].get("tool_calls")) == ("length", None)
    assert reason == "tool_calls"
    assert call.pop("id").startswith("call_")
    assert call["type"] == "function" and call["function"]["name"] == "f"
    assert json.loads(call["function"]["arguments"]) == {"a": 7}, "as in the tool's schema"
    model.close()
