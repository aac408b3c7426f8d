"""The health service and reflection."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from serve_app.domain.access import AccessTable
from serve_app.domain.routing_table import RoutingTable

INFERENCE = "org.pytorch.serve.grpc.inference.InferenceAPIsService"
SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("service", ["", INFERENCE])
def test_health_follows_the_routing_table(over_grpc: Any, service: str) -> None:
    server = over_grpc(table=RoutingTable())
    stub = HealthStub(server.channel)
    request = HealthCheckRequest(service=service)
    assert stub.Check(request).status == NOT_SERVING
    updates = stub.Watch(request, timeout=60)
    assert next(updates).status == NOT_SERVING
    server.reader.update(
        RoutingTable(1, {}, startup_complete=True, access=AccessTable({}))
    )  # probes need no key
    assert stub.Check(request).status == SERVING
    assert next(updates).status == SERVING
    updates.cancel()


def test_unknown_services_are_not_found(over_grpc: Any) -> None:
    stub = HealthStub(over_grpc().channel)
    with pytest.raises(grpc.RpcError) as raised:
        stub.Check(HealthCheckRequest(service="nothing"))
    assert raised.value.code() == grpc.StatusCode.NOT_FOUND
    assert INFERENCE in raised.value.details()
    updates = stub.Watch(HealthCheckRequest(service="nothing"), timeout=60)
    assert next(updates).status == HealthCheckResponse.SERVICE_UNKNOWN
    updates.cancel()


def test_the_management_server_is_always_serving(managed_by_grpc: Any) -> None:
    assert HealthStub(managed_by_grpc().channel).Check(HealthCheckRequest()).status == SERVING


def test_reflection_lists_services_and_methods(over_grpc: Any) -> None:
    database = ProtoReflectionDescriptorDatabase(over_grpc().channel)
    assert INFERENCE in database.get_services()
    pool = DescriptorPool(database)
    service = pool.FindServiceByName(INFERENCE)
    assert [method.name for method in service.methods] == [
        "Ping",
        "Predictions",
        "StreamPredictions",
        "StreamPredictions2",
    ]


def test_reflection_can_be_disabled(over_grpc: Any) -> None:
    database = ProtoReflectionDescriptorDatabase(over_grpc(grpc={"reflection": False}).channel)
    with pytest.raises(grpc.RpcError) as raised:
        database.get_services()
    assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED
