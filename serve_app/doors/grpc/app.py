"""The gRPC servers behind the ports, with every protocol that is spoken there; where they listen is not said here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from serve_app.controlplane import ControlPlane
from serve_app.dataplane import DataPlane
from serve_app.doors.grpc.health import HealthDoor
from serve_app.doors.grpc.rpc import Port
from serve_app.doors.grpc.server import Limits, Server
from serve_app.doors.oip import grpc as oip
from serve_app.doors.torchserve import grpc as torchserve
from serve_app.proto import pool
from serve_app.settings import Settings
from serve_app.telemetry.access_log import AccessLog
from serve_app.telemetry.metrics import Meters


def inference_server(
    plane: DataPlane, control: ControlPlane, settings: Settings, meters: Meters, access: AccessLog | None = None
) -> Server:
    """What answers on the inference port; others may listen on the same one."""
    g = settings.grpc
    server = _server(settings, g.max_connection_age, g.max_connection_age_grace)
    port = Port(lambda: plane.access, meters.grpc_response, access)
    doors: dict[str, Door] = {
        torchserve.INFERENCE: torchserve.InferenceDoor(plane, settings, port),
        oip.SERVICE: oip.OpenInferenceDoor(plane, control, settings, port),
    }
    _open(server, settings, lambda: plane.ready, doors)
    return server


def management_server(
    control: ControlPlane, settings: Settings, meters: Meters, access: AccessLog | None = None
) -> Server:
    """What answers on the management port."""
    g = settings.grpc
    server = _server(settings, g.management_max_connection_age, g.management_max_connection_age_grace)
    port = Port(lambda: control.access, meters.grpc_response, access)
    _open(server, settings, lambda: True, {torchserve.MANAGEMENT: torchserve.ManagementDoor(control, settings, port)})
    return server


def _server(settings: Settings, age: float, grace: float) -> Server:
    """Ages are in seconds, 0: without end."""
    most = settings.runtime.max_response_size
    return Server(Limits(settings.inference.max_request_size, most, settings.grpc.max_concurrent_calls, age, grace))


class Door(Protocol):
    """A service: its methods by their names."""

    methods: Mapping[str, grpc.RpcMethodHandler]


def _open(server: Server, settings: Settings, ready: Callable[[], bool], doors: Mapping[str, Door]) -> None:
    """Add the services, their health, and what the server says of its own methods."""
    for name, door in doors.items():
        server.add_registered_method_handlers(name, door.methods)
    health_pb2_grpc.add_HealthServicer_to_server(HealthDoor(ready, doors), server)
    if settings.grpc.reflection:
        names = (*doors, health.SERVICE_NAME, reflection.SERVICE_NAME)
        for known in (health_pb2, reflection_pb2):
            pool.add(known.DESCRIPTOR)
        tells = reflection.aio.ReflectionServicer(names, pool.POOL)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(tells, server)
