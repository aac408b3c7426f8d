"""Tests of sampling, stop strings and streams of ``causal_lm``: a row's values are those of ``llm``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from handlers.builtin.causal_lm import CausalLM
from handlers.builtin.llm import LanguageModel
from handlers.context import Context
from handlers.errors import PredictionException

pytestmark = pytest.mark.integration

ROWS: list[dict[str, Any]] = [
    {"prompt": "Once", "max_new_tokens": 20},
    {"prompt": "Once upon a time", "max_new_tokens": 24, "temperature": 0.9, "seed": 3},
    {"prompt": "a", "max_new_tokens": 8, "top_k": 5, "seed": 2**63 - 1},
    {"prompt": "b c", "max_new_tokens": 16, "top_p": 0.6, "seed": 7, "frequency_penalty": 1.5},
    {"prompt": "aaaa", "max_new_tokens": 12, "repetition_penalty": 1.8, "logit_bias": {"98": 4}},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.hf_folders import save_byte_llama

    return save_byte_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalLM:
    model = CausalLM()
    model.initialize(Context("m", str(folder), {}))
    return model


def handle(model: CausalLM, *bodies: Any) -> tuple[list[Any], dict[int, list[str]], Context]:
    """Return the values of a batch, the chunks of its streams by their rows, and the context."""
    context = Context("m", "/m", {})
    chunks: dict[int, list[str]] = {}
    count = len(bodies)
    context.begin(
        [f"{i}" for i in range(count)],
        [{}] * count,
        [{}] * count,
        lambda index, text: chunks.setdefault(index, []).append(text),
    )
    return model.handle([{"body": body} for body in bodies], context), chunks, context


def generate_with_llm(folder: Path, bodies: list[dict[str, Any]]) -> list[Any]:
    async def generate() -> list[Any]:
        llm = LanguageModel()
        context = Context("m", str(folder), {})
        await llm.initialize(context)
        context.begin([f"{i}" for i in range(len(bodies))], [{}] * len(bodies), [{}] * len(bodies))
        values = await llm.handle([{"body": body} for body in bodies], context)
        assert llm.engine is not None
        await llm.engine.shutdown()
        return values

    return asyncio.run(generate())


def test_rows_of_a_batch_sample_as_with_llm(model: CausalLM, folder: Path) -> None:
    expected = [value["text"] for value in generate_with_llm(folder, ROWS)]
    together, _, _ = handle(model, *ROWS)
    assert [value["text"] for value in together] == expected
    assert [handle(model, row)[0][0] for row in ROWS] == together, "the same whatever else is in the batch"
    greedy = [{key: row[key] for key in ("prompt", "max_new_tokens")} for row in ROWS]
    assert all(a != b for a, b in zip(handle(model, *greedy)[0][1:], together[1:])), "each parameter acts"


@pytest.mark.nightly
def test_an_unseeded_row_differs_each_time(model: CausalLM) -> None:
    row = {"prompt": "Once", "max_new_tokens": 30, "temperature": 1.0}
    first, second = handle(model, row, row)[0]
    assert first["tokens"] != second["tokens"]


def test_a_stop_string_ends_its_row_alone(model: CausalLM) -> None:
    row = {"prompt": "Once", "max_new_tokens": 30}
    [whole] = handle(model, row)[0]
    stop = whole["text"][10:12]
    stopped, other = handle(model, {**row, "stop": [stop]}, row)[0]
    assert stopped["text"] == whole["text"][: whole["text"].index(stop)]
    assert len(stopped["tokens"]) < 30
    assert other == whole


def test_chunks_of_a_stream_make_the_text(model: CausalLM) -> None:
    [whole, sampled] = handle(model, *ROWS[:2])[0]
    rows = [{**ROWS[0], "stream": True}, ROWS[0], {**ROWS[1], "stream": True}]
    values, chunks, context = handle(model, *rows)
    assert list(chunks) == [0, 2] and all(len(texts) > 1 for texts in chunks.values())
    assert "".join(chunks[0]) + values[0] == whole["text"]
    assert "".join(chunks[2]) + values[2] == sampled["text"]
    assert values[1] == whole
    assert context.get_response_content_type(2) == "text/plain; charset=utf-8"
    assert context.get_response_content_type(1) is None


def test_requests_keep_their_earlier_forms(model: CausalLM) -> None:
    tokens = model.tokenizer.encode("Once")
    forms = [{"prompt": "Once"}, {"prompt": tokens, "unknown": 1}, "Once", tokens, b'{"prompt": "Once"}']
    values = handle(model, *forms)[0]
    assert all(value == values[0] for value in values) and len(values[0]["tokens"]) <= 64


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": "a", "temperature": -1}, "temperature is -1; it is a number from 0"),
        ({"prompt": "a", "max_new_tokens": 0}, "max_new_tokens is 0; it is a whole number from 1"),
        ({"prompt": "a", "max_new_tokens": 300}, "more than the 256 positions"),
        ({"prompt": [300]}, "token ids from 0 to 256"),
        ({"prompt": []}, "token ids from 0 to 256"),
        ({"prompt": "a", "logit_bias": {"999": 1}}, "999 is no token"),
        ({"prompt": "a", "guided_choice": ["b"]}, "does not serve guided_choice.* handler llm"),
        ({"prompt": "a", "logits": True, "stream": True}, "stream and logits are alternatives"),
        (b"{", "not JSON"),
        ("\ud800", "The text is no Unicode"),
    ],
)
def test_an_invalid_row_fails_alone(model: CausalLM, body: Any, message: str) -> None:
    row = {"prompt": "a", "max_new_tokens": 4}
    error, value = handle(model, body, row)[0]
    assert isinstance(error, PredictionException) and error.error_code == 400
    with pytest.raises(PredictionException, match=message):
        raise error
    assert value == handle(model, row)[0][0]


def test_texts_need_a_tokenizer(tmp_path: Path) -> None:
    from tests.support.hf_folders import save_llama

    model = CausalLM()
    model.initialize(Context("m", str(save_llama(tmp_path)), {}))
    row = {"prompt": [5], "max_new_tokens": 4, "temperature": 1.0, "seed": 1}
    value, stop, stream, text = handle(model, row, {**row, "stop": "a"}, {**row, "stream": True}, "a")[0]
    assert len(value["tokens"]) == 4 and "text" not in value
    assert "stop needs the texts" in str(stop) and "stream needs the texts" in str(stream)
    assert "has no tokenizer; send prompt as a list" in str(text)
