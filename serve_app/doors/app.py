"""The ASGI applications behind the ports: each request to its door, each answer counted and logged once."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from serve_app.controlplane import ControlPlane
from serve_app.dataplane import DataPlane
from serve_app.doors import openapi
from serve_app.doors.deferrals import DeferralDoor, Replay
from serve_app.doors.exchange import EVERY_ANSWER, CallerLeft, Exchange, Receive, Scope, Send, every_answer
from serve_app.doors.metrics import MetricsDoor, Render
from serve_app.doors.oip.rest import OpenInferenceDoor
from serve_app.doors.openai.inference import OpenAIDoor
from serve_app.doors.openapi.door import OpenAPIDoor
from serve_app.doors.openapi.methods import Methods
from serve_app.doors.torchserve.inference import InferenceDoor
from serve_app.doors.torchserve.management import ManagementDoor
from serve_app.doors.torchserve.socket import SocketDoor
from serve_app.doors.torchserve.workflows import WorkflowDoor
from serve_app.errors import MethodNotAllowed, RelayError
from serve_app.settings import Settings
from serve_app.telemetry.access_log import AccessLog
from serve_app.telemetry.metrics import Meters
from serve_app.types import Access

_log = logging.getLogger("torchrelay.doors")
# TorchServe's predictions take every one of them. TRACE, CONNECT and what somebody made up are refused everywhere.
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"))
_CALLER_LEFT = 499  # in the access log only: nobody was there to get an answer


class Door(Protocol):
    """A protocol: it reads a request, asks a plane and writes what came back."""

    def knows(self, exchange: Exchange) -> bool:
        """Whether the path is one of this protocol's."""

    async def answer(self, exchange: Exchange) -> None:
        """Answer one request, or raise before the answer has begun."""

    async def refuse(self, exchange: Exchange, error: Exception) -> None:
        """Say ``error`` in this protocol's words."""


class Doors:
    """Several protocols on one port: a request goes to the first that knows its path, or else to the first of all."""

    def __init__(self, first: Door, *others: Door) -> None:
        self._doors = (first, *others)

    def knows(self, exchange: Exchange) -> bool:
        return any(door.knows(exchange) for door in self._doors)

    async def answer(self, exchange: Exchange) -> None:
        await self._of(exchange).answer(exchange)

    async def refuse(self, exchange: Exchange, error: Exception) -> None:
        await self._of(exchange).refuse(exchange, error)

    def _of(self, exchange: Exchange) -> Door:
        for door in self._doors:
            if door.knows(exchange):
                return door
        return self._doors[0]


class App:
    """An ASGI application over one door. Cancelling it, as a server does when a client left, cancels the call."""

    def __init__(
        self,
        door: Door,
        count: Callable[[int], None] | None,
        access: AccessLog | None,
        always: tuple[tuple[bytes, bytes], ...] = EVERY_ANSWER,
        sockets: Callable[[Scope, Receive, Send], Awaitable[None]] | None = None,
        *,
        methods: Methods,
    ) -> None:
        self._door = door
        self._methods = methods
        self._sockets = sockets  # what answers where a WebSocket is asked for
        self._count = count  # a status that was answered
        self._access = access
        self._always = always

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            other = self._sockets if scope["type"] == "websocket" and self._sockets is not None else _decline
            return await other(scope, receive, send)
        started = time.perf_counter()
        exchange = Exchange(scope, receive, send, self._always)
        try:
            if exchange.method not in _METHODS:
                raise MethodNotAllowed()
            if exchange.method == "OPTIONS":
                self._allow(exchange)
            await self._door.answer(exchange)
        except CallerLeft:
            pass
        except Exception as error:
            known = isinstance(error, RelayError)
            if exchange.status:
                _log.error("%s broke off in mid-answer", exchange.request_id, exc_info=None if known else error)
                raise
            if not known:
                _log.error("%s failed: a fault of this server", exchange.request_id, exc_info=error)
            if isinstance(error, MethodNotAllowed):
                self._allow(exchange, exchange.method)
            await self._door.refuse(exchange, error)
        finally:
            if self._count is not None and exchange.status:
                self._count(exchange.status)
            if self._access is not None:
                self._write(self._access, exchange, time.perf_counter() - started)

    def _allow(self, exchange: Exchange, but: str = "") -> None:
        if (methods := self._methods.allow(exchange.path, but)) is not None:
            exchange.say(b"allow", methods)

    def _write(self, access: AccessLog, exchange: Exchange, seconds: float) -> None:
        scope = exchange.scope
        host, port = scope.get("client") or ("", 0)
        query = scope.get("query_string")
        access.write(
            f"{host}:{port}" if host else "-",
            exchange.method,
            f"{exchange.path}?{query.decode('latin-1')}" if query else exchange.path,
            scope["http_version"],
            exchange.status or _CALLER_LEFT,
            seconds * 1000,
            exchange.request_id,
            exchange.model,
            exchange.version,
            _came_with(exchange.headers) if access.json else None,
        )


