"""Tests of structured output: JSON Schemas, regular expressions and choices, with a real engine."""

from __future__ import annotations

import json
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from handlers.engines import openai, structured_output
from handlers.engines.engine import SamplingParams
from handlers.errors import PredictionException
from tests.support.served_llm import HELLO, ServedModel, serve_copy

pytestmark = pytest.mark.integration

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "age": {"type": "integer", "maximum": 99, "minimum": 10},
    },
    "required": ["city", "age"],
    "additionalProperties": False,
}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
TOOLS = [
    {"type": "function", "function": {"name": "find", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]
BOUNDED_JSON = {"type": "object", "additionalProperties": {"enum": [1]}, "maxProperties": 1}


@pytest.fixture(scope="module")
def model(
    one_thread: None, language_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedModel]:
    template = "{% if tools %}tools {% endif %}Hello"
    with serve_copy(language_model, tmp_path_factory.mktemp("structured"), template) as model:
        yield model


def content(response: dict[str, Any]) -> list[str]:
    assert {choice["finish_reason"] for choice in response["choices"]} == {"stop"}
    return [choice["message"]["content"] for choice in response["choices"]]


def test_a_json_schema_constrains_sampled_choices(model: ServedModel) -> None:
    params = {"messages": HELLO, "max_tokens": 200, "response_format": RESPONSE_FORMAT, "n": 6, "seed": 3}
    texts = content(model(openai.CHAT, **params))
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) > 1
    assert texts == content(model(openai.CHAT, **params)), "the seed yields the same texts again"
    streamed = [""] * 6
    for event in model.events(openai.CHAT, **params):
        [choice] = event["choices"]
        streamed[choice["index"]] += choice["delta"].get("content", "")
    assert streamed == texts


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[A-Z]{3}-[0-9]{2}"}, "[A-Z]{3}-[0-9]{2}"),
        ({"structured_outputs": {"regex": "(yes|no)!"}}, "(yes|no)!"),
        ({"guided_choice": ['say "yes"', "no\n", "né"]}, 'say "yes"|no\n|né'),
        ({"structured_outputs": {"choice": ["one"]}}, "one"),
        ({"structured_outputs": {"json": BOUNDED_JSON}}, r"(?s)\s*\{.*\}\s*"),
        ({"guided_json": json.dumps(BOUNDED_JSON)}, r"(?s)\s*\{.*\}\s*"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.slow
def test_formats_constrain_greedy_and_sampled_texts(
    model: ServedModel, fields: dict[str, Any], pattern: str, temperature: float
) -> None:
    params = {"prompt": "Hello", "max_tokens": 220, "temperature": temperature, "seed": 1, **fields}
    if "json" in str(fields):
        params["logit_bias"] = {str(byte): -100 for byte in model.tokens("abcdef\\")}
        params["max_tokens"] = 245
    [choice] = model(openai.COMPLETIONS, **params)["choices"]
    if choice["finish_reason"] == "stop":
        assert re.fullmatch(pattern, choice["text"])
    else:
        assert "json" in str(fields), "a key may be longer than the limit of tokens"


def test_a_batch_mixes_formats_and_free_texts(model: ServedModel) -> None:
    free = model("", prompt="Hello", max_new_tokens=20)["text"]
    rows = [
        {"prompt": "Hello", "max_new_tokens": 20},
        {"prompt": "Hello", "max_new_tokens": 20, "guided_regex": "[0-9]{5}"},
        {"prompt": "Hello", "max_new_tokens": 20, "guided_choice": ["left", "right"], "temperature": 1},
    ]
    context = model.context("")
    context.begin(list("abc"), [{}] * 3, [{}] * 3)
    results = model.loop.run_until_complete(model.entry([{"body": row} for row in rows], context))
    assert results[0]["text"] == free, "the others do not constrain this text"
    assert re.fullmatch("[0-9]{5}", results[1]["text"]) and results[2]["text"] in ("left", "right")


def test_preempted_texts_keep_their_format(model: ServedModel) -> None:
    """Six requests of 150 tokens do not fit into the cache of 512 at once."""
    fields = {"max_new_tokens": 200, "guided_regex": "([a-z][0-9]){75}"}
    context = model.context("")
    context.begin(list("abcdef"), [{}] * 6, [{}] * 6)
    rows = [{"body": {"prompt": f"{number} words", **fields}} for number in range(6)]
    results = model.loop.run_until_complete(model.entry(rows, context))
    assert {result["finish_reason"] for result in results} == {"stop"}
    assert all(re.fullmatch("([a-z][0-9]){75}", result["text"]) for result in results)


def test_stop_strings_end_a_constrained_text(model: ServedModel) -> None:
    params = {"prompt": "Hello", "max_tokens": 50, "temperature": 0, "guided_choice": ["one two three"]}
    [choice] = model(openai.COMPLETIONS, **params, stop=" three")["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("one two", "stop")
    [choice] = model(openai.COMPLETIONS, **{**params, "max_tokens": 5})["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("one t", "length")


def test_logprobs_are_those_of_the_model(model: ServedModel) -> None:
    params = {"prompt": "Hello", "max_tokens": 50, "temperature": 0, "logprobs": 1}
    [free] = model(openai.COMPLETIONS, **{**params, "max_tokens": 1})["choices"]
    [choice] = model(openai.COMPLETIONS, **params, guided_choice=["Q"])["choices"]
    assert choice["logprobs"]["tokens"] == ["Q"]
    assert choice["logprobs"]["top_logprobs"][0] == free["logprobs"]["top_logprobs"][0]
    assert choice["logprobs"]["token_logprobs"][0] < free["logprobs"]["token_logprobs"][0]


def test_a_named_tool_is_called(model: ServedModel) -> None:
    choice = {"type": "function", "function": {"name": "find"}}
    params = {"messages": HELLO, "max_tokens": 200, "seed": 2, "tools": TOOLS, "tool_choice": choice}
    [made] = model(openai.CHAT, **params)["choices"]
    [call] = made["message"]["tool_calls"]
    assert (made["message"]["content"], made["finish_reason"]) == (None, "stop")
    assert call["function"]["name"] == "find" and call["id"].startswith("call_")
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
    deltas = [event["choices"][0]["delta"] for event in model.events(openai.CHAT, **params)]
    [streamed] = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert streamed["function"] == call["function"]


def test_required_calls_match_the_schemas_of_the_tools(model: ServedModel) -> None:
    tools = [TOOLS[0], {"type": "function", "function": {"name": "halt", "parameters": {
        "properties": {"when": {"$ref": "#/$defs/time"}}, "required": ["when"], "additionalProperties": False,
        "$defs": {"time": {"enum": ["now"]}},
    }}}]  # fmt: skip
    params = {
        "messages": HELLO,
        "max_tokens": 240,
        "tools": tools,
        "tool_choice": "required",
        "n": 8,
        "seed": 1,
    }
    names = set()
    for choice in model(openai.CHAT, **params, parallel_tool_calls=False)["choices"]:
        if choice["finish_reason"] == "length":
            continue
        [call] = choice["message"]["tool_calls"]
        arguments, name = json.loads(call["function"]["arguments"]), call["function"]["name"]
        assert choice["finish_reason"] == "tool_calls"
        if name == "find":
            jsonschema.validate(arguments, SCHEMA)
        else:
            assert arguments == {"when": "now"}
        names.add(name)
    assert names == {"find", "halt"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": {"type": "xml"}}, 'response_format is {"type": "text"}, {"type": "json_ob'),
        ({"response_format": "json"}, "response_format is {"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema is a JSON Schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "text"}}}},
            "response_format.json_schema.schema: Invalid type: text",
        ),
        ({"guided_json": {"not": {"type": "object"}}}, 'guided_json: Unimplemented keys: ["not"]'),
        ({"guided_json": "{"}, "guided_json is no JSON"),
        ({"guided_json": {"enum": ["x" * 120_000]}}, "guided_json: it has 12"),
        ({"guided_regex": "(a"}, "guided_regex: "),
        ({"guided_regex": 5}, "guided_regex is 5; it is a regular expression"),
        ({"guided_regex": "(?=a)b"}, "look-around"),
        ({"guided_choice": []}, "guided_choice is []; it is a list of texts"),
        ({"guided_choice": ["a", ""]}, "it is a list of texts, none of them empty"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs is an object with one"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs is an object with one of json, json_obj"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object is False; it is"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex and guided_choice are alternatives"),
        ({"response_format": RESPONSE_FORMAT, "tools": TOOLS}, 'is not served: set "tool_choice": "none"'),
        ({"tools": [{"type": "function"}]}, 'tools[0] is {"type": "function", "function"'),
        ({"tools": TOOLS, "tool_choice": "always"}, 'tool_choice is "none", "auto", "required"'),
        ({"tool_choice": "required"}, 'tool_choice is "none", "auto", "required" (with tools)'),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "none"}}}, "the function of one of the tools"),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"type": "x"}}}], "tool_choice": "required"},
            "tools: Invalid type: x",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)  # fmt: skip
