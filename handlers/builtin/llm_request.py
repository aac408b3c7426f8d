"""The request of the handler ``llm``: a text, or a JSON object of generation parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from handlers import json_text
from handlers.engines.engine import SamplingParams
from handlers.engines.request_fields import (
    MAX_COUNT,
    PENALTIES,
    STRUCTURED_OUTPUT_FIELDS,
    parse_logit_bias,
    parse_structured_output,
)
from handlers.errors import PredictionException

PARAMETERS = (
    *("max_new_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream", "adapter"),
    *PENALTIES,
    "logit_bias",
    *STRUCTURED_OUTPUT_FIELDS,
)
_MAX_STOP_STRINGS = 16
_SYNONYMS = {"inputs": "prompt", "max_tokens": "max_new_tokens"}


@dataclass(frozen=True)
class ParsedRequest:
    """A parsed request; ``prompt`` is a text or a list of token ids.

    Without ``max_new_tokens``, the model's configuration decides; without ``adapter``, the base model
    generates.
    """

    prompt: str | list[int]
    max_new_tokens: int | None
    sampling: SamplingParams
    stops: tuple[str, ...]
    stream: bool
    adapter: str | None = None
    prompt_logprobs: int | None = None


def parse_request(row: Any, default: SamplingParams) -> ParsedRequest:
    """Return the request in a row.

    Raises PredictionException (400) that names the invalid value and the valid ones.
    """
    if not isinstance(row, Mapping):  # of an envelope
        body: Any = row
    else:
        body = row.get("body", row.get("data")) if "body" in row or "data" in row else dict(row)
    if isinstance(body, (bytes, bytearray, memoryview)):
        body = _decode_text("the request", body)
        if body.lstrip().startswith("{"):
            try:
                body = json_text.loads(body)
            except ValueError as error:
                raise PredictionException(f"The request is no JSON: {error}.", 400) from None
    if isinstance(body, str):
        body = {"prompt": body}
    if not isinstance(body, Mapping):
        raise PredictionException('A request is a text, or JSON: {"prompt": "Once upon a time"}.', 400)
    values: dict[str, Any] = {}
    for key, value in [*body.items(), *_read_parameters(body)]:
        name = _SYNONYMS.get(key, key)
        if name in ("prompt", *PARAMETERS):
            if name in values:
                raise PredictionException(f"{name} is given twice (also as {key}): give it once.", 400)
            values[name] = value
        elif key != "parameters":
            raise PredictionException(
                f"{key!r} is not known: there are prompt, {', '.join(PARAMETERS)}.", 400
            )
    if values.get("prompt") is None:
        raise PredictionException('There is no prompt: send a text, or {"prompt": "Once upon a time"}.', 400)
    return ParsedRequest(
        _parse_prompt(values["prompt"]),
        _parse_number(values, "max_new_tokens", int, None, 1, MAX_COUNT),
        _parse_sampling(values, default),
        _parse_stops(values.get("stop")),
        _parse_flag(values.get("stream")),
        _parse_adapter(values.get("adapter")),
    )


def _read_parameters(body: Mapping[str, Any]) -> list[tuple[str, Any]]:
    nested = body.get("parameters")
    if nested is not None and not isinstance(nested, Mapping):
        raise PredictionException('parameters is an object, such as {"temperature": 0.7}.', 400)
    return list((nested or {}).items())


def _parse_sampling(values: Mapping[str, Any], default: SamplingParams) -> SamplingParams:
    is_sampled = any(values.get(name) is not None for name in ("top_p", "top_k", "seed"))
    return SamplingParams(
        _parse_number(
            values, "temperature", float, default.temperature or (1.0 if is_sampled else 0.0), 0, 100
        ),
        _parse_number(values, "top_k", int, default.top_k, 0, MAX_COUNT),
        _parse_number(values, "top_p", float, default.top_p, 0, 1),
        _parse_number(values, "seed", int, default.seed, 0, 2**63 - 1),
        **{
            name: _parse_number(values, name, float, getattr(default, name), *limits)
            for name, limits in PENALTIES.items()
        },
        logit_bias=parse_logit_bias(values.get("logit_bias")),
        structured_output=parse_structured_output(values),
    )


def _parse_number(
    values: Mapping[str, Any],
    name: str,
    kind: Callable[[Any], Any],
    default: Any,
    minimum: float,
    maximum: float,
) -> Any:
    value = values.get(name)
    if value is None:
        return default
    try:
        if isinstance(value, (bytes, bytearray)):  # a field of a form
            value = value.decode()
        number = kind(value)
        is_valid = not isinstance(value, bool) and (isinstance(value, str) or number == value)
        is_valid = is_valid and minimum <= number <= maximum
    except (TypeError, ValueError, OverflowError):
        is_valid = False
    if not is_valid:
        expected = "a whole number" if kind is int else "a number"
        raise PredictionException(
            f"{name} is {value!r:.100}; it is {expected} from {minimum} to {maximum}.", 400
        )
    return number


def _parse_prompt(value: Any) -> str | list[int]:
    if isinstance(value, (bytes, bytearray)):
        value = _decode_text("prompt", value)
    if isinstance(value, str) or (isinstance(value, list) and all(type(token) is int for token in value)):
        return value
    raise PredictionException("prompt is a text, or a list of token ids.", 400)


def _parse_adapter(value: Any) -> str | None:
    if isinstance(value, (bytes, bytearray)):
        value = _decode_text("adapter", value)
    if value is not None and not isinstance(value, str):
        raise PredictionException(f"adapter is {value!r:.100}; it is the name of an adapter.", 400)
    return value or None


def _parse_stops(value: Any) -> tuple[str, ...]:
    if isinstance(value, (bytes, bytearray)):
        value = _decode_text("stop", value)
    stops = [value] if isinstance(value, str) else value or []
    is_valid = (
        isinstance(stops, list)
        and len(stops) <= _MAX_STOP_STRINGS
        and all(isinstance(s, str) and s for s in stops)
    )
    if not is_valid:
        raise PredictionException(
            f"stop is a text, or a list of up to {_MAX_STOP_STRINGS} texts, none of them empty.", 400
        )
    return tuple(stops)


def _parse_flag(value: Any) -> bool:
    if isinstance(value, (bytes, bytearray)):
        value = bytes(value).decode(errors="replace")
    flags = {None: False, True: True, False: False, "true": True, "false": False}
    if isinstance(value, (str, bool, type(None))) and value in flags:
        return flags[value]
    raise PredictionException(f"stream is {value!r:.100}; it is true or false.", 400)


def _decode_text(name: str, value: Any) -> str:
    try:
        return bytes(value).decode()
    except UnicodeDecodeError as error:
        raise PredictionException(f"{name} is no UTF-8 text: {error}.", 400) from None
