"""The request of the handler ``causal_lm``: a prompt with generation parameters, or one for logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from handlers import json_text
from handlers.builtin.llm_request import PARAMETERS, ParsedRequest, parse_request
from handlers.engines.engine import SamplingParams
from handlers.errors import PredictionException

_DEFAULT_NEW_TOKENS = 64  # for rows without max_new_tokens
_FIELDS = {"prompt", "inputs", "max_tokens", "parameters", *PARAMETERS} - {"adapter"}  # others are ignored


@dataclass(frozen=True)
class BatchRequest:
    """A parsed row; with ``logits``, it requests the scores of the next token instead of a text."""

    tokens: list[int]
    max_new_tokens: int
    logits: bool
    sampling: SamplingParams
    stops: tuple[str, ...]
    stream: bool


def parse_batch_request(row: Any, default: SamplingParams, tokenizer: Any, config: Any) -> BatchRequest:
    """Return the request in a row of a model with this ``config`` and ``tokenizer`` (None without one).

    Raises PredictionException (400) with the invalid value and the valid ones.
    """
    value = _read_body(row)
    if value.get("adapter"):
        raise PredictionException("causal_lm has no adapters: register the model with the handler llm.", 400)
    parsed = parse_request({"body": {key: value[key] for key in value if key in _FIELDS}}, default)
    _check_features(parsed, tokenizer)
    prompt = parsed.prompt
    if isinstance(prompt, str):
        prompt = tokenizer.encode(json_text.check_text(prompt))
    if not prompt or not all(0 <= token < config.vocab_size for token in prompt):
        raise PredictionException(
            f"prompt is a text, or a list of token ids from 0 to {config.vocab_size - 1}.", 400
        )
    invalid = next((t for t, _ in parsed.sampling.logit_bias if t >= config.vocab_size), None)
    if invalid is not None:
        raise PredictionException(
            f"logit_bias: {invalid} is no token of this model: its ids are 0 to {config.vocab_size - 1}.", 400
        )
    max_new_tokens = parsed.max_new_tokens or _DEFAULT_NEW_TOKENS
    max_positions = getattr(config, "max_position_embeddings", None)
    if max_positions is not None and len(prompt) + max_new_tokens > max_positions:
        requested = f"{len(prompt)} tokens of the prompt and max_new_tokens {max_new_tokens}"
        raise PredictionException(
            f"{requested} are more than the {max_positions} positions of this model.", 400
        )
    logits = value.get("logits") is True
    return BatchRequest(prompt, max_new_tokens, logits, parsed.sampling, parsed.stops, parsed.stream)


def _read_body(row: Any) -> Mapping[str, Any]:
    value = row
    if isinstance(row, Mapping):
        value = next((row[name] for name in ("data", "body") if row.get(name) is not None), row)
    try:
        value = json_text.loads(value) if isinstance(value, (bytes, bytearray)) else value
    except ValueError as error:
        raise PredictionException(f"The input is not JSON: {error}", 400) from error
    return value if isinstance(value, Mapping) else {"prompt": value}


def _check_features(parsed: ParsedRequest, tokenizer: Any) -> None:
    """Raise PredictionException for what this handler, or a model without a tokenizer, cannot do."""
    output = parsed.sampling.structured_output
    if output is not None:
        raise PredictionException(
            f"causal_lm does not serve {output.field_name}: register the model with the handler llm.", 400
        )
    if tokenizer is not None:
        return
    if isinstance(parsed.prompt, str):
        raise PredictionException("This model has no tokenizer; send prompt as a list of token ids.", 400)
    for name, value in (("stop", parsed.stops), ("stream", parsed.stream)):
        if value:
            raise PredictionException(
                f"{name} needs the texts of tokens, and this model has no tokenizer: archive it, too.", 400
            )
