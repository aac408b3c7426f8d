"""The requests of text-embeddings-inference: each input is a row, and the answers become one document."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
from typing_extensions import NotRequired, TypedDict

from serve_app.domain import exact_json
from serve_app.domain.request import InferenceResponse, InputPart
from serve_app.domain.validation import documented
from serve_app.protocols.openai.embeddings import (
    MAX_INPUTS,
    EmbeddingsFields,
    Input,
    build_inputs,
    is_token_ids,
    parse_vector,
    read_dimensions,
    shorten,
)
from serve_app.protocols.openai.errors import InvalidField
from serve_app.protocols.openai.fields import find_ignored
from serve_app.protocols.openai.ranking import build_pair, read_score
from serve_app.protocols.tei.errors import BatchTooLarge, EmptyInputs

_Text = Annotated[str, documented(minLength=1)]
_Ids = Annotated[list[Annotated[int, documented(minimum=0)]], documented(minItems=1)]
_Inputs = Annotated[
    _Text | _Ids | Annotated[list[_Text | _Ids], documented(minItems=1, maxItems=MAX_INPUTS)],
    documented("A text or its token ids, or several of them."),
]
_Pair = Annotated[list[_Text], documented(minItems=1, maxItems=2)]


class TruncationFields(TypedDict):
    truncate: NotRequired[Annotated[bool, documented("The default is true; false refuses long texts (413).")]]
    truncation_direction: NotRequired[Literal["left", "right", "Left", "Right"]]


class TeiEmbedAllBody(TruncationFields):
    inputs: _Inputs
    prompt_name: NotRequired[str]


class TeiEmbedBody(TeiEmbedAllBody):
    normalize: NotRequired[Annotated[bool, documented("The default is true.")]]
    dimensions: NotRequired[
        Annotated[int, documented("Shorten each vector to its first numbers.", minimum=1)]
    ]


class TeiRerankBody(TruncationFields):
    query: _Text
    texts: Annotated[list[_Text], documented(minItems=1, maxItems=MAX_INPUTS)]
    raw_scores: NotRequired[bool]
    return_text: NotRequired[bool]


class TeiRank(TypedDict):
    index: Annotated[int, documented("Of the text in the request.", minimum=0)]
    score: float
    text: NotRequired[str]


class TeiPredictBody(TruncationFields):
    """The inputs are a text, a pair of texts, or a list of lists of one text or two."""

    inputs: _Text | _Pair | Annotated[list[_Pair], documented(minItems=1, maxItems=MAX_INPUTS)]
    raw_scores: NotRequired[bool]


class TeiPrediction(TypedDict):
    label: str
    score: float


class TeiSentences(TypedDict):
    source_sentence: _Text
    sentences: Annotated[list[_Text], documented(minItems=1, maxItems=MAX_INPUTS - 1)]


class TeiSimilarityParameters(TruncationFields):
    prompt_name: NotRequired[str]


class TeiSimilarityBody(TypedDict):
    inputs: TeiSentences
    parameters: NotRequired[TeiSimilarityParameters]


class TeiTokenizeBody(TypedDict):
    inputs: _Text | Annotated[list[_Text], documented(minItems=1, maxItems=MAX_INPUTS)]
    add_special_tokens: NotRequired[bool]
    prompt_name: NotRequired[str]


class TeiToken(TypedDict):
    id: int
    text: str
    special: bool
    start: Annotated[int | None, documented("The first character.")]
    stop: int | None


class TeiDecodeBody(TypedDict):
    ids: _Ids | Annotated[list[_Ids], documented(minItems=1, maxItems=MAX_INPUTS)]
    skip_special_tokens: NotRequired[bool]


class TeiEmbeddingsBody(EmbeddingsFields):
    """The body of OpenAI's embeddings."""

    model: NotRequired[Annotated[str, documented("Has no effect: the path names the model.")]]


class TeiSparseValue(TypedDict):
    index: int
    value: float


Rows = list[tuple[InputPart, ...]]


