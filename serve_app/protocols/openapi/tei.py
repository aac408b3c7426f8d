"""The API of Hugging Face's text-embeddings-inference."""

from __future__ import annotations

from typing import Any

from serve_app.protocols.http.endpoints import (
    API,
    NO_CONTENT,
    Content,
    Endpoint,
    ErrorFormat,
    get,
    json,
    post,
)
from serve_app.protocols.http.exchange import InferenceHeaders
from serve_app.protocols.openai.embeddings import EmbeddingList
from serve_app.protocols.openapi.openai import OPENAI, inference
from serve_app.protocols.tei import requests as tei
from serve_app.protocols.tei.errors import TeiError
from serve_app.protocols.tei.routes import TeiInfo

_BASE = "/tei/{model_id}"
_ERRORS = (400, 410, 422, 424, 429, 503, 504)
_Vector = list[float]


def _post(name: str, id: str, summary: str, body: Any, result: Any) -> Endpoint:
    content = json(result, from_model=True)
    responses = {200: content, "default": NO_CONTENT}
    path = f"{_BASE}/{name}" if name else _BASE
    return post(path, id, summary, responses, _ERRORS, body, headers=InferenceHeaders)


TEI = API(
    "text-embeddings-inference",
    "The API of text-embeddings-inference, whose base URL names the model.",
    ErrorFormat(TeiError, common=(401, 403)),
    (
        _post("embed", "tei_embed", "Get the vector of each text.", tei.TeiEmbedBody, list[_Vector]),
        _post(
            "embed_all",
            "tei_embed_all",
            "Get the vector of each token.",
            tei.TeiEmbedAllBody,
            list[list[_Vector]],
        ),
        _post(
            "embed_sparse",
            "tei_embed_sparse",
            "Get the weights of the vocabulary's terms.",
            tei.TeiEmbedAllBody,
            list[list[tei.TeiSparseValue]],
        ),
        _post(
            "rerank",
            "tei_rerank",
            "Rank texts by their relevance to a query.",
            tei.TeiRerankBody,
            list[tei.TeiRank],
        ),
        _post(
            "predict",
            "tei_predict",
            "Get the scores of all labels.",
            tei.TeiPredictBody,
            list[tei.TeiPrediction] | list[list[tei.TeiPrediction]],
        ),
        _post(
            "similarity", "tei_similarity", "Compare a sentence with others.", tei.TeiSimilarityBody, _Vector
        ),
        _post(
            "tokenize",
            "tei_tokenize",
            "Get the tokens of texts.",
            tei.TeiTokenizeBody,
            list[list[tei.TeiToken]],
        ),
        _post("decode", "tei_decode", "Get the texts of token ids.", tei.TeiDecodeBody, list[str]),
        _post("", "tei_default", "Get what the model answers.", dict[str, Any], Any),
        get(_BASE, "tei_ready", "Check whether the model is ready.", {200: Content({})}, (503,)),
        get(f"{_BASE}/health", "tei_health", "Check whether the model is ready.", {200: Content({})}, (503,)),
        get(
            f"{_BASE}/info",
            "tei_info",
            "Get the model's description.",
            json(TeiInfo, from_model=True),
            _ERRORS,
        ),
    ),
)
TEI_OPENAI = API(
    TEI.tag,
    TEI.description,
    OPENAI.errors,
    tuple(
        inference(
            f"{_BASE}/{path}",
            id,
            "Get OpenAI's embeddings.",
            tei.TeiEmbeddingsBody,
            json(EmbeddingList, from_model=True),
        )
        for path, id in (("v1/embeddings", "tei_v1_embeddings"), ("embeddings", "tei_embeddings"))
    ),
)
