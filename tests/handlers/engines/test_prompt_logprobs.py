"""Log-probabilities of prompts, with a forward pass of transformers as the reference."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from handlers.engines import openai
from handlers.engines.engine import GenerationRequest, Logprob, SamplingParams
from handlers.errors import PredictionException
from tests.support.engine_runs import run_with_engine
from tests.support.hf_folders import save_llama
from tests.support.lora_folders import load_model, save_adapter
from tests.support.served_llm import ServedModel

pytestmark = pytest.mark.integration

PROMPT = [(7 * i * i + 3 * i) % 251 for i in range(300)]  # three chunks, of which the last is short


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), max_position_embeddings=512, initializer_range=0.2)


@pytest.fixture
def model(language_model: Path) -> Iterator[ServedModel]:
    made = ServedModel(language_model)
    yield made
    made.close()


async def rate(engine: Any, prompt: list[int], adapter: str | None = None, new: int = 0) -> list[Logprob]:
    request = GenerationRequest(f"{adapter} {new}", prompt, new, adapter=adapter, prompt_logprobs=2)
    chunks = [chunk async for chunk in engine.generate(request)]
    assert sum(len(chunk.tokens) for chunk in chunks) == new and chunks[-1].finish_reason == "length"
    return list(chunks[0].prompt_logprobs)


def reference(folder: Path, prompt: list[int], adapter: Path | None = None) -> torch.Tensor:
    with torch.no_grad():
        logits = load_model(folder, adapter)(torch.tensor([prompt])).logits[0]
    values: torch.Tensor = logits.log_softmax(-1)
    return values


def assert_equal(found: list[Logprob], expected: torch.Tensor, prompt: list[int]) -> None:
    assert [logprob.token for logprob in found] == prompt and found[0] == Logprob(prompt[0], None)
    for logprob, row, token in zip(found[1:], expected, prompt[1:]):
        assert logprob.logprob == pytest.approx(float(row[token]), abs=1e-4)
        values, tokens = row.topk(2)
        assert [token for token, _ in logprob.top_tokens] == tokens.tolist()
        assert [value for _, value in logprob.top_tokens] == pytest.approx(values.tolist(), abs=1e-4)


def test_chunks_equal_one_forward_pass_while_others_generate(folder: Path, tmp_path: Path) -> None:
    adapter = save_adapter(folder, tmp_path / "adapter")

    async def run(engine: Any) -> Any:
        await engine.load_adapter("poet", adapter)
        alone = [t async for c in engine.generate(GenerationRequest("a", PROMPT[:9], 60)) for t in c.tokens]
        others = GenerationRequest("b", PROMPT[:9], 60)

        async def generate() -> list[int]:
            return [token async for chunk in engine.generate(others) for token in chunk.tokens]

        results = await asyncio.gather(
            generate(), rate(engine, PROMPT), rate(engine, PROMPT, "poet"), rate(engine, PROMPT, new=3)
        )
        assert results[0] == alone, "the rows of the loop are not affected"
        return results[1:]

    base, adapted, generated = run_with_engine(folder, run)
    assert_equal(base, reference(folder, PROMPT), PROMPT)
    assert_equal(adapted, reference(folder, PROMPT, adapter), PROMPT)
    assert generated == base


def test_one_prompt_has_a_cache_at_a_time(folder: Path) -> None:
    """A request of 128 long prompts would fill the memory otherwise."""

    async def run(engine: Any) -> None:
        scorer, caches = engine._prompt_scorer, []
        score_chunk = scorer._score_chunk

        def record(*args: Any) -> Any:
            caches.append(id(args[-1]))
            return score_chunk(*args)

        scorer._score_chunk = record
        requests = [GenerationRequest(f"{i}", PROMPT, 0, prompt_logprobs=0) for i in range(3)]
        await asyncio.gather(*(anext(engine.generate(request)) for request in requests))
        assert len(caches) == 9 and all(len(set(caches[i : i + 3])) == 1 for i in (0, 3, 6))

    run_with_engine(folder, run)


def test_prompts_of_one_token_and_beyond_the_capacity(folder: Path) -> None:
    async def run(engine: Any) -> None:
        assert await rate(engine, [5]) == [Logprob(5, None)]
        with pytest.raises(PredictionException, match="the limit is 512"):
            await rate(engine, [1] * 513)

    run_with_engine(folder, run)


def test_sliding_attention_limits_the_prompt(tmp_path: Path) -> None:
    """Up to its window, it is full attention."""
    config = transformers.MistralConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=160, max_position_embeddings=512, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.MistralForCausalLM(config).save_pretrained(tmp_path)

    async def run(engine: Any) -> None:
        assert_equal(await rate(engine, PROMPT[:160]), reference(tmp_path, PROMPT[:160]), PROMPT[:160])
        with pytest.raises(PredictionException, match="prompts of up to 160 tokens here"):
            await rate(engine, PROMPT[:161])

    run_with_engine(tmp_path, run)


def test_scores_that_are_not_numbers_fail_their_request_only(folder: Path) -> None:
    async def run(engine: Any) -> None:
        with torch.no_grad():
            engine.model.get_input_embeddings().weight[9] = float("nan")
        with pytest.raises(PredictionException, match="not finite numbers"):
            await rate(engine, [9, 1, 2])
        assert len(await rate(engine, [1, 2], new=2)) == 2

    run_with_engine(folder, run)


def test_echo_with_logprobs_rates_the_prompt(model: ServedModel) -> None:
    """Requests of lm-eval, whole and streamed; ``max_tokens`` 0 generates nothing."""
    params = {"prompt": [model.tokens("Roses are"), model.tokens("Violets")], "logprobs": 1, "temperature": 0}
    plain = model(openai.COMPLETIONS, **params, max_tokens=4)
    echoed = model(openai.COMPLETIONS, **params, max_tokens=4, echo=True)
    rated = model(openai.COMPLETIONS, **params, max_tokens=0, echo=True)
    assert rated["usage"]["completion_tokens"] == 0
    for prompt, without, both, only in zip(
        params["prompt"], plain["choices"], echoed["choices"], rated["choices"]
    ):
        logprobs, count = both["logprobs"], len(prompt)
        assert "".join(logprobs["tokens"]) == both["text"] == only["text"] + without["text"]
        for name in ("token_logprobs", "tokens"):
            parts = [*only["logprobs"][name][1:], *without["logprobs"][name]]
            assert logprobs[name][1:] == (parts if name == "tokens" else pytest.approx(parts, abs=1e-5))
        assert logprobs["text_offset"] == list(range(count + 4))
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        assert all(-40 < value < 0 for value in logprobs["token_logprobs"][1:])
        assert only["finish_reason"] == "length"
    events = model.events(openai.COMPLETIONS, **params, max_tokens=4, echo=True)
    for index, choice in enumerate(echoed["choices"]):
        parts = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == choice["text"]
        values = [value for part in parts if part["logprobs"] for value in part["logprobs"]["token_logprobs"]]
        assert values[1:] == pytest.approx(choice["logprobs"]["token_logprobs"][1:], abs=1e-5)
    with pytest.raises(PredictionException, match="more than 1048576: send several requests"):
        request = openai.parse_request(
            openai.COMPLETIONS, {"body": {**params, "echo": True}}, SamplingParams()
        )
        openai.check_prompt_logprobs(request, [range(2**19)] * 2)
