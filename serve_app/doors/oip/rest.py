"""The Open Inference Protocol over HTTP, with binary tensors, repository, statistics and generated text."""

from __future__ import annotations

from dataclasses import replace

import orjson

from serve_app.controlplane import ControlPlane
from serve_app.dataplane import DataPlane
from serve_app.doors import auth
from serve_app.doors.deferrals import Aside
from serve_app.doors.exchange import JSON, Exchange, deadline, priority, reply_headers
from serve_app.doors.oip import compression, convert, errors, framing, generate, metadata, repository
from serve_app.doors.oip.errors import Unsupported
from serve_app.doors.streaming import EVENT_STREAM, Alive, whole
from serve_app.errors import InvalidBody, MethodNotAllowed, RelayError, ResourceNotFound
from serve_app.settings import Settings
from serve_app.types import Call, Reply, ReplyStream

_OCTETS = (b"content-type", b"application/octet-stream")
_LENGTH = framing.LENGTH.encode()
_GENERATE = ("generate", "generate_stream")


class OpenInferenceDoor:
    """The routes under ``/v2``; those of the repository and of statistics are there where ``control`` is."""

    def __init__(self, plane: DataPlane, settings: Settings, control: ControlPlane | None = None) -> None:
        self._plane = plane
        self._control = control
        self._aside = Aside(plane, control, settings)
        self._limit = settings.inference.max_request_size
        self._runtime = settings.runtime
        self._shown = settings.inference.handler_errors

    def knows(self, exchange: Exchange) -> bool:
        return exchange.segments[:1] == ["v2"]

    async def refuse(self, exchange: Exchange, error: Exception) -> None:
        await errors.refuse(exchange, error, exchange.segments[-1] in _GENERATE, self._shown)

    async def answer(self, exchange: Exchange) -> None:
        if exchange.method == "OPTIONS":
            return await exchange.reply(204, [], b"")
        match exchange.segments[1:]:
            case ["models", model, "infer"]:
                await self._infer(exchange, model, None)
            case ["models", model, "versions", version, "infer"]:
                await self._infer(exchange, model, version)
            case []:
                _only(exchange, "GET")
                await _say(exchange, metadata.server())
            case ["health", "live"]:
                _only(exchange, "GET")
                await _say(exchange, {"live": True})
            case ["health", "ready"]:
                _only(exchange, "GET")
                await _say(exchange, {"ready": self._plane.ready}, 200 if self._plane.ready else 503)
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

    async def _model(self, exchange: Exchange, model: str, version: str | None, verb: str = "") -> None:
        exchange.model, exchange.version = model, version or ""
        match verb:
            case "generate" | "generate_stream":
                await self._generate(exchange, model, version)
            case "stats":
                await self._statistics(exchange, model, version)
            case "" | "ready" | "config":
                await self._tell(exchange, model, version, verb)
            case _:
                raise ResourceNotFound()

    async def _infer(self, exchange: Exchange, model: str, version: str | None) -> None:
        exchange.model, exchange.version = model, version or ""
        _only(exchange, "POST")
        auth.admit(self._plane.access, exchange, "infer")
        auth.cover(exchange, model)
        headers = exchange.headers
        if "prefer" in headers and await self._aside.take(exchange, model, version):
            return
        length = headers.get(framing.LENGTH)
        body = await (self._body(exchange) if "content-encoding" in headers else exchange.body(self._limit))
        if length == "0":
            asked = framing.raw(model, version, body, self._plane.describe(model, version).signature)
        else:
            asked = framing.read(model, version, body, length)
        call = convert.call(asked, exchange.request_id, headers, self._runtime, deadline(headers), priority(headers))
        watch = exchange.watch()
        try:
            reply = await self._ask(exchange, call)
            if isinstance(reply, ReplyStream):
                reply = await self._collected(reply)
        finally:
            watch.cancel()
        body, head = framing.write(asked, model, reply)
        sent = reply_headers(reply, typed=False)
        if reply.headers:
            exchange.yield_to(sent)
        if head is None:
            sent.append(JSON)
        else:
            sent += _OCTETS, (_LENGTH, b"%d" % head)
        if "accept-encoding" in headers and (coding := compression.asked(headers["accept-encoding"], len(body))):
            body = await compression.deflated(body, coding)
            sent.append((b"content-encoding", coding.encode()))
        await exchange.reply(200, sent, body)

    async def _body(self, exchange: Exchange) -> bytes:
        """The whole body, no longer compressed. Raises TooLarge, InvalidBody and CallerLeft."""
        body = await exchange.body(self._limit)
        coding = exchange.headers.pop("content-encoding", "identity")
        return body if coding == "identity" else await compression.inflated(body, coding, self._limit)

    async def _ask(self, exchange: Exchange, call: Call) -> Reply | ReplyStream:
        try:
            reply = await self._plane.infer(call)
        except RelayError as error:
            exchange.version = error.version or exchange.version
            raise
        exchange.version = (reply.head if isinstance(reply, ReplyStream) else reply).version
        return reply

    async def _collected(self, stream: ReplyStream) -> Reply:
        """A streamed reply in one piece: the protocol's ``infer`` has no other. Raises OutputTooLarge."""
        body = await whole(stream, self._runtime.max_response_size)
        return replace(stream.head, body=body, content_type=None)

    async def _generate(self, exchange: Exchange, model: str, version: str | None) -> None:
        _only(exchange, "POST")
        auth.admit(self._plane.access, exchange, "infer")
        auth.cover(exchange, model)
        said = framing.document(await self._body(exchange))
        asked = generate.read(model, version, said, exchange.segments[-1] == "generate_stream")
        headers = exchange.headers
        call = generate.call(asked, exchange.request_id, headers, deadline(headers), priority(headers))
        watch = exchange.watch()
        try:
            reply = await self._ask(exchange, call)
            if isinstance(reply, ReplyStream):
                return await self._stream(exchange, asked, reply)
        finally:
            watch.cancel()
        said = generate.whole(asked, reply)
        await exchange.reply(200, [JSON, *reply_headers(reply, typed=False)], orjson.dumps(said))

    async def _stream(self, exchange: Exchange, asked: generate.Prompt, reply: ReplyStream) -> None:
        events = Alive(ReplyStream(reply.head, generate.events(asked, reply)))
        headers = [(b"content-type", EVENT_STREAM.encode()), *reply_headers(reply.head, typed=False)]
        try:
            await exchange.stream(200, headers, ReplyStream(reply.head, events))
        finally:
            await reply.aclose()

    async def _tell(self, exchange: Exchange, model: str, version: str | None, verb: str) -> None:
        _only(exchange, "GET")
        auth.admit(self._plane.access, exchange, "observe", "infer")
        auth.cover(exchange, model)
        row = self._plane.describe(model, version)
        if verb == "ready":
            ready = metadata.ready(row)
            await _say(exchange, {"name": model, "ready": ready}, 200 if ready else 503)
        elif verb == "config":
            await _say(exchange, metadata.config(model, row))
        else:
            await _say(exchange, metadata.model(model, self._plane.table.models[model], row))

    async def _statistics(self, exchange: Exchange, model: str | None, version: str | None) -> None:
        _only(exchange, "GET")
        auth.admit(self._plane.access, exchange, "observe", "infer")
        if model is not None:
            auth.cover(exchange, model)
            version = version and self._plane.find(model, version).version
        figures = await self._controlled().figures(auth.within(exchange))
        if model is not None:
            self._plane.find(model, version)  # or there is no such model
            figures = [one for one in figures if one.model == model and version in (None, one.version)]
        await _say(exchange, metadata.statistics(figures))

    async def _index(self, exchange: Exchange) -> None:
        _only(exchange, "POST")
        auth.admit(self._plane.access, exchange, "observe", "infer")
        body = await self._body(exchange)
        ready = (framing.document(body) if body.strip() else {}).get("ready", False)
        if type(ready) is not bool:
            raise InvalidBody("ready is true (only what can be asked) or false.")
        await _say(exchange, metadata.index(self._plane.table, auth.within(exchange), ready))

    async def _repository(self, exchange: Exchange, model: str, verb: str) -> None:
        _only(exchange, "POST")
        auth.admit(self._plane.access, exchange, "manage")
        auth.cover(exchange, model)
        control, body = self._controlled(), await self._body(exchange)
        parameters = (framing.document(body) if body.strip() else {}).get("parameters") or {}
        if not isinstance(parameters, dict):
            raise InvalidBody("parameters is an object.")
        if verb == "load":
            await repository.load(control, model, parameters, auth.within(exchange))
        else:
            await repository.unload(control, model)
        await exchange.reply(200, [], b"")

    def _controlled(self) -> ControlPlane:
        if self._control is None:
            raise Unsupported("This address answers for one model alone; ask the server's own.")
        return self._control


def _only(exchange: Exchange, method: str) -> None:
    if exchange.method != method and not (method == "GET" and exchange.method == "HEAD"):
        raise MethodNotAllowed()


async def _say(exchange: Exchange, said: object, status: int = 200) -> None:
    await exchange.reply(status, [JSON], orjson.dumps(said))
