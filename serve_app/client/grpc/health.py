"""Whether a server answers."""

from __future__ import annotations

import json

import grpc
from google.protobuf.empty_pb2 import Empty
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from serve_app.client.ask import operation, streaming
from serve_app.client.errors import ServerError
from serve_app.client.grpc.ask import Ask, Listen, Port, Talk
from serve_app.proto.inference_pb2_grpc import InferenceAPIsServiceStub
from serve_app.proto.open_inference_grpc_pb2 import ServerLiveRequest, ServerReadyRequest
from serve_app.proto.open_inference_grpc_pb2_grpc import GRPCInferenceServiceStub


class Health:
    """Of the inference port by each of its services, and ``grpc.health.v1`` of both ports; none wants a key."""

    @operation
    def live(self) -> Talk[bool]:
        """Whether the server answers at all."""
        return (yield from _is_well("ServerLive", ServerLiveRequest(), "live"))

    @operation
    def ready(self) -> Talk[bool]:
        """Whether the server has its table, and every version that start-up wanted is ready or has failed."""
        return (yield from _is_well("ServerReady", ServerReadyRequest(), "ready"))

    @operation
    def ping(self) -> Talk[str]:
        """``Healthy``, or ``Unhealthy`` where a default version has not the workers that it should have."""
        answer = yield Ask("inference", InferenceAPIsServiceStub, "Ping", Empty(), once=True)
        return json.loads(answer.message.health)["status"]

    @operation
    def health(self, service: str = "", port: Port = "inference") -> Talk[str]:
        """``SERVING`` or ``NOT_SERVING``: a service of a port, or the server. Raises NotFound."""
        asked = HealthCheckRequest(service=service)
        return _word((yield Ask(port, HealthStub, "Check", asked, once=True)).message)

    @streaming
    def watch_health(self, service: str = "", port: Port = "inference", *, timeout: float | None = None) -> Listen[str]:
        """The same at once, and whenever it changes, for ``timeout`` seconds or for ever."""
        asked = HealthCheckRequest(service=service)
        return Listen(Ask(port, HealthStub, "Watch", asked, within=timeout), _word, patient=True)


def _word(answer: HealthCheckResponse) -> str:
    return HealthCheckResponse.ServingStatus.Name(answer.status)


def _is_well(method: str, message: object, field: str) -> Talk[bool]:
    ask = Ask("inference", GRPCInferenceServiceStub, method, message, within=2.0, once=True)
    try:
        return getattr((yield ask).message, field)
    except (grpc.RpcError, ServerError):
        return False
