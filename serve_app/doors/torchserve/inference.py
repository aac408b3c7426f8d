"""TorchServe's REST inference API over the data plane, with health routes that tell the truth beside it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import orjson

from serve_app.controlplane import ControlPlane
from serve_app.dataplane import DataPlane
from serve_app.doors import auth, experiments
from serve_app.doors.deferrals import Aside
from serve_app.doors.exchange import Exchange, author_headers, by_arm, by_version, deadline, priority, reply_headers
from serve_app.doors.streaming import EVENT_STREAM, Events
from serve_app.doors.torchserve import errors, forms, openapi
from serve_app.errors import (
    ClientTimeout,
    MethodNotAllowed,
    MissingParameter,
    OfStep,
    RelayError,
    ResourceNotFound,
)
from serve_app.settings import Settings
from serve_app.types import Call, Input, Kind, Reply, ReplyStream

Route = Callable[[Exchange], Awaitable[None]]

# Seconds for which a request that came too late is not answered where TorchServe would never answer it.
SILENCE = 120.0
_OPEN = ("ping", "health", "api-description")  # these want no key, and neither does OPTIONS


class InferenceDoor:
    """The routes of the inference port. The method matters only where it is OPTIONS."""

    def __init__(self, plane: DataPlane, settings: Settings, control: ControlPlane | None = None) -> None:
        self._plane = plane
        self._control = control
        self._aside = Aside(plane, control, settings)
        self._limit = settings.inference.max_request_size
        self._api = openapi.BOTH if settings.inference.also_management else openapi.INFERENCE
        self._drops = settings.inference.late_answer == "drop"
        self._shown = settings.inference.handler_errors
        self._routes: dict[str, Route] = {
            "predictions": self._predict,
            "explanations": self._explain,
            "invocations": self._invocations,
            "wfpredict": self._wfpredict,
            "ping": self._ping,
            "health": self._health,
            "api-description": self._describe_api,
        }

    async def refuse(self, exchange: Exchange, error: Exception) -> None:
        if self._drops and isinstance(error, ClientTimeout):
            await exchange.silence(SILENCE)
        await errors.refuse(exchange, error, self._shown)

    def knows(self, exchange: Exchange) -> bool:
        return self._route(exchange.segments) is not None

    async def answer(self, exchange: Exchange) -> None:
        segments = exchange.segments
        if segments and segments[0] not in _OPEN and exchange.method != "OPTIONS":
            auth.admit(self._plane.access, exchange, "infer")
        route = self._route(segments)
        if route is None:
            raise ResourceNotFound()
        await route(exchange)

    def _route(self, segments: list[str]) -> Route | None:
        """What answers a path: by its first segment, or else by what it looks like."""
        if not segments:
            return self._root
        route = self._routes.get(segments[0])
        if route is not None:
            return route
        if segments[-1] == "infer":  # another protocol's, and more frequent than all that follows
            return None
        match segments:
            case ["v1", "models", asked] if asked.endswith((":predict", ":explain")):
                return self._kserve_v1
            case ["v2", "models", _, "explain"]:
                return self._explain_v2
            case ["experiments", _, "events"] if self._control is not None:
                return self._rewards
            case ["models", _, "invoke"]:
                return self._named
            case ["models", *_]:
                return None
            case [_, "predict"] | [_, _, "predict"]:
                return self._named
        return None

    async def _root(self, exchange: Exchange) -> None:
        if exchange.method in ("GET", "HEAD"):  # how KServe's first protocol asks whether a server lives
            return await errors.reply_json(exchange, {"status": "alive"})
        if exchange.method != "OPTIONS":
            raise MethodNotAllowed()
        await errors.reply_json(exchange, self._api)

    async def _predict(self, exchange: Exchange) -> None:
        await self._infer(exchange, "predict")

    async def _explain(self, exchange: Exchange) -> None:
        await self._infer(exchange, "explain")

    async def _infer(self, exchange: Exchange, kind: Kind) -> None:
        segments = exchange.segments
        if len(segments) < 2:
            raise ResourceNotFound()
        exchange.headers["url_path"] = "/".join(segments[3:])
        await self._ask(exchange, segments[1], segments[2] if len(segments) > 2 else None, kind)

    async def _wfpredict(self, exchange: Exchange) -> None:
        """TorchServe's route of workflows, by their names; what goes wrong in a step has one status there."""
        if len(exchange.segments) < 2:
            raise ResourceNotFound()
        name = exchange.segments[1]
        self._plane.find_workflow(name)
        try:
            await self._ask(exchange, name, None)
        except RelayError as error:
            if isinstance(error, OfStep):
                raise errors.NodeFailed.like(error) from None
            raise

    async def _kserve_v1(self, exchange: Exchange) -> None:
        model, _, verb = exchange.segments[2].partition(":")
        await self._ask(exchange, model, None, "explain" if verb == "explain" else "predict")

    async def _explain_v2(self, exchange: Exchange) -> None:
        """What the Open Inference Protocol has no word for."""
        await self._ask(exchange, exchange.segments[2], None, "explain")

    async def _named(self, exchange: Exchange) -> None:
        """``/models/{model}/invoke``, ``/{model}/predict`` and ``/{model}/{version}/predict``: the query is input."""
        first, second, *rest = exchange.segments
        model, version = (second, None) if first == "models" else (first, second if rest else None)
        await self._ask(exchange, model, version, query=_query(exchange))

    async def _invocations(self, exchange: Exchange) -> None:
        """The query names the model, or else a field of the form; or start-up has loaded one, and no other."""
        if len(exchange.segments) > 1:
            raise ResourceNotFound()
        query, inputs = _query(exchange), None
        model = _model_name(query)
        if not model:
            inputs = query + forms.inputs(exchange.headers.get("content-type"), await exchange.body(self._limit))
            model = _model_name(inputs) or self._plane.startup_model
            if not model:
                raise MissingParameter("model_name")
        await self._ask(exchange, model, None, query=query, inputs=inputs)

    async def _ask(
        self,
        exchange: Exchange,
        model: str,
        version: str | None,
        kind: Kind = "predict",
        query: tuple[Input, ...] = (),
        inputs: tuple[Input, ...] | None = None,
    ) -> None:
        """Answer with what the model says to ``inputs``, or else to ``query`` and the request's body."""
        exchange.model, exchange.version = model, version or ""
        if exchange.method == "OPTIONS":
            self._plane.find(model, version)
            return await errors.reply_json(exchange, openapi.of_model(model))
        auth.cover(exchange, model)
        headers = exchange.headers
        if inputs is None:
            if "prefer" in headers and await self._aside.take(exchange, model, version):
                return
            inputs = query + forms.inputs(headers.get("content-type"), await exchange.body(self._limit))
        headers["explain"] = "True" if kind == "explain" else "False"
        call = Call(
            model, version, inputs, headers, kind, exchange.request_id, deadline(headers), priority(headers)
        )
        watch = exchange.watch()
        try:
            await self._send(exchange, await self._plane.infer(call))
        except RelayError as error:
            exchange.version = error.version or exchange.version
            raise
        finally:
            watch.cancel()

    async def _send(self, exchange: Exchange, reply: Reply | ReplyStream) -> None:
        if isinstance(reply, ReplyStream):
            head = reply.head
            exchange.version = head.version
            if EVENT_STREAM in exchange.headers.get("accept", "") and head.content_type != EVENT_STREAM:
                return await self._events(exchange, reply)
            sent = author_headers(head.content_type, head.headers)
            exchange.yield_to(sent)
            sent += (b"ts_stream_next", b"true"), by_version(head.version)
            if head.arm:
                sent.append(by_arm(head.arm))
            await exchange.stream(errors.http_status(head.status), sent, reply)
        else:
            exchange.version = reply.version
            if exchange.headers.get("accept") == EVENT_STREAM and reply.content_type != EVENT_STREAM:
                return await self._events(exchange, ReplyStream(reply, _alone(reply.body)))
            sent = reply_headers(reply)
            if reply.headers:
                exchange.yield_to(sent)
            await exchange.reply(errors.http_status(reply.status), sent, reply.body)

    async def _events(self, exchange: Exchange, stream: ReplyStream) -> None:
        """Answer with server-sent events, for a caller that says in its header Accept that it reads these."""
        head, id = stream.head, exchange.request_id
        sent = author_headers(None, (one for one in head.headers if one[0].lower() != "content-type"))
        exchange.yield_to(sent)
        sent += (b"content-type", EVENT_STREAM.encode()), (b"x-accel-buffering", b"no"), by_version(head.version)
        if head.arm:
            sent.append(by_arm(head.arm))
        end = orjson.dumps({"request_id": id, "version": head.version})
        events = Events(stream, end, lambda error: orjson.dumps(errors.document(error, id, self._shown)))
        await exchange.stream(errors.http_status(head.status), sent, ReplyStream(head, events))

    async def _rewards(self, exchange: Exchange) -> None:
        """What became of calls later is told where calls are made: applications need no other port or key."""
        assert self._control is not None
        await experiments.by_id(exchange, self._control, exchange.segments[1:], self._limit)

    async def _ping(self, exchange: Exchange) -> None:
        if self._plane.healthy:
            await errors.reply_json(exchange, {"status": "Healthy"})
        else:
            await errors.reply_json(exchange, {"status": "Unhealthy"}, 500)

    async def _health(self, exchange: Exchange) -> None:
        if exchange.segments == ["health", "live"]:
            await errors.reply_json(exchange, {"live": True})
        elif exchange.segments == ["health", "ready"]:
            await errors.reply_json(exchange, self._readiness(), 200 if self._plane.ready else 503)
        else:
            raise ResourceNotFound()

    def _readiness(self) -> dict[str, Any]:
        """Which versions are still loading and which have failed, as model/version."""
        table = self._plane.table
        phases: dict[str, list[str]] = {"loading": [], "failed": []}
        for model, row in sorted(table.models.items()):
            for version in row.versions.values():
                if version.phase in phases:
                    phases[version.phase].append(f"{model}/{version.version}")
        said: dict[str, Any] = {"ready": self._plane.ready, **phases}
        if table.generation == 0:
            said["reason"] = "no routing table has reached this process yet"
        return said

    async def _describe_api(self, exchange: Exchange) -> None:
        if len(exchange.segments) > 1:
            raise ResourceNotFound()
        await errors.reply_json(exchange, self._api)


async def _alone(body: bytes) -> AsyncIterator[bytes]:
    yield body


def _query(exchange: Exchange) -> tuple[Input, ...]:
    return forms.query(exchange.scope.get("query_string", b""))


def _model_name(inputs: tuple[Input, ...]) -> str:
    """What the first input of that name says; empty where none says anything."""
    named = (part.value.decode("utf-8", "replace") for part in inputs if part.name == "model_name" and part.value)
    return next(named, "")
