"""Log-probabilities of a prompt's tokens, by forward passes of a transformers model beside its loop.

Continuous batching computes the logits of each row's last token only. Here a prompt runs in chunks with a
cache of its own, on one thread, so that it delays the loop of the other requests by one chunk at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from handlers.engines.engine import Logprob
from handlers.engines.lora import Adapter, AdapterTable
from handlers.errors import PredictionException

_CHUNK_TOKENS = 128  # their logits take 66 MB with a vocabulary of 128,000


class PromptScorer:
    """A model, with its adapters, that rates prompts one chunk at a time."""

    def __init__(self, model: Any, adapters: AdapterTable) -> None:
        self._model = model
        self._adapters = adapters
        self._thread = ThreadPoolExecutor(1, "prompt_logprobs")
        self._lock = asyncio.Lock()  # one prompt's cache at a time: a request may have 128 prompts
        config = model.config.get_text_config()
        # Up to this length, sliding attention is full attention.
        self._max_tokens = getattr(config, "sliding_window", None) or getattr(
            config, "attention_chunk_size", None
        )

    async def score(self, prompt: Sequence[int], count: int, adapter: Adapter | None) -> list[Logprob]:
        """Return the Logprob of each token of ``prompt``, with the ``count`` most likely ones.

        The first token has none. Raises PredictionException.
        """
        from transformers import DynamicCache

        if self._max_tokens is not None and len(prompt) > self._max_tokens:
            raise PredictionException(
                f"echo together with logprobs takes prompts of up to {self._max_tokens} tokens here.",
                400,
            )
        loop, cache = asyncio.get_running_loop(), DynamicCache()
        scored = [Logprob(prompt[0], None)]
        async with self._lock:
            for start in range(0, len(prompt) - 1, _CHUNK_TOKENS):
                tokens = prompt[start : start + _CHUNK_TOKENS + 1]
                scored += await loop.run_in_executor(
                    self._thread, self._score_chunk, tokens, start, count, adapter, cache
                )
        return scored

    @torch.no_grad()
    def _score_chunk(
        self, tokens: Sequence[int], start: int, count: int, adapter: Adapter | None, cache: Any
    ) -> list[Logprob]:
        """Return the Logprobs of all tokens but the first, which follow ``start`` tokens in the cache."""
        model = self._model
        inputs = torch.tensor([tokens[:-1]], device=model.device)
        length = inputs.shape[1]
        mask = torch.full((length, start + length), torch.finfo(model.dtype).min, dtype=model.dtype)
        with self._adapters.apply(adapter, length):
            logits = model(
                inputs,
                attention_mask=mask.triu_(start + 1)[None, None].to(model.device),
                past_key_values=cache,
                use_cache=True,
            ).logits[0]
        logprobs = logits.float().log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(tokens[1:], device=model.device)[:, None])[:, 0]
        if chosen.isnan().any():
            raise PredictionException("The model's scores of this prompt are not finite numbers.", 500)
        values, likely = (found.tolist() for found in logprobs.topk(min(count, logprobs.shape[1])))
        return [
            Logprob(token, logprob, tuple(zip(*top)))
            for token, logprob, *top in zip(tokens[1:], chosen.tolist(), likely, values)
        ]

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
