"""Structured output: the tokens that a JSON Schema, a regular expression or a list of texts allows next.

The library llguidance compiles the format and computes a mask over the vocabulary before each token.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from handlers import extras
from handlers.engines.engine import StructuredOutput
from handlers.errors import PredictionException

_MAX_LENGTH = 120_000  # characters of a schema, as in OpenAI's API
_MAX_CACHED_GRAMMARS = 64
_JSON_OBJECT = '{"type": "object"}'
# Without a bound, a small model may generate white space until it reaches max_tokens.
_JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \n\r\t]{0,20}"}


class GrammarCompiler:
    """A compiler of structured outputs for the tokenizer in ``folder``.

    It keeps the compiled grammars that were used last. ``vocab_size`` is the number of the model's logits.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self.limits: dict[str, int] = {}  # of llguidance's LLParserLimits, where they are not its defaults
        self._folder = folder
        self._vocab_size = vocab_size
        self._lock = threading.Lock()  # so that only one thread converts the tokenizer
        self._tokenizers: dict[tuple[int, ...], Any] = {}
        self._compiled = functools.lru_cache(_MAX_CACHED_GRAMMARS)(self._compile)

    def compile(self, output: StructuredOutput, end_tokens: Iterable[int]) -> Any:
        """Return a new LLMatcher; after the complete text, it allows ``end_tokens`` only.

        Raises PredictionException 400, which names the field, for a format that cannot be compiled, and where
        llguidance is missing or does not support the tokenizer.
        """
        tokens = tuple(sorted(token for token in end_tokens if 0 <= token < self._vocab_size))
        return self._compiled(output, tokens).deep_copy()

    def _compile(self, output: StructuredOutput, end_tokens: tuple[int, ...]) -> Any:
        if len(output.value) > _MAX_LENGTH:
            raise invalid_output(
                output, f"it has {len(output.value)} characters, and may have {_MAX_LENGTH}."
            )
        if not end_tokens:
            raise invalid_output(output, "this model has no end token, so a complete text could not end.")
        with self._lock:
            if (tokenizer := self._tokenizers.get(end_tokens)) is None:
                tokenizer = self._tokenizers[end_tokens] = self._convert_tokenizer(output, end_tokens)
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False, **self.limits)
        matcher = LLMatcher(tokenizer, _to_grammar(output), log_level=0, limits=limits)
        matcher.compute_bitmask()  # some formats exceed llguidance's limits here only
        if matcher.is_error():
            raise invalid_output(output, matcher.get_error())
        return matcher

    def _convert_tokenizer(self, output: StructuredOutput, end_tokens: tuple[int, ...]) -> Any:
        from transformers import AutoTokenizer

        try:
            from llguidance import hf
        except ImportError:
            hint = extras.install_command("llguidance")
            raise invalid_output(
                output, f"structured output needs llguidance where the model runs: {hint}."
            ) from None
        tokenizer = AutoTokenizer.from_pretrained(
            self._folder, local_files_only=True, trust_remote_code=False
        )
        try:
            return hf.from_tokenizer(tokenizer, self._vocab_size, list(end_tokens))
        except ValueError as error:
            reason = f"this model's tokenizer does not support structured output: {error}"
            raise invalid_output(output, reason) from None


def allowed_tokens(matcher: Any, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Return a mask of ``vocab_size`` booleans: the tokens that may come next."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return torch.from_numpy(np.unpackbits(bits, count=vocab_size, bitorder="little")).to(device).bool()


def _to_grammar(output: StructuredOutput) -> str:
    from llguidance import LLMatcher, grammar_from

    if output.kind in ("json", "json_object"):
        return LLMatcher.grammar_from_json_schema(output.value or _JSON_OBJECT, overrides=_JSON_OPTIONS)
    return grammar_from(output.kind, output.value)


def invalid_output(output: StructuredOutput, reason: str) -> PredictionException:
    """Return the error of a format that cannot be generated."""
    return PredictionException(f"{output.field_name}: {reason}", 400)
