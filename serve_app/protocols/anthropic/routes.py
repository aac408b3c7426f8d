"""The routes of Anthropic's Messages API, for models whose handlers have OpenAI's chat completions."""

from __future__ import annotations

from typing import Any

from serve_app.dataplane.data_plane import DataPlane
from serve_app.domain import exact_json
from serve_app.domain.request import InputPart
from serve_app.errors import MethodNotAllowed
from serve_app.protocols.anthropic import errors
from serve_app.protocols.anthropic.messages import MessagesTranslation, TokenCount, build_chat
from serve_app.protocols.http import auth
from serve_app.protocols.http.exchange import JSON, HttpExchange, version_headers
from serve_app.protocols.openai.errors import InvalidField
from serve_app.protocols.openai.model_calls import TOKENIZE, ModelCalls
from serve_app.settings import Settings


class AnthropicRoutes:
    """Messages, and the number of their tokens. The header ``x-api-key`` may hold the key."""

    def __init__(self, plane: DataPlane, settings: Settings, calls: ModelCalls) -> None:
        self._plane = plane
        self._calls = calls
        self._shown = settings.inference.handler_errors

    def matches(self, exchange: HttpExchange) -> bool:
        match exchange.segments:
            case ["v1", "messages"] | ["v1", "messages", "count_tokens"]:
                return True
        return False

    async def send_error(self, exchange: HttpExchange, error: Exception) -> None:
        await errors.send_error(exchange, error, self._shown)

    async def handle(self, exchange: HttpExchange) -> None:
        if exchange.method == "OPTIONS":  # a browser's preflight request has no key
            return await exchange.send_response(204, [], b"")
        exchange.add_header(b"request-id", exchange.request_id.encode())  # Anthropic's clients read it
        key = exchange.headers.pop("x-api-key", None)  # no handler sees it
        if key is not None:
            exchange.headers.setdefault("authorization", f"Bearer {key}")
        auth.authorize(self._plane.access, exchange, "infer")
        if exchange.method != "POST":
            raise MethodNotAllowed()
        _, document = await self._calls.read_object(exchange)
        if len(exchange.segments) == 2:
            return await self._calls.answer_chat(exchange, document, MessagesTranslation)
        await self._count_tokens(exchange, document)

    async def _count_tokens(self, exchange: HttpExchange, document: dict[str, Any]) -> None:
        model, version = self._calls.authorize_model(exchange, document)
        body = exact_json.dumps({**build_chat(document), "model": document["model"]})
        inputs = (InputPart("body", body, "application/json"),)
        request = self._calls.build_request(exchange, model, version, inputs, TOKENIZE)
        response, answer = await self._calls.infer_json(exchange, request)
        if type(answer.get("count")) is not int:
            raise InvalidField(f"Model {model} does not count tokens.", "model")
        count: TokenCount = {"input_tokens": answer["count"]}
        headers = [JSON, *version_headers(response)]
        await exchange.send_response(200, headers, exact_json.dumps(count))
