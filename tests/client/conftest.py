"""The fixtures of the in-process servers, and the clients that connect to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from serve_app.client import Client
from tests.support.blocking_clients import BlockingAsyncClient
from tests.support.inference_functions import ClientFactory
from tests.support.protocol_servers import inference, management, over_grpc, over_http

__all__ = ["inference", "management", "over_grpc", "over_http"]


@pytest.fixture(params=[Client, BlockingAsyncClient], ids=["blocking", "asyncio"])
def make_client(request: pytest.FixtureRequest, over_http: Any) -> Iterator[ClientFactory]:
    """Provide a function that connects a client to in-process servers; each test runs with both clients."""
    clients = []

    def connect(inference: Any = None, management: Any = None, **options: Any) -> Any:
        servers = {"inference": inference, "management": management}
        addresses = {name: over_http(server.app) for name, server in servers.items() if server is not None}
        clients.append(request.param(**addresses, **options))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()
