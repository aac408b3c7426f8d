"""Texts that a model writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from handlers.errors import PredictionException
from handlers.tasks.base import COUNT, FLAG, FRACTION, POSITIVE, TEXT, Example, TextTask

_NEW_TOKENS = 64  # where neither the request nor the folder's generation_config.json says


class Group(NamedTuple):
    """The rows of a batch that ask for the same way of writing: they are written together."""

    rows: list[int]
    inputs: Any
    how: dict[str, Any]


class _Generation(TextTask):
    """``generate`` takes one set of options a call, so rows with the same parameters share one."""

    key: ClassVar[str] = "generated_text"
    parameters = {
        "max_new_tokens": COUNT,
        "min_new_tokens": COUNT,
        "do_sample": FLAG,
        "temperature": POSITIVE,
        "top_k": COUNT,
        "top_p": FRACTION,
        "num_beams": COUNT,
        "repetition_penalty": POSITIVE,
        "no_repeat_ngram_size": COUNT,
    }
    _ours = ("prefix", "return_full_text")  # parameters that are not generate's

    def fit(self, model: Any) -> None:
        super().fit(model)
        self._takes |= {"attention_mask"}
        said = model.generation_config
        self._usual = said.max_new_tokens or (None if said.max_length else _NEW_TOKENS)
        if said.pad_token_id is None:
            said.pad_token_id = self.tokenizer.pad_token_id

    def encode(self, examples: Sequence[Example]) -> list[Group]:
        groups: dict[str, list[int]] = {}
        for row, example in enumerate(examples):
            groups.setdefault(json.dumps(example.parameters, sort_keys=True), []).append(row)
        return [self._group(rows, [examples[row] for row in rows]) for rows in groups.values()]

    def _group(self, rows: list[int], examples: Sequence[Example]) -> Group:
        how = {name: value for name, value in examples[0].parameters.items() if name not in self._ours}
        if self._usual is not None:
            how.setdefault("max_new_tokens", self._usual)
        return Group(rows, super().encode(examples), how)

    def forward(self, model: Any, encoded: list[Group], device: Any) -> list[torch.Tensor]:
        return [model.generate(**group.inputs.to(device), **group.how) for group in encoded]

    def answers(self, output: list[torch.Tensor], encoded: list[Group], examples: Sequence[Example]) -> list[Any]:
        answers: list[Any] = [None] * len(examples)
        for group, written in zip(encoded, output):
            for row, ids in zip(group.rows, written.cpu()):
                answers[row] = {self.key: self._text(ids, group, examples[row])}
        return answers

    def _text(self, ids: torch.Tensor, group: Group, example: Example) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


class TextGeneration(_Generation):
    """``{"generated_text"}``: the text and what follows it, or with ``return_full_text: false`` that alone."""

    auto = "AutoModelForCausalLM"
    parameters = {**_Generation.parameters, "return_full_text": FLAG}

    def __init__(self, directory: Path, config: Any, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        super().__init__(directory, config, options, defaults)
        self.tokenizer.padding_side = "left"  # what is written must follow what was said

    def read(self, row: Any) -> Example:
        example = super().read(row)
        length = len(self.tokenizer(example.value).input_ids)
        wanted = example.parameters.get("max_new_tokens", 1)
        if not length:
            raise PredictionException("There is nothing to go on from: the text is empty.", 400)
        if self.limit is not None and length + wanted > self.limit:
            what = f"{length} tokens, with {wanted} to write, are more than the model's {self.limit}"
            raise PredictionException(f"The text is too long: {what}.", 400)
        return example

    def _text(self, ids: torch.Tensor, group: Group, example: Example) -> str:
        new = self.tokenizer.decode(ids[group.inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return example.value + new if example.parameters.get("return_full_text", True) else new


class Text2TextGeneration(_Generation):
    """``{"generated_text"}``; before every text stands ``prefix``, else what config.json has for the task."""

    auto = "AutoModelForSeq2SeqLM"
    task: ClassVar[str] = "text2text-generation"
    parameters = {**_Generation.parameters, "prefix": TEXT}

    def __init__(self, directory: Path, config: Any, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        super().__init__(directory, config, options, defaults)
        said = json.loads((directory / "config.json").read_bytes()).get("task_specific_params") or {}
        self._prefix = (said.get(self.task) or {}).get("prefix") or ""

    def encode(self, examples: Sequence[Example]) -> list[Group]:
        prefixes = [example.parameters.get("prefix", self._prefix) for example in examples]
        return super().encode([e._replace(value=prefix + e.value) for e, prefix in zip(examples, prefixes)])


class Summarization(Text2TextGeneration):
    """``{"summary_text"}``"""

    key = "summary_text"
    task = "summarization"


class Translation(Text2TextGeneration):
    """``{"translation_text"}``"""

    key = "translation_text"
    task = "translation"
