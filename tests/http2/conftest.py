"""The HTTP/2 test server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from serve_app.http2.limits import Http2Limits
from tests.support.http2_peer import EchoServer, StartServer
from tests.support.protocol_servers import grpc_listening

__all__ = ["grpc_listening", "start_server"]


@pytest.fixture
def start_server(grpc_listening: Any) -> Iterator[StartServer]:
    with contextlib.ExitStack() as stack:

        def start(**limits: Any) -> EchoServer:
            server = EchoServer(Http2Limits(**limits))
            server.address = stack.enter_context(grpc_listening(lambda: server.server))
            return server

        yield start
