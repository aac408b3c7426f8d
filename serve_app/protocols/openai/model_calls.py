"""Calls of the data plane for requests whose body names the model: generated text, and rows of one response.

The APIs of other language servers are translations onto chat completions and rows; keys, deadlines, splits
and disconnects are treated alike in all of them.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, NoReturn, Protocol

import orjson

from serve_app.dataplane.access_limits import count_tokens
from serve_app.dataplane.data_plane import DataPlane
from serve_app.domain import exact_json
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart, ResponseStream
from serve_app.errors import HandlerRejected, InvalidBody, RelayError
from serve_app.protocols.http import auth, form_data, large_body
from serve_app.protocols.http.exchange import (
    JSON,
    HttpExchange,
    build_response_headers,
    encode_handler_headers,
    parse_deadline,
    parse_priority,
    uuid4,
    version_headers,
)
from serve_app.protocols.http.sse import EVENT_STREAM, KEEP_ALIVE_COMMENT, KeepAlive
from serve_app.protocols.openai import errors
from serve_app.protocols.openai.errors import InvalidField
from serve_app.protocols.openai.fields import build_ignored_header
from serve_app.protocols.openai.model_ids import parse_id
from serve_app.settings import MIB, Settings

CHAT = "v1/chat/completions"
TOKENIZE = "tokenize"  # vLLM's path, which the handler llm answers

_MIN_CONCURRENT_ROWS = 16  # of one request, even if the model's batches are smaller
_MAX_ROWS_BYTES = 512 * MIB  # of the answers to one request: 2,048 vectors of 8,192 numbers have 330 MiB
_NO_BUFFERING = (b"x-accel-buffering", b"no")
_EVENT_STREAM = (b"content-type", EVENT_STREAM.encode())
_ROW_TOKENS = re.compile(rb'"tokens":\s*(\d{1,12})\b')
_DATA = b"data:"
_DONE = b"[DONE]"


class RowsRequest(Protocol):
    """A parsed request of several rows, whose responses become one; ``ignored`` are its unknown fields."""

    @property
    def ignored(self) -> Sequence[str]: ...

    @property
    def rows(self) -> list[tuple[InputPart, ...]]: ...

    def encode(self, model: str, responses: Sequence[InferenceResponse]) -> bytes: ...


class ChatTranslation(Protocol):
    """A request of another API as a chat completion, and the translation of its response.

    ``chat`` is the body without the model; ``ignored`` are the unknown fields. The events of a stream are
    those of ``start``, of ``push`` with each chunk of the chat, and of ``finish``, or of ``fail`` after an
    error.
    """

    @property
    def chat(self) -> Mapping[str, Any]: ...

    @property
    def stream(self) -> bool: ...

    @property
    def ignored(self) -> Sequence[str]: ...

    def encode(self, completion: Mapping[str, Any]) -> bytes: ...

    def start(self) -> bytes: ...

    def push(self, chunk: Mapping[str, Any]) -> bytes: ...

    def finish(self) -> bytes: ...

    def fail(self, error: errors.OpenAIErrorFields, status: int) -> bytes: ...


class ModelCalls:
    """The calls of one port."""

    def __init__(self, plane: DataPlane, settings: Settings) -> None:
        self._plane = plane
        self._limit = settings.inference.max_request_size
        self._shown = settings.inference.handler_errors

    # Requests

    async def read_object(self, exchange: HttpExchange) -> tuple[bytes, dict[str, Any]]:
        """Return the body as bytes and as a JSON object. Raises InvalidBody."""
        body = await exchange.read_body(self._limit)
        return body, await large_body.parse_body(body, parse_object, body)

    async def read_form(self, exchange: HttpExchange) -> tuple[InputPart, ...]:
        """Return the fields of a form with a file. Raises InvalidBody."""
        body = await exchange.read_body(self._limit)
        content_type = exchange.headers.get("content-type", "")
        if content_type.partition(";")[0].strip().lower() != form_data.MULTIPART:
            raise InvalidBody(f"The body is a form: send it as {form_data.MULTIPART}.")
        return await form_data.read_body(content_type, body)

    def authorize_model(self, exchange: HttpExchange, document: Mapping[str, Any]) -> tuple[str, str | None]:
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
        self,
        exchange: HttpExchange,
        model: str,
        version: str | None,
        inputs: tuple[InputPart, ...],
        url_path: str = "",
    ) -> InferenceRequest:
        """Return the request; its handler receives ``url_path``, by default that of the exchange."""
        headers = exchange.headers
        headers["url_path"] = url_path or "/".join(exchange.segments)
        headers["explain"] = "False"
        deadline, priority = parse_deadline(headers), parse_priority(headers)
        return InferenceRequest(
            model, version, inputs, headers, "predict", exchange.request_id, deadline, priority
        )

    # Generated text

    async def generate(self, exchange: HttpExchange, request: InferenceRequest) -> None:
        """Answer by the handler's own response, whole or streamed."""
        with exchange.cancel_on_disconnect():
            response = await self._plane.infer(request, exchange.grant)
            if isinstance(response, ResponseStream):
                await self._send_stream(exchange, response, self._forward_events(exchange, response))
            else:
                await self._send_response(exchange, response)

    async def answer_chat(
        self,
        exchange: HttpExchange,
        document: Mapping[str, Any],
        translate: Callable[[Mapping[str, Any]], ChatTranslation],
    ) -> None:
        """Answer a request in another API's form, which names the model, by a chat completion."""
        model, version = self.authorize_model(exchange, document)
        translation = translate(document)
        body = exact_json.dumps(
            {**translation.chat, "model": document["model"], "stream": translation.stream}
        )
        inputs = (InputPart("body", body, "application/json"),)
        request = self.build_request(exchange, model, version, inputs, CHAT)
        with exchange.cancel_on_disconnect():
            response = await self._plane.infer(request, exchange.grant)
            if isinstance(response, ResponseStream):
                events = self._translate_events(exchange, response, translation)
                await self._send_stream(exchange, response, events, translation.ignored)
            else:
                await self._send_translated(exchange, response, translation)

    async def infer_json(
        self, exchange: HttpExchange, request: InferenceRequest
    ) -> tuple[InferenceResponse, dict[str, Any]]:
        """Return the response, and the JSON object in it. Raises RelayError."""
        with exchange.cancel_on_disconnect():
            response = await self._plane.infer(request, exchange.grant)
            if isinstance(response, ResponseStream):
                await reject_stream(response, request.model)
        check_response(response)
        exchange.version = response.version
        return response, _parse_answer(response.body, request.model)

    async def _send_response(self, exchange: HttpExchange, response: InferenceResponse) -> None:
        exchange.version = response.version
        headers = build_response_headers(response)
        if not response.content_type:
            headers.append(_EVENT_STREAM if response.body.startswith(_DATA) else JSON)
        if response.headers:
            exchange.override_defaults(headers)
        await exchange.send_response(_valid_status(response), headers, response.body)

    async def _send_translated(
        self, exchange: HttpExchange, response: InferenceResponse, translation: ChatTranslation
    ) -> None:
        """Send a response that came as a whole, be it of a stream or not."""
        check_response(response)
        exchange.version = response.version
        try:
            if translation.stream:
                if not response.body.startswith(_DATA):
                    raise ValueError("no events")
                chunks = map(translation.push, _EventParser().feed(response.body))
                body = b"".join((translation.start(), *chunks, translation.finish()))
            else:
                body = translation.encode(orjson.loads(response.body))
        except _MALFORMED:
            raise _not_a_chat(exchange.model) from None
        headers = build_response_headers(response, with_content_type=False)
        headers += _EVENT_STREAM if translation.stream else JSON, *build_ignored_header(translation.ignored)
        await exchange.send_response(200, headers, body)

    async def _send_stream(
        self,
        exchange: HttpExchange,
        stream: ResponseStream,
        events: AsyncIterator[bytes],
        ignored: Sequence[str] = (),
    ) -> None:
        """Send ``events``, which are made of the handler's stream as it arrives."""
        head = stream.head
        exchange.version = head.version
        headers = encode_handler_headers(head.content_type or EVENT_STREAM, head.headers)
        exchange.override_defaults(headers)
        headers += _NO_BUFFERING, *version_headers(head), *build_ignored_header(ignored)
        await exchange.send_stream(_valid_status(head), headers, ResponseStream(head, events))

    async def _forward_events(self, exchange: HttpExchange, stream: ResponseStream) -> AsyncIterator[bytes]:
        async with aclosing(KeepAlive(stream)) as chunks:
            try:
                async for chunk in chunks:
                    yield chunk
            except RelayError as error:
                document = errors.to_document(error, exchange.request_id, self._shown)
                yield b"data: %b\n\n" % exact_json.dumps(document)

    async def _translate_events(
        self, exchange: HttpExchange, stream: ResponseStream, translation: ChatTranslation
    ) -> AsyncIterator[bytes]:
        parser = _EventParser()
        async with aclosing(KeepAlive(stream)) as chunks:
            try:
                yield translation.start()
                async for chunk in chunks:
                    if chunk is KEEP_ALIVE_COMMENT:
                        yield chunk
                    elif events := b"".join(map(translation.push, parser.feed(chunk))):
                        yield events
                yield translation.finish()
            except (RelayError, *_MALFORMED) as caught:
                error = caught if isinstance(caught, RelayError) else _not_a_chat(exchange.model)
                document = errors.to_document(error, exchange.request_id, self._shown)
                yield translation.fail(document["error"], errors.find_status(error)[0])

    # Rows

    async def answer_rows(
        self,
        exchange: HttpExchange,
        document: Mapping[str, Any],
        parse: Callable[[Mapping[str, Any]], RowsRequest],
    ) -> None:
        """Answer a request, which names the model, by the responses to all of its rows."""
        model, version = self.authorize_model(exchange, document)
        rows_request = parse(document)
        rows = rows_request.rows
        request = self.build_request(exchange, model, version, ())
        admission = self._plane.admit_key(exchange.grant, len(rows))
        with exchange.cancel_on_disconnect():
            responses = await self._infer_rows(request, rows)
            # 2,048 vectors of 1,024 numbers take a second.
            size = sum(len(response.body) for response in responses)
            body = await large_body.run(size, rows_request.encode, document["model"], responses)
            if admission is not None:
                admission.add_tokens(count_tokens(body) or sum(map(_count_row_tokens, responses)))
            if admission is not None:
                admission.release()
        exchange.version = responses[0].version
        headers = [JSON, *version_headers(responses[0]), *build_ignored_header(rows_request.ignored)]
        await exchange.send_response(200, headers, body)

    async def _infer_rows(
        self, request: InferenceRequest, rows: Sequence[tuple[InputPart, ...]]
    ) -> list[InferenceResponse]:
        """Return the response to each row, all from one version.

        Enough requests to fill two of the model's batches run concurrently. Raises InvalidField where the
        responses are too large together, as those of each token's vector may be.
        """
        model, version = request.model, request.version
        version_route = self._plane.find_version(model, version)
        concurrency = min(
            version_route.job_queue_size, max(_MIN_CONCURRENT_ROWS, 2 * version_route.max_batch_size)
        )
        responses: dict[int, InferenceResponse] = {}
        size = 0
        remaining = iter(enumerate(rows))

        async def infer(index: int, inputs: tuple[InputPart, ...]) -> None:
            nonlocal size
            request_id = uuid4() if index else request.request_id
            response = await self._plane.infer(
                replace(request, version=version, inputs=inputs, request_id=request_id)
            )
            if isinstance(response, ResponseStream):
                await reject_stream(response, model)
            check_response(response)
            size += len(response.body)
            if size > _MAX_ROWS_BYTES:
                raise InvalidField(
                    f"The model's answers to {len(responses) + 1} of {len(rows)} inputs have more than "
                    f"{_MAX_ROWS_BYTES // MIB} MiB together: send fewer inputs in a request.",
                    "input",
                )
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