@dataclass(frozen=True)
class TeiRequest:
    """A parsed request; ``build`` makes its document of the model's name and the rows' answers."""

    rows: Rows
    build: Callable[[str, list[bytes]], Any]
    ignored: tuple[str, ...] = ()

    def encode(self, model: str, responses: Sequence[InferenceResponse]) -> bytes:
        """Return the body of the response. Raises InvalidField if the model does not return such answers."""
        return exact_json.dumps(self.build(model, [response.body for response in responses]))


def parse_embed(body: Mapping[str, Any]) -> TeiRequest:
    """Parse a request for the vector of each text. Raises InvalidField."""
    parameters = _read_parameters(body, "sentence_embedding")
    rows = _build_rows(_parse_inputs(body), parameters)
    dimensions, normalize = read_dimensions(body), parameters.get("normalize", True)

    def build(model: str, answers: list[bytes]) -> list[list[float]]:
        vectors = [parse_vector(answer, model)[0] for answer in answers]
        return vectors if dimensions is None else [shorten(v, dimensions, normalize) for v in vectors]

    return TeiRequest(rows, build, _find_ignored(body, TeiEmbedBody))


def parse_embed_all(body: Mapping[str, Any]) -> TeiRequest:
    """Parse a request for the vector of each token. Raises InvalidField."""
    return _parse_lists(body, "token_embeddings")


def parse_embed_sparse(body: Mapping[str, Any]) -> TeiRequest:
    """Parse a request for the weights of terms. Raises InvalidField."""
    return _parse_lists(body, "sparse_embedding")


def parse_rerank(body: Mapping[str, Any]) -> TeiRequest:
    """Parse a request to rank texts by a query. Raises InvalidField."""
    query, texts = body.get("query"), body.get("texts")
    if not isinstance(query, str) or not query:
        raise InvalidField("query is a text that is not empty.", "query")
    texts = _check_texts(texts, "texts")
    function = "none" if _read_flag(body, "raw_scores") else "sigmoid"
    parameters = {**_read_parameters(body, "score"), "function_to_apply": function}
    return_text = _read_flag(body, "return_text")

    def build(model: str, answers: list[bytes]) -> list[TeiRank]:
        scores = [read_score(answer, model)[0] for answer in answers]
        ranks: list[TeiRank] = []
        for index in sorted(range(len(scores)), key=lambda index: -scores[index]):
            rank: TeiRank = {"index": index, "score": scores[index]}
            ranks.append({**rank, "text": texts[index]} if return_text else rank)
        return ranks

    rows = [build_pair(query, text, parameters) for text in texts]
    return TeiRequest(rows, build, _find_ignored(body, TeiRerankBody))


def parse_predict(body: Mapping[str, Any]) -> TeiRequest:
    """Parse a request for the scores of all labels. Raises InvalidField."""
    inputs = body.get("inputs")
    is_single = isinstance(inputs, str) or _is_pair(inputs)
    inputs = [inputs] if is_single else inputs
    if inputs in ("", []):
        raise EmptyInputs("inputs is empty: send a text, or a list of pairs.", "inputs")
    if not isinstance(inputs, list) or not (is_single or all(map(_is_pair, inputs))):
        raise InvalidField(
            "inputs is a text, a pair [text, text], or a list of lists of one text or two.", "inputs"
        )
    _check_count(inputs, "inputs")
    parameters = _read_parameters(body, "labels")
    if _read_flag(body, "raw_scores"):
        parameters["function_to_apply"] = "none"
    texts = [[item] if isinstance(item, str) else item for item in inputs]
    rows = [
        build_pair(item[0], item[1], parameters) if len(item) == 2 else build_inputs(item[0], parameters)
        for item in texts
    ]

    def build(model: str, answers: list[bytes]) -> Any:
        return _build_predictions(model, answers, is_single)

    return TeiRequest(rows, build, _find_ignored(body, TeiPredictBody))


