"""grpc.health.v1, and what a server says of its own methods."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from serve_app.types import Access, Table

INFERENCE = "org.pytorch.serve.grpc.inference.InferenceAPIsService"
SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("service", ["", INFERENCE])
def test_health_follows_the_routing_table(over_grpc: Any, service: str) -> None:
    server = over_grpc(table=Table())
    stub = HealthStub(server.channel)
    asked = HealthCheckRequest(service=service)
    assert stub.Check(asked).status == NOT_SERVING
    watched = stub.Watch(asked, timeout=60)
    assert next(watched).status == NOT_SERVING
    server.reader.put(Table(1, {}, settled=True, access=Access({})))  # probes show no key
    assert stub.Check(asked).status == SERVING
    assert next(watched).status == SERVING
    watched.cancel()


def test_a_service_that_is_not_here(over_grpc: Any) -> None:
    stub = HealthStub(over_grpc().channel)
    with pytest.raises(grpc.RpcError) as raised:
        stub.Check(HealthCheckRequest(service="nothing"))
    assert raised.value.code() == grpc.StatusCode.NOT_FOUND
    assert INFERENCE in raised.value.details()
    watched = stub.Watch(HealthCheckRequest(service="nothing"), timeout=60)
    assert next(watched).status == HealthCheckResponse.SERVICE_UNKNOWN
    watched.cancel()


def test_management_is_ready_as_soon_as_it_answers(managed_by_grpc: Any) -> None:
    assert HealthStub(managed_by_grpc().channel).Check(HealthCheckRequest()).status == SERVING


def test_a_tool_learns_what_is_spoken(over_grpc: Any) -> None:
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


def test_what_is_spoken_can_be_kept_quiet(over_grpc: Any) -> None:
    database = ProtoReflectionDescriptorDatabase(over_grpc(grpc={"reflection": False}).channel)
    with pytest.raises(grpc.RpcError) as raised:
        database.get_services()
    assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED
