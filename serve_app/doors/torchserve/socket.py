"""Predictions over a WebSocket: each message is a request, each piece of its answer a message back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from serve_app.dataplane import DataPlane
from serve_app.doors import auth
from serve_app.doors.exchange import Exchange, Receive, Scope, Send, deadline, priority, uuid4
from serve_app.doors.torchserve import errors
from serve_app.errors import Forbidden, RelayError, ResourceNotFound, TooLarge, WrongModel, reason
from serve_app.settings import Settings
from serve_app.telemetry.access_log import AccessLog
from serve_app.types import Call, Input, ReplyStream

_log = logging.getLogger("torchrelay.doors")

_WAITING = 16  # messages that may wait for the one before them
_TOO_LARGE, _TOO_MANY = 1009, 1008  # RFC 6455, 7.4.1
_CALLER_LEFT = 499


class SocketDoor:
    """``/predictions/{model}[/{version}]`` as a WebSocket: requests one after the other, until somebody closes it.

    A text message that begins as an object or a list does is JSON, any other one text; a binary one is bytes, and the
    handshake's Content-Type goes before both. The answer is a message for each piece, text where the piece is UTF-8,
    and then ``{"end": {"status", "request_id", "version", "pieces"}}``, with an ``error`` where it went wrong. Closing
    cancels what is under way. ``count`` and ``access`` are told of each request, as of one of HTTP.
    """

    def __init__(
        self, plane: DataPlane, settings: Settings, count: Callable[[int], None], access: AccessLog | None
    ) -> None:
        self._plane = plane
        self._limit = settings.inference.max_request_size
        self._shown = settings.inference.handler_errors
        self._origin = settings.inference.cors_allowed_origin
        self._count = count
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def refuse(message: Any) -> None:
            await send({**message, "type": f"websocket.{message['type']}"})

        exchange = Exchange({**scope, "method": "WEBSOCKET"}, receive, refuse)
        await receive()  # websocket.connect
        try:
            key = exchange.headers.get("authorization")
            self._check(exchange)
        except RelayError as error:
            if "websocket.http.response" in scope.get("extensions", ()):
                return await errors.refuse(exchange, error, self._shown)
            return await send({"type": "websocket.close", "code": 1008, "reason": str(error)[:100]})
        await send({"type": "websocket.accept", "headers": []})
        talk = _Talk(self, exchange, key, send)
        try:
            await talk.listen(receive, self._limit)
        finally:
            await talk.close()

    def _check(self, exchange: Exchange) -> None:
        """Raises what would be answered to a request over HTTP, before its body is looked at."""
        auth.admit(self._plane.access, exchange, "infer")
        self._check_origin(exchange.headers)
        segments = exchange.segments
        if len(segments) < 2 or segments[0] != "predictions":
            raise ResourceNotFound()
        exchange.model, exchange.version = segments[1], segments[2] if len(segments) > 2 else ""
        exchange.headers |= {"url_path": "/".join(segments[3:]), "explain": "False"}
        auth.cover(exchange, exchange.model)
        deadline(exchange.headers), priority(exchange.headers)
        self._plane.find(exchange.model, exchange.version or None)

    def _check_origin(self, headers: Mapping[str, str]) -> None:
        """Raises Forbidden: a browser lets a page of any origin open a WebSocket, and only says which one it is."""
        origin = headers.get("origin")
        if origin is None or self._origin in ("*", origin) or origin.partition("://")[2] == headers.get("host"):
            return
        raise Forbidden(f"Pages of {origin:.100} may not connect here: name it in inference.cors_allowed_origin.")

    async def infer(self, talk: _Talk, request_id: str, part: Input) -> None:
        """Ask the plane, and send what it says. Raises RelayError."""
        exchange = talk.exchange
        access = self._plane.access
        # A key may have ended, or been taken back, since the last message.
        if access is not None and not auth.grant(access, talk.key, "infer").covers(exchange.model):
            raise WrongModel(exchange.model)
        headers = dict(exchange.headers)
        until, urgency = deadline(headers), priority(headers)
        asked = exchange.version or None
        reply = await self._plane.infer(
            Call(exchange.model, asked, (part,), headers, "predict", request_id, until, urgency)
        )
        if isinstance(reply, ReplyStream):
            talk.began(reply.head.version, errors.http_status(reply.head.status), reply.head.arm)
            try:
                async for piece in reply:
                    await talk.say(piece)
            finally:
                await reply.aclose()
        else:
            talk.began(reply.version, errors.http_status(reply.status), reply.arm)
            await talk.say(reply.body)

    def failed(self, error: Exception, request_id: str) -> tuple[int, dict[str, Any]]:
        """An error's status, and what is said of it."""
        said: dict[str, Any] = {"reason": reason(error)}
        if isinstance(error, RelayError):
            if error.retry_after is not None:
                said["retry_after"] = error.retry_after
        else:
            _log.error("%s failed: a fault of this server", request_id, exc_info=error)
        said["error"] = errors.document(error, request_id, self._shown) or {"message": str(error)}
        return errors.look_up(error)[0], said

    def told(self, exchange: Exchange, status: int, seconds: float, request_id: str, version: str) -> None:
        """Count a request and log it."""
        self._count(status)
        if self._access is not None:
            host, port = exchange.scope.get("client") or ("", 0)
            self._access.write(
                f"{host}:{port}" if host else "-",
                exchange.method,
                exchange.path,
                exchange.scope.get("http_version", "1.1"),
                status,
                seconds * 1000,
                request_id,
                exchange.model,
                version,
                None,
            )


