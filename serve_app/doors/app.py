"""The ASGI applications behind the ports: each request to its door, each answer counted and logged once."""

from __future__ import annotations

import logging
import time
from typing import Any, Protocol

from serve_app.controlplane import ControlPlane
from serve_app.dataplane import DataPlane
from serve_app.doors.exchange import CallerLeft, Exchange, Receive, Scope, Send
from serve_app.doors.torchserve.inference import InferenceDoor
from serve_app.doors.torchserve.management import ManagementDoor
from serve_app.errors import RelayError
from serve_app.settings import Settings
from serve_app.telemetry.logs import AccessLog
from serve_app.telemetry.metrics import Meters

_log = logging.getLogger(__name__)
_CALLER_LEFT = 499  # in the access log only: nobody was there to get an answer


class Door(Protocol):
    """A protocol: it reads a request, asks a plane and writes what came back."""

    async def answer(self, exchange: Exchange) -> None:
        """Answer one request, or raise before the answer has begun."""

    async def refuse(self, exchange: Exchange, error: Exception) -> None:
        """Say ``error`` in this protocol's words."""


class App:
    """An ASGI application over one door. Cancelling it, as a server does when a client left, cancels the call."""

    def __init__(self, door: Door, meters: Meters | None, access: AccessLog | None) -> None:
        self._door = door
        self._meters = meters
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await _decline(scope, receive, send)
        started = time.perf_counter()
        exchange = Exchange(scope, receive, send)
        try:
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
            await self._door.refuse(exchange, error)
        finally:
            if self._meters is not None and exchange.status:
                self._meters.response(exchange.status)
            if self._access is not None:
                self._write(self._access, exchange, time.perf_counter() - started)

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
        )


def inference_app(plane: DataPlane, settings: Settings, meters: Meters, access: AccessLog | None = None) -> App:
    """What answers on the inference port, in replicas and gateways alike."""
    return App(InferenceDoor(plane, settings), meters, access)


def management_app(control: ControlPlane, settings: Settings, access: AccessLog | None = None) -> App:
    """What answers on the management port."""
    return App(ManagementDoor(control, settings), None, access)


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
