"""Continuous batching on a CPU computes what the model alone does, for rows of any lengths in a step."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from handlers import engines
from handlers.engines.engine import GenerationRequest, Sampling

SIZES = {"num_blocks": 40, "page_size": 8, "max_batch_tokens": 48}
VOCABULARY = 90


def saved(folder: Path, kind: str, **more: Any) -> Path:
    """A model that never learnt anything, of four heads and a context of 160 tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 160}
    config = AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None, initializer_range=0.5, **{**sizes, **more}
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def requests() -> list[GenerationRequest]:
    """Short ones beside long ones; some longer than a step; two that begin alike, and one asked for twice."""
    sampling = Sampling(logprobs=0)
    prompts = [[(i * 31 + place * 7) % VOCABULARY for place in range(n)] for i, n in enumerate((1, 2, 3, 60, 100, 30))]
    prompts += [prompts[3][:40] + [5, 6, 7], prompts[3]]
    return [GenerationRequest(str(i), prompt, 4 + 3 * i, sampling) for i, prompt in enumerate(prompts)]


async def answered(folder: Path) -> tuple[str, list[list[Any]]]:
    """How the engine's model attends, and each answer's tokens as they are told."""
    engine: Any = await engines.start(folder, None, SIZES)

    async def told(request: GenerationRequest) -> list[Any]:
        return [token async for chunk in engine.generate(request) for token in chunk.logprobs]

    try:
        answers = await asyncio.wait_for(asyncio.gather(*map(told, requests())), 60)
        return engine.model.config._attn_implementation, answers
    finally:
        await engine.shutdown()


@pytest.mark.parametrize(
    ("kind", "more", "how"),
    [
        ("llama", {"intermediate_size": 48, "num_key_value_heads": 2}, "rows"),
        ("gpt2", {}, "rows"),
        ("mistral", {"intermediate_size": 48, "num_key_value_heads": 4, "sliding_window": 16}, "sdpa"),
    ],
)
def test_each_row_sees_its_own_tokens_and_no_others(tmp_path: Path, kind: str, more: Any, how: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = saved(tmp_path, kind, **more)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    attends, answers = asyncio.run(answered(folder))
    assert attends == how
    for request, answer in zip(requests(), answers, strict=True):
        assert len(answer) == request.max_new_tokens
        made = [token.token for token in answer]
        with torch.no_grad():
            scores = model(torch.tensor([[*request.prompt, *made]])).logits[0, len(request.prompt) - 1 : -1]
        expected = scores.log_softmax(-1)[range(len(made)), made]
        assert torch.allclose(torch.tensor([token.logprob for token in answer]), expected, atol=1e-3)