class _EventParser:
    """A parser of the events of a chat's stream, whose chunks may end anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[dict[str, Any]]:
        """Return the documents that are complete now. Raises ValueError where one is no JSON."""
        *events, self._rest = (self._rest + chunk).split(b"\n\n")
        data = [event.removeprefix(_DATA).strip() for event in events if event.startswith(_DATA)]
        return [orjson.loads(document) for document in data if document != _DONE]


# Faults of a translation where a handler answers something else than a chat completion.
_MALFORMED = (ValueError, KeyError, TypeError, IndexError, AttributeError)


def check_response(response: InferenceResponse) -> None:
    """Raise HandlerRejected where the handler has set the status of an error."""
    if response.status >= 400:
        error = HandlerRejected(response.body.decode(errors="replace"), response.status)
        error.selected_version, error.arm = response.version, response.arm
        raise error


async def reject_stream(stream: ResponseStream, model: str) -> NoReturn:
    """Close a stream. Always raises InvalidField."""
    await stream.aclose()
    raise InvalidField(f"Model {model} answers a text with a stream instead of numbers.", "model")


def parse_object(body: bytes) -> dict[str, Any]:
    """Return a body as a JSON object. Raises InvalidBody."""
    try:
        document = exact_json.loads(body)
    except ValueError as error:
        raise InvalidBody(f"The body is no JSON: {error}.") from None
    if not isinstance(document, dict):
        raise InvalidBody("The body is a JSON object.")
    return document


def _parse_answer(body: bytes, model: str) -> dict[str, Any]:
    try:
        answer = orjson.loads(body)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise InvalidField(f"Model {model} answers no JSON object.", "model")
    return answer


def _count_row_tokens(response: InferenceResponse) -> int:
    """Return the number of tokens in a row's response, 0 where the model does not count them."""
    found = _ROW_TOKENS.search(response.body)
    return int(found[1]) if found else 0


def _not_a_chat(model: str) -> InvalidField:
    return InvalidField(
        f"Model {model} answers no chat completion: this route is of models with OpenAI's API.", "model"
    )


def _valid_status(response: InferenceResponse) -> int:
    return response.status if 200 <= response.status < 600 else 500