class _Talk:
    """One connection: messages wait in order, and one request is under way."""

    def __init__(self, door: SocketDoor, exchange: Exchange, key: str | None, send: Send) -> None:
        self.exchange = exchange
        self.key = key
        self._door = door
        self._send = send
        self._waiting: asyncio.Queue[Input] = asyncio.Queue()
        self._bytes = 0  # that wait
        self._pieces = 0  # of the answer under way
        self._head: dict[str, Any] = {}
        self._worker = asyncio.ensure_future(self._work())

    async def listen(self, receive: Receive, limit: int) -> None:
        """Take messages in until the client leaves, or sends what is too much."""
        while True:
            message = await receive()
            if message["type"] == "websocket.disconnect":
                return
            part = self._part(message)
            if len(part.value) > limit:
                return await self._end(_TOO_LARGE, f"{TooLarge(limit)}")
            self._bytes += len(part.value)
            if self._waiting.qsize() >= _WAITING or self._bytes > 2 * limit:
                much = f"More than {_WAITING} requests, or {2 * limit} bytes of them, wait: wait for their ends."
                return await self._end(_TOO_MANY, much)
            self._waiting.put_nowait(part)

    async def close(self) -> None:
        self._worker.cancel()
        await asyncio.wait((self._worker,))

    def began(self, version: str, status: int, arm: str) -> None:
        """The answer has begun."""
        self._head = {"version": version, "status": status}
        if arm:
            self._head["arm"] = arm

    async def say(self, piece: bytes) -> None:
        """Send one piece; it waits for a client that reads slowly."""
        if piece:
            self._pieces += 1
            try:
                await self._send({"type": "websocket.send", "text": piece.decode()})
            except UnicodeDecodeError:
                await self._send({"type": "websocket.send", "bytes": piece})

    def _part(self, message: Any) -> Input:
        text = message.get("text")
        named = self.exchange.headers.get("content-type")
        if text is None:
            return Input("body", message["bytes"], named)
        said = named or ("application/json" if text.lstrip()[:1] in ("{", "[") else "text/plain")
        return Input("body", text.encode("utf-8", "replace"), said)

    async def _work(self) -> None:
        while True:
            part = await self._waiting.get()
            request_id, began = uuid4(), time.perf_counter()
            self._pieces, self._head = 0, {"version": self.exchange.version, "status": 200}
            status = _CALLER_LEFT
            said: dict[str, Any] = {}
            try:
                try:
                    await self._door.infer(self, request_id, part)
                    status = self._head["status"]
                except OSError:  # the client has left
                    return
                except Exception as error:
                    status, said = self._door.failed(error, request_id)
                    self._head["version"] = getattr(error, "version", "") or self._head["version"]
                finally:
                    self._bytes -= len(part.value)
                    seconds = time.perf_counter() - began
                    self._door.told(self.exchange, status, seconds, request_id, self._head["version"])
                end = {**self._head, "status": status, "request_id": request_id, "pieces": self._pieces, **said}
                await self._send({"type": "websocket.send", "text": orjson.dumps({"end": end}).decode()})
            except OSError:
                return

    async def _end(self, code: int, reason: str) -> None:
        await self._send({"type": "websocket.close", "code": code, "reason": reason[:120]})
