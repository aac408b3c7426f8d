"""Transcription and translation of speech by models of the kind of Whisper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from handlers.audio import decode_wav, resample
from handlers.errors import HandlerLoadError, PredictionException
from handlers.explain.attributions import ExplanationOptions
from handlers.images import decode_base64
from handlers.tasks.base import FLAG, FRACTION, TEXT, Task, TaskInput, count_to, join_names, one_of

_MAX_SECONDS = 1800  # half an hour, whose features take some 350 MiB while they are computed


class Speech(NamedTuple):
    """The samples of an audio at the model's rate, its language, None to detect it, and the prompt."""

    samples: np.ndarray
    language: str | None
    prompt: tuple[int, ...]


class SpeechGroup(NamedTuple):
    """The rows of a batch with the same options, which run in one ``generate`` call."""

    rows: list[int]
    features: Any
    languages: list[str | None]
    options: dict[str, Any]


class SpeechRecognition(Task):
    """A task that answers ``{"text"}`` for a WAV file, or its bytes in base64.

    With ``return_timestamps`` the answer has ``chunks`` of ``{"timestamp": [start, end], "text"}``, with
    ``details`` the ``language`` and the ``duration`` in seconds. Audio that is longer than the model's window
    is transcribed window by window.
    """

    auto_class = "AutoModelForSpeechSeq2Seq"
    prepares_rows = True
    parameters = {
        "language": TEXT,
        "task": one_of("transcribe", "translate"),
        "return_timestamps": FLAG,
        "prompt": TEXT,
        "temperature": FRACTION,
        "num_beams": count_to(8),
        "details": FLAG,
    }

    def __init__(
        self, directory: Path, config: Any, options: Mapping[str, Any], defaults: Mapping[str, Any]
    ) -> None:
        from transformers import AutoFeatureExtractor, AutoTokenizer

        self._languages: dict[str, int] = {}  # of the model; parameters are checked before it is known
        super().__init__(directory, config, options, defaults)
        self.tokenizer = AutoTokenizer.from_pretrained(directory, **options)
        self._extractor = AutoFeatureExtractor.from_pretrained(directory, **options)
        if not hasattr(self._extractor, "nb_max_frames") or not hasattr(self.tokenizer, "get_prompt_ids"):
            raise HandlerLoadError(
                f"{directory}: its {type(self._extractor).__name__} is not served for speech; there is "
                "Whisper's. Write a handler that runs the model."
            )

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("transcription",)

    def prepare(self, model: Any) -> None:
        config = model.generation_config
        self._languages = dict(getattr(config, "lang_to_id", None) or {})
        self._is_multilingual = bool(getattr(config, "is_multilingual", self._languages))
        self._has_timestamps = hasattr(config, "no_timestamps_token_id")
        self._default_language: str | None = getattr(config, "language", None)
        self._max_prompt = model.config.max_target_positions // 2 - 1  # as in Whisper

    def parse_value(self, value: Any, parameters: Mapping[str, Any]) -> tuple[Any, None]:
        language = self._find_language(parameters.get("language"))
        if parameters.get("task") == "translate" and not self._is_multilingual:
            raise PredictionException("This model reads English only, and does not translate.", 400)
        if parameters.get("return_timestamps") and not self._has_timestamps:
            raise PredictionException("This model's generation_config.json defines no timestamps.", 400)
        samples, _ = self.parse_inputs(value)
        if not self._has_timestamps and len(samples) > self._extractor.n_samples:
            raise PredictionException(
                f"This model has no timestamps, and reads at most {self._extractor.chunk_length} s.", 413
            )
        return Speech(samples, language, self._encode_prompt(parameters.get("prompt"))), None

    def parse_inputs(self, value: Any) -> tuple[Any, None]:
        if isinstance(value, str):
            value = decode_base64(value, "an audio file")
        if not isinstance(value, (bytes, bytearray, memoryview)) or not value:
            raise PredictionException(
                'There is no audio: send the bytes of a WAV file, or {"inputs": "its bytes in base64"}.', 400
            )
        samples, rate = decode_wav(value, _MAX_SECONDS)
        return resample(samples, rate, self._extractor.sampling_rate), None

    def encode(self, examples: Sequence[TaskInput]) -> list[SpeechGroup]:
        groups: dict[tuple[Any, ...], list[int]] = {}
        for row, example in enumerate(examples):
            is_long = len(example.value.samples) > self._extractor.n_samples
            names = ("task", "return_timestamps", "temperature", "num_beams")
            key = (is_long, example.value.prompt, *(example.parameters.get(name) for name in names))
            groups.setdefault(key, []).append(row)
        return [self._group(rows, [examples[row] for row in rows], key) for key, rows in groups.items()]

    def _group(self, rows: list[int], examples: Sequence[TaskInput], key: tuple[Any, ...]) -> SpeechGroup:
        is_long, prompt, task, timestamps, temperature, beams = key
        features = self._extractor(
            [example.value.samples for example in examples],
            sampling_rate=self._extractor.sampling_rate,
            padding="longest" if is_long else "max_length",
            truncation=False,
            return_attention_mask=True,
            return_tensors="pt",
        )
        options: dict[str, Any] = {"return_timestamps": bool(timestamps) or is_long}
        if self._is_multilingual:
            options["task"] = task or "transcribe"
        if temperature is not None:
            options["temperature"] = float(temperature)
        if beams is not None:
            options["num_beams"] = beams
        if prompt:
            options["prompt_ids"] = torch.tensor(prompt)
        return SpeechGroup(rows, features, [example.value.language for example in examples], options)

    def forward(self, model: Any, encoded: list[SpeechGroup], device: Any) -> list[list[Any]]:
        return [self._generate(model, group, device) for group in encoded]

    def _generate(self, model: Any, group: SpeechGroup, device: Any) -> list[Any]:
        """Return the segments of each row, or its tokens where it needs no timestamps."""
        features, options = group.features.to(device), dict(group.options)
        features["input_features"] = features["input_features"].to(model.dtype)
        if self._is_multilingual:
            self._detect_languages(model, features["input_features"], group.languages)
            options["language"] = group.languages
        if "prompt_ids" in options:
            options["prompt_ids"] = options["prompt_ids"].to(device)
        if not options["return_timestamps"]:
            return list(model.generate(**features, **options).cpu())
        return list(model.generate(**features, **options, return_segments=True)["segments"])

    def _detect_languages(self, model: Any, features: torch.Tensor, languages: list[str | None]) -> None:
        """Set the languages that are None to those of the first windows."""
        rows = [row for row, language in enumerate(languages) if language is None]
        if not rows:
            return
        frames = self._extractor.nb_max_frames
        found = model.detect_language(features[rows, :, :frames], num_segment_frames=frames).tolist()
        codes = {id: _strip_token(token) for token, id in self._languages.items()}
        for row, id in zip(rows, found):
            languages[row] = codes[id]

    def postprocess(
        self, output: list[list[Any]], encoded: list[SpeechGroup], examples: Sequence[TaskInput]
    ) -> list[Any]:
        answers: list[Any] = [None] * len(examples)
        for group, results in zip(encoded, output):
            for row, language, result in zip(group.rows, group.languages, results):
                answers[row] = self._build_answer(result, language, examples[row])
        return answers

    def _build_answer(self, result: Any, language: str | None, example: TaskInput) -> dict[str, Any]:
        if isinstance(result, torch.Tensor):
            answer: dict[str, Any] = {"text": self._decode(result)}
        else:
            chunks: list[dict[str, Any]] = [
                {
                    "timestamp": [round(float(segment["start"]), 2), round(float(segment["end"]), 2)],
                    "text": self._decode(segment["tokens"]),
                }
                for segment in result
            ]
            answer = {"text": "".join(chunk["text"] for chunk in chunks)}
            if example.parameters.get("return_timestamps"):
                answer["chunks"] = chunks
        if example.parameters.get("details"):
            seconds = len(example.value.samples) / self._extractor.sampling_rate
            answer |= {"language": language or "en", "duration": round(seconds, 3)}
        return answer

    def _find_language(self, name: str | None) -> str | None:
        """Return the code of a language, which may be given by its code or its English name."""
        from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

        name = self._default_language if name is None else name
        if not name:
            return None
        code = TO_LANGUAGE_CODE.get(_strip_token(name.lower()), _strip_token(name.lower()))
        codes = sorted(map(_strip_token, self._languages)) if self._is_multilingual else ["en"]
        if code not in codes:
            raise PredictionException(
                f"The language {name!r:.100} is not one of this model's: {join_names(codes)}.", 400
            )
        return code

    def _encode_prompt(self, text: str | None) -> tuple[int, ...]:
        """Return the tokens of a prompt, of a long one the last."""
        if not text or not text.strip():
            return ()
        ids = self.tokenizer(f" {text.strip()}", add_special_tokens=False)["input_ids"]
        if not set(ids).isdisjoint(self.tokenizer.all_special_ids):
            raise PredictionException("The prompt has special tokens of the model: leave them out.", 400)
        start = self.tokenizer.convert_tokens_to_ids("<|startofprev|>")
        return (start, *ids[-self._max_prompt + 1 :])

    def _decode(self, ids: Any) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def explain(self, model: Any, example: TaskInput, options: ExplanationOptions) -> Any:
        raise PredictionException("Transcriptions are not explained.", 501)


def _strip_token(name: str) -> str:
    """Return ``en`` for ``<|en|>``."""
    return name.removeprefix("<|").removesuffix("|>")
