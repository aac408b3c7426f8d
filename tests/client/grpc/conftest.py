"""The gRPC clients, connected to in-process servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from blocking_clients import BlockingAsyncGrpcClient
from client_helpers import ClientFactory

from serve_app.client.grpc import GrpcClient


@pytest.fixture(params=[GrpcClient, BlockingAsyncGrpcClient], ids=["blocking", "asyncio"])
def make_client(request: pytest.FixtureRequest) -> Iterator[ClientFactory]:
    """Provide a function that connects a client to servers; each test runs with both clients."""
    clients = []

    def connect(inference: Any = None, management: Any = None, **options: Any) -> Any:
        servers = {"inference": inference, "management": management}
        addresses = {
            name: getattr(server, "address", server) for name, server in servers.items() if server is not None
        }
        clients.append(request.param(**addresses, **options))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()
