"""A task: from what a request says to the model's input, and from the model's output to an answer."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from handlers import explanations
from handlers.errors import HandlerLoadError, PredictionException
from handlers.explanations import Question
from handlers.vision import ToRGB, from_base64, open_image

MOST_EXPLAINED = 16  # explanations of one request: each is as much work as one alone
_RGB = ToRGB()
_OF_EXPLANATIONS = tuple(field.name for field in dataclasses.fields(Question))


class Parameter(NamedTuple):
    """What a request's parameter must be, in words, and whether a value is that."""

    wants: str
    fits: Callable[[Any], bool]


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


COUNT = Parameter("a whole number from 1", lambda value: type(value) is int and value >= 1)
NUMBER = Parameter("a number", _number)
POSITIVE = Parameter("a number above 0", lambda value: _number(value) and value > 0)
FRACTION = Parameter("a number from 0 to 1", lambda value: _number(value) and 0 <= value <= 1)
FLAG = Parameter("true or false", lambda value: isinstance(value, bool))
TEXT = Parameter("a text", lambda value: isinstance(value, str))
TEXTS = Parameter(
    "a list of texts", lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value)
)


def one_of(*words: str) -> Parameter:
    return Parameter(f"one of {', '.join(words)}", lambda value: isinstance(value, str) and value in words)


class Example(NamedTuple):
    """One row, read: a text and perhaps its pair, or an image; and the parameters, checked and whole."""

    value: Any
    pair: str | None
    parameters: Mapping[str, Any]


