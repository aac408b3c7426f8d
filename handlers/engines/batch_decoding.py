"""Decoding of a batch of whole requests by ``generate``, each row with its own sampling, stops and stream.

The rows sample as those of the handler ``llm`` do: a seed yields the same tokens in both.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from transformers import LogitsProcessor, StoppingCriteria

from handlers.engines.detokenizer import Detokenizer
from handlers.engines.engine import SamplingParams
from handlers.engines.sampler import adjust_scores, are_usable, sample_token, unusable_scores
from handlers.errors import PredictionException

NO_TOKEN = -1  # of a row whose scores are not usable


class RowDecoder:
    """The decoding of one row: it chooses each token from the scores and knows when the row is finished.

    ``tokens`` are the generated ones without an end token. ``error`` is that of a row whose scores were not
    usable. ``send`` receives each chunk of the text;
    ``decode`` converts token ids and is needed for ``send`` and ``stops`` only.
    """

    def __init__(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        max_new_tokens: int,
        end_tokens: Sequence[int] = (),
        stops: Sequence[str] = (),
        decode: Callable[[list[int]], str] | None = None,
        send: Callable[[str], None] | None = None,
    ) -> None:
        self.prompt = prompt
        self.max_new_tokens = max_new_tokens
        self.tokens: list[int] = []
        self.finished = False
        self.error: PredictionException | None = None
        self._sampling = sampling
        if sampling.seed is None:
            self._sampling = replace(sampling, seed=secrets.randbits(63))
        self._end_tokens = end_tokens
        self._send = send
        self._detokenizer = None
        if decode is not None and (stops or send is not None):
            self._detokenizer = Detokenizer(decode, stops)

    @property
    def is_plain(self) -> bool:
        """Return whether the most likely token is always the next one."""
        sampling = self._sampling
        return sampling.is_greedy and not (sampling.has_penalties or sampling.logit_bias)

    @property
    def stopped(self) -> bool:
        """Return whether a stop string has ended the text."""
        return self._detokenizer is not None and self._detokenizer.stopped

    @property
    def stop(self) -> str | None:
        """Return the stop string that has ended the text."""
        return None if self._detokenizer is None else self._detokenizer.stop

    def choose(self, scores: torch.Tensor) -> int:
        """Return the next token by its ``scores`` (vocabulary), which it may change.

        It is NO_TOKEN where the scores are not usable.
        """
        if not self.is_plain:
            adjust_scores(scores, self._sampling, self.prompt + self.tokens, self.tokens)
        if not are_usable(scores):
            return NO_TOKEN
        if self._sampling.is_greedy:
            return int(scores.argmax())
        return int(sample_token(scores, self._sampling, len(self.prompt) + len(self.tokens)))

    def append(self, token: int) -> bool:
        """Add the next token and return whether the row is finished; a finished row ignores it.

        NO_TOKEN finishes the row with an error.
        """
        if self.finished:
            return True
        if token == NO_TOKEN:
            self.finished, self.error = True, unusable_scores()
            return True
        if token in self._end_tokens:
            self.finished = True
            return True
        self.tokens.append(token)
        self.finished = len(self.tokens) >= self.max_new_tokens
        if self._detokenizer is not None:
            text = self._detokenizer.push([token])
            self.finished = self.finished or self._detokenizer.stopped
            if text and self._send is not None:
                self._send(text)
        return self.finished

    def finish(self) -> tuple[str, str] | None:
        """Return the whole text and the part that was not sent; None where the text was not decoded."""
        if self._detokenizer is None:
            return None
        rest = self._detokenizer.finish()
        return self._detokenizer.text, rest


def list_end_tokens(model: Any) -> list[int]:
    """Return the ids of the tokens that end a text of a model of transformers."""
    end = model.generation_config.eos_token_id
    return [end] if isinstance(end, int) else list(end or ())


def decode_rows(model: Any, inputs: dict[str, torch.Tensor], rows: Sequence[RowDecoder]) -> None:
    """Generate until all rows are finished, by the ``generate`` of a transformers model.

    ``inputs`` are the padded prompts. All ranks of a sharded model call this at the same time.
    """
    model.generate(
        **inputs,
        max_new_tokens=max(row.max_new_tokens for row in rows),
        do_sample=False,
        repetition_penalty=1.0,  # the rows have their own, which does not count the padding
        pad_token_id=0,
        logits_processor=[_TokenChoice(rows)],
        stopping_criteria=[_RowStops(rows)],
    )


class _TokenChoice(LogitsProcessor):
    """A processor that masks all tokens but the chosen one, for a loop that decodes greedily.

    On several ranks, all take the tokens of rank 0: scores may differ in their last bits, and rows without a
    seed draw one on each rank.
    """

    def __init__(self, rows: Sequence[RowDecoder]) -> None:
        self._rows = rows
        self._all_plain = all(row.is_plain for row in rows)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._all_plain:
            for row, is_usable in zip(self._rows, are_usable(scores).tolist()):
                if not is_usable:
                    row.append(NO_TOKEN)
            return scores
        tokens = torch.tensor([0 if row.finished else row.choose(s) for row, s in zip(self._rows, scores)])
        tokens = tokens.to(scores.device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast(tokens, 0)
        for row, token in zip(self._rows, tokens.tolist()):
            if token == NO_TOKEN:
                row.append(token)
        scores = scores.fill_(float("-inf"))
        return scores.scatter_(1, tokens.clamp_min(0)[:, None], 0.0)


class _RowStops(StoppingCriteria):
    """A criterion that adds each step's tokens to their rows and reports which rows are finished."""

    def __init__(self, rows: Sequence[RowDecoder]) -> None:
        self._rows = rows

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        finished = [row.append(token) for row, token in zip(self._rows, input_ids[:, -1].tolist())]
        return torch.tensor(finished, device=input_ids.device)
