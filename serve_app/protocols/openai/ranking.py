"""Relevance scores of texts by cross-encoders: ``/v1/score`` as in vLLM, ``/v1/rerank`` as in Jina's API.

Each pair of texts becomes a row, and the scores become one response.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
from typing_extensions import NotRequired, TypedDict

from serve_app.domain import exact_json
from serve_app.domain.request import InferenceResponse, InputPart
from serve_app.domain.validation import STRICT, documented
from serve_app.protocols.openai.embeddings import MAX_INPUTS, encode_row
from serve_app.protocols.openai.errors import InvalidField
from serve_app.protocols.openai.fields import find_ignored

# For the models of a folder: one without a score refuses. Handlers of authors ignore the parameters.
_PARAMETERS = {"output_value": "score", "tokens": True}

_Text = Annotated[str, documented(minLength=1)]
_Texts = _Text | Annotated[list[_Text], documented(minItems=1, maxItems=MAX_INPUTS)]
_Model = Annotated[str, documented("name, or name:version", minLength=1)]


class ScoreBody(TypedDict):
    """Two texts, or lists of as many texts; a single ``text_1`` is compared with each of ``text_2``."""

    model: _Model
    text_1: _Texts
    text_2: _Texts
    user: NotRequired[str]


class RankingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class Score(TypedDict):
    object: Literal["score"]
    index: Annotated[int, documented(minimum=0)]
    score: float


class ScoreList(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: RankingUsage


class RerankDocument(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    text: _Text


class RerankBody(TypedDict):
    model: _Model
    query: _Text
    documents: Annotated[list[_Text | RerankDocument], documented(minItems=1, maxItems=MAX_INPUTS)]
    top_n: NotRequired[Annotated[int, documented("The default is all.", minimum=1)]]
    return_documents: NotRequired[Annotated[bool, documented("The default is true.")]]
    user: NotRequired[str]


class RankedDocument(TypedDict):
    text: str


class RerankResult(TypedDict):
    index: Annotated[int, documented("Of the document in the request.", minimum=0)]
    relevance_score: float
    document: NotRequired[RankedDocument]


class RerankList(TypedDict):
    """The documents, the most relevant first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: RankingUsage


@dataclass(frozen=True)
class RankingRequest:
    """The pairs of a request; each is a row."""

    pairs: tuple[tuple[str, str], ...]
    ignored: tuple[str, ...]

    @property
    def rows(self) -> list[tuple[InputPart, ...]]:
        return [build_pair(*pair, _PARAMETERS) for pair in self.pairs]


@dataclass(frozen=True)
class ScoreRequest(RankingRequest):
    """A parsed request for scores."""

    def encode(self, model: str, responses: Sequence[InferenceResponse]) -> bytes:
        """Return the body of the response. Raises InvalidField if the model does not return scores."""
        scores, usage = _parse_scores(responses, model)
        data: list[Score] = [
            {"object": "score", "index": index, "score": score} for index, score in enumerate(scores)
        ]
        document: ScoreList = {
            "id": f"score-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": data,
            "usage": usage,
        }
        return exact_json.dumps(document)


@dataclass(frozen=True)
class RerankRequest(RankingRequest):
    """A parsed request to rank documents by their relevance to a query."""

    top_n: int | None = None
    return_documents: bool = True

    def encode(self, model: str, responses: Sequence[InferenceResponse]) -> bytes:
        """Return the body of the response. Raises InvalidField if the model does not return scores."""
        scores, usage = _parse_scores(responses, model)
        results: list[RerankResult] = []
        for index in sorted(range(len(scores)), key=lambda index: -scores[index])[: self.top_n]:
            result: RerankResult = {"index": index, "relevance_score": scores[index]}
            if self.return_documents:
                result["document"] = {"text": self.pairs[index][1]}
            results.append(result)
        id = f"rerank-{uuid.uuid4().hex}"
        document: RerankList = {"id": id, "model": model, "results": results, "usage": usage}
        return exact_json.dumps(document)


def parse_score(body: Mapping[str, Any]) -> ScoreRequest:
    """Parse a body of ``/v1/score``. Raises InvalidField."""
    first, second = _parse_texts(body, "text_1"), _parse_texts(body, "text_2")
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        raise InvalidField(
            f"text_1 has {len(first)} texts, and text_2 {len(second)}: give as many, or one text_1.", "text_1"
        )
    return ScoreRequest(tuple(zip(first, second)), find_ignored(body, ScoreBody.__annotations__))


def parse_rerank(body: Mapping[str, Any]) -> RerankRequest:
    """Parse a body of ``/v1/rerank``. Raises InvalidField."""
    query, documents = body.get("query"), body.get("documents")
    if not isinstance(query, str) or not query:
        raise InvalidField("query is a text that is not empty.", "query")
    if not isinstance(documents, list):
        raise InvalidField('documents is a list of texts, or of {"text": "..."}.', "documents")
    texts = [item["text"] if isinstance(item, dict) and set(item) == {"text"} else item for item in documents]
    top_n, return_documents = body.get("top_n"), body.get("return_documents")
    if top_n is not None and (type(top_n) is not int or top_n < 1):
        raise InvalidField(f"top_n is {top_n!r:.100}; it is a whole number from 1.", "top_n")
    if return_documents is not None and not isinstance(return_documents, bool):
        raise InvalidField("return_documents is true or false.", "return_documents")
    pairs = tuple((query, text) for text in _parse_texts({"documents": texts}, "documents"))
    return RerankRequest(
        pairs, find_ignored(body, RerankBody.__annotations__), top_n, return_documents is not False
    )


def _parse_texts(body: Mapping[str, Any], field: str) -> list[str]:
    value = body.get(field)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise InvalidField(f"{field} is a text, or a list of texts, none of them empty.", field)
    if len(texts) > MAX_INPUTS:
        raise InvalidField(
            f"{field} has {len(texts)} texts, and may have {MAX_INPUTS}: send several requests.", field
        )
    return texts


def build_pair(text: str, pair: str, parameters: Mapping[str, Any]) -> tuple[InputPart, ...]:
    """Return the inputs of a request for two texts."""
    row = {"text": text, "text_pair": pair, "parameters": parameters}
    return (InputPart("body", encode_row(row), "application/json"),)


def _parse_scores(responses: Sequence[InferenceResponse], model: str) -> tuple[list[float], RankingUsage]:
    """Return the score of each row, and the number of tokens, or 0 if the model does not count them."""
    scores, tokens = [], 0
    for response in responses:
        score, count = read_score(response.body, model)
        scores.append(score)
        tokens += count
    return scores, {"prompt_tokens": tokens, "total_tokens": tokens}


def read_score(body: bytes, model: str) -> tuple[float, int]:
    """Return the score of a row and its number of tokens, or 0 if the model does not count them."""
    tokens = 0
    try:
        answer = orjson.loads(body)
        if isinstance(answer, list):
            [answer] = answer
        if isinstance(answer, dict):
            answer, tokens = answer["score"], int(answer.get("tokens", 0))
        if type(answer) in (float, int):
            return float(answer), tokens
    except (ValueError, TypeError, KeyError):
        pass
    expected = (
        'a cross-encoder answers two texts with one number, or {"score": 0.5, "tokens": 7} of one label'
    )
    raise InvalidField(f"Model {model} answers no scores: {expected}.", "model")
