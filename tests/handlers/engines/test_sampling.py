"""Tests of penalties and logit bias, against transformers and against the model's own logits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from handlers.engines import openai
from tests.support.served_llm import ServedModel, serve_copy

pytestmark = pytest.mark.integration

PROMPT = "Roses are red, roses are"
COUNT = 80


@pytest.fixture(scope="module")
def model(
    one_thread: None, language_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedModel]:
    with serve_copy(language_model, tmp_path_factory.mktemp("sampling"), eos_token_id=300) as model:
        yield model


def generate(model: ServedModel, **fields: Any) -> list[str]:
    """Return the tokens' texts of a greedy completion, which logprobs list."""
    params = {"prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, "logprobs": 0, **fields}
    [choice] = model(openai.COMPLETIONS, **params)["choices"]
    return choice["logprobs"]["tokens"]


def decode(model: ServedModel, ids: list[int]) -> list[str]:
    return [model.entry.instance._decode([token]) for token in ids]


def test_the_repetition_penalty_equals_that_of_transformers(model: ServedModel, language_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([model.tokens(PROMPT)])
    reference = AutoModelForCausalLM.from_pretrained(language_model)
    for penalty in (1.3, 0.8):
        generated = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=COUNT,
            do_sample=False,
            repetition_penalty=penalty,
            eos_token_id=300,
            pad_token_id=0,
        )
        expected = decode(model, generated[0, ids.shape[1] :].tolist())
        assert generate(model, repetition_penalty=penalty) == expected != generate(model)


@pytest.mark.nightly
def test_penalties_of_presence_and_frequency_count_generated_tokens(
    model: ServedModel, language_model: Path
) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(language_model)
    prompt, differs = model.tokens(PROMPT), False
    for presence, frequency in ((1.5, 0.0), (0.0, 0.7), (-2.0, 0.0)):
        generated: list[int] = []
        for _ in range(COUNT):
            with torch.no_grad():
                logits = reference(torch.tensor([prompt + generated])).logits[0, -1]
            for token in set(generated):
                logits[token] -= presence + frequency * generated.count(token)
            generated.append(int(logits.argmax()))
        made = generate(model, presence_penalty=presence, frequency_penalty=frequency)
        assert made == decode(model, generated)
        differs = differs or made != generate(model)
    assert differs


def test_logit_bias_forces_and_forbids_tokens(model: ServedModel) -> None:
    free = generate(model)
    [token] = model.tokens("Q")
    assert generate(model, logit_bias={str(token): 100}) == ["Q"] * COUNT
    [frequent] = model.tokens(max((text for text in free if text.isascii()), key=free.count))
    without = generate(model, logit_bias={str(frequent): -100})
    assert model.entry.instance._decode([frequent]) not in without
    native = model("", prompt=PROMPT, max_new_tokens=4, logit_bias={str(token): 100})
    assert native["text"] == "QQQQ"


@pytest.mark.nightly
def test_a_preempted_request_keeps_its_penalties(model: ServedModel) -> None:
    """Six requests of 100 tokens do not fit into the cache of 512 at once."""
    fields = {"max_new_tokens": 100, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
    bodies = [{"prompt": f"{number} words", **fields} for number in range(6)]
    alone = [model("", **body)["text"] for body in bodies]
    context = model.context("")
    context.begin(list("abcdef"), [{}] * 6, [{}] * 6)
    results = model.loop.run_until_complete(model.entry([{"body": body} for body in bodies], context))
    assert [result["text"] for result in results] == alone


def test_the_folder_sets_the_default_repetition_penalty(language_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(language_model, folder)
    settings = folder / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "repetition_penalty": 1.3}))
    model = ServedModel(folder)
    assert model.entry.instance.default_sampling.repetition_penalty == 1.3
    fields = {"prompt": PROMPT, "max_new_tokens": 30}
    default = model("", **fields)["text"]
    assert default == model("", **fields, repetition_penalty=1.3)["text"]
    assert default != model("", **fields, repetition_penalty=1)["text"]
    model.close()
