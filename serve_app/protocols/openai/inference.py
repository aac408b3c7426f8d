"""OpenAI's API over the data plane: models, completions, chat completions, embeddings and ranking."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any, Literal, Protocol

import orjson
from typing_extensions import NotRequired, TypedDict

from serve_app.dataplane.access_limits import count_tokens
from serve_app.dataplane.data_plane import DataPlane
from serve_app.domain import exact_json
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart, ResponseStream
from serve_app.domain.validation import documented
from serve_app.errors import InvalidBody, MethodNotAllowed, NoReplica, RelayError
from serve_app.protocols.http import auth, large_body
from serve_app.protocols.http.exchange import (
    JSON,
    Headers,
    HttpExchange,
    build_response_headers,
    encode_handler_headers,
    parse_deadline,
    parse_priority,
    uuid4,
    version_headers,
)
from serve_app.protocols.http.sse import EVENT_STREAM, KeepAlive
from serve_app.protocols.openai import embeddings, errors, ranking
from serve_app.protocols.openai.errors import InvalidField
from serve_app.protocols.openai.fields import build_ignored_header
from serve_app.protocols.openai.model_ids import (
    OpenAIModel,
    describe_model,
    is_ready,
    list_models,
    parse_id,
)
from serve_app.settings import Settings

Route = Callable[[HttpExchange], Awaitable[None]]

_MIN_CONCURRENT_ROWS = 16  # of one request, even if the model's batches are smaller
_NO_BUFFERING = (b"x-accel-buffering", b"no")


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


class RowsRequest(Protocol):
    """A parsed request of several rows, whose responses become one; ``ignored`` are its unknown fields."""

    @property
    def ignored(self) -> Sequence[str]: ...

    @property
    def rows(self) -> list[tuple[InputPart, ...]]: ...

    def encode(self, model: str, responses: Sequence[InferenceResponse]) -> bytes: ...


class OpenAIRoutes:
    """The routes of OpenAI's API.

    ``model`` in a body is a model's name, whose version the traffic policy selects, or ``name:version``, each
    with the name of a LoRA adapter after a colon or without. The header ``url_path`` of a request holds the
    path for the handler, as TorchServe sets it under ``/predictions/{model}/{version}/v1/...``, and the
    header ``adapter`` the adapter, which is empty for the base model.
    """

    def __init__(self, plane: DataPlane, settings: Settings) -> None:
        self._plane = plane
        self._limit = settings.inference.max_request_size
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
            case ["embeddings"]:
                return self._embed
            case ["rerank"]:
                return self._rerank
            case ["score"]:
                return self._score
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

    # Completions

    async def _generate(self, exchange: HttpExchange) -> None:
        body = await exchange.read_body(self._limit)
        document = await large_body.parse_body(body, parse_object, body)
        model, version = self.authorize_model(exchange, document)
        inputs = (InputPart("body", body, "application/json"),)
        request = self.build_request(exchange, model, version, inputs)
        disconnect_check = exchange.cancel_on_disconnect()
        try:
            response = await self._plane.infer(request, exchange.grant)
            if isinstance(response, ResponseStream):
                await self._send_stream(exchange, response)
            else:
                await self._send_response(exchange, response)
        finally:
            disconnect_check.cancel()

    async def _send_response(self, exchange: HttpExchange, response: InferenceResponse) -> None:
        exchange.version = response.version
        headers = build_response_headers(response)
        if not response.content_type:
            is_event_stream = response.body.startswith(b"data:")
            headers.append((b"content-type", EVENT_STREAM.encode()) if is_event_stream else JSON)
        if response.headers:
            exchange.override_defaults(headers)
        await exchange.send_response(_valid_status(response), headers, response.body)

    async def _send_stream(self, exchange: HttpExchange, stream: ResponseStream) -> None:
        """Forward the handler's events as they arrive."""
        head = stream.head
        exchange.version = head.version
        headers = encode_handler_headers(head.content_type or EVENT_STREAM, head.headers)
        exchange.override_defaults(headers)
        headers += _NO_BUFFERING, *version_headers(head)
        events = ResponseStream(head, self._encode_events(exchange, stream))
        await exchange.send_stream(_valid_status(head), headers, events)

    async def _encode_events(self, exchange: HttpExchange, stream: ResponseStream) -> AsyncIterator[bytes]:
        async with aclosing(KeepAlive(stream)) as chunks:
            try:
                async for chunk in chunks:
                    yield chunk
            except RelayError as error:
                document = errors.to_document(error, exchange.request_id, self._shown)
                yield b"data: %b\n\n" % orjson.dumps(document)

    # Embeddings and ranking

    async def _embed(self, exchange: HttpExchange) -> None:
        await self._answer_rows(exchange, embeddings.parse_request)

    async def _rerank(self, exchange: HttpExchange) -> None:
        await self._answer_rows(exchange, ranking.parse_rerank)

    async def _score(self, exchange: HttpExchange) -> None:
        await self._answer_rows(exchange, ranking.parse_score)

    async def _answer_rows(
        self, exchange: HttpExchange, parse: Callable[[Mapping[str, Any]], RowsRequest]
    ) -> None:
        body = await exchange.read_body(self._limit)
        document = await large_body.parse_body(body, parse_object, body)
        model, version = self.authorize_model(exchange, document)
        rows_request = parse(document)
        rows = rows_request.rows
        request = self.build_request(exchange, model, version, ())
        admission = self._plane.admit_key(exchange.grant, len(rows))
        disconnect_check = exchange.cancel_on_disconnect()
        try:
            responses = await self._infer_rows(request, rows)
            body = rows_request.encode(document["model"], responses)
            if admission is not None:
                admission.add_tokens(count_tokens(body))
        finally:
            disconnect_check.cancel()
            if admission is not None:
                admission.release()
        exchange.version = responses[0].version
        headers = [JSON, *version_headers(responses[0]), *build_ignored_header(rows_request.ignored)]
        await exchange.send_response(200, headers, body)

    async def _infer_rows(
        self, request: InferenceRequest, rows: Sequence[tuple[InputPart, ...]]
    ) -> list[InferenceResponse]:
        """Return the response to each row, all from one version.

        Enough requests to fill two of the model's batches run concurrently.
        """
        model, version = request.model, request.version
        version_route = self._plane.find_version(model, version)
        concurrency = min(
            version_route.job_queue_size, max(_MIN_CONCURRENT_ROWS, 2 * version_route.max_batch_size)
        )
        responses: dict[int, InferenceResponse] = {}
        remaining = iter(enumerate(rows))

        async def infer(index: int, inputs: tuple[InputPart, ...]) -> None:
            request_id = uuid4() if index else request.request_id
            response = await self._plane.infer(
                replace(request, version=version, inputs=inputs, request_id=request_id)
            )
            if isinstance(response, ResponseStream):
                await embeddings.reject_stream(response, model)
            embeddings.check_response(response)
            responses[index] = response

        async def infer_remaining() -> None:
            for index, inputs in remaining:
                await infer(index, inputs)

        if version is None and self._plane.splits_traffic(model):
            # The first response selects the version of all.
            await infer(*next(remaining))
            version = responses[0].version
        tasks = [asyncio.ensure_future(infer_remaining()) for _ in range(max(1, min(concurrency, len(rows))))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return [responses[index] for index in range(len(rows))]

    # Requests

    def authorize_model(self, exchange: HttpExchange, document: dict[str, Any]) -> tuple[str, str | None]:
        """Return the model and the version, if any, that a body names. The key must cover the model."""
        id = document.get("model")
        if not isinstance(id, str) or not id:
            raise InvalidField(
                "model is the name of a model, name:version or name:adapter; GET /v1/models lists them.",
                "model",
            )
        exchange.model = id.partition(":")[0]
        auth.require_model(exchange, exchange.model)
        model, version, adapter = parse_id(self._plane.table, id)
        exchange.version, exchange.headers["adapter"] = version or "", adapter
        return model, version

    def build_request(
        self, exchange: HttpExchange, model: str, version: str | None, inputs: tuple[InputPart, ...]
    ) -> InferenceRequest:
        headers = exchange.headers
        headers["url_path"] = "/".join(exchange.segments)
        headers["explain"] = "False"
        deadline, priority = parse_deadline(headers), parse_priority(headers)
        return InferenceRequest(
            model, version, inputs, headers, "predict", exchange.request_id, deadline, priority
        )


class EmbeddingRoute:
    """The route of embeddings of one text, in steps that do not wait; see ``server/callback_app.py``.

    Several texts are several requests, which need a task. So does a key, whose tokens are counted in the
    response to all texts.
    """

    def __init__(self, routes: OpenAIRoutes, plane: DataPlane, settings: Settings) -> None:
        self._routes = routes
        self._plane = plane
        self._shown = settings.inference.handler_errors

    def authorize(self, exchange: HttpExchange) -> bool:
        if exchange.segments != ["v1", "embeddings"]:
            return False
        auth.authorize(self._plane.access, exchange, "infer")
        return exchange.grant is None

    def parse(self, exchange: HttpExchange, body: bytes) -> InferenceRequest | None:
        document = parse_object(body)
        model, version = self._routes.authorize_model(exchange, document)
        request = embeddings.parse_request(document)
        if len(request.inputs) > 1:
            return None
        exchange.parsed = request, document["model"]
        return self._routes.build_request(
            exchange, model, version, embeddings.build_inputs(request.inputs[0])
        )

    def render(self, exchange: HttpExchange, response: InferenceResponse) -> tuple[int, Headers, bytes]:
        embeddings.check_response(response)
        request, model = exchange.parsed
        body = embeddings.encode_response(request, model, [response])
        headers = [JSON, *version_headers(response), *build_ignored_header(request.ignored)]
        return 200, headers, body

    def render_error(self, exchange: HttpExchange, error: Exception) -> tuple[int, Headers, bytes]:
        return errors.render_error(exchange, error, self._shown)

    async def send(self, exchange: HttpExchange, response: InferenceResponse | ResponseStream) -> None:
        assert isinstance(response, ResponseStream)
        await embeddings.reject_stream(response, exchange.model)


def parse_object(body: bytes) -> dict[str, Any]:
    try:
        document = exact_json.loads(body)
    except ValueError as error:
        raise InvalidBody(f"The body is no JSON: {error}.") from None
    if not isinstance(document, dict):
        raise InvalidBody("The body is a JSON object.")
    return document


def _valid_status(response: InferenceResponse) -> int:
    return response.status if 200 <= response.status < 600 else 500
