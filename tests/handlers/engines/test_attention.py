"""Tests of per-row attention: batched rows of any length attend as each row alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from handlers import engines
from handlers.engines.engine import GenerationRequest, SamplingParams

pytestmark = pytest.mark.integration


SIZES = {"num_blocks": 40, "page_size": 8, "max_batch_tokens": 48}
VOCABULARY = 90


def save_model(folder: Path, kind: str, **overrides: Any) -> Path:
    """Save an untrained model with four heads and a context of 160 tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 160,
    }
    config = AutoConfig.for_model(
        kind,
        vocab_size=VOCABULARY,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.5,
        **{**sizes, **overrides},
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def make_requests() -> list[GenerationRequest]:
    """Return short and long requests: some exceed a step, two share a prefix, and two are equal."""
    sampling = SamplingParams(logprobs=0)
    prompts = [
        [(i * 31 + position * 7) % VOCABULARY for position in range(n)]
        for i, n in enumerate((1, 2, 3, 60, 100, 30))
    ]
    prompts += [[*prompts[3][:40], 5, 6, 7], prompts[3]]
    return [GenerationRequest(str(i), prompt, 4 + 3 * i, sampling) for i, prompt in enumerate(prompts)]


async def generate_all(folder: Path) -> tuple[str, list[list[Any]]]:
    """Return the attention implementation of the engine, and the log-probabilities of each completion."""
    engine: Any = await engines.start(folder, None, SIZES)

    async def collect(request: GenerationRequest) -> list[Any]:
        return [token async for chunk in engine.generate(request) for token in chunk.logprobs]

    try:
        completions = await asyncio.wait_for(asyncio.gather(*map(collect, make_requests())), 200)
        return engine.model.config._attn_implementation, completions
    finally:
        await engine.shutdown()


@pytest.mark.parametrize(
    ("kind", "overrides", "implementation"),
    [
        ("llama", {"intermediate_size": 48, "num_key_value_heads": 2}, "rows"),
        ("gpt2", {}, "rows"),
        ("mistral", {"intermediate_size": 48, "num_key_value_heads": 4, "sliding_window": 16}, "sdpa"),
    ],
)
def test_each_row_attends_to_its_own_tokens_only(
    tmp_path: Path, kind: str, overrides: Any, implementation: str
) -> None:
    from transformers import AutoModelForCausalLM

    folder = save_model(tmp_path, kind, **overrides)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    used, completions = asyncio.run(generate_all(folder))
    assert used == implementation
    for request, completion in zip(make_requests(), completions, strict=True):
        assert len(completion) == request.max_new_tokens
        generated = [logprob.token for logprob in completion]
        with torch.no_grad():
            scores = model(torch.tensor([[*request.prompt, *generated]])).logits[
                0, len(request.prompt) - 1 : -1
            ]
        expected = scores.log_softmax(-1)[range(len(generated)), generated]
        assert torch.allclose(torch.tensor([logprob.logprob for logprob in completion]), expected, atol=1e-3)