def parse_similarity(body: Mapping[str, Any]) -> TeiRequest:
    """Parse a request for the cosine similarities of a sentence to others. Raises InvalidField."""
    inputs, options = body.get("inputs"), body.get("parameters") or {}
    source = inputs.get("source_sentence") if isinstance(inputs, Mapping) else None
    if not isinstance(inputs, Mapping) or not isinstance(source, str) or not source:
        raise InvalidField('inputs is {"source_sentence": "...", "sentences": ["..."]}.', "inputs")
    if not isinstance(options, Mapping):
        raise InvalidField("parameters is an object.", "parameters")
    sentences = _check_texts(inputs.get("sentences"), "sentences")
    rows = _build_rows([source, *sentences], _read_parameters(options, "sentence_embedding"))

    def build(model: str, answers: list[bytes]) -> list[float]:
        first, *others = (parse_vector(answer, model)[0] for answer in answers)
        return [_compute_cosine(first, other) for other in others]

    ignored = _find_ignored(body, TeiSimilarityBody) + _find_ignored(options, TeiSimilarityParameters)
    return TeiRequest(rows, build, ignored)


def parse_tokenize(body: Mapping[str, Any]) -> TeiRequest:
    """Parse a request for the tokens of texts. Raises InvalidField."""
    inputs = body.get("inputs")
    texts = _check_texts([inputs] if isinstance(inputs, str) else inputs, "inputs")
    parameters = {"output_value": "token_ids", **_read_given(body, ("prompt_name",), ("add_special_tokens",))}
    rows = _build_rows(texts, parameters)
    return TeiRequest(rows, _build_lists, _find_ignored(body, TeiTokenizeBody))


def parse_decode(body: Mapping[str, Any]) -> TeiRequest:
    """Parse a request for the texts of token ids. Raises InvalidField."""
    ids = body.get("ids")
    batch = [ids] if is_token_ids(ids) else ids
    if batch == []:
        raise EmptyInputs("ids is empty: send a list of token ids.", "ids")
    if not isinstance(batch, list) or not all(map(is_token_ids, batch)):
        raise InvalidField("ids is a list of token ids, or a list of such lists.", "ids")
    _check_count(batch, "ids")
    parameters = {"output_value": "text", **_read_given(body, (), ("skip_special_tokens",))}
    rows = _build_rows([tuple(item) for item in batch], parameters)

    def build(model: str, answers: list[bytes]) -> list[str]:
        return [answer.decode(errors="replace") for answer in answers]

    return TeiRequest(rows, build, _find_ignored(body, TeiDecodeBody))


def parse_default(body: Mapping[str, Any]) -> TeiRequest:
    """Parse a request for what the model answers: vectors, weights of terms, labels, similarities or ranks.

    It may have the form of Hugging Face's Inference API, whose options are in ``parameters``. Raises
    InvalidField.
    """
    if "query" in body:
        return parse_rerank(body)
    if isinstance(body.get("inputs"), Mapping):
        return parse_similarity(body)
    options = body.get("parameters")
    if options is not None and not isinstance(options, Mapping):
        raise InvalidField("parameters is an object.", "parameters")
    merged = {**(options or {}), **body}
    parameters = _read_parameters(merged, ["sentence_embedding", "sparse_embedding", "labels"])
    if _read_flag(merged, "raw_scores"):
        parameters["function_to_apply"] = "none"
    parameters |= _read_given(merged, ("function_to_apply",), ())
    if (top_k := merged.get("top_k")) is not None:
        if type(top_k) is not int or not 1 <= top_k < 2**31:
            raise InvalidField(f"top_k is {top_k!r:.100}; it is a whole number from 1.", "top_k")
        parameters["top_k"] = top_k
    is_flat = isinstance(body.get("inputs"), str) and options is None
    dimensions = read_dimensions(merged)

    def build(model: str, answers: list[bytes]) -> Any:
        documents = [_parse_list(answer, model) for answer in answers]
        if all(isinstance(item, Mapping) and "label" in item for document in documents for item in document):
            return _build_predictions(model, answers, is_flat)
        if dimensions is None:
            return documents
        normalize = parameters.get("normalize", True)
        return [shorten(parse_vector(answer, model)[0], dimensions, normalize) for answer in answers]

    known = {*TeiEmbedBody.__annotations__, "model", "parameters", "raw_scores", "function_to_apply", "top_k"}
    return TeiRequest(_build_rows(_parse_inputs(body), parameters), build, find_ignored(merged, known))


# Fields


