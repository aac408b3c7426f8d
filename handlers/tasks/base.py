"""The base classes of tasks, which convert requests to model inputs and model outputs to answers."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from handlers import json_text
from handlers.builtin.vision import ToRGB
from handlers.errors import HandlerLoadError, PredictionException
from handlers.explain import attributions
from handlers.explain.attributions import ExplanationOptions
from handlers.images import check_processor, decode_base64, open_image

MAX_EXPLANATIONS = 16  # of one request: each costs as much as a request of its own
_RGB = ToRGB()
_SURROGATE = re.compile("[\ud800-\udfff]")
_EXPLANATION_FIELDS = tuple(field.name for field in dataclasses.fields(ExplanationOptions))


class TaskParameter(NamedTuple):
    """The expected value of a request's parameter, as a description and as a check."""

    expected: str
    is_valid: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def count_to(maximum: int) -> TaskParameter:
    return TaskParameter(
        f"a whole number from 1 to {maximum}", lambda value: type(value) is int and 1 <= value <= maximum
    )


COUNT = count_to(2**31 - 1)
FRACTION = TaskParameter("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
FLAG = TaskParameter("true or false", lambda value: isinstance(value, bool))


def _is_text(value: Any) -> bool:
    """Return whether a value is a text that a tokenizer takes, without half of a surrogate pair."""
    return isinstance(value, str) and _SURROGATE.search(value) is None


TEXT = TaskParameter("a text", _is_text)
TEXTS = TaskParameter(
    "a list of texts", lambda value: isinstance(value, list) and all(_is_text(item) for item in value)
)


def number_between(minimum: float, maximum: float) -> TaskParameter:
    return TaskParameter(
        f"a number from {minimum} to {maximum}",
        lambda value: _is_number(value) and minimum <= value <= maximum,
    )


def one_of(*names: str) -> TaskParameter:
    return TaskParameter(
        f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names
    )


class TaskInput(NamedTuple):
    """A parsed row: a text and perhaps its pair, or an image, with valid parameters and their defaults."""

    value: Any
    pair: str | None
    parameters: Mapping[str, Any]


class Task(ABC):
    """A task: ``parse`` each row, ``encode`` the batch, ``forward`` it, ``postprocess`` the output.

    ``defaults`` are the default parameters of requests.
    """

    auto_class: ClassVar[str]  # transformers' class that loads such a model
    parameters: ClassVar[Mapping[str, TaskParameter]] = {}
    optional_weights: ClassVar[tuple[str, ...]] = ()  # prefixes of unused weights, which may be missing
    prepares_rows: ClassVar[bool] = False  # whether rows are parsed before their batch, in another thread
    default_target: ClassVar[Any] = None  # of explanations; None explains the model's answer

    def __init__(
        self, directory: Path, config: Any, options: Mapping[str, Any], defaults: Mapping[str, Any]
    ) -> None:
        self.is_cancelled: Callable[[], bool] = lambda: False  # replaced by the handler
        self.directory = directory
        self.config = config
        self.options = options
        self.defaults: Mapping[str, Any] = {}
        try:
            self.defaults = self.validate_parameters(defaults)
        except PredictionException as error:
            raise HandlerLoadError(f"{directory}: parameters in model-config.yaml: {error.message}") from None

    @classmethod
    def load(cls, directory: Path, trusted: bool, defaults: Mapping[str, Any]) -> tuple[Any, Task]:
        """Load the model on the CPU, and its task.

        Nothing is downloaded; the folder's own code runs only where ``trusted``. Raises HandlerLoadError.
        """
        import transformers

        transformers.utils.logging.disable_progress_bar()
        options = {"local_files_only": True, "trust_remote_code": trusted}
        try:
            config = transformers.AutoConfig.from_pretrained(directory, **options)
            auto_class = getattr(transformers, cls.model_class(config))
            model, loading_info = auto_class.from_pretrained(
                directory,
                config=config,
                output_loading_info=True,
                use_safetensors=None if trusted else True,
                **options,
            )
            task = cls(directory, model.config, options, defaults)
            task.prepare(model)
        except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
            if isinstance(error, HandlerLoadError):
                raise
            raise HandlerLoadError(f"{directory}: transformers cannot load it: {error}") from error
        missing = sorted(
            key for key in loading_info["missing_keys"] if not key.startswith(cls.optional_weights)
        )
        if missing:
            raise HandlerLoadError(
                f"{directory}: its weights lack {', '.join(missing[:5])}{' ...' * (len(missing) > 5)}, "
                f"which would be random; {type(model).__name__} is not what was saved there. Name the task "
                "that it was trained for."
            )
        return model, task

    @classmethod
    def model_class(cls, config: Any) -> str:
        return cls.auto_class

    def prepare(self, model: Any) -> None:  # noqa: B027 - most tasks have nothing to prepare
        """Prepare the state that depends on the model."""

    def parse(self, row: Any) -> TaskInput:
        """Parse a row. Raises PredictionException with status 400 for invalid input."""
        value, given = _parse_row(row)
        parameters = {**self.defaults, **self.validate_parameters(given)} if given else self.defaults
        value, pair = self.parse_value(value, parameters)
        return TaskInput(value, pair, parameters)

    def validate_parameters(self, parameters: Any) -> dict[str, Any]:
        if not isinstance(parameters, Mapping):
            raise PredictionException(
                f"The parameters must be a JSON object, and are {parameters!r:.100}.", 400
            )
        validated = dict(parameters)
        for name, value in parameters.items():
            if name == "output_value":
                validated[name] = self._select_output(value)
                continue
            parameter = self.parameters.get(name)
            if parameter is None:
                matches = difflib.get_close_matches(str(name), self.parameters, 1)
                hint = (
                    f"did you mean {matches[0]!r}?"
                    if matches
                    else f"there are {', '.join(self.parameters) or 'none'}."
                )
                raise PredictionException(f"There is no parameter {name!r:.100} here; {hint}", 400)
            if not parameter.is_valid(value):
                raise PredictionException(
                    f"The parameter {name} must be {parameter.expected}, and is {value!r:.100}.", 400
                )
        return validated

    def _select_output(self, value: Any) -> str:
        """Return the first of the requested outputs that the task has. Raises PredictionException."""
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise PredictionException(
                f"The parameter output_value must be a name or a list of names, and is {value!r:.100}.", 400
            )
        for name in names:
            if name in self.outputs:
                return name
        raise PredictionException(
            f"This model's task has no output {' or '.join(names)!s:.100}; there are "
            f"{join_names(self.outputs)}. Register the folder with the task that has it.",
            400,
        )

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the names that a request's ``output_value`` may have."""
        return ()

    def describe(self) -> dict[str, Any]:
        """Return what the description of the model has beside its task and parameters."""
        return {}

    def needs_model(self, example: TaskInput) -> bool:
        """Return whether ``example`` is a row of the model's batch."""
        return True

    def answer_without_model(self, example: TaskInput) -> Any:
        """Return the answer to an example that does not need the model."""
        raise NotImplementedError(f"{type(self).__name__} answers each request by the model")

    def parse_value(self, value: Any, parameters: Mapping[str, Any]) -> tuple[Any, str | None]:
        """Return a row's text and its pair, or its image, for valid parameters."""
        return self.parse_inputs(value)

    @abstractmethod
    def parse_inputs(self, value: Any) -> tuple[Any, str | None]:
        """Return a row's text and its pair, or its image. Raises PredictionException."""

    @abstractmethod
    def encode(self, examples: Sequence[TaskInput]) -> Any:
        """Return the model's input for all examples, on the CPU."""

    def forward(self, model: Any, encoded: Any, device: Any) -> Any:
        """Return the model's output."""
        return model(**encoded.to(device))

    @abstractmethod
    def explain(self, model: Any, example: TaskInput, options: ExplanationOptions) -> Any:
        """Return the attribution of each input part to ``options.target``. Raises PredictionException."""

    @abstractmethod
    def postprocess(self, output: Any, encoded: Any, examples: Sequence[TaskInput]) -> list[Any]:
        """Return one answer per example."""


class TextTask(Task):
    """A task on texts. A batch is padded to its longest row and truncated to the model's limit."""

    fields: ClassVar[tuple[str, str]] = ("text", "text_pair")  # the second only if accepts_pairs
    accepts_pairs: ClassVar[bool] = False

    def __init__(
        self, directory: Path, config: Any, options: Mapping[str, Any], defaults: Mapping[str, Any]
    ) -> None:
        super().__init__(directory, config, options, defaults)
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(directory, **options)
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token or self.tokenizer.convert_ids_to_tokens(0)
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = self.tokenizer.pad_token_id
        self.max_length = self._infer_max_length()

    def _infer_max_length(self) -> int | None:
        """Return the model's maximum number of tokens; None where neither tokenizer nor model defines one."""
        positions = getattr(self.config, "max_position_embeddings", None) or getattr(
            self.config, "n_positions", None
        )
        if positions and "roberta" in self.config.model_type:
            positions -= self.config.pad_token_id + 1  # RoBERTa counts positions from behind the padding's
        limits = [n for n in (positions, self.tokenizer.model_max_length) if n and n < 10**9]
        return min(limits) if limits else None

    def prepare(self, model: Any) -> None:
        self._forward_arguments = set(inspect.signature(model.forward).parameters)

    def length_function(self) -> Callable[[Any], int] | None:
        """Return a thread-safe function of a row's length in tokens; None without a fast tokenizer.

        It has a copy of the tokenizer's core, whose padding and truncation each batch changes.
        """
        core = getattr(self.tokenizer, "backend_tokenizer", None)
        if core is None:
            return None
        core = type(core).from_str(core.to_str())
        core.no_padding()
        core.no_truncation()

        def length(row: Any) -> int:
            tokens = len(core.encode(*self.parse_inputs(_parse_row(extract_explanation_fields(row))[0])).ids)
            return tokens if self.max_length is None else min(tokens, self.max_length)

        return length

    def parse_inputs(self, value: Any) -> tuple[Any, str | None]:
        first, second = self.fields
        pair = None
        if isinstance(value, Mapping):
            allowed = self.fields if self.accepts_pairs else (first,)
            unknown = [name for name in value if name not in allowed]
            if unknown or first not in value:
                expected, received = " and ".join(allowed), ", ".join(map(str, value)) or "nothing"
                cure = f'Send a text, or JSON with {expected} or "inputs", and the rest as "parameters"'
                raise PredictionException(f"{cure}; found {received:.200}.", 400)
            value, pair = value[first], value.get(second)
        return _decode_text(value), None if pair is None else _decode_text(pair)

    def encode(self, examples: Sequence[TaskInput]) -> Any:
        pairs = [example.pair for example in examples]
        texts = [example.value for example in examples]
        if any(pair is not None for pair in pairs) and None in pairs:
            rows = [self.tokenize(text, pair) for text, pair in zip(texts, pairs)]
            encoded = self.tokenizer.pad(rows, padding=True, return_tensors="pt")
        else:
            encoded = self.tokenize(
                texts, None if pairs[0] is None else pairs, padding=True, return_tensors="pt"
            )
        return self.drop_unsupported(encoded)

    def tokenize(self, texts: Any, pairs: Any = None, **options: Any) -> Any:
        truncation = self.max_length is not None
        return self.tokenizer(texts, pairs, truncation=truncation, max_length=self.max_length, **options)

    def text_mask(self, encoded: Any) -> torch.Tensor:
        """Return which tokens of a tokenized row are the first text's, rather than special or the pair's."""
        if self.tokenizer.is_fast:
            return torch.tensor([part == 0 for part in encoded.sequence_ids(0)])
        ids = encoded["input_ids"][0].tolist()
        return torch.tensor(self.tokenizer.get_special_tokens_mask(ids, already_has_special_tokens=True)) == 0

    def drop_unsupported(self, encoded: Any) -> Any:
        """Remove the tokenizer's outputs that the model does not accept."""
        for name in [name for name in encoded if name not in self._forward_arguments]:
            del encoded[name]
        return encoded


class ImageTask(Task):
    """A task on images: bytes, or base64 text. The folder's processor prepares them with Pillow and numpy."""

    default_target = 0
    prepares_rows = True

    def __init__(
        self, directory: Path, config: Any, options: Mapping[str, Any], defaults: Mapping[str, Any]
    ) -> None:
        super().__init__(directory, config, options, defaults)
        from transformers import AutoImageProcessor

        self.processor = AutoImageProcessor.from_pretrained(directory, backend="pil", **options)

    def parse_inputs(self, value: Any) -> tuple[Any, None]:
        if isinstance(value, str):
            value = decode_base64(value)
        if not isinstance(value, (bytes, bytearray, memoryview)) or not value:
            raise PredictionException(
                'There is no image: send its bytes, or {"inputs": "its bytes in base64"}.', 400
            )
        image = open_image(value)
        check_processor(self.processor, image.size)
        return _RGB(image), None

    def encode(self, examples: Sequence[TaskInput]) -> Any:
        return self.processor(images=[example.value for example in examples], return_tensors="pt")

    def forward(self, model: Any, encoded: Any, device: Any) -> Any:
        return model(**encoded.to(device, model.dtype))

    def explain(self, model: Any, example: TaskInput, options: ExplanationOptions) -> Any:
        """Return the attribution of each number of the image's tensor, nested like it."""
        options = options.for_target(output_index(options.target, self.config.label2id))
        pixels = self.encode([example])["pixel_values"].to(model.device, model.dtype)
        return attributions.attribute(lambda x: self.label_scores(model(x)), pixels, options)[0].tolist()

    def label_scores(self, output: Any) -> torch.Tensor:
        """Return the score of each label, rows x labels, which explanations attribute."""
        return output.logits

    @staticmethod
    def image_sizes(examples: Sequence[TaskInput]) -> list[tuple[int, int]]:
        """Return the (height, width) of each original image."""
        return [(example.value.height, example.value.width) for example in examples]


def to_cpu_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Convert to the precision and device that numpy and JSON need."""
    return tensor.float().cpu()


def output_index(target: Any, labels: Mapping[str, int] | None) -> int:
    """Return the index of the output with this label or number. Raises PredictionException."""
    labels = labels or {}
    index = labels.get(target) if isinstance(target, str) else None
    index = parse_integer(target) if index is None else index
    if index is None:
        names = join_names(sorted(labels, key=lambda label: labels[label]))
        raise PredictionException(f"There is no label {target!r:.100}; there are {names}.", 400)
    return index


def parse_integer(target: Any) -> int | None:
    """Return a target of JSON or of a form as an integer; None where it is none."""
    if isinstance(target, str):
        with contextlib.suppress(ValueError):
            return int(target)
    return target if type(target) is int else None


def parse_object(target: Any) -> Mapping[str, Any] | None:
    """Return a target of JSON or of a form as an object; None where it is none."""
    if isinstance(target, str) and target.lstrip().startswith("{"):
        with contextlib.suppress(ValueError):
            target = json_text.loads(target)
    return target if isinstance(target, Mapping) else None


def join_names(names: Iterable[Any]) -> str:
    """Join the first 20 names for a message."""
    texts = [str(name)[:100] for name in names]
    return ", ".join([*texts[:20], *(["..."] if len(texts) > 20 else [])]) or "none"


def extract_explanation_fields(row: Any) -> Any:
    """Move a row's explanation options from its JSON to fields of the row, where a form has them."""
    if not isinstance(row, Mapping):
        return row
    name = next((name for name in ("data", "body") if row.get(name) is not None), None)
    value = row if name is None else row[name]
    if not isinstance(value, Mapping) or value.keys().isdisjoint(_EXPLANATION_FIELDS):
        return row
    options = {key: value[key] for key in _EXPLANATION_FIELDS if key in value}
    rest = {key: item for key, item in value.items() if key not in options}
    return {**({} if name is None else row), (name or "body"): rest, **options}


def _parse_row(row: Any) -> tuple[Any, Any]:
    """Return a row's value and parameters: a text, bytes, or JSON with ``inputs`` and ``parameters``."""
    value = row
    if isinstance(row, Mapping):
        value = next((row[name] for name in ("data", "body") if row.get(name) is not None), row)
    if isinstance(value, (bytes, bytearray)) and value[:1] == b"{":
        value = _parse_json(value)
    if isinstance(value, Mapping):
        parameters = value.get("parameters")
    else:  # a separate field of the form
        parameters = row.get("parameters") if isinstance(row, Mapping) else None
    if isinstance(parameters, (str, bytes, bytearray)):  # a field of a form
        parameters = _parse_json(parameters)
    parameters = {} if parameters is None else parameters
    if not isinstance(value, Mapping):
        return value, parameters
    rest = {name: item for name, item in value.items() if name != "parameters"}
    return rest["inputs"] if set(rest) == {"inputs"} else rest, parameters


def _parse_json(text: str | bytes | bytearray) -> Any:
    try:
        return json_text.loads(text)
    except ValueError as error:
        raise PredictionException(f"This is not JSON: {error}", 400) from error


def _decode_text(value: Any) -> str:
    try:
        if isinstance(value, (bytes, bytearray)):
            return bytes(value).decode()
        if isinstance(value, str):
            value.encode()  # half of a surrogate pair is no text to a tokenizer
            return value
    except UnicodeError as error:
        raise PredictionException(f"This is not UTF-8 text: {error}", 400) from error
    raise PredictionException(
        f"The input must be one text, and is {value!r:.100}; send each text as a request.", 400
    )
