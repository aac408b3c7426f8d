"""Per-request sampling for continuous batching."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor

from handlers.engines.engine import Logprob, SamplingParams, StructuredOutput
from handlers.engines.structured_output import allowed_tokens, invalid_output
from handlers.errors import PredictionException

_GREEDY = SamplingParams()


class _Row(NamedTuple):
    """A request whose next token is sampled."""

    state: Any  # transformers' RequestState
    sampling: SamplingParams

    @property
    def id(self) -> str:
        return self.state.request_id

    @property
    def position(self) -> int:
        """The number of tokens before the next one, also of a request that was preempted."""
        return len(self.state.initial_tokens) + self.state.generated_len()

    @property
    def generated(self) -> list[int]:
        """The generated tokens; after a preemption, the older ones are at the end of the initial tokens."""
        prompt_length = self.state._true_initial_tokens or len(self.state.initial_tokens)
        return self.state.initial_tokens[prompt_length:] + self.state.generated_tokens


class Sampler(ContinuousBatchingLogitsProcessor):
    """A logits processor that masks all tokens but the sampled one, in a loop that decodes greedily.

    Greedy requests cost nothing and stay exact. Other tokens are sampled from the request's seed and the
    token's position, so they are the same whatever else is in the batch, and on every rank. The engine adds a
    seed to requests without one. ``compile_output`` returns the matcher of a structured output and its end
    tokens.
    """

    supported_kwargs: dict[str, type] = {"sampling": SamplingParams}
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self, compile_output: Callable[[StructuredOutput, Iterable[int]], Any]) -> None:
        self._rows: list[_Row] = []
        self._recorded: dict[str, list[Logprob]] = {}
        self._compile_output = compile_output
        self._failures: dict[str, PredictionException] = {}
        self._matchers: dict[str, Any] = {}

    def record_logprobs(self, request_id: str) -> list[Logprob]:
        """Return a list that grows by each token's Logprob before the loop outputs the token."""
        return self._recorded.setdefault(request_id, [])

    def find_failure(self, request_id: str) -> PredictionException | None:
        """Return the error of a request for which no further token could be chosen."""
        return self._failures.get(request_id)

    def keep_matcher(self, request_id: str, matcher: Any) -> None:
        """Store a request's compiled matcher, so that the loop's thread does not compile it."""
        self._matchers[request_id] = matcher

    def forget(self, request_id: str) -> None:
        self._matchers.pop(request_id, None)
        self._recorded.pop(request_id, None)
        self._failures.pop(request_id, None)

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        self._rows = [
            _Row(row.state, row.state.logit_processor_kwargs.get("sampling", _GREEDY))
            for row in requests_with_new_token
        ]
        return torch.zeros(len(self._rows), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        recorded = [self._recorded.get(row.id) for row in self._rows]
        logprobs = [
            None if tokens is None else scores[index].float().log_softmax(-1)
            for index, tokens in enumerate(recorded)
        ]
        for index, row in enumerate(self._rows):
            self._adjust(scores[index], row)
        is_usable = are_usable(scores).tolist()
        for index, row in enumerate(self._rows):
            token: torch.Tensor | int | None = None
            if not is_usable[index]:  # an error here would end the loop of all requests
                self._failures.setdefault(row.id, unusable_scores())
                token = 0
            elif not row.sampling.is_greedy:
                token = sample_token(scores[index], row.sampling, row.position)
            tokens, row_logprobs = recorded[index], logprobs[index]
            if tokens is not None and row_logprobs is not None:
                chosen = scores[index].argmax() if token is None else token
                tokens.append(_to_logprob(row_logprobs, chosen, row.sampling))
            if token is not None:
                scores[index] = float("-inf")
                scores[index, token] = 0.0
        return scores

    def _adjust(self, scores: torch.Tensor, row: _Row) -> None:
        """Apply the request's penalties, logit bias and structured output to its scores, in place."""
        if row.sampling.has_penalties or row.sampling.logit_bias:
            tokens = row.state.initial_tokens + row.state.generated_tokens
            adjust_scores(scores, row.sampling, tokens, row.generated)
        if row.sampling.structured_output is not None:
            matcher = self._advance_matcher(row, row.sampling.structured_output)
            scores.masked_fill_(~allowed_tokens(matcher, len(scores), scores.device), float("-inf"))
            if matcher.is_error():  # it allows the end tokens only
                self._failures[row.id] = invalid_output(row.sampling.structured_output, matcher.get_error())

    def _advance_matcher(self, row: _Row, output: StructuredOutput) -> Any:
        """Return the request's matcher after all generated tokens.

        The state keeps it, because ranks other than 0 are not informed of the end of a request. They also
        compile it here; rank 0 has a copy for each state, of which a preempted request has several.
        """
        matcher, consumed = getattr(row.state, "output_matcher", (None, 0))
        if matcher is None:
            kept = self._matchers.get(row.id)
            matcher = (
                self._compile_output(output, row.state._eos_token_ids) if kept is None else kept.deep_copy()
            )
        generated = row.generated
        matcher.consume_tokens(generated[consumed:])
        row.state.output_matcher = matcher, len(generated)
        return matcher


def are_usable(scores: torch.Tensor) -> torch.Tensor:
    """Return for each row of ``scores`` (rows x vocabulary) whether a token can be chosen by them.

    Scores of -infinity exclude tokens; the highest must be a finite number.
    """
    return scores.amax(-1).isfinite()


def unusable_scores() -> PredictionException:
    """Return the error of a row whose scores are not usable."""
    return PredictionException(
        "The model's scores of the next token are not finite numbers: its weights or its adapter are "
        "damaged, or its dtype is too small for this prompt.",
        500,
    )


def adjust_scores(
    scores: torch.Tensor, sampling: SamplingParams, tokens: list[int], generated: list[int]
) -> None:
    """Apply the penalties and the logit bias to ``scores`` (vocabulary), in place.

    ``tokens`` are those of prompt and output. As in vLLM, the penalty of repetitions counts the prompt, the
    others do not.
    """
    if sampling.has_penalties:
        _penalize(scores, sampling, tokens, generated)
    if sampling.logit_bias:
        biased, biases = zip(*sampling.logit_bias)
        scores[list(biased)] += torch.tensor(biases, dtype=scores.dtype, device=scores.device)


def _penalize(
    scores: torch.Tensor, sampling: SamplingParams, tokens: list[int], generated: list[int]
) -> None:
    if sampling.repetition_penalty != 1:
        indices = torch.tensor(tokens, device=scores.device)
        values = scores[indices]
        penalty = sampling.repetition_penalty
        scores[indices] = torch.where(values > 0, values / penalty, values * penalty)
    if generated:
        counts = torch.bincount(torch.tensor(generated, device=scores.device), minlength=len(scores))
        scores -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)


