"""OpenAI's API over the data plane: models, completions, chat completions and embeddings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import orjson

from serve_app.dataplane import DataPlane
from serve_app.doors import auth
from serve_app.doors.exchange import (
    JSON,
    Exchange,
    Headers,
    author_headers,
    by_arm,
    by_version,
    deadline,
    priority,
    reply_headers,
    uuid4,
)
from serve_app.doors.openai import embeddings, errors
from serve_app.doors.openai.errors import InvalidField
from serve_app.doors.streaming import EVENT_STREAM, Alive
from serve_app.errors import HandlerSaid, InvalidBody, MethodNotAllowed, NoWorker, RelayError
from serve_app.settings import Settings
from serve_app.types import Call, Input, Reply, ReplyStream, VersionRow, matches

Route = Callable[[Exchange], Awaitable[None]]

_LEAST_ROWS = 16  # of one request that are under way at once, however small the model's batches are
_OF_EVENTS = (b"x-accel-buffering", b"no")


class OpenAIDoor:
    """``model`` in a body is a model's name, whose version the policy picks, or ``name:version``.

    A call has the header ``url_path``, by which a handler knows what it is asked, as TorchServe has it under
    ``/predictions/{model}/{version}/v1/...``.
    """

    def __init__(self, plane: DataPlane, settings: Settings) -> None:
        self._plane = plane
        self._limit = settings.inference.max_request_size
        self._shown = settings.inference.handler_errors

    def knows(self, exchange: Exchange) -> bool:
        return self._route(exchange.segments) is not None

    async def refuse(self, exchange: Exchange, error: Exception) -> None:
        await errors.refuse(exchange, error, self._shown)

    async def answer(self, exchange: Exchange) -> None:
        route = self._route(exchange.segments)
        assert route is not None
        if exchange.method == "OPTIONS":  # a browser asks before it asks
            return await exchange.reply(204, [], b"")
        auth.admit(self._plane.access, exchange, "infer")
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
            case ["models"]:
                return self._list
            case ["models", asked] if not asked.endswith((":predict", ":explain")):
                return self._show
        return None

    # Models

    async def _list(self, exchange: Exchange) -> None:
        ids = list(self._ids(auth.within(exchange)))
        data = [_model(id) for id in ids]
        await exchange.reply(200, [JSON], orjson.dumps({"object": "list", "data": data, "models": ids}))

    def _ids(self, within: tuple[str, ...]) -> Iterator[str]:
        """Each model by its name; and each of its versions, where it has several."""
        for name, row in sorted(self._plane.table.models.items()):
            if matches(name, within):
                if (default := row.versions.get(row.default)) is not None and _answers(default):
                    yield name
                if len(row.versions) > 1:
                    yield from (f"{name}:{version}" for version, one in row.versions.items() if _answers(one))

    async def _show(self, exchange: Exchange) -> None:
        asked = exchange.segments[2]
        model, version = _named(asked)
        auth.cover(exchange, model)
        row = self._plane.find(model, version)
        if not _answers(row):
            error = NoWorker(model, version, row.last_error)
            error.retry_after = None  # who looks whether it is ready should not be held up
            raise error
        await exchange.reply(200, [JSON], orjson.dumps(_model(asked)))

    # Completions

    async def _generate(self, exchange: Exchange) -> None:
        body = await exchange.body(self._limit)
        said = _object(body)
        model, version = self._asked(exchange, said)
        call = self._call(exchange, model, version, (Input("body", body, "application/json"),))
        watch = exchange.watch()
        try:
            reply = await self._plane.infer(call)
            if isinstance(reply, ReplyStream):
                await self._stream(exchange, reply)
            else:
                await self._reply(exchange, reply)
        except RelayError as error:
            exchange.version = error.version or exchange.version
            raise
        finally:
            watch.cancel()

    async def _reply(self, exchange: Exchange, reply: Reply) -> None:
        exchange.version = reply.version
        sent = reply_headers(reply)
        if not reply.content_type:
            sent.append((b"content-type", EVENT_STREAM.encode()) if reply.body.startswith(b"data:") else JSON)
        if reply.headers:
            exchange.yield_to(sent)
        await exchange.reply(_status(reply), sent, reply.body)

    async def _stream(self, exchange: Exchange, stream: ReplyStream) -> None:
        """The handler's own events, each as it comes."""
        head = stream.head
        exchange.version = head.version
        sent = author_headers(head.content_type or EVENT_STREAM, head.headers)
        exchange.yield_to(sent)
        sent += _OF_EVENTS, by_version(head.version)
        if head.arm:
            sent.append(by_arm(head.arm))
        await exchange.stream(_status(head), sent, ReplyStream(head, self._events(exchange, stream)))

    async def _events(self, exchange: Exchange, stream: ReplyStream) -> AsyncIterator[bytes]:
        async with aclosing(Alive(stream)) as pieces:
            try:
                async for piece in pieces:
                    yield piece
            except RelayError as error:
                yield b"data: %b\n\n" % orjson.dumps(errors.document(error, exchange.request_id, self._shown))

    # Embeddings

    async def _embed(self, exchange: Exchange) -> None:
        said = _object(await exchange.body(self._limit))
        model, version = self._asked(exchange, said)
        asked = embeddings.read(said)
        watch = exchange.watch()
        try:
            replies = await self._rows(self._call(exchange, model, version, ()), asked.inputs)
        except RelayError as error:
            exchange.version = error.version or exchange.version
            raise
        finally:
            watch.cancel()
        exchange.version = replies[0].version
        sent: Headers = [JSON, by_version(replies[0].version)]
        if replies[0].arm:
            sent.append(by_arm(replies[0].arm))
        await exchange.reply(200, sent, embeddings.written(asked, said["model"], replies))

    async def _rows(self, call: Call, texts: tuple[str, ...]) -> list[Reply]:
        """The reply to each text, all of one version; so many are under way at once as fill the model's batches."""
        model, version = call.model, call.version
        row = self._plane.find(model, version)
        together = min(row.job_queue_size, max(_LEAST_ROWS, 2 * row.max_batch_size))
        replies: dict[int, Reply] = {}
        waiting = iter(enumerate(texts))

        async def ask(place: int, text: str) -> None:
            id = uuid4() if place else call.request_id
            reply = await self._plane.infer(
                replace(call, version=version, inputs=embeddings.row(text), request_id=id)
            )
            if isinstance(reply, ReplyStream):
                await reply.aclose()
                raise InvalidField(f"Model {model} answers with a stream, which is no embedding.", "model")
            if reply.status >= 400:
                raise HandlerSaid(reply.body.decode(errors="replace"), reply.status)
            replies[place] = reply

        async def work() -> None:
            for place, text in waiting:
                await ask(place, text)

        if version is None and self._plane.divided(model):  # one falls to a version, the others follow it
            await ask(*next(waiting))
            version = replies[0].version
        tasks = [asyncio.ensure_future(work()) for _ in range(max(1, min(together, len(texts))))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return [replies[place] for place in range(len(texts))]

    # Calls

    def _asked(self, exchange: Exchange, said: dict[str, Any]) -> tuple[str, str | None]:
        """The model, which the request's key must cover, and the version, if any, that a body names."""
        asked = said.get("model")
        if not isinstance(asked, str) or not asked:
            raise InvalidField("model is the name of a model, or name:version; GET /v1/models lists them.", "model")
        model, version = _named(asked)
        exchange.model, exchange.version = model, version or ""
        auth.cover(exchange, model)
        return model, version

    def _call(self, exchange: Exchange, model: str, version: str | None, inputs: tuple[Input, ...]) -> Call:
        headers = exchange.headers
        headers["url_path"] = "/".join(exchange.segments)
        headers["explain"] = "False"
        until, urgency = deadline(headers), priority(headers)
        return Call(model, version, inputs, headers, "predict", exchange.request_id, until, urgency)


def _named(asked: str) -> tuple[str, str | None]:
    """``name`` or ``name:version``; no name has a colon in it."""
    model, _, version = asked.partition(":")
    return model, version or None


def _answers(row: VersionRow) -> bool:
    """Whether a call is answered; one that sleeps wakes up for it."""
    return row.phase in ("ready", "idle") or row.replicas > 0


def _model(id: str) -> dict[str, Any]:
    """In OpenAI's words and, at their end, in those of KServe's first protocol, which has the same addresses."""
    return {"id": id, "object": "model", "created": 0, "owned_by": "torchrelay", "name": id, "ready": True}


def _object(body: bytes) -> dict[str, Any]:
    try:
        said = orjson.loads(body)
    except ValueError as error:
        raise InvalidBody(f"The body is no JSON: {error}.") from None
    if not isinstance(said, dict):
        raise InvalidBody("The body is a JSON object.")
    return said


def _status(reply: Reply) -> int:
    return reply.status if 200 <= reply.status < 600 else 500
