"""The fields of a request that constrain its tokens: structured output, penalties and logit bias.

The names are those of OpenAI's API and of vLLM's additions to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from handlers import json_text
from handlers.engines.engine import StructuredOutput
from handlers.errors import PredictionException

# The range of each penalty; outside of it, outputs are noise.
PENALTIES = {
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
}
STRUCTURED_OUTPUT_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
)
_KINDS = ("json", "json_object", "regex", "choice")
MAX_COUNT = 2**31 - 1  # of new tokens and of top_k; engines store them in 32 bits
_MAX_BIASED_TOKENS = 1024
_MAX_BIAS = 100
_TOKEN_ID = re.compile("[0-9]{1,10}")  # int refuses texts of more than 4,300 digits


def parse_structured_output(body: Mapping[str, Any]) -> StructuredOutput | None:
    """Return the format that ``body`` requests for the text, if any. Raises PredictionException 400."""
    formats = {
        field: output
        for field in STRUCTURED_OUTPUT_FIELDS
        if body.get(field) is not None and (output := _parse_field(field, body[field])) is not None
    }
    if len(formats) > 1:
        raise PredictionException(f"{' and '.join(formats)} are alternatives: give one of them.", 400)
    return next(iter(formats.values()), None)


def parse_logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Return (token, addend) pairs of ``{"50256": -100}``. Raises PredictionException 400."""
    if value is None:
        return ()
    if not isinstance(value, Mapping) or len(value) > _MAX_BIASED_TOKENS:
        raise PredictionException(
            f'logit_bias is an object of up to {_MAX_BIASED_TOKENS} token ids: {{"50256": -100}}.', 400
        )
    biases: dict[int, float] = {}
    for key, bias in value.items():
        is_number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
        is_token = _TOKEN_ID.fullmatch(str(key)) is not None
        if not is_token or not is_number or not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise PredictionException(
                f"logit_bias has {key!r:.100}: {bias!r:.100}; it is a token id, and a number from "
                f"-{_MAX_BIAS} to {_MAX_BIAS}.",
                400,
            )
        token = int(key)
        if token in biases:
            raise PredictionException(f"logit_bias has the token {token} twice: give it once.", 400)
        biases[token] = float(bias)
    return tuple(biases.items())


def _parse_field(field: str, value: Any) -> StructuredOutput | None:
    if field == "response_format":
        return _parse_response_format(value)
    if field != "structured_outputs":
        return _build(field, field.removeprefix("guided_"), value)
    given = (
        {key: item for key, item in value.items() if item is not None} if isinstance(value, Mapping) else {}
    )
    if len(given) != 1 or next(iter(given)) not in _KINDS:
        raise PredictionException(
            f'structured_outputs is an object with one of {", ".join(_KINDS)}: {{"regex": "[0-9]+"}}.', 400
        )
    [(kind, item)] = given.items()
    return _build(f"structured_outputs.{kind}", kind, item)


def _parse_response_format(value: Any) -> StructuredOutput | None:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutput("json_object")
    if kind == "json_schema":
        document = value.get("json_schema")
        schema = document.get("schema") if isinstance(document, Mapping) else None
        return _build("response_format.json_schema.schema", "json", schema)
    raise PredictionException(
        'response_format is {"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", '
        '"json_schema": {"name": ..., "schema": {...}}}.',
        400,
    )


def _build(field: str, kind: str, value: Any) -> StructuredOutput:
    if kind == "json":
        if isinstance(value, str):
            try:
                value = json_text.loads(value)
            except ValueError as error:
                raise PredictionException(f"{field} is no JSON: {error}.", 400) from None
        if isinstance(value, Mapping):
            return StructuredOutput("json", json.dumps(value), field)
        raise PredictionException(f'{field} is a JSON Schema: {{"type": "object", "properties": ...}}.', 400)
    if kind == "json_object" and value is True:
        return StructuredOutput("json_object", field_name=field)
    if kind == "regex" and isinstance(value, str) and value:
        return StructuredOutput("regex", value, field)
    is_list = kind == "choice" and isinstance(value, list) and value
    if is_list and all(isinstance(text, str) and text for text in value):
        return StructuredOutput("choice", json.dumps(value), field)
    expected = {"regex": "a regular expression", "choice": "a list of texts, none of them empty"}
    raise PredictionException(f"{field} is {value!r:.100}; it is {expected.get(kind, 'true')}.", 400)
