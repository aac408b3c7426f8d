"""TorchServe's REST inference API over the data plane, with health routes that tell the truth beside it."""

from __future__ import annotations

import math
import time
from typing import Any

from serve_app.dataplane import DataPlane
from serve_app.doors import auth
from serve_app.doors.exchange import Exchange, Headers, author_headers
from serve_app.doors.torchserve import errors, forms, openapi
from serve_app.errors import BadRequest, MethodNotAllowed, ModelNotFound, RelayError, ResourceNotFound
from serve_app.settings import Settings
from serve_app.types import Call, Kind, Reply, ReplyStream

TIMEOUT = "x-request-timeout-seconds"
_OPEN = ("ping", "health", "api-description")  # these want no key, and neither does OPTIONS


class InferenceDoor:
    """The routes of the inference port, by their first segment. The method matters only where it is OPTIONS."""

    def __init__(self, plane: DataPlane, settings: Settings) -> None:
        self._plane = plane
        self._limit = settings.inference.max_request_size
        self._routes = {
            "predictions": self._predict,
            "explanations": self._explain,
            "ping": self._ping,
            "health": self._health,
            "api-description": self._describe_api,
        }

    refuse = staticmethod(errors.refuse)

    def knows(self, exchange: Exchange) -> bool:
        return not exchange.segments or exchange.segments[0] in self._routes

    async def answer(self, exchange: Exchange) -> None:
        segments = exchange.segments
        if not segments:
            if exchange.method != "OPTIONS":
                raise MethodNotAllowed()
            return await errors.reply_json(exchange, openapi.document(openapi.INFERENCE))
        if segments[0] not in _OPEN and exchange.method != "OPTIONS":
            auth.admit(self._plane.access, exchange, "infer")
        route = self._routes.get(segments[0])
        if route is None:
            raise ResourceNotFound()
        await route(exchange)

    async def _predict(self, exchange: Exchange) -> None:
        await self._infer(exchange, "predict", "False")

    async def _explain(self, exchange: Exchange) -> None:
        await self._infer(exchange, "explain", "True")

    async def _infer(self, exchange: Exchange, kind: Kind, explain: str) -> None:
        segments = exchange.segments
        if len(segments) < 2:
            raise ResourceNotFound()
        model = segments[1]
        version = segments[2] if len(segments) > 2 else None
        exchange.model, exchange.version = model, version or ""
        if exchange.method == "OPTIONS":
            if model not in self._plane.table.models:
                raise ModelNotFound(model)
            return await errors.reply_json(exchange, openapi.of_model(openapi.INFERENCE, model))
        auth.cover(exchange, model)
        headers = exchange.headers
        body = await exchange.body(self._limit)
        headers["url_path"] = "/".join(segments[3:])
        headers["explain"] = explain
        call = Call(
            model,
            version,
            forms.inputs(headers.get("content-type"), body),
            headers,
            kind,
            exchange.request_id,
            _deadline(headers.get(TIMEOUT)),
        )
        watch = exchange.watch()
        try:
            await self._send(exchange, await self._plane.infer(call))
        except RelayError as error:
            exchange.version = exchange.version or error.version
            raise
        finally:
            watch.cancel()

    async def _send(self, exchange: Exchange, reply: Reply | ReplyStream) -> None:
        if isinstance(reply, ReplyStream):
            head = reply.head
            exchange.version = head.version
            sent = author_headers(head.content_type, head.headers)
            sent.append((b"ts_stream_next", b"true"))
            await exchange.stream(errors.http_status(head.status), sent, reply)
        else:
            exchange.version = reply.version
            await exchange.reply(errors.http_status(reply.status), _headers(reply), reply.body)

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
        await errors.reply_json(exchange, openapi.document(openapi.INFERENCE))


def _headers(reply: Reply) -> Headers:
    sent = author_headers(reply.content_type, reply.headers) if reply.content_type or reply.headers else []
    times = reply.timings
    if times.batch_size:
        said = "queue;dur=%.3f, inference;dur=%.3f, batch;desc=%d"
        sent.append(
            (b"server-timing", (said % (times.queue * 1000, times.inference * 1000, times.batch_size)).encode())
        )
    return sent


def _deadline(seconds: str | None) -> float | None:
    """When the caller stops waiting; 0 seconds are without end, as Ray Serve has it for this header."""
    if seconds is None:
        return None
    try:
        limit = float(seconds)
    except ValueError:
        limit = -1.0
    if not 0 <= limit < math.inf:
        raise BadRequest(f"Header {TIMEOUT} must be a number of seconds, 0 for no limit; got {seconds!r}.")
    return time.time() + limit if limit else None
