"""Health of a server."""

from __future__ import annotations

import json

import grpc
from google.protobuf.empty_pb2 import Empty
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from serve_app.client._operations import Operation, StreamOperation
from serve_app.client.errors import ServerError
from serve_app.client.grpc._operations import GrpcFlow, GrpcRequestDescriptor, GrpcStreamDescriptor, Port
from serve_app.proto.inference_pb2_grpc import InferenceAPIsServiceStub
from serve_app.proto.open_inference_grpc_pb2 import ServerLiveRequest, ServerReadyRequest
from serve_app.proto.open_inference_grpc_pb2_grpc import GRPCInferenceServiceStub


class GrpcHealthOperations:
    """The health methods of the inference services, and ``grpc.health.v1`` of both ports; none needs a
    key.
    """

    @Operation
    def live(self) -> GrpcFlow[bool]:
        """Return whether the server responds at all."""
        return (yield from _check("ServerLive", ServerLiveRequest(), "live"))

    @Operation
    def ready(self) -> GrpcFlow[bool]:
        """Return whether the server has a routing table and no version of its start-up is still loading."""
        return (yield from _check("ServerReady", ServerReadyRequest(), "ready"))

    @Operation
    def ping(self) -> GrpcFlow[str]:
        """Return ``Healthy``, or ``Unhealthy`` where a default version lacks workers."""
        reply = yield GrpcRequestDescriptor(
            "inference", InferenceAPIsServiceStub, "Ping", Empty(), retryable=False
        )
        status: str = json.loads(reply.message.health)["status"]
        return status

    @Operation
    def health(self, service: str = "", port: Port = "inference") -> GrpcFlow[str]:
        """Return ``SERVING`` or ``NOT_SERVING`` of a service of a port, or of the server.

        Raises NotFoundError.
        """
        message = HealthCheckRequest(service=service)
        reply = yield GrpcRequestDescriptor(port, HealthStub, "Check", message, retryable=False)
        return _status_name(reply.message)

    @StreamOperation
    def watch_health(
        self, service: str = "", port: Port = "inference", *, timeout: float | None = None
    ) -> GrpcStreamDescriptor[str]:
        """Yield the status of ``health`` at once and at every change, for ``timeout`` seconds or forever."""
        message = HealthCheckRequest(service=service)
        request = GrpcRequestDescriptor(port, HealthStub, "Watch", message, timeout=timeout)
        return GrpcStreamDescriptor(request, _status_name, may_idle=True)


def _status_name(response: HealthCheckResponse) -> str:
    name: str = HealthCheckResponse.ServingStatus.Name(response.status)
    return name


def _check(method: str, message: object, field: str) -> GrpcFlow[bool]:
    request = GrpcRequestDescriptor(
        "inference", GRPCInferenceServiceStub, method, message, timeout=2.0, retryable=False
    )
    try:
        return bool(getattr((yield request).message, field))
    except (grpc.RpcError, ServerError):
        return False