def test_invalid_formats_are_rejected(model: ServedModel, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PredictionException) as raised:
        model(openai.CHAT, messages=HELLO, stream=True, **fields)
    assert raised.value.error_code == 400
    assert message in raised.value.message
    assert not model.chunks, "nothing was streamed before the error"


def test_a_text_that_exceeds_a_limit_is_rejected(model: ServedModel) -> None:
    free = {"prompt": "Hello", "max_tokens": 60, "temperature": 0}
    expected = model(openai.COMPLETIONS, **free)
    model.entry.instance.engine._grammars.limits = {"max_lexer_states": 20}
    with pytest.raises(PredictionException, match="guided_regex: lexer error: too many states") as raised:
        model(openai.COMPLETIONS, **free, guided_regex="(a|b)*a(a|b){200}")
    model.entry.instance.engine._grammars.limits = {}
    assert raised.value.error_code == 400
    assert model(openai.COMPLETIONS, **free)["choices"] == expected["choices"], "the loop continues"


def test_a_missing_library_is_named_with_its_extra(
    language_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    model = ServedModel(language_model)
    with pytest.raises(PredictionException, match=r"guided_regex: .*pip install 'torchrelay\[llm\]'"):
        model("", prompt="Hello", guided_regex="a")
    assert model("", prompt="Hello", max_new_tokens=1)["usage"]["completion_tokens"] == 1
    model.close()


def test_a_model_without_an_end_token_is_rejected(language_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(language_model, folder)
    settings = folder / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token_id": 300}))
    model = ServedModel(folder)
    with pytest.raises(PredictionException, match="guided_regex: this model has no end token"):
        model("", prompt="Hello", guided_regex="a")
    model.close()


def test_definitions_of_the_same_name_must_be_equal() -> None:
    tools = [
        {"function": {"name": name, "parameters": {"$defs": {"x": {"const": name}}}}} for name in ("a", "b")
    ]
    body = {"messages": HELLO, "tools": tools, "tool_choice": "required"}
    with pytest.raises(PredictionException, match=r"tools: \$defs of b has another 'x'"):
        openai.parse_request(openai.CHAT, {"body": body}, SamplingParams())


def test_the_loop_compiles_no_format_that_the_cache_has_dropped(
    language_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three requests do not fit into the cache of 512 tokens at once, so some of them are preempted."""
    monkeypatch.setattr(structured_output, "_MAX_CACHED_GRAMMARS", 0)
    compile_grammar, threads = structured_output.GrammarCompiler._compile, []

    def record(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return compile_grammar(*args)

    monkeypatch.setattr(structured_output.GrammarCompiler, "_compile", record)
    model = ServedModel(language_model)
    loop = model.entry.instance.engine._manager._generation_thread
    response = model(openai.COMPLETIONS, prompt="Hello", n=3, max_tokens=230, guided_regex="[ab]{220}")
    assert all(re.fullmatch("[ab]{220}", choice["text"]) for choice in response["choices"])
    assert loop is not None and loop not in threads and len(threads) == 3
    assert not model.entry.instance.engine._sampler._matchers
    model.close()
