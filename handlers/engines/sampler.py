"""Per-request sampling for continuous batching."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor

from handlers.engines.engine import Logprob, SamplingParams

_GREEDY = SamplingParams()


class Sampler(ContinuousBatchingLogitsProcessor):
    """A logits processor that masks all tokens but the sampled one, in a loop that decodes greedily.

    Greedy requests cost nothing and stay exact. Other tokens are sampled from the request's seed and the
    token's position, so they are the same whatever else is in the batch, and on every rank. The engine adds a
    seed to requests without one.
    """

    supported_kwargs: dict[str, type] = {"sampling": SamplingParams}
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._rows: list[tuple[str, int, SamplingParams]] = []
        self._recorded: dict[str, list[Logprob]] = {}

    def record_logprobs(self, request_id: str) -> list[Logprob]:
        """Return a list that grows by each token's Logprob before the loop outputs the token."""
        return self._recorded.setdefault(request_id, [])

    def forget(self, request_id: str) -> None:
        self._recorded.pop(request_id, None)

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        self._rows = [
            (
                row.state.request_id,
                _position(row.state),
                row.state.logit_processor_kwargs.get("sampling", _GREEDY),
            )
            for row in requests_with_new_token
        ]
        return torch.zeros(len(self._rows), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        for index, (request_id, position, sampling) in enumerate(self._rows):
            token = None
            recorded = self._recorded.get(request_id)
            logprobs = None if recorded is None else scores[index].float().log_softmax(-1)
            if sampling.temperature > 0:
                generator = torch.Generator(scores.device)
                generator.manual_seed(hash((sampling.seed, position)))
                token = _sample(scores[index], sampling, generator)
            if recorded is not None and logprobs is not None:
                chosen = scores[index].argmax() if token is None else token
                recorded.append(_to_logprob(logprobs, chosen, sampling))
            if token is not None:
                scores[index] = float("-inf")
                scores[index, token] = 0.0
        return scores


def _position(state: Any) -> int:
    """Return how many tokens precede the next one, also for a request that was preempted."""
    return len(state.initial_tokens) + state.generated_len()


def _to_logprob(logprobs: torch.Tensor, token: torch.Tensor, sampling: SamplingParams) -> Logprob:
    values, tokens = logprobs.topk(min(sampling.logprobs or 0, logprobs.numel()))
    return Logprob(int(token), float(logprobs[token]), tuple(zip(tokens.tolist(), values.tolist())))


def _sample(scores: torch.Tensor, sampling: SamplingParams, generator: torch.Generator) -> torch.Tensor:
    """Sample a token of ``scores`` (vocabulary) as transformers' warpers do: temperature, top k, top p."""
    ordered, tokens = (scores / sampling.temperature).sort(descending=True)
    if 0 < sampling.top_k < ordered.numel():
        ordered, tokens = ordered[: sampling.top_k], tokens[: sampling.top_k]
    probabilities = ordered.softmax(-1)
    if sampling.top_p < 1:
        preceding = probabilities.cumsum(-1) - probabilities  # total probability of the likelier tokens
        probabilities = probabilities.masked_fill(preceding >= sampling.top_p, 0.0)
        probabilities[0] = probabilities[0].clamp_min(torch.finfo(probabilities.dtype).tiny)
    return tokens[torch.multinomial(probabilities, 1, generator=generator)]