def _came_with(headers: dict[str, str]) -> dict[str, str]:
    """The ids that a request brought: the answer has one of its own, and who looks for theirs finds it in the log."""
    return {name: headers[name] for name in ("x-request-id", "traceparent") if name in headers}


def inference_app(
    plane: DataPlane,
    settings: Settings,
    meters: Meters,
    access: AccessLog | None = None,
    control: ControlPlane | None = None,
    render: Render | None = None,
) -> App:
    """What answers on the inference port, in replicas and gateways alike.

    A gateway has a ``control`` plane too: experiments are told of rewards there, and the whole management API is there
    where the settings say so. It may have the metrics (``render``) as well.
    """
    door: Door = InferenceDoor(plane, settings, control)
    others: list[Door] = [OpenInferenceDoor(plane, settings, control)]
    if control is not None and settings.inference.also_management:
        others += ManagementDoor(control, settings), WorkflowDoor(control, settings)
    if control is not None:
        others.append(DeferralDoor(plane, control))
    others.append(OpenAIDoor(plane, settings))
    document = openapi.inference(settings.inference.also_management)
    others.append(OpenAPIDoor(document))
    if render is not None:
        others.append(MetricsDoor(render, settings, lambda: plane.access))
    sockets = SocketDoor(plane, settings, meters.response, access)
    always, methods = every_answer(settings.inference), Methods(document)
    return App(Doors(door, *others), meters.response, access, always, sockets, methods=methods)


def replay(plane: DataPlane, settings: Settings) -> Replay:
    """What answers predictions that were put aside, as ``inference_app`` would have answered them."""
    doors = Doors(InferenceDoor(plane, settings), OpenInferenceDoor(plane, settings))
    return Replay(doors, settings.asynchronous.max_result_size)


def management_app(
    control: ControlPlane,
    settings: Settings,
    access: AccessLog | None = None,
    render: Render | None = None,
    meters: Meters | None = None,
) -> App:
    """What answers on the management port; with ``render``, the metrics too."""
    doors: list[Door] = [ManagementDoor(control, settings), WorkflowDoor(control, settings)]
    document = openapi.management()
    doors.append(OpenAPIDoor(document))
    if render is not None:
        doors.append(MetricsDoor(render, settings, lambda: control.access))
    always, methods = every_answer(settings.inference), Methods(document)
    return App(Doors(*doors), meters and meters.rest, access, always, methods=methods)


def metrics_app(
    render: Render, settings: Settings, access: Callable[[], Access | None], meters: Meters | None = None
) -> App:
    """What answers on the metrics port."""
    document = openapi.metrics()
    doors = Doors(MetricsDoor(render, settings, access), OpenAPIDoor(document))
    always, methods = every_answer(settings.inference), Methods(document)
    return App(doors, meters and meters.rest, None, always, methods=methods)


async def _decline(scope: Scope, receive: Receive, send: Send) -> None:
    """Acknowledge the server's start and stop; close whatever else is not HTTP."""
    message: Any
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008, "reason": "This server speaks no WebSocket here."})
        return
    raise ValueError(f"ASGI scope {scope['type']!r} is not served here; http, websocket and lifespan are")
