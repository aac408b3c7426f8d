"""A gRPC port of our own: bound, shared, waited for, and refused in words."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

import grpc
import grpc.aio
import pytest
from parts import free_port

from serve_app.deployments.grpc_listener import GrpcListener
from serve_app.errors import ConfigurationError
from serve_app.protocols.grpc.http2.server import Http2Server


async def word(data: bytes, context: Any) -> bytes:
    return b"here"


def listener(port: int, shared: bool = False) -> GrpcListener:
    server = Http2Server()
    server.add_registered_method_handlers("test.Test", {"Say": grpc.unary_unary_rpc_method_handler(word)})
    return GrpcListener(server, "127.0.0.1", port, "grpc.port", None, shared)


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


def test_a_port_of_its_own_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        port = free_port()
        with socket.create_server(("127.0.0.1", port)):
            new = listener(port)
            opening = asyncio.create_task(new.open())
            while not caplog.messages:
                await asyncio.sleep(0.01)
            assert f"127.0.0.1:{port} is in use by pid {os.getpid()}" in caplog.messages[0]
        await opening
        assert await say(port) == b"here"
        await new.close()

    asyncio.run(main())


@pytest.mark.parametrize("shared", [False, True])
def test_a_port_that_stays_taken_is_an_error_with_its_holder_and_a_cure(shared: bool) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            with pytest.raises(ConfigurationError) as raised:
                await listener(port, shared).open(timeout=0.0)
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
