"""Texts that a model writes."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from handlers import explanations
from handlers.errors import HandlerLoadError, PredictionException
from handlers.explanations import Question
from handlers.tasks.base import COUNT, FLAG, FRACTION, POSITIVE, TEXT, Example, TextTask

_NEW_TOKENS = 64  # where neither the request nor the folder's generation_config.json says
_EXPLAINED = 64  # tokens of what is written whose probability is explained
_AT_ONCE = 8  # rows of an explanation: each has a score for every word of the vocabulary at every token


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
    _ours = ("prefix", "return_full_text", "src_lang", "tgt_lang")  # parameters that are not generate's

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

    def explain(self, model: Any, example: Example, question: Question) -> Any:
        """What had it written: an attribution for each token of the text, for the logarithm of the probability of what
        is written after it.

        That is what the model itself writes, up to 64 tokens and without the one that ends it; or ``target``.
        """
        [group] = self.encode([example])
        group.inputs.to(model.device)
        if question.target is None:
            with torch.inference_mode():
                written = model.generate(**group.inputs, **group.how)[0].tolist()
            tokens = self._written(written, len(self._begun(model, group)), model)
            tokens, why = tokens[:_EXPLAINED], "The model writes nothing after this text; say what as the target."
        else:
            tokens = self._tokens(example, question.target) if isinstance(question.target, str) else []
            why = f"The target {question.target!r:.100} is no text that could be written after the text."
        if not tokens:
            raise PredictionException(why, 400)
        if len(tokens) > _EXPLAINED:
            have = f"The target has {len(tokens)} tokens"
            raise PredictionException(f"{have}, and {_EXPLAINED} are explained at most.", 400)
        found = self._explained(model, group, tokens, question)
        return {"target": self.tokenizer.decode(tokens, skip_special_tokens=True), **found}

    def _written(self, written: list[int], begun: int, model: Any) -> list[int]:
        """Of all that generate gave what is new, to where it ends."""
        ends = model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        new = written[begun:]
        return new[: next((place for place, token in enumerate(new) if token in ends), None)]

    @abstractmethod
    def _begun(self, model: Any, group: Group) -> list[int]:
        """The tokens after which writing begins."""

    @abstractmethod
    def _tokens(self, example: Example, target: str) -> list[int]:
        """What is to be written, as tokens."""

    @abstractmethod
    def _explained(self, model: Any, group: Group, tokens: list[int], question: Question) -> dict[str, Any]: ...

    def _of_tokens(
        self, model: Any, encoded: Any, words: torch.Tensor, tokens: list[int], question: Question, layer: Any = None
    ) -> dict[str, Any]:
        """``explanations.of_encoded`` for the probability of ``tokens``, those that the last places are about."""
        wanted = torch.tensor(tokens, device=model.device)

        def score(output: Any) -> torch.Tensor:
            logits = output.logits[:, -len(tokens) :].float().log_softmax(-1)
            return logits.gather(-1, wanted.expand(len(logits), -1).unsqueeze(-1)).sum((1, 2))

        at_once = question.internal_batch_size or _AT_ONCE
        question = dataclasses.replace(question, target=0, internal_batch_size=at_once)
        fixed = {"use_cache": False} if "use_cache" in self._takes else {}
        if "logits_to_keep" in self._takes:
            fixed["logits_to_keep"] = len(tokens)
        return explanations.of_encoded(model, self.tokenizer, encoded, words, question, score, layer, **fixed)

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

    def inputs(self, value: Any) -> tuple[Any, str | None]:
        if isinstance(value, Mapping) and not value.keys().isdisjoint(("messages", "prompt")):
            cure = "register the same folder with handler=llm to be answered this, in streams and by OpenAI's API"
            raise PredictionException(f'The task text-generation wants a text, or JSON with "inputs"; {cure}.', 400)
        return super().inputs(value)

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

    def _begun(self, model: Any, group: Group) -> list[int]:
        return group.inputs["input_ids"][0].tolist()

    def _tokens(self, example: Example, target: str) -> list[int]:
        """As the tokenizer cuts both texts up together, where that leaves the first one as it is."""
        alone, both = (
            self.tokenizer(text, add_special_tokens=False).input_ids for text in (example.value, example.value + target)
        )
        if both[: len(alone)] == alone:
            return both[len(alone) :]
        return self.tokenizer(target, add_special_tokens=False).input_ids

    def _explained(self, model: Any, group: Group, tokens: list[int], question: Question) -> dict[str, Any]:
        begun = self._begun(model, group)
        whole = [*begun, *tokens]
        if self.limit is not None and len(whole) > self.limit:
            what = f"{len(begun)} tokens, with {len(tokens)} written, are more than the model's {self.limit}"
            raise PredictionException(f"The text is too long to be explained: {what}.", 400)
        ids = torch.tensor([whole[:-1]])  # nothing comes after the last
        words = torch.zeros(ids.shape[1], dtype=torch.bool)
        words[: len(begun)] = self.words(group.inputs)
        encoded = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        found = self._of_tokens(model, encoded, words, tokens, question)
        return {**found, **{name: found[name][: len(begun)] for name in ("tokens", "attributions")}}

    def _text(self, ids: torch.Tensor, group: Group, example: Example) -> str:
        new = self.tokenizer.decode(ids[group.inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return example.value + new if example.parameters.get("return_full_text", True) else new


class Text2TextGeneration(_Generation):
    """``{"generated_text"}``; before every text stands ``prefix``, else config.json's, of the task or of all."""

    auto = "AutoModelForSeq2SeqLM"
    task: ClassVar[str] = "text2text-generation"
    parameters = {**_Generation.parameters, "prefix": TEXT}

    def __init__(self, directory: Path, config: Any, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        super().__init__(directory, config, options, defaults)
        said = json.loads((directory / "config.json").read_bytes())
        self._specific: Mapping[str, Any] = said.get("task_specific_params") or {}
        self._prefix: str = (self._specific.get(self.task) or {}).get("prefix") or said.get("prefix") or ""

    def encode(self, examples: Sequence[Example]) -> list[Group]:
        return super().encode([e._replace(value=self._before(e.parameters) + e.value) for e in examples])

    def _begun(self, model: Any, group: Group) -> list[int]:
        said = model.generation_config
        forced = group.how.get("forced_bos_token_id", said.forced_bos_token_id)
        start = said.bos_token_id if said.decoder_start_token_id is None else said.decoder_start_token_id
        return [start] if forced is None else [start, forced]

    def _tokens(self, example: Example, target: str) -> list[int]:
        return self.tokenizer(text_target=target, add_special_tokens=False).input_ids

    def _explained(self, model: Any, group: Group, tokens: list[int], question: Question) -> dict[str, Any]:
        words, encoder = self.words(group.inputs), model.get_encoder()
        begun = torch.tensor([[*self._begun(model, group), *tokens[:-1]]])
        encoded = {**group.inputs, "decoder_input_ids": begun}
        return self._of_tokens(model, encoded, words, tokens, question, encoder.get_input_embeddings())

    def _before(self, parameters: Mapping[str, Any]) -> str:
        """What stands before a text with these parameters."""
        return parameters.get("prefix", self._prefix)


class Summarization(Text2TextGeneration):
    """``{"summary_text"}``"""

    key = "summary_text"
    task = "summarization"


class Translation(Text2TextGeneration):
    """``{"translation_text"}``. ``src_lang`` and ``tgt_lang`` are for models of several languages: for tokenizers that
    mark texts by them (NLLB's, M2M100's, mBART's), in whose words, and for models that are told by a prefix (T5's), in
    those of config.json's ``task_specific_params``: ``translation_en_to_de``."""

    key = "translation_text"
    task = "translation"
    parameters = {**Text2TextGeneration.parameters, "src_lang": TEXT, "tgt_lang": TEXT}

    def __init__(self, directory: Path, config: Any, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        super().__init__(directory, config, options, defaults)
        self._marks = hasattr(self.tokenizer, "_build_translation_inputs")  # as transformers' own pipeline tells them
        self._pairs = _pairs(self._specific)
        if len(self._pairs) == 1 and not self._prefix:
            [self._prefix] = self._pairs.values()
        try:
            self._check_languages(self.defaults)
        except PredictionException as error:
            raise HandlerLoadError(f"{directory}: parameters in model-config.yaml: {error.message}") from None

    def fit(self, model: Any) -> None:
        super().fit(model)
        self._target_known = getattr(model.generation_config, "forced_bos_token_id", None) is not None

    def read(self, row: Any) -> Example:
        example = super().read(row)
        self._check_languages(example.parameters)
        if not self._marks:
            return example
        for name, known in (("src_lang", self.tokenizer.src_lang), ("tgt_lang", self._target_known)):
            if not known and name not in example.parameters:
                raise PredictionException(f"This model has many languages; say which one with {name}.", 400)
        return example

    def _check_languages(self, parameters: Mapping[str, Any]) -> None:
        if self._pairs and not self._marks:
            self._before(parameters)
            return
        for name in ("src_lang", "tgt_lang"):
            said = parameters.get(name)
            if said is None:
                continue
            if not self._marks:
                raise PredictionException(
                    f"There is no parameter {name!r} here; the model has one pair of languages.", 400
                )
            if self._language(said) is None:
                near = difflib.get_close_matches(said, self.tokenizer.all_special_tokens, 1)
                hint = f"did you mean {near[0]!r}?" if near else "write it as the model's tokenizer does."
                raise PredictionException(f"The {name} {said!r:.100} is no language of this model; {hint}", 400)

    def _before(self, parameters: Mapping[str, Any]) -> str:
        source, target = parameters.get("src_lang"), parameters.get("tgt_lang")
        if self._marks or not self._pairs or "prefix" in parameters or source is target is None:
            return super()._before(parameters)
        fits = [pair for pair in self._pairs if source in (None, pair[0]) and target in (None, pair[1])]
        if len(fits) != 1:
            said = f"src_lang {source!r:.100} and tgt_lang {target!r:.100} are"
            able = ", ".join(f"{one} to {other}" for one, other in self._pairs)
            why = "too little" if fits else "no pair of this model"
            raise PredictionException(f"{said} {why}; it has {able}.", 400)
        return self._pairs[fits[0]]

    def _language(self, code: str) -> int | None:
        """The token that stands for a language."""
        if hasattr(self.tokenizer, "get_lang_id"):
            try:
                return self.tokenizer.get_lang_id(code)
            except KeyError:
                return None
        known = code in self.tokenizer.all_special_tokens
        return self.tokenizer.convert_tokens_to_ids(code) if known else None

    def _group(self, rows: list[int], examples: Sequence[Example]) -> Group:
        if not self._marks:
            return super()._group(rows, examples)
        source, target = (examples[0].parameters.get(name) for name in ("src_lang", "tgt_lang"))
        usual = self.tokenizer.src_lang
        try:
            self.tokenizer.src_lang = source or usual
            group = super()._group(rows, examples)
        finally:
            self.tokenizer.src_lang = usual
        if target is not None:
            group.how["forced_bos_token_id"] = self._language(target)
        return group


def _pairs(specific: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """From which language to which, and the prefix that says so."""
    found = {}
    for task, said in specific.items():
        languages = re.fullmatch(r"translation_(.+)_to_(.+)", task)
        if languages and isinstance(said, Mapping) and isinstance(said.get("prefix"), str):
            found[languages[1], languages[2]] = said["prefix"]
    return found
