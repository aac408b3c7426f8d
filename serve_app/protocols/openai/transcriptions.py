"""OpenAI's transcriptions and translations of audio: a form becomes a row, its answer text or subtitles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
from typing_extensions import NotRequired, TypedDict

from serve_app.domain.request import InputPart
from serve_app.domain.validation import documented
from serve_app.protocols.http.exchange import JSON, Headers
from serve_app.protocols.openai.errors import InvalidField

_FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
_MAX_SECONDS = 1e9  # of a time in a model's answer; larger ones are no times
_TEXT = (b"content-type", b"text/plain; charset=utf-8")
_VTT = (b"content-type", b"text/vtt; charset=utf-8")


class TranslationForm(TypedDict):
    """A form with the file, which is WAV for the models of a folder."""

    file: Annotated[bytes, documented("The audio.")]
    model: Annotated[str, documented("name, or name:version", minLength=1)]
    prompt: NotRequired[Annotated[str, documented("A text that precedes, for its style and its names.")]]
    response_format: NotRequired[Literal["json", "text", "srt", "verbose_json", "vtt"]]
    temperature: NotRequired[Annotated[float, documented(minimum=0, maximum=1)]]


_TranscriptionFields = TypedDict(
    "_TranscriptionFields",
    {"timestamp_granularities[]": Annotated[list[Literal["segment"]], documented("Of verbose_json.")]},
    total=False,
)


class TranscriptionForm(TranslationForm, _TranscriptionFields):
    language: NotRequired[Annotated[str, documented("A code as en; the default is to detect it.")]]
    stream: NotRequired[Annotated[bool, documented("Streams are not served: false.")]]


class DurationUsage(TypedDict):
    type: Literal["duration"]
    seconds: Annotated[int, documented(minimum=0)]


class Transcription(TypedDict):
    text: str
    usage: NotRequired[DurationUsage]


class TranscriptionSegment(TypedDict):
    id: int
    start: Annotated[float, documented("In seconds.")]
    end: float
    text: str


class VerboseTranscription(Transcription):
    task: Literal["transcribe", "translate"]
    language: str
    duration: float
    segments: list[TranscriptionSegment]


@dataclass(frozen=True)
class TranscriptionRequest:
    """A parsed request; ``ignored`` are its unknown fields."""

    inputs: tuple[InputPart, ...]
    task: Literal["transcribe", "translate"]
    response_format: str
    ignored: tuple[str, ...] = ()

    def encode(self, model: str, answer: Mapping[str, Any]) -> tuple[Headers, bytes]:
        """Return the content type and the body of the response.

        Raises InvalidField where the model returns no text, or no timestamps where they are requested.
        """
        text = answer.get("text")
        if not isinstance(text, str):
            raise InvalidField(
                f'Model {model} answers no text: a model of speech answers {{"text": "..."}}.', "model"
            )
        if self.response_format == "text":
            return [_TEXT], f"{text.strip()}\n".encode()
        if self.response_format == "json":
            document: Transcription = {"text": text, **_find_usage(answer)}
            return [JSON], orjson.dumps(document)
        segments = _read_segments(answer, model)
        if self.response_format == "srt":
            cues = [f"{segment['id'] + 1}\n{_format_cue(segment, ',')}\n" for segment in segments]
            return [_TEXT], "\n".join(cues).encode()
        if self.response_format == "vtt":
            return [_VTT], "\n".join(["WEBVTT\n", *(f"{_format_cue(s, '.')}\n" for s in segments)]).encode()
        verbose: VerboseTranscription = {
            "task": self.task,
            "language": str(answer.get("language") or ""),
            "duration": _read_duration(answer) or (segments[-1]["end"] if segments else 0.0),
            "text": text,
            "segments": segments,
            **_find_usage(answer),
        }
        return [JSON], orjson.dumps(verbose)


def parse_request(
    fields: Sequence[InputPart], task: Literal["transcribe", "translate"]
) -> TranscriptionRequest:
    """Parse the fields of a form. Raises InvalidField."""
    known = TranslationForm if task == "translate" else TranscriptionForm
    names = {field.name for field in fields}
    file = next((field.value for field in fields if field.name == "file"), None)
    if not file:
        raise InvalidField("file is the audio's file, which is not empty, in multipart/form-data.", "file")
    texts = {
        field.name: _decode(field)
        for field in fields
        if field.name in known.__annotations__ and field.name != "file"
    }
    response_format = texts.get("response_format") or "json"
    if response_format not in _FORMATS:
        raise InvalidField(f"response_format is one of {', '.join(_FORMATS)}.", "response_format")
    if (texts.get("stream") or "false").lower() != "false":
        raise InvalidField("stream is not served for audio: leave it out.", "stream")
    for field in fields:
        if field.name.startswith("timestamp_granularities") and field.value != b"segment":
            raise InvalidField(
                "timestamp_granularities[] is segment; words have none.", "timestamp_granularities"
            )
    parameters: dict[str, Any] = {
        "output_value": "transcription",  # a model of a folder without it refuses
        "task": task,
        "details": True,
        "return_timestamps": response_format not in ("json", "text"),
    }
    parameters |= {name: texts[name] for name in ("language", "prompt") if texts.get(name)}
    if texts.get("temperature"):
        parameters["temperature"] = _parse_temperature(texts["temperature"])
    inputs = (
        InputPart("data", file, "application/octet-stream"),
        InputPart("parameters", orjson.dumps(parameters), "application/json"),
    )
    unknown = sorted(names - known.__annotations__.keys() - {"timestamp_granularities"})
    return TranscriptionRequest(inputs, task, response_format, tuple(unknown))


def read_field(fields: Sequence[InputPart], name: str) -> str | None:
    """Return the text of a field, None without one. Raises InvalidField."""
    return next((_decode(field) for field in fields if field.name == name), None)


def _decode(field: InputPart) -> str:
    try:
        return field.value.decode()
    except UnicodeDecodeError:
        raise InvalidField(f"{field.name:.100} is no UTF-8 text.", field.name) from None


def _parse_temperature(text: str) -> float:
    try:
        temperature = float(text)
    except ValueError:
        temperature = -1.0
    if not 0 <= temperature <= 1:
        raise InvalidField(f"temperature is {text!r:.100}; it is a number from 0 to 1.", "temperature")
    return temperature


def _find_usage(answer: Mapping[str, Any]) -> Any:
    duration = _read_duration(answer)
    if duration is None:
        return {}
    return {"usage": {"type": "duration", "seconds": math.ceil(duration)}}


def _read_duration(answer: Mapping[str, Any]) -> float | None:
    """Return the audio's seconds; None where the model returns none, or something else."""
    duration = answer.get("duration")
    if not isinstance(duration, (int, float)) or not 0 <= duration <= _MAX_SECONDS:
        return None
    return float(duration)


