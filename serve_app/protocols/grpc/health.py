"""grpc.health.v1: the server's health, on request or as a stream of changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serve_app.protocols.grpc.call import CallContext

_WATCH_INTERVAL = 0.5  # seconds between checks for a watching client

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthService(health_pb2_grpc.HealthServicer):
    """The health service.

    ``ready`` holds for the server, whose name in requests is ``""``, and for each of ``services``. Probes
    need no key, as on the HTTP ports.
    """

    def __init__(self, ready: Callable[[], bool], services: Collection[str]) -> None:
        self._ready = ready
        self._services = {"", *services}

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: CallContext
    ) -> health_pb2.HealthCheckResponse:
        status = self._status(request.service)
        if status == _UNKNOWN:
            services = ", ".join(sorted(self._services - {""}))
            details = f"No service {request.service!r} is here; there are {services}."
            await context.abort(grpc.StatusCode.NOT_FOUND, details)
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: CallContext
    ) -> None:
        last = None
        while True:
            status = self._status(request.service)
            if status != last:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last = status
            await asyncio.sleep(_WATCH_INTERVAL)

    def _status(self, service: str) -> int:
        if service not in self._services:
            return _UNKNOWN
        return _SERVING if self._ready() else _NOT_SERVING
