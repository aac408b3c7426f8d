"""Tests of the numbers of a request: any number is served or refused, and ends no other request."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from handlers.builtin.llm_request import parse_request
from handlers.context import Context
from handlers.engines import openai
from handlers.engines.engine import SamplingParams
from handlers.errors import PredictionException
from tests.support.served_llm import ServedModel

pytestmark = pytest.mark.integration

DAMAGED = "~"  # its embedding is not a number in the damaged model

NUMBERS = st.one_of(
    st.floats(),
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1e-40, 1e-320, 5e-324, 1e-5, 1e308, 2**31, 2**63, 2**64, 10**400, -1e-300, True]),
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.one_of(NUMBERS, st.floats(0, 2)),
        "top_k": st.one_of(NUMBERS, st.integers(0, 300)),
        "top_p": st.one_of(NUMBERS, st.floats(0, 1)),
        "presence_penalty": st.one_of(NUMBERS, st.floats(-2, 2)),
        "frequency_penalty": st.one_of(NUMBERS, st.floats(-2, 2)),
        "repetition_penalty": st.one_of(NUMBERS, st.floats(0.01, 100)),
        "seed": NUMBERS,
        "n": st.one_of(NUMBERS, st.integers(1, 3)),
        "max_tokens": st.one_of(NUMBERS, st.integers(1, 3)),
        "logprobs": st.one_of(NUMBERS, st.integers(0, 5)),
        "logit_bias": st.dictionaries(
            st.one_of(st.integers(0, 256).map(str), st.text("0123456789٣²", max_size=8)),
            st.one_of(NUMBERS, st.floats(-100, 100)),
            max_size=3,
        ),
    },
)


@pytest.fixture(scope="module")
def model(language_model: Path, one_thread: None) -> Iterator[ServedModel]:
    made = ServedModel(language_model)
    yield made
    made.close()


@pytest.fixture(scope="module")
def damaged_folder(language_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model in which the embedding of ``DAMAGED`` is not a number."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("damaged") / "model"
    shutil.copytree(language_model, folder)
    [token] = AutoTokenizer.from_pretrained(folder).encode(DAMAGED)
    weights = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        weights.get_input_embeddings().weight[token] = float("nan")
    weights.save_pretrained(folder)
    return folder


def answer_together(model: ServedModel, bodies: list[dict[str, Any]]) -> list[Any]:
    """Return the values of rows that run together."""
    context = model.context("")
    context.begin([f"{i}" for i in range(len(bodies))], [{}] * len(bodies), [{}] * len(bodies))
    rows = model.entry([{"body": body} for body in bodies], context)
    return model.loop.run_until_complete(asyncio.wait_for(rows, 200))


@pytest.mark.parametrize("temperature", [1e-40, 1e-320, 1e-6, 1e-5])
def test_a_tiny_temperature_is_greedy_and_ends_no_other_request(
    model: ServedModel, temperature: float
) -> None:
    victims = [{"prompt": f"{number} roses", "max_new_tokens": 40, "temperature": 1} for number in range(3)]
    attack = {"prompt": "x", "max_new_tokens": 4, "temperature": temperature}
    greedy, *others = answer_together(model, [attack, *victims])
    assert greedy["text"] == model("", **{**attack, "temperature": 0})["text"]
    assert all(victim["finish_reason"] in ("stop", "length") for victim in others)


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_scores_that_are_not_numbers_fail_their_own_row(
    damaged_folder: Path, one_thread: None, temperature: float
) -> None:
    model = ServedModel(damaged_folder)
    engine = model.entry.instance.engine
    running = engine._manager
    bodies = [{"prompt": text, "max_new_tokens": 30} for text in ("roses", f"a{DAMAGED}", "violets")]
    bodies[1]["temperature"] = temperature
    first, failed, last = answer_together(model, bodies)
    assert isinstance(failed, PredictionException) and failed.error_code == 500
    assert "not finite numbers" in failed.message
    assert [first, last] == answer_together(model, [bodies[0], bodies[2]])
    with pytest.raises(PredictionException, match="not finite numbers"):
        model(openai.COMPLETIONS, prompt=DAMAGED, logprobs=2, max_tokens=3, temperature=temperature)
    assert engine._manager is running, "the generation loop has not been replaced"
    assert not engine.cache_usage
    model.close()


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_scores_that_are_not_numbers_fail_their_own_row_of_a_batch(
    damaged_folder: Path, temperature: float
) -> None:
    from handlers.builtin.causal_lm import CausalLM

    model = CausalLM()
    model.initialize(Context("m", str(damaged_folder), {}))
    bodies = [{"prompt": text, "max_new_tokens": 12} for text in ("roses", f"a{DAMAGED}", "violets")]
    bodies[1]["temperature"] = temperature

    def handle(*rows: Any) -> list[Any]:
        context = Context("m", "/m", {})
        context.begin([f"{i}" for i in range(len(rows))], [{}] * len(rows), [{}] * len(rows))
        return model.handle([{"body": row} for row in rows], context)

    first, failed, last = handle(*bodies)
    assert isinstance(failed, PredictionException) and failed.error_code == 500
    assert [first, last] == handle(bodies[0], bodies[2])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=FIELDS)
@example(fields={"temperature": 1e-40, "repetition_penalty": 0.01, "logit_bias": {"5": 100}, "max_tokens": 2})
@example(fields={"seed": 2**63 - 1, "n": 3, "max_tokens": 2})
@example(fields={"max_tokens": int("9" * 4300)})
def test_any_numbers_are_served_or_refused(model: ServedModel, fields: dict[str, Any]) -> None:
    running = model.entry.instance.engine._manager
    request = {"prompt": "ab", "max_tokens": 2, **fields}
    native = {name: value for name, value in request.items() if name not in ("n", "logprobs")}
    for path, body in ((openai.COMPLETIONS, request), ("", native)):
        try:
            response = model(path, json.dumps(body).encode())
        except PredictionException as error:
            assert error.error_code == 400
            assert len(error.message) < 10_000
        else:
            assert response["usage"]["completion_tokens"] <= 3 * 3
            json.dumps(response, allow_nan=False)
    assert model.entry.instance.engine._manager is running, "the generation loop has not been replaced"


@given(fields=FIELDS)
def test_parsed_numbers_are_within_their_bounds(fields: dict[str, Any]) -> None:
    try:
        request = openai.parse_request(
            openai.COMPLETIONS, {"body": {"prompt": "a", **fields}}, SamplingParams()
        )
        openai.check_output_size(request, 256)
    except PredictionException:
        return
    sampling = request.sampling
    assert 0 <= sampling.temperature <= 2 and 0 <= sampling.top_p <= 1 and 0 <= sampling.top_k < 2**31
    assert all(-100 <= bias <= 100 and token < 10**10 for token, bias in sampling.logit_bias)
    assert request.n * (request.max_new_tokens or 256) * ((sampling.logprobs or 0) + 1) <= 2**20
    native = {name: value for name, value in fields.items() if name not in ("n", "logprobs", "seed")}
    assert parse_request({"body": {"prompt": "a", **native}}, SamplingParams()).sampling.top_k < 2**31


@pytest.mark.parametrize("bias", [{"5": 1, "05": 2}, {"9" * 5000: 1}, {"²": 1}, {"٣": 1}, {"5": 10**400}])
def test_invalid_biases_are_refused(model: ServedModel, bias: dict[str, float]) -> None:
    for path in (openai.COMPLETIONS, ""):
        with pytest.raises(PredictionException, match="logit_bias has") as raised:
            model(path, prompt="a", logit_bias=bias)
        assert raised.value.error_code == 400


@pytest.mark.parametrize("prompt", [[-1], [2**40], [10**400], [257], [1] * 2000, "a" * 2000], ids=str)
@pytest.mark.parametrize("echo", [True, False])
def test_invalid_prompts_are_refused(model: ServedModel, prompt: Any, echo: bool) -> None:
    with pytest.raises(PredictionException) as raised:
        model(openai.COMPLETIONS, prompt=prompt, echo=echo, max_tokens=1)
    assert raised.value.error_code == 400
    with pytest.raises(PredictionException) as raised:
        model("", prompt=prompt, max_new_tokens=1)
    assert raised.value.error_code == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 128, "max_tokens": 8193},
        {"prompt": ["a"] * 64, "n": 2, "max_tokens": 2000, "logprobs": 5},
        {"max_tokens": 2**31 - 1},
    ],
)
def test_the_size_of_a_response_is_bounded(model: ServedModel, fields: dict[str, Any]) -> None:
    with pytest.raises(PredictionException, match="are more than 1048576: lower max_tokens") as raised:
        model(openai.COMPLETIONS, **{"prompt": "a", **fields})
    assert raised.value.error_code == 400
