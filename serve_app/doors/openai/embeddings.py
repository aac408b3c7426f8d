"""Embeddings as OpenAI's API has them: a body becomes one text a row, and the rows' vectors become its answer."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from serve_app.doors.openai.errors import InvalidField
from serve_app.types import Input, Reply

MOST_INPUTS = 2048  # of one request, as OpenAI has it
_FORMATS = ("float", "base64")
_WORDS = ("model", "input", "encoding_format", "user")
# Beside the text: what Torchrelay's own models of sentences take, and others pass over.
_COUNTED = Input("parameters", b'{"tokens": true}', "application/json")


@dataclass(frozen=True)
class Asked:
    """``inputs`` are the texts; ``base64`` whether vectors go out as the base64 of little-endian float32."""

    inputs: tuple[str, ...]
    base64: bool


def read(body: Mapping[str, Any]) -> Asked:
    """What a body asks for. Raises InvalidField."""
    inputs = body.get("input")
    texts = [inputs] if isinstance(inputs, str) else inputs
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise InvalidField("input is a text, or a list of texts, none of them empty; not of token ids.", "input")
    if len(texts) > MOST_INPUTS:
        raise InvalidField(f"input has {len(texts)} texts, and may have {MOST_INPUTS}: send several requests.", "input")
    if body.get("dimensions") is not None:
        raise InvalidField("dimensions is not served: a vector is as long as the model makes it.", "dimensions")
    form = body.get("encoding_format")
    if form not in (None, *_FORMATS):
        raise InvalidField(f"encoding_format is one of {', '.join(_FORMATS)}.", "encoding_format")
    for word, value in body.items():
        if word not in _WORDS and value is not None:
            raise InvalidField(f"{word!r} is not known here: there are {', '.join(_WORDS)}.", word)
    return Asked(tuple(texts), form == "base64")


def row(text: str) -> tuple[Input, ...]:
    """A text as a model gets it."""
    return Input("body", text.encode("utf-8", "replace"), "text/plain"), _COUNTED


def written(asked: Asked, model: str, replies: Sequence[Reply]) -> bytes:
    """The answer of all rows. Raises InvalidField where the model answers with something else than vectors."""
    data, tokens = [], 0
    for index, reply in enumerate(replies):
        vector, count = _vector(reply.body, model)
        tokens += count
        said: Any = vector
        if asked.base64:
            said = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
        data.append({"object": "embedding", "index": index, "embedding": said})
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return orjson.dumps({"object": "list", "data": data, "model": model, "usage": usage})


def _vector(body: bytes, model: str) -> tuple[list[float], int]:
    """A row's vector, and how many tokens its text had; 0 where the model does not say."""
    tokens = 0
    try:
        said = orjson.loads(body)
        if isinstance(said, dict):
            said, tokens = said["embedding"], int(said.get("tokens", 0))
        if said and all(type(number) in (float, int) for number in said):
            return said, tokens
    except (ValueError, TypeError, KeyError):
        pass
    cure = 'a model of embeddings answers a text with a list of numbers, or {"embedding": [...], "tokens": 5}'
    raise InvalidField(f"Model {model} answers no embeddings: {cure}.", "model")
