"""Management and health over gRPC, with both clients."""

from __future__ import annotations

from typing import Any

import pytest
from client_helpers import ClientFactory

from serve_app.client import Client
from serve_app.client import errors as client_errors
from serve_app.domain.access import AccessTable
from serve_app.domain.model import ModelSpec
from serve_app.domain.routing_table import RoutingTable


def test_results_equal_those_over_http(
    make_client: ClientFactory,
    over_grpc: Any,
    inference: Any,
    over_http: Any,
    managed_by_grpc: Any,
    management: Any,
) -> None:
    """The same operations return the same documents, to the last key."""
    ports = managed_by_grpc(), management()
    for port in ports:
        for name in ("a", "b"):
            port.control_api.put(ModelSpec(name, "1.0", f"{name}.mar", "", ""))
        port.control_api.metadata = {"labels": 3}
    client = make_client(over_grpc(), ports[0])
    with Client(over_http(inference().app), over_http(ports[1].app)) as http_client:
        for operation in (
            lambda client: client.metadata("m"),
            lambda client: client.metadata("m", "2.0"),
            lambda client: client.repository(),
            lambda client: client.repository(ready=True),
            lambda client: client.statistics(),
            lambda client: client.statistics("m"),
            lambda client: client.model_ready("m", "2.0"),
            lambda client: {
                **client.config("m"),
                **dict.fromkeys(("dynamic_batching", "instance_group", "version_policy")),
            },
            lambda client: client.live(),
            lambda client: client.ready(),
            lambda client: client.models(),
            lambda client: client.describe("a"),
            lambda client: client.describe("a", "1.0"),
            lambda client: client.describe("a", customized=True),
            lambda client: client.register("new.mar", initial_workers=1, synchronous=True, batch_size=None),
            lambda client: client.register("new-2.0.mar", batch_size=4),
            lambda client: client.scale("new", min_worker=2, synchronous=True),
            lambda client: client.set_default("new", "2.0"),
            lambda client: client.unregister("new", "1.0"),
        ):
            assert operation(client) == operation(http_client)
    for over_grpc_call, over_http_call in zip(*(port.control_api.operations for port in ports), strict=True):
        assert over_grpc_call[0] == over_http_call[0]
        if over_grpc_call[0] == "register":
            assert over_grpc_call == over_http_call


def test_models_are_listed_page_by_page(make_client: ClientFactory, managed_by_grpc: Any) -> None:
    server = managed_by_grpc()
    for index in range(120):
        server.control_api.put(ModelSpec(f"m{index:03}", "1.0", "m.mar", "", ""))
    assert len(make_client(None, server).models()) == 120


def test_management_errors(make_client: ClientFactory, managed_by_grpc: Any) -> None:
    server = managed_by_grpc()
    client = make_client(None, server)
    client.register("m-1.0.mar")
    with pytest.raises(client_errors.ConflictError, match=r"1\.0 is already registered") as error:
        client.register("m-1.0.mar")
    assert error.value.status == 409
    for call in (
        lambda: client.describe("x"),
        lambda: client.unregister("x"),
        lambda: client.set_default("m", "9"),
    ):
        with pytest.raises(client_errors.NotFoundError):
            call()
    with pytest.raises(ValueError, match="no colour, only batch_size, handler"):
        client.register("m-2.0.mar", colour="red")
    with pytest.raises(ValueError, match="one version"):
        client.describe("m", "all", customized=True)


def test_health_operations(make_client: ClientFactory, over_grpc: Any, managed_by_grpc: Any) -> None:
    server = over_grpc(table=RoutingTable())
    client = make_client(server, managed_by_grpc())
    statuses = client.watch_health()
    assert (next(statuses), client.live(), client.ready(), client.health()) == (
        "NOT_SERVING",
        True,
        False,
        "NOT_SERVING",
    )
    server.reader.update(
        RoutingTable(1, {}, startup_complete=True, access=AccessTable({}))
    )  # probes send no key
    assert next(statuses) == "SERVING"
    statuses.close()
    service = "inference.GRPCInferenceService"
    assert (client.ready(), client.ping(), client.health(service)) == (True, "Healthy", "SERVING")
    assert client.health(port="management") == "SERVING"
    with pytest.raises(client_errors.NotFoundError, match="nothing"):
        client.health("nothing")
