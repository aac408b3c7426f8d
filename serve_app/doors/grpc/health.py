"""grpc.health.v1: whether this server answers, asked once or watched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serve_app.doors.grpc.server import Context

_LOOK = 0.5  # seconds between looks for who watches

_Status = health_pb2.HealthCheckResponse
_SERVING, _NOT_SERVING, _UNKNOWN = _Status.SERVING, _Status.NOT_SERVING, _Status.SERVICE_UNKNOWN


class HealthDoor(health_pb2_grpc.HealthServicer):
    """``ready`` speaks for the server, which is asked for as ``""``, and for every one of ``services``.

    Probes show no key, as on the HTTP ports.
    """

    def __init__(self, ready: Callable[[], bool], services: Collection[str]) -> None:
        self._ready = ready
        self._services = {"", *services}

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> _Status:
        status = self._status(request.service)
        if status == _UNKNOWN:
            known = ", ".join(sorted(self._services - {""}))
            details = f"No service {request.service!r} is here; there are {known}."
            await context.abort(grpc.StatusCode.NOT_FOUND, details)
        return _Status(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        said = None
        while True:
            status = self._status(request.service)
            if status != said:
                await context.write(_Status(status=status))
                said = status
            await asyncio.sleep(_LOOK)

    def _status(self, service: str) -> int:
        if service not in self._services:
            return _UNKNOWN
        return _SERVING if self._ready() else _NOT_SERVING
