"""The base class of encoders' tasks, whose requests select an output, truncation, and the tokenizer alone."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from handlers.errors import HandlerLoadError, PredictionException
from handlers.tasks.base import FLAG, TEXT, TaskInput, TaskParameter, TextTask, join_names, one_of

TOKEN_IDS, TEXT_OF_IDS = "token_ids", "text"  # outputs of the tokenizer, which need no model
_TOKENIZER_OUTPUTS = (TOKEN_IDS, TEXT_OF_IDS)
_MAX_LISTED = 2**17  # characters, each of which may be a token that takes 700 bytes
_OUTPUT = TaskParameter("the name of an output, or a list of names, of which the first known counts", bool)


class EncoderTask(TextTask):
    """A task whose ``output_value`` selects one of ``outputs``.

    A text may be a list of token ids, which are decoded. ``truncate: false`` refuses a text beyond the
    model's limit with 413. ``prompt_name`` selects the prompt of config_sentence_transformers.json that
    precedes the text. The output ``token_ids`` is the tokens of a text, ``text`` the text of token ids.
    """

    model_outputs: ClassVar[tuple[str, ...]]  # the first is the default
    applies_default_prompt: ClassVar[bool] = False
    parameters = {
        "output_value": _OUTPUT,
        "tokens": FLAG,
        "truncate": FLAG,
        "truncation_direction": one_of("left", "right"),
        "prompt_name": TEXT,
        "add_special_tokens": FLAG,
        "skip_special_tokens": FLAG,
    }

    def __init__(
        self, directory: Path, config: Any, options: Mapping[str, Any], defaults: Mapping[str, Any]
    ) -> None:
        super().__init__(directory, config, options, defaults)
        self._prompts, default = _read_prompts(directory)
        self._default_prompt = default if self.applies_default_prompt else None

    @cached_property
    def _left_tokenizer(self) -> Any:
        tokenizer = copy.deepcopy(self.tokenizer)
        tokenizer.truncation_side = "left"
        return tokenizer

    @property
    def outputs(self) -> tuple[str, ...]:
        return (*self.model_outputs, *_TOKENIZER_OUTPUTS)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "outputs": list(self.outputs), "max_length": self.max_length}

    def get_output(self, example: TaskInput) -> str:
        """Return the output that a request has selected."""
        name: str = example.parameters.get("output_value", self.model_outputs[0])
        return name

    def needs_model(self, example: TaskInput) -> bool:
        return self.get_output(example) not in _TOKENIZER_OUTPUTS

    def answer_without_model(self, example: TaskInput) -> Any:
        if self.get_output(example) == TOKEN_IDS:
            return self._list_tokens(example.value, example.parameters.get("add_special_tokens", True))
        return self._decode(example.value, example.parameters.get("skip_special_tokens", True))

    def parse_value(self, value: Any, parameters: Mapping[str, Any]) -> tuple[Any, str | None]:
        output = parameters.get("output_value")
        if output == TEXT_OF_IDS:
            if not _is_token_ids(value):
                raise PredictionException("The inputs are token ids, a list of whole numbers.", 400)
            return value, None
        text, pair = super().parse_value(value, parameters)
        text = self._find_prompt(parameters.get("prompt_name")) + text
        if output == TOKEN_IDS:
            if pair is not None:
                raise PredictionException("token_ids is the output of one text, without text_pair.", 400)
            if len(text) > _MAX_LISTED:
                raise PredictionException(
                    f"The text has {len(text)} characters, and the tokens of at most {_MAX_LISTED} are "
                    "listed: send it in parts.",
                    413,
                )
        elif parameters.get("truncate") is False:
            self._check_length(text, pair, self.get_limit(parameters))
        return text, pair

    def parse_inputs(self, value: Any) -> tuple[Any, str | None]:
        return super().parse_inputs(self._decode(value, True) if _is_token_ids(value) else value)

    def encode(self, examples: Sequence[TaskInput]) -> Any:
        choices = [
            (example.parameters.get("truncation_direction") == "left", self.get_limit(example.parameters))
            for example in examples
        ]
        if choices == [(False, self.max_length)] * len(choices):
            return super().encode(examples)
        texts, pairs = [example.value for example in examples], [example.pair for example in examples]
        if len(set(choices)) == 1 and not any(pairs):
            encoded = self._truncate(texts, None, *choices[0], padding=True, return_tensors="pt")
        else:
            rows = [self._truncate(*row) for row in zip(texts, pairs, *zip(*choices))]
            encoded = self.tokenizer.pad(rows, padding=True, return_tensors="pt")
        return self.drop_unsupported(encoded)

    def _truncate(self, texts: Any, pairs: Any, from_left: bool, limit: int | None, **options: Any) -> Any:
        tokenizer = self._left_tokenizer if from_left else self.tokenizer
        return tokenizer(texts, pairs, truncation=limit is not None, max_length=limit, **options)

    def get_limit(self, parameters: Mapping[str, Any]) -> int | None:
        """Return the maximum number of tokens of a request's text."""
        return self.max_length

    def _find_prompt(self, name: str | None) -> str:
        """Return the text of a prompt, or of the default one."""
        if name is None:
            return self._prompts[self._default_prompt] if self._default_prompt else ""
        if name not in self._prompts:
            raise PredictionException(
                f"There is no prompt {name!r:.100}; this model has {join_names(self._prompts)}.", 400
            )
        return self._prompts[name]

    def _check_length(self, text: str, pair: str | None, limit: int | None) -> None:
        count = len(self.tokenizer(text, pair, verbose=False)["input_ids"])
        if limit is not None and count > limit:
            raise PredictionException(
                f"The text has {count} tokens, and the model reads {limit}: shorten it, or send "
                '"truncate": true.',
                413,
            )

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        size = len(self.tokenizer)
        if invalid := [id for id in ids if not 0 <= id < size]:
            raise PredictionException(
                f"There is no token {invalid[0]}: this model's ids are from 0 to {size - 1}. Send the text "
                "where the ids are of another tokenizer.",
                400,
            )
        text: str = self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def _list_tokens(self, text: str, add_special_tokens: bool) -> list[dict[str, Any]]:
        """Return the tokens of a text; ``start`` and ``stop`` are characters, None of special tokens."""
        is_fast = self.tokenizer.is_fast
        encoded = self.tokenizer(
            text,
            add_special_tokens=add_special_tokens,
            return_offsets_mapping=is_fast,
            return_special_tokens_mask=True,
            verbose=False,
        )
        ids, specials = encoded["input_ids"], encoded["special_tokens_mask"]
        offsets = encoded["offset_mapping"] if is_fast else [None] * len(ids)
        tokens = []
        for id, name, is_special, offset in zip(
            ids, self.tokenizer.convert_ids_to_tokens(ids), specials, offsets
        ):
            start, stop = (None, None) if is_special or offset is None else offset
            part = name if start is None else text[start:stop]
            tokens.append({"id": id, "text": part, "special": bool(is_special), "start": start, "stop": stop})
        return tokens


