"""The built-in handler ``causal_lm``: a Hugging Face language model, whole or sharded over processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from handlers.distributed import placement
from handlers.distributed.degrees import degrees
from handlers.errors import HandlerLoadError, PredictionException
from handlers.explain.unsupported import refuse_explanations

_DEFAULT_NEW_TOKENS = 64  # for rows without max_new_tokens


@dataclass(frozen=True)
class _ScoreRequest:
    """A parsed row; with ``logits``, it requests the scores of the next token instead of a text."""

    tokens: list[int]
    max_new_tokens: int
    logits: bool


class CausalLM:
    """A handler that generates greedily with the archive's Hugging Face folder.

    ``tensor_parallel`` and ``pipeline_parallel`` shard the model, by the ``engine`` of model-config.yaml. An
    unsharded model may be placed on several devices, by ``device_map``.

    A row is JSON, ``{"prompt": a text or a list of token ids, "max_new_tokens": 64}``. Its value is
    ``{"tokens", "text"}``, with the text if the folder has a tokenizer. For ``{"prompt", "logits": true}`` it
    is ``{"logits"}``: the score of each token of the vocabulary as the next token. The rows of a batch run
    together.
    """

    def __init__(self) -> None:
        self.model: Any = None
        self.tokenizer: Any = None
        self._in_pipeline = False

    def initialize(self, context: Any) -> None:
        from transformers import AutoTokenizer

        folder = _find_model_folder(Path(context.system_properties["model_dir"]))
        _, pipeline = degrees(context.model_yaml_config)
        self._in_pipeline = pipeline > 1
        self.model = placement.load(folder, context.system_properties["gpu_id"], context.model_yaml_config)
        if (folder / "tokenizer_config.json").is_file():
            self.tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        end = self.model.generation_config.eos_token_id
        self._end_tokens = [end] if isinstance(end, int) else list(end or ())

    def handle(self, data: list[Any], context: Any) -> list[Any]:
        refuse_explanations("causal_lm", context)
        values: list[Any] = [None] * len(data)
        requests: dict[int, _ScoreRequest] = {}
        for index, row in enumerate(data):
            try:
                requests[index] = self._parse_row(row)
            except PredictionException as error:
                values[index] = error
        for logits, compute in ((True, self._compute_logits), (False, self._generate)):
            indices = [index for index in requests if requests[index].logits is logits]
            if indices:
                with torch.inference_mode():
                    results = compute([requests[index] for index in indices])
                for index, value in zip(indices, results):
                    values[index] = value
        return values

    def _parse_row(self, row: Mapping[str, Any]) -> _ScoreRequest:
        value = row["data"] if row.get("data") is not None else row.get("body")
        try:
            value = json.loads(value) if isinstance(value, (bytes, bytearray)) else value
        except ValueError as error:
            raise PredictionException(f"The input is not JSON: {error}", 400) from error
        if not isinstance(value, Mapping):
            value = {"prompt": value}
        prompt, max_new_tokens = value.get("prompt"), value.get("max_new_tokens", _DEFAULT_NEW_TOKENS)
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise PredictionException(
                    "This model has no tokenizer; send prompt as a list of token ids.", 400
                )
            prompt = self.tokenizer.encode(prompt)
        vocab_size = self.model.config.vocab_size
        if (
            not isinstance(prompt, list)
            or not prompt
            or not all(type(t) is int and 0 <= t < vocab_size for t in prompt)
        ):
            raise PredictionException(
                f"prompt is a text, or a list of token ids from 0 to {vocab_size - 1}.", 400
            )
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            raise PredictionException(
                f"max_new_tokens is {max_new_tokens!r}, and must be a whole number from 1.", 400
            )
        max_positions = getattr(self.model.config, "max_position_embeddings", None)
        if max_positions is not None and len(prompt) + max_new_tokens > max_positions:
            requested = f"{len(prompt)} tokens of the prompt and max_new_tokens {max_new_tokens}"
            raise PredictionException(
                f"{requested} are more than the {max_positions} positions of this model.", 400
            )
        return _ScoreRequest(prompt, max_new_tokens, value.get("logits") is True)

    def _pad(self, requests: list[_ScoreRequest]) -> dict[str, torch.Tensor]:
        """Return the prompts as one tensor, padded on the left, with their mask."""
        length = max(len(request.tokens) for request in requests)
        tokens = torch.tensor([[0] * (length - len(request.tokens)) + request.tokens for request in requests])
        mask = torch.tensor(
            [[0] * (length - len(request.tokens)) + [1] * len(request.tokens) for request in requests]
        )
        device = placement.input_device(self.model)
        return {"input_ids": tokens.to(device), "attention_mask": mask.to(device)}

    def _compute_logits(self, requests: list[_ScoreRequest]) -> list[Any]:
        inputs = self._pad(requests)
        positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        logits = self.model(**inputs, position_ids=positions).logits[:, -1].float()
        return [{"logits": row} for row in logits.tolist()]

    def _generate(self, requests: list[_ScoreRequest]) -> list[Any]:
        if self._in_pipeline:  # there transformers' generate reads the padding of a prompt as a part of it
            values: dict[int, Any] = {}
            for length in sorted({len(request.tokens) for request in requests}):
                indices = [index for index, request in enumerate(requests) if len(request.tokens) == length]
                values |= zip(indices, self._generate_together([requests[index] for index in indices]))
            return [values[index] for index in range(len(requests))]
        return self._generate_together(requests)

    def _generate_together(self, requests: list[_ScoreRequest]) -> list[Any]:
        inputs = self._pad(requests)
        max_new_tokens = max(request.max_new_tokens for request in requests)
        results = self.model.generate(
            **inputs, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0
        )
        rows = results[:, inputs["input_ids"].shape[1] :].tolist()
        return [self._format_tokens(row[: request.max_new_tokens]) for request, row in zip(requests, rows)]

    def _format_tokens(self, tokens: list[int]) -> dict[str, Any]:
        ends = [tokens.index(end) for end in self._end_tokens if end in tokens]
        tokens = tokens[: min(ends)] if ends else tokens
        if self.tokenizer is None:
            return {"tokens": tokens}
        return {"tokens": tokens, "text": self.tokenizer.decode(tokens, skip_special_tokens=True)}


def _find_model_folder(directory: Path) -> Path:
    """Return the folder with the model's config.json: the archive itself, or a folder in it."""
    if (directory / "config.json").is_file():
        return directory
    for config in sorted(directory.glob("*/config.json")):
        return config.parent
    raise HandlerLoadError(f"{directory}: no config.json in it. Pack a Hugging Face folder's files.")
