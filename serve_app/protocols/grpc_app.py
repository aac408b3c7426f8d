"""The gRPC servers of the inference and the management port, with all their services.

The deployments bind the ports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from serve_app.control.api import ControlPlane
from serve_app.dataplane.data_plane import DataPlane
from serve_app.errors import AccessDenied
from serve_app.http2.limits import Http2Limits
from serve_app.http2.server import Http2Server
from serve_app.proto import pool
from serve_app.protocols.grpc import aio_server
from serve_app.protocols.grpc.call import GrpcCall, ServiceAdapter
from serve_app.protocols.grpc.call_guard import CallGuard, CallLimits
from serve_app.protocols.grpc.health import HealthService
from serve_app.protocols.http.auth import create_actor
from serve_app.protocols.management.audit import RefusalRecorder
from serve_app.protocols.openinference import grpc as openinference
from serve_app.protocols.torchserve import grpc as torchserve
from serve_app.settings import Settings
from serve_app.telemetry.access_log import AccessLog
from serve_app.telemetry.metrics import Meters


def inference_server(
    plane: DataPlane,
    control: ControlPlane,
    settings: Settings,
    meters: Meters,
    access: AccessLog | None = None,
) -> Http2Server:
    """Return the server of the inference port, which several servers of a node may share."""
    adapter = ServiceAdapter(lambda: plane.access, meters.grpc_response, access)
    server = Http2Server(Http2Limits.from_settings(settings), adapter.authorize)
    services: dict[str, GrpcService] = {
        torchserve.INFERENCE: torchserve.InferenceService(plane, settings, adapter),
        openinference.SERVICE: openinference.OpenInferenceService(plane, control, settings, adapter),
    }
    _add_services(server, settings, lambda: plane.ready, services)
    return server


def management_server(
    control: ControlPlane, settings: Settings, meters: Meters, access: AccessLog | None = None
) -> grpc.aio.Server:
    """Return the server of the management port, for the running event loop."""
    refusals = RefusalRecorder(control)

    def record_refusal(call: GrpcCall, path: str, error: AccessDenied) -> None:
        refusals.record(create_actor(call.grant, call.context.peer), "gRPC", path, error)

    adapter = ServiceAdapter(lambda: control.access, meters.grpc_response, access, record_refusal)
    limits = CallLimits(max_calls=settings.grpc.management_max_concurrent_calls)
    server = aio_server.create_server(settings, CallGuard(adapter.refuses, adapter.needs_key, limits))
    service = torchserve.ManagementService(control, settings, adapter)
    _add_services(server, settings, lambda: True, {torchserve.MANAGEMENT: service})
    return server


class GrpcService(Protocol):
    """A service and its methods by name."""

    @property
    def methods(self) -> Mapping[str, grpc.RpcMethodHandler]: ...


def _add_services(
    server: Http2Server | grpc.aio.Server,
    settings: Settings,
    ready: Callable[[], bool],
    services: Mapping[str, GrpcService],
) -> None:
    """Add the services, their health service, and reflection if it is enabled."""
    for name, service in services.items():
        if isinstance(server, Http2Server):
            server.add_registered_method_handlers(name, service.methods)
        else:
            handlers = aio_server.adapt(service.methods)
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
    health_pb2_grpc.add_HealthServicer_to_server(HealthService(ready, services), server)
    if settings.grpc.reflection:
        names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        for module in (health_pb2, reflection_pb2):
            pool.add(module.DESCRIPTOR)
        servicer = reflection.aio.ReflectionServicer(names, pool.POOL)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
