"""OpenAI's API over the data plane: models, generated text, embeddings and ranking."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Literal

import orjson
from typing_extensions import NotRequired, TypedDict

from serve_app.dataplane.data_plane import DataPlane
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart, ResponseStream
from serve_app.domain.validation import documented
from serve_app.errors import MethodNotAllowed, NoReplica
from serve_app.protocols.http import auth
from serve_app.protocols.http.exchange import JSON, Headers, HttpExchange, version_headers
from serve_app.protocols.openai import embeddings, errors, ranking, transcriptions
from serve_app.protocols.openai.fields import build_ignored_header
from serve_app.protocols.openai.model_calls import ModelCalls, check_response, parse_object, reject_stream
from serve_app.protocols.openai.model_ids import (
    OpenAIModel,
    describe_model,
    is_ready,
    list_models,
    parse_id,
)
from serve_app.protocols.openai.responses import ResponsesTranslation
from serve_app.settings import Settings

Route = Callable[[HttpExchange], Awaitable[None]]

_ModelId = Annotated[str, documented("name, name:version, name:adapter or name:version:adapter", minLength=1)]


class CompletionBody(TypedDict):
    """A request; the handler defines further fields: prompt, max_tokens, temperature, stop, stream, …"""

    model: _ModelId


class ChatMessage(TypedDict):
    role: str


class ChatCompletionBody(TypedDict):
    """A request; the handler defines further fields: max_tokens, temperature, stop, tools, …"""

    model: _ModelId
    messages: list[ChatMessage]
    stream: NotRequired[Annotated[bool, documented("Answer with server-sent events.")]]


class OpenAIModelList(TypedDict):
    object: Literal["list"]
    data: list[OpenAIModel]
    models: Annotated[list[str], documented("The ids, as in KServe's first protocol.")]


class OpenAIRoutes:
    """The routes of OpenAI's API.

    ``model`` in a body is a model's name, whose version the traffic policy selects, or ``name:version``, each
    with the name of a LoRA adapter after a colon or without. The header ``url_path`` of a request holds the
    path for the handler, as TorchServe sets it under ``/predictions/{model}/{version}/v1/...``, and the
    header ``adapter`` the adapter, which is empty for the base model.
    """

    def __init__(self, plane: DataPlane, settings: Settings, calls: ModelCalls) -> None:
        self._plane = plane
        self._calls = calls
        self._shown = settings.inference.handler_errors

    def matches(self, exchange: HttpExchange) -> bool:
        return self._route(exchange.segments) is not None

    async def send_error(self, exchange: HttpExchange, error: Exception) -> None:
        await errors.send_error(exchange, error, self._shown)

    async def handle(self, exchange: HttpExchange) -> None:
        route = self._route(exchange.segments)
        assert route is not None
        if exchange.method == "OPTIONS":  # a browser's preflight request has no key
            return await exchange.send_response(204, [], b"")
        auth.authorize(self._plane.access, exchange, "infer")
        if exchange.method != ("GET" if exchange.segments[1] == "models" else "POST"):
            raise MethodNotAllowed()
        await route(exchange)

    def _route(self, segments: list[str]) -> Route | None:
        if not segments or segments[0] != "v1":
            return None
        match segments[1:]:
            case ["chat", "completions"] | ["completions"]:
                return self._generate
            case ["responses"]:
                return self._respond
            case ["embeddings"]:
                return self._embed
            case ["rerank"]:
                return self._rerank
            case ["score"]:
                return self._score
            case ["audio", "transcriptions"]:
                return partial(self._transcribe, "transcribe")
            case ["audio", "translations"]:
                return partial(self._transcribe, "translate")
            case ["models"]:
                return self._list_models
            case ["models", id] if not id.endswith((":predict", ":explain")):
                return self._show_model
        return None

    # Models

    async def _list_models(self, exchange: HttpExchange) -> None:
        data = list(list_models(self._plane.table, auth.get_allowed_models(exchange)))
        document: OpenAIModelList = {"object": "list", "data": data, "models": [item["id"] for item in data]}
        await exchange.send_response(200, [JSON], orjson.dumps(document))

    async def _show_model(self, exchange: HttpExchange) -> None:
        id = exchange.segments[2]
        auth.require_model(exchange, id.partition(":")[0])
        model, version, adapter = parse_id(self._plane.table, id)
        version_route = self._plane.find_version(model, version)
        if not is_ready(version_route):
            error = NoReplica(model, version, version_route.last_error)
            error.retry_after = None  # a readiness check should not wait
            raise error
        document = describe_model(id, id.removesuffix(f":{adapter}") if adapter else "")
        await exchange.send_response(200, [JSON], orjson.dumps(document))

    # Generated text

    async def _generate(self, exchange: HttpExchange) -> None:
        body, document = await self._calls.read_object(exchange)
        model, version = self._calls.authorize_model(exchange, document)
        inputs = (InputPart("body", body, "application/json"),)
        await self._calls.generate(exchange, self._calls.build_request(exchange, model, version, inputs))

    async def _respond(self, exchange: HttpExchange) -> None:
        _, document = await self._calls.read_object(exchange)
        await self._calls.answer_chat(exchange, document, ResponsesTranslation)

    # Embeddings and ranking

    async def _embed(self, exchange: HttpExchange) -> None:
        _, document = await self._calls.read_object(exchange)
        await self._calls.answer_rows(exchange, document, embeddings.parse_request)

    async def _rerank(self, exchange: HttpExchange) -> None:
        _, document = await self._calls.read_object(exchange)
        await self._calls.answer_rows(exchange, document, ranking.parse_rerank)

    async def _score(self, exchange: HttpExchange) -> None:
        _, document = await self._calls.read_object(exchange)
        await self._calls.answer_rows(exchange, document, ranking.parse_score)

    # Audio

    async def _transcribe(self, task: Literal["transcribe", "translate"], exchange: HttpExchange) -> None:
        fields = await self._calls.read_form(exchange)
        id = transcriptions.read_field(fields, "model")
        model, version = self._calls.authorize_model(exchange, {"model": id})
        form = transcriptions.parse_request(fields, task)
        request = self._calls.build_request(exchange, model, version, form.inputs)
        response, answer = await self._calls.infer_json(exchange, request)
        headers, body = form.encode(model, answer)
        headers += *version_headers(response), *build_ignored_header(form.ignored)
        await exchange.send_response(200, headers, body)


class EmbeddingRoute:
    """The route of embeddings of one text, in steps that do not wait; see ``server/callback_app.py``.

    Several texts are several requests, which need a task. So does a key, whose tokens are counted in the
    response to all texts.
    """

    def __init__(self, plane: DataPlane, settings: Settings, calls: ModelCalls) -> None:
        self._plane = plane
        self._calls = calls
        self._shown = settings.inference.handler_errors

    def authorize(self, exchange: HttpExchange) -> bool:
        if exchange.segments != ["v1", "embeddings"]:
            return False
        auth.authorize(self._plane.access, exchange, "infer")
        return exchange.grant is None

    def parse(self, exchange: HttpExchange, body: bytes) -> InferenceRequest | None:
        document = parse_object(body)
        model, version = self._calls.authorize_model(exchange, document)
        request = embeddings.parse_request(document)
        if len(request.inputs) > 1:
            return None
        exchange.parsed = request, document["model"]
        inputs = embeddings.build_inputs(request.inputs[0])
        return self._calls.build_request(exchange, model, version, inputs)

    def render(self, exchange: HttpExchange, response: InferenceResponse) -> tuple[int, Headers, bytes]:
        check_response(response)
        request, model = exchange.parsed
        body = embeddings.encode_response(request, model, [response])
        headers = [JSON, *version_headers(response), *build_ignored_header(request.ignored)]
        return 200, headers, body

    def render_error(self, exchange: HttpExchange, error: Exception) -> tuple[int, Headers, bytes]:
        return errors.render_error(exchange, error, self._shown)

    async def send(self, exchange: HttpExchange, response: InferenceResponse | ResponseStream) -> None:
        assert isinstance(response, ResponseStream)
        await reject_stream(response, exchange.model)
