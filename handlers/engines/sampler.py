"""How continuous batching draws each request's tokens as that request asks."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor

from handlers.engines.engine import Sampling

_GREEDY = Sampling()


class Sampler(ContinuousBatchingLogitsProcessor):
    """Leaves the drawn token as the only possible one in its row, in a loop that takes the likeliest.

    So greedy requests cost nothing and stay exact, and each other one has a generator of random numbers of its own.
    """

    supported_kwargs: dict[str, type] = {"sampling": Sampling}
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._rows: list[tuple[str, Sampling]] = []
        self._generators: dict[str, torch.Generator] = {}

    def forget(self, request_id: str) -> None:
        self._generators.pop(request_id, None)

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        self._rows = [
            (row.state.request_id, row.state.logit_processor_kwargs.get("sampling", _GREEDY))
            for row in requests_with_new_token
        ]
        return torch.zeros(len(self._rows), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        for index, (request_id, sampling) in enumerate(self._rows):
            if sampling.temperature > 0:
                token = _drawn(scores[index], sampling, self._generator(request_id, sampling.seed, scores.device))
                scores[index] = float("-inf")
                scores[index, token] = 0.0
        return scores

    def _generator(self, request_id: str, seed: int | None, device: torch.device) -> torch.Generator:
        generator = self._generators.get(request_id)
        if generator is None:
            generator = self._generators[request_id] = torch.Generator(device)
            if seed is None:
                generator.seed()
            else:
                generator.manual_seed(seed)
        return generator


def _drawn(scores: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> torch.Tensor:
    """One token of ``scores`` (vocabulary), as transformers' warpers have it: temperature, top k, top p."""
    ordered, tokens = (scores / sampling.temperature).sort(descending=True)
    if 0 < sampling.top_k < ordered.numel():
        ordered, tokens = ordered[: sampling.top_k], tokens[: sampling.top_k]
    chances = ordered.softmax(-1)
    if sampling.top_p < 1:
        before = chances.cumsum(-1) - chances  # what the likelier ones have together
        chances = chances.masked_fill(before >= sampling.top_p, 0.0)
        chances[0] = chances[0].clamp_min(torch.finfo(chances.dtype).tiny)
    return tokens[torch.multinomial(chances, 1, generator=generator)]
