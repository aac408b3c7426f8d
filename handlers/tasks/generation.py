"""Text generation: continuation, summarization and translation."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from handlers.errors import HandlerLoadError, PredictionException
from handlers.explain import attributions
from handlers.explain.attributions import ExplanationOptions
from handlers.tasks.base import COUNT, FLAG, FRACTION, TEXT, TaskInput, TextTask, count_to, number_between

_DEFAULT_NEW_TOKENS = 64  # without a number in the request and in generation_config.json
_MAX_BEAM_TOKENS = 65_536  # new tokens times beams of a row: each has keys and values in memory
_MAX_EXPLAINED_TOKENS = 64  # of the generated text
_EXPLANATION_BATCH_SIZE = 8  # each row has a score for every token of the vocabulary at every position


class GenerationGroup(NamedTuple):
    """The rows of a batch with the same generation options, which run in one ``generate`` call."""

    rows: list[int]
    inputs: Any
    options: dict[str, Any]


class _CallersLeft:
    """A stopping criterion of transformers that ends all rows once their callers have left."""

    def __init__(self, is_cancelled: Callable[[], bool]) -> None:
        self._is_cancelled = is_cancelled

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self._is_cancelled(), device=input_ids.device)


class _GenerationTask(TextTask):
    """A task that calls ``generate`` once per set of parameters, as a call has one set of options."""

    answer_key: ClassVar[str] = "generated_text"
    parameters = {
        "max_new_tokens": COUNT,
        "min_new_tokens": COUNT,
        "do_sample": FLAG,
        "temperature": number_between(0.00001, 100),  # scores divided by less may overflow
        "top_k": COUNT,
        "top_p": FRACTION,
        "num_beams": count_to(64),
        "repetition_penalty": number_between(0.01, 100),
        "no_repeat_ngram_size": COUNT,
    }
    _own_parameters = ("prefix", "return_full_text", "src_lang", "tgt_lang")  # not options of generate

    def prepare(self, model: Any) -> None:
        super().prepare(model)
        self._forward_arguments |= {"attention_mask"}
        config = model.generation_config
        default = None if config.max_length else _DEFAULT_NEW_TOKENS
        self._default_new_tokens = config.max_new_tokens or default
        if config.pad_token_id is None:
            config.pad_token_id = self.tokenizer.pad_token_id

    def parse(self, row: Any) -> TaskInput:
        example = super().parse(row)
        default = self._default_new_tokens or 1
        tokens = example.parameters.get("max_new_tokens", default) * example.parameters.get("num_beams", 1)
        limit = max(_MAX_BEAM_TOKENS, default)
        if tokens > limit:
            raise PredictionException(
                f"max_new_tokens times num_beams is {tokens}, and at most {limit}.", 400
            )
        return example

    def encode(self, examples: Sequence[TaskInput]) -> list[GenerationGroup]:
        groups: dict[str, list[int]] = {}
        for row, example in enumerate(examples):
            groups.setdefault(json.dumps(example.parameters, sort_keys=True), []).append(row)
        return [self._group(rows, [examples[row] for row in rows]) for rows in groups.values()]

    def _group(self, rows: list[int], examples: Sequence[TaskInput]) -> GenerationGroup:
        options = {
            name: value for name, value in examples[0].parameters.items() if name not in self._own_parameters
        }
        if self._default_new_tokens is not None:
            options.setdefault("max_new_tokens", self._default_new_tokens)
        return GenerationGroup(rows, super().encode(examples), options)

    def forward(self, model: Any, encoded: list[GenerationGroup], device: Any) -> list[torch.Tensor]:
        stops = [_CallersLeft(self.is_cancelled)]
        return [
            model.generate(**group.inputs.to(device), **group.options, stopping_criteria=stops)
            for group in encoded
        ]

    def explain(self, model: Any, example: TaskInput, options: ExplanationOptions) -> Any:
        """Return the attribution of each token of the text to the log-probability of a continuation.

        The continuation is ``target``, or the model's own: up to 64 tokens, without the end token.
        """
        [group] = self.encode([example])
        group.inputs.to(model.device)
        if options.target is None:
            with torch.inference_mode():
                generated = model.generate(**group.inputs, **group.options)[0].tolist()
            tokens = self._new_tokens(generated, len(self._prompt_tokens(model, group)), model)
            tokens = tokens[:_MAX_EXPLAINED_TOKENS]
            message = "The model generates nothing after this text; send a continuation as the target."
        else:
            is_text = isinstance(options.target, str)
            tokens = self._target_tokens(example, options.target) if is_text else []
            message = f"The target {options.target!r:.100} is no text that could be written after the text."
        if not tokens:
            raise PredictionException(message, 400)
        if len(tokens) > _MAX_EXPLAINED_TOKENS:
            reason = f"The target has {len(tokens)} tokens"
            raise PredictionException(f"{reason}, and {_MAX_EXPLAINED_TOKENS} are explained at most.", 400)
        explanation = self._explain_tokens(model, group, tokens, options)
        return {"target": self.tokenizer.decode(tokens, skip_special_tokens=True), **explanation}

    def _new_tokens(self, generated: list[int], prompt_length: int, model: Any) -> list[int]:
        """Return the tokens behind the prompt, up to the end token."""
        ends = model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        new = generated[prompt_length:]
        return new[: next((index for index, token in enumerate(new) if token in ends), None)]

    @abstractmethod
    def _prompt_tokens(self, model: Any, group: GenerationGroup) -> list[int]:
        """Return the tokens that precede the generated ones."""

    @abstractmethod
    def _target_tokens(self, example: TaskInput, target: str) -> list[int]:
        """Tokenize the text to explain."""

    @abstractmethod
    def _explain_tokens(
        self, model: Any, group: GenerationGroup, tokens: list[int], options: ExplanationOptions
    ) -> dict[str, Any]: ...

    def _attribute(
        self,
        model: Any,
        encoded: Any,
        text_mask: torch.Tensor,
        tokens: list[int],
        options: ExplanationOptions,
        layer: Any = None,
    ) -> dict[str, Any]:
        """Call ``attribute_encoded`` for the probability of ``tokens``, which the last positions predict."""
        target = torch.tensor(tokens, device=model.device)

        def score(output: Any) -> torch.Tensor:
            logits = output.logits[:, -len(tokens) :].float().log_softmax(-1)
            return logits.gather(-1, target.expand(len(logits), -1).unsqueeze(-1)).sum((1, 2))

        batch_size = options.internal_batch_size or _EXPLANATION_BATCH_SIZE
        options = dataclasses.replace(options, target=0, internal_batch_size=batch_size)
        fixed: dict[str, Any] = {"use_cache": False} if "use_cache" in self._forward_arguments else {}
        if "logits_to_keep" in self._forward_arguments:
            fixed["logits_to_keep"] = len(tokens)
        return attributions.attribute_encoded(
            model, self.tokenizer, encoded, text_mask, options, score, layer, **fixed
        )

    def postprocess(
        self, output: list[torch.Tensor], encoded: list[GenerationGroup], examples: Sequence[TaskInput]
    ) -> list[Any]:
        answers: list[Any] = [None] * len(examples)
        for group, generated in zip(encoded, output):
            for row, ids in zip(group.rows, generated.cpu()):
                answers[row] = {self.answer_key: self._decode_answer(ids, group, examples[row])}
        return answers

    def _decode_answer(self, ids: torch.Tensor, group: GenerationGroup, example: TaskInput) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


class TextGeneration(_GenerationTask):
    """A task that answers ``{"generated_text"}``: the text and its continuation.

    With ``return_full_text: false`` the answer is the continuation only.
    """

    auto_class = "AutoModelForCausalLM"
    parameters = {**_GenerationTask.parameters, "return_full_text": FLAG}

    def __init__(
        self, directory: Path, config: Any, options: Mapping[str, Any], defaults: Mapping[str, Any]
    ) -> None:
        super().__init__(directory, config, options, defaults)
        self.tokenizer.padding_side = "left"  # the generated tokens must follow the text

    def parse_inputs(self, value: Any) -> tuple[Any, str | None]:
        if isinstance(value, Mapping) and not value.keys().isdisjoint(("messages", "prompt")):
            cure = (
                "register the same folder with handler=llm to be answered this, in streams and by OpenAI's "
                "API"
            )
            raise PredictionException(
                f'The task text-generation wants a text, or JSON with "inputs"; {cure}.', 400
            )
        return super().parse_inputs(value)

    def parse(self, row: Any) -> TaskInput:
        example = super().parse(row)
        length = len(self.tokenizer(example.value).input_ids)
        new_tokens = example.parameters.get("max_new_tokens", 1)
        if not length:
            raise PredictionException("There is nothing to go on from: the text is empty.", 400)
        if self.max_length is not None and length + new_tokens > self.max_length:
            reason = (
                f"{length} tokens, with {new_tokens} to write, are more than the model's {self.max_length}"
            )
            raise PredictionException(f"The text is too long: {reason}.", 400)
        return example

    def _prompt_tokens(self, model: Any, group: GenerationGroup) -> list[int]:
        return group.inputs["input_ids"][0].tolist()

    def _target_tokens(self, example: TaskInput, target: str) -> list[int]:
        """Tokenize the concatenated texts; separately where the first one's tokens would change."""
        first, both = (
            self.tokenizer(text, add_special_tokens=False).input_ids
            for text in (example.value, example.value + target)
        )
        if both[: len(first)] == first:
            return both[len(first) :]
        return self.tokenizer(target, add_special_tokens=False).input_ids

    def _explain_tokens(
        self, model: Any, group: GenerationGroup, tokens: list[int], options: ExplanationOptions
    ) -> dict[str, Any]:
        prompt = self._prompt_tokens(model, group)
        sequence = [*prompt, *tokens]
        if self.max_length is not None and len(sequence) > self.max_length:
            reason = (
                f"{len(prompt)} tokens, with {len(tokens)} written, are more than the model's "
                f"{self.max_length}"
            )
            raise PredictionException(f"The text is too long to be explained: {reason}.", 400)
        ids = torch.tensor([sequence[:-1]])  # the last token predicts none of the target
        text_mask = torch.zeros(ids.shape[1], dtype=torch.bool)
        text_mask[: len(prompt)] = self.text_mask(group.inputs)
        encoded = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        explanation = self._attribute(model, encoded, text_mask, tokens, options)
        of_prompt = {name: explanation[name][: len(prompt)] for name in ("tokens", "attributions")}
        return {**explanation, **of_prompt}

    def _decode_answer(self, ids: torch.Tensor, group: GenerationGroup, example: TaskInput) -> str:
        new = self.tokenizer.decode(ids[group.inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return example.value + new if example.parameters.get("return_full_text", True) else new


class Text2TextGeneration(_GenerationTask):
    """A task that answers ``{"generated_text"}``.

    Each text is preceded by ``prefix``; its default is the task's or the model's prefix of config.json.
    """

    auto_class = "AutoModelForSeq2SeqLM"
    task: ClassVar[str] = "text2text-generation"
    parameters = {**_GenerationTask.parameters, "prefix": TEXT}

    def __init__(
        self, directory: Path, config: Any, options: Mapping[str, Any], defaults: Mapping[str, Any]
    ) -> None:
        super().__init__(directory, config, options, defaults)
        document = json.loads((directory / "config.json").read_bytes())
        self._task_params: Mapping[str, Any] = document.get("task_specific_params") or {}
        task_params = self._task_params.get(self.task) or {}
        self._prefix: str = task_params.get("prefix") or document.get("prefix") or ""

    def encode(self, examples: Sequence[TaskInput]) -> list[GenerationGroup]:
        return super().encode(
            [e._replace(value=self._select_prefix(e.parameters) + e.value) for e in examples]
        )

    def _prompt_tokens(self, model: Any, group: GenerationGroup) -> list[int]:
        config = model.generation_config
        forced = group.options.get("forced_bos_token_id", config.forced_bos_token_id)
        start = (
            config.bos_token_id if config.decoder_start_token_id is None else config.decoder_start_token_id
        )
        return [start] if forced is None else [start, forced]

    def _target_tokens(self, example: TaskInput, target: str) -> list[int]:
        return self.tokenizer(text_target=target, add_special_tokens=False).input_ids

    def _explain_tokens(
        self, model: Any, group: GenerationGroup, tokens: list[int], options: ExplanationOptions
    ) -> dict[str, Any]:
        text_mask, embedding = self.text_mask(group.inputs), model.get_encoder().get_input_embeddings()
        decoder_ids = torch.tensor([[*self._prompt_tokens(model, group), *tokens[:-1]]])
        encoded = {**group.inputs, "decoder_input_ids": decoder_ids}
        return self._attribute(model, encoded, text_mask, tokens, options, embedding)

    def _select_prefix(self, parameters: Mapping[str, Any]) -> str:
        """Return the prefix of a text with these parameters."""
        return parameters.get("prefix", self._prefix)


class Summarization(Text2TextGeneration):
    """A task that answers ``{"summary_text"}``."""

    answer_key = "summary_text"
    task = "summarization"


class Translation(Text2TextGeneration):
    """A task that answers ``{"translation_text"}``.

    ``src_lang`` and ``tgt_lang`` select the languages of a multilingual model. Some tokenizers mark texts
    with their own language codes (NLLB, M2M100, mBART). Other models read a prefix (T5), whose languages are
    those of config.json's ``task_specific_params``: ``translation_en_to_de``.
    """

    answer_key = "translation_text"
    task = "translation"
    parameters = {**Text2TextGeneration.parameters, "src_lang": TEXT, "tgt_lang": TEXT}

    def __init__(
        self, directory: Path, config: Any, options: Mapping[str, Any], defaults: Mapping[str, Any]
    ) -> None:
        super().__init__(directory, config, options, defaults)
        # The same test as in transformers' pipeline.
        self._has_language_codes = hasattr(self.tokenizer, "_build_translation_inputs")
        self._pairs = _language_pairs(self._task_params)
        if len(self._pairs) == 1 and not self._prefix:
            [self._prefix] = self._pairs.values()
        try:
            self._check_languages(self.defaults)
        except PredictionException as error:
            raise HandlerLoadError(f"{directory}: parameters in model-config.yaml: {error.message}") from None

    def prepare(self, model: Any) -> None:
        super().prepare(model)
        self._has_default_target = getattr(model.generation_config, "forced_bos_token_id", None) is not None

    def parse(self, row: Any) -> TaskInput:
        example = super().parse(row)
        self._check_languages(example.parameters)
        if not self._has_language_codes:
            return example
        for name, default in (
            ("src_lang", self.tokenizer.src_lang),
            ("tgt_lang", self._has_default_target),
        ):
            if not default and name not in example.parameters:
                raise PredictionException(f"This model has many languages; select one with {name}.", 400)
        return example

    def _check_languages(self, parameters: Mapping[str, Any]) -> None:
        if self._pairs and not self._has_language_codes:
            self._select_prefix(parameters)
            return
        for name in ("src_lang", "tgt_lang"):
            code = parameters.get(name)
            if code is None:
                continue
            if not self._has_language_codes:
                raise PredictionException(
                    f"There is no parameter {name!r} here; the model has one pair of languages.", 400
                )
            if self._language_token(code) is None:
                matches = difflib.get_close_matches(code, self.tokenizer.all_special_tokens, 1)
                hint = (
                    f"did you mean {matches[0]!r}?" if matches else "write it as the model's tokenizer does."
                )
                raise PredictionException(
                    f"The {name} {code!r:.100} is no language of this model; {hint}", 400
                )

    def _select_prefix(self, parameters: Mapping[str, Any]) -> str:
        source, target = parameters.get("src_lang"), parameters.get("tgt_lang")
        if self._has_language_codes or not self._pairs or "prefix" in parameters or source is target is None:
            return super()._select_prefix(parameters)
        matches = [pair for pair in self._pairs if source in (None, pair[0]) and target in (None, pair[1])]
        if len(matches) != 1:
            languages = f"src_lang {source!r:.100} and tgt_lang {target!r:.100} are"
            available = ", ".join(f"{first} to {second}" for first, second in self._pairs)
            reason = "too little" if matches else "no pair of this model"
            raise PredictionException(f"{languages} {reason}; it has {available}.", 400)
        return self._pairs[matches[0]]

    def _language_token(self, code: str) -> int | None:
        """Return the token of a language; None for an unknown one."""
        if hasattr(self.tokenizer, "get_lang_id"):
            try:
                return self.tokenizer.get_lang_id(code)
            except KeyError:
                return None
        is_known = code in self.tokenizer.all_special_tokens
        return self.tokenizer.convert_tokens_to_ids(code) if is_known else None

    def _group(self, rows: list[int], examples: Sequence[TaskInput]) -> GenerationGroup:
        if not self._has_language_codes:
            return super()._group(rows, examples)
        source, target = (examples[0].parameters.get(name) for name in ("src_lang", "tgt_lang"))
        default = self.tokenizer.src_lang
        try:
            self.tokenizer.src_lang = source or default
            group = super()._group(rows, examples)
        finally:
            self.tokenizer.src_lang = default
        if target is not None:
            group.options["forced_bos_token_id"] = self._language_token(target)
        return group


def _language_pairs(task_params: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """Return the prefix of each pair of languages."""
    prefixes = {}
    for task, params in task_params.items():
        languages = re.fullmatch(r"translation_(.+)_to_(.+)", task)
        if languages and isinstance(params, Mapping) and isinstance(params.get("prefix"), str):
            prefixes[languages[1], languages[2]] = params["prefix"]
    return prefixes
