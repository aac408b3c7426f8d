"""The built-in handler ``causal_lm``: a Hugging Face language model, whole or sharded over several processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from handlers import placement
from handlers.degrees import degrees
from handlers.errors import HandlerLoadError, PredictionException
from handlers.unexplained import refuse_explanations

_NEW_TOKENS = 64  # where a row does not say


@dataclass(frozen=True)
class _Asked:
    """A row as it was read; ``logits``: the scores of what comes next, and no generation."""

    tokens: list[int]
    max_new_tokens: int
    logits: bool


class CausalLM:
    """Serves the archive's Hugging Face folder, greedily; ``tensor_parallel`` and ``pipeline_parallel`` cut it up.

    ``engine`` in model-config.yaml says by whom. A whole one may lie on several devices, by ``device_map``.

    A row is JSON, ``{"prompt": a text or a list of token ids, "max_new_tokens": 64}``; the answer is
    ``{"tokens", "text"}``, the text where the folder has a tokenizer. ``{"prompt", "logits": true}`` answers
    ``{"logits"}``: a score for each token of the vocabulary, of what comes after the prompt. The rows of a batch
    run together.
    """

    def __init__(self) -> None:
        self.model: Any = None
        self.tokenizer: Any = None
        self._in_pipeline = False

    def initialize(self, context: Any) -> None:
        from transformers import AutoTokenizer

        folder = _folder(Path(context.system_properties["model_dir"]))
        _, pipeline = degrees(context.model_yaml_config)
        self._in_pipeline = pipeline > 1
        self.model = placement.load(folder, context.system_properties["gpu_id"], context.model_yaml_config)
        if (folder / "tokenizer_config.json").is_file():
            self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        end = self.model.generation_config.eos_token_id
        self._end = [end] if isinstance(end, int) else list(end or ())

    def handle(self, data: list[Any], context: Any) -> list[Any]:
        refuse_explanations("causal_lm", context)
        answers: list[Any] = [None] * len(data)
        asked: dict[int, _Asked] = {}
        for index, row in enumerate(data):
            try:
                asked[index] = self._read(row)
            except PredictionException as error:
                answers[index] = error
        for logits, answer in ((True, self._logits), (False, self._generate)):
            places = [index for index in asked if asked[index].logits is logits]
            if places:
                with torch.inference_mode():
                    made = answer([asked[index] for index in places])
                for index, value in zip(places, made):
                    answers[index] = value
        return answers

    def _read(self, row: Mapping[str, Any]) -> _Asked:
        value = row["data"] if row.get("data") is not None else row.get("body")
        try:
            value = json.loads(value) if isinstance(value, (bytes, bytearray)) else value
        except ValueError as error:
            raise PredictionException(f"The input is not JSON: {error}", 400) from error
        if not isinstance(value, Mapping):
            value = {"prompt": value}
        prompt, count = value.get("prompt"), value.get("max_new_tokens", _NEW_TOKENS)
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise PredictionException("This model has no tokenizer; send prompt as a list of token ids.", 400)
            prompt = self.tokenizer.encode(prompt)
        words = self.model.config.vocab_size
        if not isinstance(prompt, list) or not prompt or not all(type(t) is int and 0 <= t < words for t in prompt):
            raise PredictionException(f"prompt is a text, or a list of token ids from 0 to {words - 1}.", 400)
        if type(count) is not int or count < 1:
            raise PredictionException(f"max_new_tokens is {count!r}, and must be a whole number from 1.", 400)
        room = getattr(self.model.config, "max_position_embeddings", None)
        if room is not None and len(prompt) + count > room:
            have = f"{len(prompt)} tokens of the prompt and max_new_tokens {count}"
            raise PredictionException(f"{have} are more than the {room} positions of this model.", 400)
        return _Asked(prompt, count, value.get("logits") is True)

    def _padded(self, asked: list[_Asked]) -> dict[str, torch.Tensor]:
        """The prompts as one tensor, padded at their left."""
        length = max(len(one.tokens) for one in asked)
        tokens = torch.tensor([[0] * (length - len(one.tokens)) + one.tokens for one in asked])
        mask = torch.tensor([[0] * (length - len(one.tokens)) + [1] * len(one.tokens) for one in asked])
        device = placement.entrance(self.model)
        return {"input_ids": tokens.to(device), "attention_mask": mask.to(device)}

    def _logits(self, asked: list[_Asked]) -> list[Any]:
        inputs = self._padded(asked)
        positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        logits = self.model(**inputs, position_ids=positions).logits[:, -1].float()
        return [{"logits": row} for row in logits.tolist()]

    def _generate(self, asked: list[_Asked]) -> list[Any]:
        if self._in_pipeline:  # there transformers' generate reads the padding of a prompt as a part of it
            answers: dict[int, Any] = {}
            for length in sorted({len(one.tokens) for one in asked}):
                places = [index for index, one in enumerate(asked) if len(one.tokens) == length]
                answers |= zip(places, self._generate_together([asked[index] for index in places]))
            return [answers[index] for index in range(len(asked))]
        return self._generate_together(asked)

    def _generate_together(self, asked: list[_Asked]) -> list[Any]:
        inputs = self._padded(asked)
        count = max(one.max_new_tokens for one in asked)
        made = self.model.generate(**inputs, max_new_tokens=count, do_sample=False, pad_token_id=0)
        rows = made[:, inputs["input_ids"].shape[1] :].tolist()
        return [self._answer(row[: one.max_new_tokens]) for one, row in zip(asked, rows)]

    def _answer(self, tokens: list[int]) -> dict[str, Any]:
        ends = [tokens.index(end) for end in self._end if end in tokens]
        tokens = tokens[: min(ends)] if ends else tokens
        if self.tokenizer is None:
            return {"tokens": tokens}
        return {"tokens": tokens, "text": self.tokenizer.decode(tokens, skip_special_tokens=True)}


def _folder(directory: Path) -> Path:
    """The folder with the model's config.json: the archive itself, or the one in it that has it."""
    if (directory / "config.json").is_file():
        return directory
    for config in sorted(directory.glob("*/config.json")):
        return config.parent
    raise HandlerLoadError(f"{directory}: no config.json in it. Pack a Hugging Face folder's files.")
