"""How continuous batching draws each request's tokens as that request asks."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor

from handlers.engines.engine import Logprob, Sampling

_GREEDY = Sampling()


class Sampler(ContinuousBatchingLogitsProcessor):
    """Leaves the drawn token as the only possible one in its row, in a loop that takes the likeliest.

    So greedy requests cost nothing and stay exact. Any other token is drawn by the request's seed, which the engine
    gives to those without one, and its place in the text: whatever else is in the batch, and on every rank alike.
    """

    supported_kwargs: dict[str, type] = {"sampling": Sampling}
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._rows: list[tuple[str, int, Sampling]] = []
        self._followed: dict[str, list[Logprob]] = {}

    def follow(self, request_id: str) -> list[Logprob]:
        """A list that gets each of the request's tokens, with how likely it was, before the token is told."""
        return self._followed.setdefault(request_id, [])

    def forget(self, request_id: str) -> None:
        self._followed.pop(request_id, None)

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        self._rows = [
            (row.state.request_id, _place(row.state), row.state.logit_processor_kwargs.get("sampling", _GREEDY))
            for row in requests_with_new_token
        ]
        return torch.zeros(len(self._rows), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        for index, (request_id, place, sampling) in enumerate(self._rows):
            token = None
            followed = self._followed.get(request_id)
            chances = None if followed is None else scores[index].float().log_softmax(-1)
            if sampling.temperature > 0:
                numbers = torch.Generator(scores.device)
                numbers.manual_seed(hash((sampling.seed, place)))
                token = _drawn(scores[index], sampling, numbers)
            if followed is not None and chances is not None:
                followed.append(_told(chances, scores[index].argmax() if token is None else token, sampling))
            if token is not None:
                scores[index] = float("-inf")
                scores[index, token] = 0.0
        return scores


def _place(state: Any) -> int:
    """How many tokens stand before the one to draw, also where the request was put off in between."""
    return len(state.initial_tokens) + state.generated_len()


def _told(chances: torch.Tensor, token: torch.Tensor, sampling: Sampling) -> Logprob:
    values, tokens = chances.topk(min(sampling.logprobs or 0, chances.numel()))
    return Logprob(int(token), float(chances[token]), tuple(zip(tokens.tolist(), values.tolist())))


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
