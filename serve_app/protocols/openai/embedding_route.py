"""Embeddings of one text in steps that do not wait; see ``server/callback_app.py``."""

from __future__ import annotations

from serve_app.dataplane.data_plane import DataPlane
from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream
from serve_app.protocols.http import auth
from serve_app.protocols.http.exchange import JSON, Headers, HttpExchange, version_headers
from serve_app.protocols.openai import embeddings, errors
from serve_app.protocols.openai.fields import build_ignored_header
from serve_app.protocols.openai.inference import OpenAIRoutes, parse_object
from serve_app.settings import Settings


class EmbeddingRoute:
    """The route of embeddings.

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