def _parse_lists(body: Mapping[str, Any], output: str) -> TeiRequest:
    """Parse a request for an output that is a list for each text. Raises InvalidField."""
    rows = _build_rows(_parse_inputs(body), _read_parameters(body, output))
    return TeiRequest(rows, _build_lists, _find_ignored(body, TeiEmbedAllBody))


def _parse_inputs(body: Mapping[str, Any]) -> list[Input]:
    inputs = body.get("inputs")
    batch = [inputs] if isinstance(inputs, str) or is_token_ids(inputs) else inputs
    if not isinstance(batch, list) or not all(isinstance(item, str) or is_token_ids(item) for item in batch):
        raise InvalidField("inputs is a text, its token ids, or a list of them.", "inputs")
    if not batch or "" in batch:
        raise EmptyInputs("inputs is empty, or has an empty text.", "inputs")
    _check_count(batch, "inputs")
    return [item if isinstance(item, str) else tuple(item) for item in batch]


def _check_texts(value: Any, field: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise InvalidField(f"{field} is a list of texts.", field)
    if not value or "" in value:
        raise EmptyInputs(f"{field} is empty, or has an empty text.", field)
    _check_count(value, field)
    return value


def _check_count(items: Sequence[Any], field: str) -> None:
    if len(items) > MAX_INPUTS:
        raise BatchTooLarge(
            f"{field} has {len(items)} items, and may have {MAX_INPUTS}: send several requests.", field
        )


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) in (1, 2) and all(isinstance(t, str) and t for t in value)


def _read_parameters(body: Mapping[str, Any], output: str | list[str]) -> dict[str, Any]:
    """Return the parameters of each row."""
    given = _read_given(body, ("prompt_name",), ("truncate", "normalize"))
    direction = body.get("truncation_direction")
    if direction is not None:
        if not isinstance(direction, str) or direction.lower() not in ("left", "right"):
            raise InvalidField("truncation_direction is left or right.", "truncation_direction")
        given["truncation_direction"] = direction.lower()
    return {"output_value": output, "tokens": True, **given}


def _read_given(body: Mapping[str, Any], texts: Collection[str], flags: Collection[str]) -> dict[str, Any]:
    given: dict[str, Any] = {name: _read_flag(body, name) for name in flags if body.get(name) is not None}
    for name in texts:
        if (value := body.get(name)) is not None:
            if not isinstance(value, str):
                raise InvalidField(f"{name} is a text.", name)
            given[name] = value
    return given


def _read_flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidField(f"{name} is true or false.", name)
    return value is True


def _find_ignored(body: Mapping[str, Any], kind: type) -> tuple[str, ...]:
    return find_ignored(body, {*kind.__annotations__, "model"})


# Answers


def _build_rows(inputs: Sequence[Input], parameters: Mapping[str, Any]) -> Rows:
    return [build_inputs(input, parameters) for input in inputs]


def _build_lists(model: str, answers: list[bytes]) -> list[Any]:
    return [_parse_list(answer, model) for answer in answers]


def _build_predictions(model: str, answers: list[bytes], is_single: bool) -> Any:
    predictions = [_parse_predictions(answer, model) for answer in answers]
    return predictions[0] if is_single else predictions


def _parse_predictions(answer: bytes, model: str) -> list[TeiPrediction]:
    try:
        return [{"label": item["label"], "score": item["score"]} for item in _parse_list(answer, model)]
    except (TypeError, KeyError):
        raise _not_a_list(model) from None


def _parse_list(answer: bytes, model: str) -> list[Any]:
    """Return the list in an answer, beside which may be a number of tokens. Raises InvalidField."""
    try:
        document = orjson.loads(answer)
    except ValueError:
        document = None
    if isinstance(document, dict):
        document = document.get("embedding")
    if not isinstance(document, list):
        raise _not_a_list(model)
    return document


def _not_a_list(model: str) -> InvalidField:
    return InvalidField(
        f"Model {model} has no such answer: this route is of models of the handler huggingface.", "model"
    )


def _compute_cosine(first: Sequence[float], second: Sequence[float]) -> float:
    norms = math.hypot(*first) * math.hypot(*second)
    return sum(map(operator.mul, first, second)) / norms if norms else 0.0