class Task(ABC):
    """``read`` each row, ``encode`` them together, ``forward`` once, ``answers`` for each.

    ``defaults`` are parameters for the requests that do not say otherwise.
    """

    auto: ClassVar[str]  # transformers' class that loads such a model
    parameters: ClassVar[Mapping[str, Parameter]] = {}
    unneeded: ClassVar[tuple[str, ...]] = ()  # beginnings of weights that may be missing, because nothing asks for them
    target: ClassVar[Any] = None  # what an explanation is of, unless somebody says; None is what the model answers

    def __init__(self, directory: Path, config: Any, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.directory = directory
        self.config = config
        self.options = options
        self.defaults: Mapping[str, Any] = {}
        try:
            self.defaults = self.checked(defaults)
        except PredictionException as error:
            raise HandlerLoadError(f"{directory}: parameters in model-config.yaml: {error.message}") from None

    @classmethod
    def load(cls, directory: Path, trusted: bool, defaults: Mapping[str, Any]) -> tuple[Any, Task]:
        """The model on the CPU, and its task. Nothing is fetched; the folder's own code runs only where ``trusted``."""
        import transformers

        transformers.utils.logging.disable_progress_bar()
        options = {"local_files_only": True, "trust_remote_code": trusted}
        try:
            config = transformers.AutoConfig.from_pretrained(directory, **options)
            auto = getattr(transformers, cls.model_class(config))
            model, told = auto.from_pretrained(
                directory, config=config, output_loading_info=True, use_safetensors=None if trusted else True, **options
            )
            task = cls(directory, model.config, options, defaults)
            task.fit(model)
        except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
            if isinstance(error, HandlerLoadError):
                raise
            raise HandlerLoadError(f"{directory}: transformers cannot load it: {error}") from error
        missing = sorted(key for key in told["missing_keys"] if not key.startswith(cls.unneeded))
        if missing:
            raise HandlerLoadError(
                f"{directory}: its weights lack {', '.join(missing[:5])}{' ...' * (len(missing) > 5)}, which would be "
                f"random; {type(model).__name__} is not what was saved there. Name the task that it was trained for."
            )
        return model, task

    @classmethod
    def model_class(cls, config: Any) -> str:
        return cls.auto

    def fit(self, model: Any) -> None:  # noqa: B027 - most tasks have nothing to make ready
        """Make ready what depends on the model."""

    def read(self, row: Any) -> Example:
        """What a row asks. PredictionException with status 400 where that is nothing this task can answer."""
        value, parameters = _said(row)
        value, pair = self.inputs(value)
        return Example(value, pair, {**self.defaults, **self.checked(parameters)} if parameters else self.defaults)

    def checked(self, parameters: Any) -> dict[str, Any]:
        if not isinstance(parameters, Mapping):
            raise PredictionException(f"The parameters must be a JSON object, and are {parameters!r:.100}.", 400)
        for name, value in parameters.items():
            known = self.parameters.get(name)
            if known is None:
                near = difflib.get_close_matches(str(name), self.parameters, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(self.parameters) or 'none'}."
                raise PredictionException(f"There is no parameter {name!r:.100} here; {hint}", 400)
            if not known.fits(value):
                raise PredictionException(f"The parameter {name} must be {known.wants}, and is {value!r:.100}.", 400)
        return dict(parameters)

    @abstractmethod
    def inputs(self, value: Any) -> tuple[Any, str | None]:
        """What a row says: a text and its pair, or an image. Raises PredictionException."""

    @abstractmethod
    def encode(self, examples: Sequence[Example]) -> Any:
        """The model's input for all of them, on the CPU."""

    def forward(self, model: Any, encoded: Any, device: Any) -> Any:
        """What the model makes of it."""
        return model(**encoded.to(device))

    @abstractmethod
    def explain(self, model: Any, example: Example, question: Question) -> Any:
        """What each part of the input had to do with ``question.target``. Raises PredictionException."""

    @abstractmethod
    def answers(self, output: Any, encoded: Any, examples: Sequence[Example]) -> list[Any]:
        """One answer for each."""


class TextTask(Task):
    """Rows are texts. A batch is padded to its own longest one, and cut off at the model's limit."""

    fields: ClassVar[tuple[str, str]] = ("text", "text_pair")  # the second only where pairs is true
    pairs: ClassVar[bool] = False

    def __init__(self, directory: Path, config: Any, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        super().__init__(directory, config, options, defaults)
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(directory, **options)
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token or self.tokenizer.convert_ids_to_tokens(0)
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = self.tokenizer.pad_token_id
        self.limit = self._limit()

    def _limit(self) -> int | None:
        """The most tokens that the model reads; None where neither tokenizer nor model says."""
        positions = getattr(self.config, "max_position_embeddings", None) or getattr(self.config, "n_positions", None)
        if positions and "roberta" in self.config.model_type:
            positions -= self.config.pad_token_id + 1  # these count positions from behind the padding's
        known = [n for n in (positions, self.tokenizer.model_max_length) if n and n < 10**9]
        return min(known) if known else None

    def fit(self, model: Any) -> None:
        self._takes = set(inspect.signature(model.forward).parameters)

    def length(self) -> Callable[[Any], int] | None:
        """What tells a row's length in tokens, in any thread; None where the tokenizer has no fast core.

        It has a core of its own: the tokenizer's is changed for each batch, by who pads it and cuts it off.
        """
        core = getattr(self.tokenizer, "backend_tokenizer", None)
        if core is None:
            return None
        core = type(core).from_str(core.to_str())
        core.no_padding()
        core.no_truncation()

        def length(row: Any) -> int:
            tokens = len(core.encode(*self.inputs(_said(unfolded(row))[0])).ids)
            return tokens if self.limit is None else min(tokens, self.limit)

        return length

    def inputs(self, value: Any) -> tuple[Any, str | None]:
        first, second = self.fields
        pair = None
        if isinstance(value, Mapping):
            known = self.fields if self.pairs else (first,)
            strange = [name for name in value if name not in known]
            if strange or first not in value:
                wants, found = " and ".join(known), ", ".join(map(str, value)) or "nothing"
                say = f'Send a text, or JSON with {wants} or "inputs", and the rest as "parameters"'
                raise PredictionException(f"{say}; found {found:.200}.", 400)
            value, pair = value[first], value.get(second)
        return _text(value), None if pair is None else _text(pair)

    def encode(self, examples: Sequence[Example]) -> Any:
        pairs = [example.pair for example in examples]
        texts = [example.value for example in examples]
        if any(pair is not None for pair in pairs) and None in pairs:
            each = [self.tokenize(text, pair) for text, pair in zip(texts, pairs)]
            encoded = self.tokenizer.pad(each, padding=True, return_tensors="pt")
        else:
            encoded = self.tokenize(texts, None if pairs[0] is None else pairs, padding=True, return_tensors="pt")
        return self.kept(encoded)

    def tokenize(self, texts: Any, pairs: Any = None, **how: Any) -> Any:
        return self.tokenizer(texts, pairs, truncation=self.limit is not None, max_length=self.limit, **how)

    def words(self, encoded: Any) -> torch.Tensor:
        """Of one row that was tokenized: which tokens are the first text's, and not the frame's or the pair's."""
        if self.tokenizer.is_fast:
            return torch.tensor([part == 0 for part in encoded.sequence_ids(0)])
        ids = encoded["input_ids"][0].tolist()
        return torch.tensor(self.tokenizer.get_special_tokens_mask(ids, already_has_special_tokens=True)) == 0

    def kept(self, encoded: Any) -> Any:
        """Without what this model does not take: a tokenizer may tell more."""
        for name in [name for name in encoded if name not in self._takes]:
            del encoded[name]
        return encoded


class ImageTask(Task):
    """Rows are images: their bytes, or base64 text. Pillow and numpy prepare them, as the folder says."""

    target = 0

    def __init__(self, directory: Path, config: Any, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        super().__init__(directory, config, options, defaults)
        from transformers import AutoImageProcessor

        self.processor = AutoImageProcessor.from_pretrained(directory, backend="pil", **options)

    def inputs(self, value: Any) -> tuple[Any, None]:
        if isinstance(value, str):
            value = from_base64(value)
        if not isinstance(value, (bytes, bytearray, memoryview)) or not value:
            raise PredictionException('There is no image: send its bytes, or {"inputs": "its bytes in base64"}.', 400)
        return _RGB(open_image(value)), None

    def encode(self, examples: Sequence[Example]) -> Any:
        return self.processor(images=[example.value for example in examples], return_tensors="pt")

    def forward(self, model: Any, encoded: Any, device: Any) -> Any:
        return model(**encoded.to(device, model.dtype))

    def explain(self, model: Any, example: Example, question: Question) -> Any:
        """A number for each number of the image's tensor, nested as that is."""
        question = question.about(output_number(question.target, self.config.label2id))
        pixels = self.encode([example])["pixel_values"].to(model.device, model.dtype)
        return explanations.attributions(lambda x: self.scores(model(x)), pixels, question)[0].tolist()

    def scores(self, output: Any) -> torch.Tensor:
        """How much of each label a model's output says that there is, rows x labels: what is explained."""
        return output.logits

    @staticmethod
    def sizes(examples: Sequence[Example]) -> list[tuple[int, int]]:
        """(height, width) of each image as it came."""
        return [(example.value.height, example.value.width) for example in examples]


def floats(tensor: torch.Tensor) -> torch.Tensor:
    """Of full precision, where numpy and JSON can have it."""
    return tensor.float().cpu()


def output_number(target: Any, labels: Mapping[str, int] | None) -> int:
    """Of the output that is asked for by its label or its number. Raises PredictionException."""
    labels = labels or {}
    found = labels.get(target) if isinstance(target, str) else None
    found = number(target) if found is None else found
    if found is None:
        there = listed(sorted(labels, key=lambda label: labels[label]))
        raise PredictionException(f"There is no label {target!r:.100}; there are {there}.", 400)
    return found


def number(target: Any) -> int | None:
    """The number that a target is, in JSON or as a form's text; None where it is none."""
    if isinstance(target, str):
        with contextlib.suppress(ValueError):
            return int(target)
    return target if type(target) is int else None


def fields(target: Any) -> Mapping[str, Any] | None:
    """The object that a target is, in JSON or as a form's text; None where it is none."""
    if isinstance(target, str) and target.lstrip().startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            target = json.loads(target)
    return target if isinstance(target, Mapping) else None


def listed(names: Iterable[Any]) -> str:
    """The first of them, for a message."""
    found = [str(name)[:100] for name in names]
    return ", ".join([*found[:20], *(["..."] if len(found) > 20 else [])]) or "none"


def unfolded(row: Any) -> Any:
    """A row that is to be explained, with what its JSON says of that as fields of its own, as a form has them."""
    if not isinstance(row, Mapping):
        return row
    name = next((name for name in ("data", "body") if row.get(name) is not None), None)
    value = row if name is None else row[name]
    if not isinstance(value, Mapping) or value.keys().isdisjoint(_OF_EXPLANATIONS):
        return row
    said = {key: value[key] for key in _OF_EXPLANATIONS if key in value}
    rest = {key: item for key, item in value.items() if key not in said}
    return {**({} if name is None else row), (name or "body"): rest, **said}


def _said(row: Any) -> tuple[Any, Any]:
    """What a row holds, and its parameters: a text, bytes, or JSON with ``inputs`` and ``parameters``."""
    value = row
    if isinstance(row, Mapping):
        value = next((row[name] for name in ("data", "body") if row.get(name) is not None), row)
    if isinstance(value, (bytes, bytearray)) and value[:1] == b"{":
        value = _parsed(value)
    if isinstance(value, Mapping):
        parameters = value.get("parameters")
    else:  # beside it, as a field of its own
        parameters = row.get("parameters") if isinstance(row, Mapping) else None
    if isinstance(parameters, (str, bytes, bytearray)):  # a field of a form
        parameters = _parsed(parameters)
    parameters = {} if parameters is None else parameters
    if not isinstance(value, Mapping):
        return value, parameters
    rest = {name: item for name, item in value.items() if name != "parameters"}
    return rest["inputs"] if set(rest) == {"inputs"} else rest, parameters


def _parsed(text: str | bytes | bytearray) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PredictionException(f"This is not JSON: {error}", 400) from error


def _text(value: Any) -> str:
    try:
        if isinstance(value, (bytes, bytearray)):
            return bytes(value).decode()
        if isinstance(value, str):
            value.encode()  # half of a surrogate pair is no text to a tokenizer
            return value
    except UnicodeError as error:
        raise PredictionException(f"This is not UTF-8 text: {error}", 400) from error
    raise PredictionException(f"The input must be one text, and is {value!r:.100}; send each text as a request.", 400)
