"""A gRPC port of our own: bound, shared, waited for, and refused in words."""

from __future__ import annotations

import asyncio
import os
import socket
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest

from serve_app.deployments.listeners.grpc import GrpcListener, ManagementGrpcListener
from serve_app.errors import ConfigurationError
from serve_app.http2.server import Http2Server
from tests.support.ports import free_port


async def word(data: bytes, context: Any) -> bytes:
    return b"here"


def listener(port: int, shared: bool = False) -> GrpcListener:
    server = Http2Server()
    server.add_registered_method_handlers("test.Test", {"Say": grpc.unary_unary_rpc_method_handler(word)})
    return GrpcListener(server, "127.0.0.1", port, "grpc.port", None, shared)


def management_listener(port: int) -> ManagementGrpcListener:
    server = grpc.aio.server()
    methods = {"Say": grpc.unary_unary_rpc_method_handler(word)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", methods),))
    return ManagementGrpcListener(server, "127.0.0.1", port, "grpc.port")


async def say(port: int) -> bytes:
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]
    ) as to:
        return await to.unary_unary("/test.Test/Say")(b"", timeout=60, wait_for_ready=True)


def test_two_share_a_port_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        port = free_port()
        old, new = listener(port, shared=True), listener(port, shared=True)
        await old.open()
        assert caplog.messages == []
        await new.open()
        assert caplog.messages == [
            f"127.0.0.1:{port} is shared with another process by pid {os.getpid()} "
            f"({caplog.messages[0].rpartition('(')[2]}"
        ]
        await old.close()
        assert await say(port) == b"here"
        await new.close()

    asyncio.run(main())


@pytest.mark.parametrize("create", [listener, management_listener])
def test_a_port_of_its_own_is_waited_for(create: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        port = free_port()
        with socket.create_server(("127.0.0.1", port)):
            new = create(port)
            opening = asyncio.create_task(new.open())
            while not caplog.messages:
                await asyncio.sleep(0.01)
            assert f"127.0.0.1:{port} is in use by pid {os.getpid()}" in caplog.messages[0]
        await opening
        assert await say(port) == b"here"
        await new.close()

    asyncio.run(main())


CREATE = [listener, partial(listener, shared=True), management_listener]


@pytest.mark.parametrize("create", CREATE)
def test_a_port_that_stays_taken_is_an_error_with_its_holder_and_a_cure(create: Any) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            with pytest.raises(ConfigurationError) as raised:
                await create(port).open(timeout=0.0)
        assert str(raised.value).startswith(f"127.0.0.1:{port}: Address already in use by pid {os.getpid()}")
        assert str(raised.value).endswith("; set grpc.port to another one")

    asyncio.run(main())


def test_an_address_that_is_not_this_machines() -> None:
    async def main() -> None:
        far = listener(free_port())
        far._host = "192.0.2.1"
        with pytest.raises(ConfigurationError, match=r"Cannot assign requested address; set grpc.port"):
            await far.open(timeout=0.0)

    asyncio.run(main())
