"""OpenAI's API: models, completions, chat completions, embeddings, and the ranking of texts."""

from __future__ import annotations

from dataclasses import replace
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
from serve_app.protocols.openai.embeddings import EmbeddingList, EmbeddingsBody
from serve_app.protocols.openai.errors import OpenAIError
from serve_app.protocols.openai.inference import (
    ChatCompletionBody,
    CompletionBody,
    OpenAIModelList,
)
from serve_app.protocols.openai.model_ids import OpenAIModel
from serve_app.protocols.openai.ranking import RerankBody, RerankList, ScoreBody, ScoreList
from serve_app.protocols.openai.responses import ResponsesBody
from serve_app.protocols.openai.transcriptions import (
    Transcription,
    TranscriptionForm,
    TranslationForm,
    VerboseTranscription,
)


def inference(path: str, id: str, summary: str, body: type | Content, result: Content) -> Endpoint:
    responses = {200: result, "default": NO_CONTENT}
    errors = (400, 404, 410, 429, 503, 504, 507)
    return post(path, id, summary, responses, errors, body, headers=InferenceHeaders)


COMPLETION = Content(
    {"application/json": Any, "text/event-stream": Any}, "The handler's response.", from_model=True
)
SPOKEN = Content(
    {"application/json": Transcription | VerboseTranscription, "text/plain": str, "text/vtt": str},
    from_model=True,
)
OPENAI = API(
    "OpenAI",
    "OpenAI's API, for models whose handlers implement it.",
    ErrorFormat(OpenAIError, common=(401, 403, 500)),
    (
        get(
            "/v1/models",
            "openai_models",
            "List the models, and the versions of those with several.",
            OpenAIModelList,
        ),
        inference("/v1/completions", "completions", "Create a completion.", CompletionBody, COMPLETION),
        inference(
            "/v1/chat/completions",
            "chat_completions",
            "Create a chat completion.",
            ChatCompletionBody,
            COMPLETION,
        ),
        inference("/v1/responses", "responses", "Create a response.", ResponsesBody, COMPLETION),
        inference(
            "/v1/embeddings",
            "embeddings",
            "Create the embedding of each text.",
            EmbeddingsBody,
            json(EmbeddingList, from_model=True),
        ),
        inference(
            "/v1/rerank",
            "rerank",
            "Rank documents by their relevance to a query.",
            RerankBody,
            json(RerankList, from_model=True),
        ),
        inference("/v1/score", "score", "Score pairs of texts.", ScoreBody, json(ScoreList, from_model=True)),
        inference(
            "/v1/audio/transcriptions",
            "transcriptions",
            "Transcribe audio.",
            Content({"multipart/form-data": TranscriptionForm}),
            SPOKEN,
        ),
        inference(
            "/v1/audio/translations",
            "translations",
            "Translate audio into English.",
            Content({"multipart/form-data": TranslationForm}),
            SPOKEN,
        ),
    ),
)
# The management API has this path, too, so it is added only to ports without that API.
OPENAI_MODEL = replace(
    OPENAI, endpoints=(get("/v1/models/{model_id}", "openai_model", "Get a model.", OpenAIModel, (503,)),)
)