def _read_segments(answer: Mapping[str, Any], model: str) -> list[TranscriptionSegment]:
    try:
        segments: list[TranscriptionSegment] = []
        for index, chunk in enumerate(answer["chunks"]):
            start, end = chunk["timestamp"]
            start, end = float(start), float(start if end is None else end)  # None: of a text that is cut off
            if not (0 <= start <= _MAX_SECONDS and 0 <= end <= _MAX_SECONDS):
                raise ValueError
            segments.append({"id": index, "start": start, "end": end, "text": str(chunk["text"])})
        return segments
    except (KeyError, TypeError, ValueError):
        raise InvalidField(
            f'Model {model} answers no timestamps: take the response_format "json" or "text".',
            "response_format",
        ) from None


def _format_cue(segment: TranscriptionSegment, separator: str) -> str:
    times = (_format_time(segment[name], separator) for name in ("start", "end"))
    # An empty line would end the cue.
    text = "\n".join(
        line for line in segment["text"].strip().replace("-->", "->").splitlines() if line.strip()
    )
    return f"{' --> '.join(times)}\n{text}"


def _format_time(seconds: float, separator: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    return (
        f"{minutes // 60:02}:{minutes % 60:02}:{milliseconds // 1000:02}{separator}{milliseconds % 1000:03}"
    )
