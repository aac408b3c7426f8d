"""OpenAI's embeddings: each text of a body becomes a request, and the vectors become one response."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
from typing_extensions import NotRequired, TypedDict

from serve_app.domain.request import InferenceResponse, InputPart
from serve_app.domain.validation import documented
from serve_app.protocols.openai.errors import InvalidField
from serve_app.protocols.openai.fields import find_ignored

MAX_INPUTS = 2048  # per request, as in OpenAI's API
_FORMATS = ("float", "base64")
# Sent with each text, for the models of a folder; handlers of authors ignore them.
_PARAMETERS = {"output_value": "sentence_embedding", "tokens": True}

Input = str | tuple[int, ...]  # a text, or its token ids
_Text = Annotated[str, documented(minLength=1)]
_TokenIds = Annotated[list[Annotated[int, documented(minimum=0)]], documented(minItems=1)]


class EmbeddingsFields(TypedDict):
    input: Annotated[
        _Text
        | Annotated[list[_Text], documented(minItems=1, maxItems=MAX_INPUTS)]
        | _TokenIds
        | Annotated[list[_TokenIds], documented(minItems=1, maxItems=MAX_INPUTS)],
        documented("A text, several texts, or token ids of the model's own tokenizer."),
    ]
    encoding_format: NotRequired[Literal["float", "base64"]]
    dimensions: NotRequired[
        Annotated[int, documented("Shorten each vector to its first numbers.", minimum=1)]
    ]
    user: NotRequired[str]


class EmbeddingsBody(EmbeddingsFields):
    """The body of a request."""

    model: Annotated[str, documented("name, or name:version", minLength=1)]


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: Annotated[int, documented(minimum=0)]
    embedding: Annotated[list[float] | str, documented("Or base64 of little-endian float32.")]


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


@dataclass(frozen=True)
class EmbeddingRequest:
    """A parsed request.

    With ``base64`` vectors are sent as base64 of little-endian float32.
    """

    inputs: tuple[Input, ...]
    base64: bool
    ignored: tuple[str, ...] = ()
    dimensions: int | None = None

    @property
    def rows(self) -> list[tuple[InputPart, ...]]:
        return [build_inputs(text) for text in self.inputs]

    def encode(self, model: str, responses: Sequence[InferenceResponse]) -> bytes:
        return encode_response(self, model, responses)


def parse_request(body: Mapping[str, Any]) -> EmbeddingRequest:
    """Parse a body. Raises InvalidField."""
    ignored = find_ignored(body, EmbeddingsBody.__annotations__)
    inputs = _parse_inputs(body.get("input"))
    dimensions = read_dimensions(body)
    encoding_format = body.get("encoding_format")
    if encoding_format not in (None, *_FORMATS):
        raise InvalidField(f"encoding_format is one of {', '.join(_FORMATS)}.", "encoding_format")
    return EmbeddingRequest(inputs, encoding_format == "base64", ignored, dimensions)


def read_dimensions(body: Mapping[str, Any]) -> int | None:
    """Return the requested length of the vectors, None for that of the model. Raises InvalidField."""
    dimensions = body.get("dimensions")
    if dimensions is not None and (type(dimensions) is not int or dimensions < 1):
        raise InvalidField(f"dimensions is {dimensions!r:.100}; it is a whole number from 1.", "dimensions")
    return dimensions


def _parse_inputs(value: Any) -> tuple[Input, ...]:
    inputs = [value] if isinstance(value, str) or is_token_ids(value) else value
    if (
        not isinstance(inputs, list)
        or not inputs
        or not (all(isinstance(text, str) and text for text in inputs) or all(map(is_token_ids, inputs)))
    ):
        raise InvalidField(
            "input is a text, a list of texts, a list of token ids, or a list of such lists, none of them "
            "empty.",
            "input",
        )
    if len(inputs) > MAX_INPUTS:
        raise InvalidField(
            f"input has {len(inputs)} texts, and may have {MAX_INPUTS}: send several requests.", "input"
        )
    return tuple(item if isinstance(item, str) else tuple(item) for item in inputs)


def is_token_ids(value: Any) -> bool:
    """Return whether a value is a list of token ids, which is not empty."""
    return (
        isinstance(value, list) and bool(value) and all(type(id) is int and 0 <= id < 2**31 for id in value)
    )


def build_inputs(input: Input, parameters: Mapping[str, Any] = _PARAMETERS) -> tuple[InputPart, ...]:
    """Return the inputs of a request for one text."""
    if isinstance(input, str):
        text = InputPart("body", input.encode("utf-8", "replace"), "text/plain")
        return text, InputPart("parameters", encode_row(parameters), "application/json")
    return (InputPart("body", encode_row({"inputs": input, "parameters": parameters}), "application/json"),)


def encode_row(row: Mapping[str, Any]) -> bytes:
    """Return JSON; half of a surrogate pair, which orjson refuses, is left to the model."""
    try:
        return orjson.dumps(row)
    except TypeError:
        return json.dumps(row).encode()


def encode_response(
    embedding_request: EmbeddingRequest, model: str, responses: Sequence[InferenceResponse]
) -> bytes:
    """Return the body of the response to all texts.

    Raises InvalidField if the model does not return vectors, or shorter ones than requested.
    """
    data: list[Embedding] = []
    tokens = 0
    for index, response in enumerate(responses):
        vector, count = parse_vector(response.body, model)
        tokens += count
        if embedding_request.dimensions is not None:
            vector = shorten(vector, embedding_request.dimensions)
        embedding: list[float] | str = vector
        if embedding_request.base64:
            embedding = _encode_base64(vector, model)
        data.append({"object": "embedding", "index": index, "embedding": embedding})
    usage: EmbeddingUsage = {"prompt_tokens": tokens, "total_tokens": tokens}
    document: EmbeddingList = {"object": "list", "data": data, "model": model, "usage": usage}
    return orjson.dumps(document)


def _encode_base64(vector: Sequence[float], model: str) -> str:
    try:
        packed = struct.pack(f"<{len(vector)}f", *vector)
    except OverflowError:
        raise InvalidField(
            f"Model {model} answers a number beyond float32: request encoding_format float.",
            "encoding_format",
        ) from None
    return base64.b64encode(packed).decode()


def shorten(vector: list[float], dimensions: int, normalize: bool = True) -> list[float]:
    """Return the first numbers of a vector, scaled to the norm 1 unless ``normalize`` is false.

    Raises InvalidField where the vector is shorter.
    """
    if dimensions > len(vector):
        raise InvalidField(
            f"dimensions is {dimensions}, and the model's vectors have {len(vector)}.", "dimensions"
        )
    first = vector[:dimensions]
    norm = math.hypot(*first) if normalize else 1.0
    return [number / norm for number in first] if norm else first


def parse_vector(body: bytes, model: str) -> tuple[list[float], int]:
    """Return the vector of a text and its number of tokens, or 0 if the model does not count them."""
    tokens = 0
    try:
        vector = orjson.loads(body)
        if isinstance(vector, dict):
            vector, tokens = vector["embedding"], int(vector.get("tokens", 0))
        if vector and all(type(number) in (float, int) for number in vector):
            return vector, tokens
    except (ValueError, TypeError, KeyError):
        pass
    expected = (
        'a model of embeddings answers a text with a list of numbers, or {"embedding": [...], "tokens": 5}'
    )
    raise InvalidField(f"Model {model} answers no embeddings: {expected}.", "model")