def with_count(answer: Any, example: TaskInput, mask: Any) -> Any:
    """Return the answer to an example, with the number of its tokens if requested."""
    return {"embedding": answer, "tokens": int(mask.sum())} if example.parameters.get("tokens") else answer


def read_json(file: Path, missing: Any = None) -> Any:
    """Return the document of a file, ``missing`` or ``{}`` where there is none. Raises HandlerLoadError."""
    try:
        document = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {} if missing is None else missing
    except (ValueError, RecursionError) as error:
        raise HandlerLoadError(f"{file}: this is not JSON: {error}") from error
    if missing is None and not isinstance(document, dict):
        raise HandlerLoadError(f"{file}: this is no JSON object")
    return document


def _read_prompts(directory: Path) -> tuple[dict[str, str], str | None]:
    """Return the prompts of a folder of sentence-transformers, and the default one's name.

    Raises HandlerLoadError.
    """
    file = directory / "config_sentence_transformers.json"
    settings = read_json(file)
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text or "", str) for text in prompts.values()):
        raise HandlerLoadError(f"{file}: prompts is no object of texts")
    if default is not None and default not in list(prompts):
        raise HandlerLoadError(f"{file}: default_prompt_name is {default!r}; there are {join_names(prompts)}")
    return {name: text or "" for name, text in prompts.items()}, default


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(id) is int for id in value)
