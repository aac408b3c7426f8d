"""OpenAI's embeddings: each text of a body becomes a request, and the vectors become one response."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NoReturn

import orjson
from typing_extensions import NotRequired, TypedDict

from serve_app.domain.request import InferenceResponse, InputPart, ResponseStream
from serve_app.domain.validation import documented
from serve_app.errors import HandlerRejected
from serve_app.protocols.openai.errors import InvalidField
from serve_app.protocols.openai.fields import find_ignored

MAX_INPUTS = 2048  # per request, as in OpenAI's API
_FORMATS = ("float", "base64")
# Sent with each text: Torchrelay's own sentence models return the number of tokens, others ignore it.
_COUNT_TOKENS = InputPart("parameters", b'{"tokens": true}', "application/json")


_Text = Annotated[str, documented(minLength=1)]


class EmbeddingsBody(TypedDict):
    """The body of a request."""

    model: Annotated[str, documented("name, or name:version", minLength=1)]
    input: _Text | Annotated[list[_Text], documented(minItems=1, maxItems=MAX_INPUTS)]
    encoding_format: NotRequired[Literal["float", "base64"]]
    user: NotRequired[str]


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

    ``inputs`` are the texts; with ``base64`` vectors are sent as base64 of little-endian float32.
    """

    inputs: tuple[str, ...]
    base64: bool
    ignored: tuple[str, ...] = ()

    @property
    def rows(self) -> list[tuple[InputPart, ...]]:
        return [build_inputs(text) for text in self.inputs]

    def encode(self, model: str, responses: Sequence[InferenceResponse]) -> bytes:
        return encode_response(self, model, responses)


def parse_request(body: Mapping[str, Any]) -> EmbeddingRequest:
    """Parse a body. Raises InvalidField."""
    ignored = find_ignored(body, EmbeddingsBody)
    inputs = body.get("input")
    texts = [inputs] if isinstance(inputs, str) else inputs
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise InvalidField(
            "input is a text, or a list of texts, none of them empty; not of token ids.", "input"
        )
    if len(texts) > MAX_INPUTS:
        raise InvalidField(
            f"input has {len(texts)} texts, and may have {MAX_INPUTS}: send several requests.", "input"
        )
    if body.get("dimensions") is not None:
        raise InvalidField(
            "dimensions is not served: a vector is as long as the model makes it.", "dimensions"
        )
    encoding_format = body.get("encoding_format")
    if encoding_format not in (None, *_FORMATS):
        raise InvalidField(f"encoding_format is one of {', '.join(_FORMATS)}.", "encoding_format")
    return EmbeddingRequest(tuple(texts), encoding_format == "base64", ignored)


def build_inputs(text: str) -> tuple[InputPart, ...]:
    """Return the inputs of a request for one text."""
    return InputPart("body", text.encode("utf-8", "replace"), "text/plain"), _COUNT_TOKENS


def encode_response(
    embedding_request: EmbeddingRequest, model: str, responses: Sequence[InferenceResponse]
) -> bytes:
    """Return the body of the response to all texts.

    Raises InvalidField if the model does not return vectors.
    """
    data: list[Embedding] = []
    tokens = 0
    for index, response in enumerate(responses):
        vector, count = _parse_vector(response.body, model)
        tokens += count
        embedding: list[float] | str = vector
        if embedding_request.base64:
            embedding = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
        data.append({"object": "embedding", "index": index, "embedding": embedding})
    usage: EmbeddingUsage = {"prompt_tokens": tokens, "total_tokens": tokens}
    document: EmbeddingList = {"object": "list", "data": data, "model": model, "usage": usage}
    return orjson.dumps(document)


def check_response(response: InferenceResponse) -> None:
    """Raise HandlerRejected where the handler has set the status of an error."""
    if response.status >= 400:
        raise HandlerRejected(response.body.decode(errors="replace"), response.status)


async def reject_stream(stream: ResponseStream, model: str) -> NoReturn:
    """Close a stream. Always raises InvalidField."""
    await stream.aclose()
    raise InvalidField(f"Model {model} answers a text with a stream instead of numbers.", "model")


def _parse_vector(body: bytes, model: str) -> tuple[list[float], int]:
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