def _to_logprob(logprobs: torch.Tensor, token: torch.Tensor | int, sampling: SamplingParams) -> Logprob:
    values, tokens = logprobs.topk(min(sampling.logprobs or 0, logprobs.numel()))
    return Logprob(int(token), float(logprobs[token]), tuple(zip(tokens.tolist(), values.tolist())))


def sample_token(scores: torch.Tensor, sampling: SamplingParams, position: int) -> torch.Tensor:
    """Sample a token of ``scores`` (vocabulary) as transformers' warpers do: temperature, top k, top p.

    The seed of ``sampling`` and the ``position`` determine it.
    """
    generator = torch.Generator(scores.device)
    generator.manual_seed(hash((sampling.seed, position)))
    ordered, tokens = scores.sort(descending=True)
    ordered = (ordered - ordered[0]) / sampling.temperature  # the highest becomes 0, so none overflows
    if 0 < sampling.top_k < ordered.numel():
        ordered, tokens = ordered[: sampling.top_k], tokens[: sampling.top_k]
    probabilities = ordered.softmax(-1)
    if sampling.top_p < 1:
        preceding = probabilities.cumsum(-1) - probabilities  # total probability of the likelier tokens
        probabilities = probabilities.masked_fill(preceding >= sampling.top_p, 0.0)
        probabilities[0] = probabilities[0].clamp_min(torch.finfo(probabilities.dtype).tiny)
    return tokens[torch.multinomial(probabilities, 1, generator=generator)]
