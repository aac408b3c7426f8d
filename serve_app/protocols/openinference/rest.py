"""The Open Inference Protocol over HTTP, with binary tensors, repository, statistics and text generation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from serve_app.control.api import ControlPlane
from serve_app.dataplane.data_plane import DataPlane
from serve_app.domain import exact_json
from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream
from serve_app.errors import InvalidBody, MethodNotAllowed, ResourceNotFound
from serve_app.protocols.http import auth, large_body
from serve_app.protocols.http.async_predictions import AsyncInterceptor
from serve_app.protocols.http.exchange import (
    JSON,
    Headers,
    HttpExchange,
    build_response_headers,
    parse_deadline,
    parse_priority,
)
from serve_app.protocols.http.sse import EVENT_STREAM, KeepAlive, read_all
from serve_app.protocols.openinference import (
    binary_codec,
    compression,
    conversion,
    errors,
    generate,
    metadata,
    repository,
)
from serve_app.protocols.openinference.errors import UnsupportedFeature
from serve_app.settings import Settings

_OCTET_STREAM = (b"content-type", b"application/octet-stream")
_JSON_LENGTH = binary_codec.JSON_LENGTH_HEADER.encode()
_GENERATE_VERBS = ("generate", "generate_stream")


class OpenInferenceRoutes:
    """The routes under ``/v2``; those of the repository and of statistics require ``control``."""

    def __init__(self, plane: DataPlane, settings: Settings, control: ControlPlane | None = None) -> None:
        self._plane = plane
        self._control = control
        self._async = AsyncInterceptor(plane, control, settings)
        self._limit = settings.inference.max_request_size
        self._runtime = settings.runtime
        self._nullify = settings.runtime.non_finite_numbers == "null"
        self._shown = settings.inference.handler_errors

    def matches(self, exchange: HttpExchange) -> bool:
        return exchange.segments[:1] == ["v2"]

    async def send_error(self, exchange: HttpExchange, error: Exception) -> None:
        await errors.send_error(exchange, error, exchange.segments[-1] in _GENERATE_VERBS, self._shown)

    async def handle(self, exchange: HttpExchange) -> None:
        if exchange.method == "OPTIONS":
            return await exchange.send_response(204, [], b"")
        if _resolve_inference(exchange):
            return await self._infer(exchange)
        match exchange.segments[1:]:
            case []:
                _require_method(exchange, "GET")
                await _send_json(exchange, metadata.describe_server())
            case ["health", "live"]:
                _require_method(exchange, "GET")
                await _send_json(exchange, {"live": True})
            case ["health", "ready"]:
                _require_method(exchange, "GET")
                await _send_json(exchange, {"ready": self._plane.ready}, 200 if self._plane.ready else 503)
            case ["repository", "index"]:
                await self._index(exchange)
            case ["repository", "models", model, "load" | "unload" as verb]:
                await self._repository(exchange, model, verb)
            case ["models", "stats"]:
                await self._statistics(exchange, None, None)
            case ["models", model, "versions", version, *verb] if len(verb) < 2:
                await self._model(exchange, model, version, *verb)
            case ["models", model, *verb] if len(verb) < 2:
                await self._model(exchange, model, None, *verb)
            case _:
                raise ResourceNotFound()

    async def _model(self, exchange: HttpExchange, model: str, version: str | None, verb: str = "") -> None:
        exchange.model, exchange.version = model, version or ""
        match verb:
            case "generate" | "generate_stream":
                await self._generate(exchange, model, version)
            case "stats":
                await self._statistics(exchange, model, version)
            case "" | "ready" | "config":
                await self._describe(exchange, model, version, verb)
            case _:
                raise ResourceNotFound()

    async def _infer(self, exchange: HttpExchange) -> None:
        _require_method(exchange, "POST")
        self._authorize(exchange)
        headers, model, version = exchange.headers, exchange.model, exchange.version or None
        if "prefer" in headers and await self._async.intercept(exchange, model, version):
            return
        body = await (
            self._read_body(exchange) if "content-encoding" in headers else exchange.read_body(self._limit)
        )
        if headers.get(binary_codec.JSON_LENGTH_HEADER) == "0":
            signature = self._plane.describe(model, version).signature
            inference = binary_codec.parse_raw_request(model, version, body, signature)
            request = self._build_request(exchange, inference)
        elif len(body) <= large_body.LARGE_BODY_BYTES:  # most requests: no await
            request = self.parse(exchange, body)
        else:
            request = await large_body.parse_body(body, self.parse, exchange, body)
        with exchange.cancel_on_disconnect():
            response = await self._run_inference(exchange, request)
            if isinstance(response, ResponseStream):
                response = await self._read_stream(response)
        await self._send_inference(exchange, response)

    def _authorize(self, exchange: HttpExchange) -> None:
        auth.authorize(self._plane.access, exchange, "infer")
        auth.require_model(exchange, exchange.model)

    # Inference in steps that do not wait; see ``server/callback_app.py``.

    def authorize(self, exchange: HttpExchange) -> bool:
        headers = exchange.headers
        if (
            not _resolve_inference(exchange)
            or "content-encoding" in headers
            or headers.get(binary_codec.JSON_LENGTH_HEADER) == "0"
        ):
            return False
        self._authorize(exchange)
        return True

    def parse(self, exchange: HttpExchange, body: bytes) -> InferenceRequest:
        length = exchange.headers.get(binary_codec.JSON_LENGTH_HEADER)
        inference = binary_codec.parse_request(exchange.model, exchange.version or None, body, length)
        return self._build_request(exchange, inference)

    def _build_request(
        self, exchange: HttpExchange, inference: conversion.ParsedInference
    ) -> InferenceRequest:
        """Return the request of a parsed inference, which the exchange keeps for the response."""
        exchange.parsed = inference
        headers = exchange.headers
        deadline, priority = parse_deadline(headers), parse_priority(headers)
        return conversion.build_request(
            inference, exchange.request_id, headers, self._runtime, deadline, priority
        )

    def render(
        self, exchange: HttpExchange, response: InferenceResponse
    ) -> tuple[int, Headers, bytes] | None:
        rendered = self._render(exchange, response)
        return None if select_coding(exchange, rendered[2]) else rendered

    def render_error(self, exchange: HttpExchange, error: Exception) -> tuple[int, Headers, bytes]:
        return errors.render_error(exchange, error, shown=self._shown)

    def _render(self, exchange: HttpExchange, response: InferenceResponse) -> tuple[int, Headers, bytes]:
        """Return status, headers and body of an inference's response, uncompressed. Raises RelayError."""
        body, json_size = binary_codec.encode_response(
            exchange.parsed, exchange.model, response, self._nullify
        )
        headers = build_response_headers(response, with_content_type=False)
        if response.headers:
            exchange.override_defaults(headers)
        if json_size is None:
            headers.append(JSON)
        else:
            headers += _OCTET_STREAM, (_JSON_LENGTH, b"%d" % json_size)
        return 200, headers, body

    async def send(self, exchange: HttpExchange, response: InferenceResponse | ResponseStream) -> None:
        """Send a stream as one response, and a compressed response."""
        with exchange.cancel_on_disconnect():
            if isinstance(response, ResponseStream):
                exchange.version = response.head.version
                response = await self._read_stream(response)
        await self._send_inference(exchange, response)

    async def _send_inference(self, exchange: HttpExchange, response: InferenceResponse) -> None:
        status, headers, body = self._render(exchange, response)
        if coding := select_coding(exchange, body):
            body = await compression.compress(body, coding)
            headers.append((b"content-encoding", coding.encode()))
        await exchange.send_response(status, headers, body)

    async def _read_body(self, exchange: HttpExchange) -> bytes:
        """Return the decompressed body. Raises RequestTooLarge, InvalidBody and ClientDisconnected."""
        body = await exchange.read_body(self._limit)
        coding = exchange.headers.pop("content-encoding", "identity")
        return body if coding == "identity" else await compression.decompress(body, coding, self._limit)

    async def _parse_object(self, body: bytes) -> dict[str, Any]:
        """Return the JSON object in the body, an empty one for an empty body."""
        if not body.strip():
            return {}
        return await large_body.parse_body(body, binary_codec.parse_json_object, body)

    async def _run_inference(
        self, exchange: HttpExchange, request: InferenceRequest
    ) -> InferenceResponse | ResponseStream:
        response = await self._plane.infer(request, exchange.grant)
        exchange.version = (response.head if isinstance(response, ResponseStream) else response).version
        return response

    async def _read_stream(self, stream: ResponseStream) -> InferenceResponse:
        """Return a streamed response as one, because ``infer`` has no streams. Raises OutputTooLarge."""
        body = await read_all(stream, self._runtime.max_response_size)
        return replace(stream.head, body=body, content_type=None)

    async def _generate(self, exchange: HttpExchange, model: str, version: str | None) -> None:
        _require_method(exchange, "POST")
        auth.authorize(self._plane.access, exchange, "infer")
        auth.require_model(exchange, model)
        body = await self._read_body(exchange)
        document = await large_body.parse_body(body, binary_codec.parse_json_object, body)
        streams = exchange.segments[-1] == "generate_stream"
        generate_request = generate.parse_request(model, version, document, streams)
        headers = exchange.headers
        request = generate.build_request(
            generate_request, exchange.request_id, headers, parse_deadline(headers), parse_priority(headers)
        )
        with exchange.cancel_on_disconnect():
            response = await self._run_inference(exchange, request)
            if isinstance(response, ResponseStream):
                return await self._stream(exchange, generate_request, response)
        response_headers = [JSON, *build_response_headers(response, with_content_type=False)]
        output = generate.to_document(generate_request, response)
        await exchange.send_response(200, response_headers, exact_json.dumps(output))

    async def _stream(
        self, exchange: HttpExchange, generate_request: generate.GenerateRequest, stream: ResponseStream
    ) -> None:
        events = KeepAlive(ResponseStream(stream.head, generate.encode_events(generate_request, stream)))
        headers = [
            (b"content-type", EVENT_STREAM.encode()),
            *build_response_headers(stream.head, with_content_type=False),
        ]
        try:
            await exchange.send_stream(200, headers, ResponseStream(stream.head, events))
        finally:
            await stream.aclose()

    async def _describe(self, exchange: HttpExchange, model: str, version: str | None, verb: str) -> None:
        _require_method(exchange, "GET")
        auth.authorize(self._plane.access, exchange, "observe", "infer")
        auth.require_model(exchange, model)
        version_route = self._plane.describe(model, version)
        if verb == "ready":
            ready = metadata.is_ready(version_route)
            await _send_json(exchange, {"name": model, "ready": ready}, 200 if ready else 503)
        elif verb == "config":
            await _send_json(exchange, metadata.describe_config(model, version_route))
        else:
            await _send_json(
                exchange, metadata.describe_model(model, self._plane.table.models[model], version_route)
            )

    async def _statistics(self, exchange: HttpExchange, model: str | None, version: str | None) -> None:
        _require_method(exchange, "GET")
        auth.authorize(self._plane.access, exchange, "observe", "infer")
        if model is not None:
            auth.require_model(exchange, model)
            version = version and self._plane.find_version(model, version).version
        stats = await self._require_control().get_version_stats(auth.get_allowed_models(exchange))
        if model is not None:
            self._plane.find_version(model, version)  # raises if the model was removed meanwhile
            stats = [s for s in stats if s.model == model and version in (None, s.version)]
        await _send_json(exchange, metadata.describe_statistics(stats))

    async def _index(self, exchange: HttpExchange) -> None:
        _require_method(exchange, "POST")
        auth.authorize(self._plane.access, exchange, "observe", "infer")
        body = await self._read_body(exchange)
        ready = (await self._parse_object(body)).get("ready", False)
        if type(ready) is not bool:
            raise InvalidBody("ready is true (only ready versions) or false.")
        await _send_json(
            exchange, metadata.list_versions(self._plane.table, auth.get_allowed_models(exchange), ready)
        )

    async def _repository(self, exchange: HttpExchange, model: str, verb: str) -> None:
        _require_method(exchange, "POST")
        auth.authorize(self._plane.access, exchange, "manage")
        auth.require_model(exchange, model)
        control, body = self._require_control(), await self._read_body(exchange)
        auth.check_again(self._plane.access, exchange)
        parameters = (await self._parse_object(body)).get("parameters") or {}
        if not isinstance(parameters, dict):
            raise InvalidBody("parameters is an object.")
        if verb == "load":
            await repository.load(control, model, parameters, auth.get_allowed_models(exchange))
        else:
            await repository.unload(control, model)
        await exchange.send_response(200, [], b"")

    def _require_control(self) -> ControlPlane:
        if self._control is None:
            raise UnsupportedFeature("This address serves one model only; use the server's own address.")
        return self._control


def _resolve_inference(exchange: HttpExchange) -> bool:
    """Set the model and version of an inference; return False for other paths."""
    match exchange.segments:
        case ["v2", "models", model, "infer"]:
            exchange.model, exchange.version = model, ""
        case ["v2", "models", model, "versions", version, "infer"]:
            exchange.model, exchange.version = model, version
        case _:
            return False
    return True


def select_coding(exchange: HttpExchange, body: bytes) -> str | None:
    """Return the coding in which the client accepts a response of this size; None: as it is."""
    accepted = exchange.headers.get("accept-encoding")
    return None if accepted is None else compression.select_coding(accepted, len(body))


def _require_method(exchange: HttpExchange, method: str) -> None:
    if exchange.method != method and not (method == "GET" and exchange.method == "HEAD"):
        raise MethodNotAllowed()


async def _send_json(exchange: HttpExchange, document: object, status: int = 200) -> None:
    await exchange.send_response(status, [JSON], exact_json.dumps(document))
