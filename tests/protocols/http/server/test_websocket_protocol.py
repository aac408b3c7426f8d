"""The server's end of a WebSocket: what a client that ignores the answers can make it keep in memory."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState
from websockets.frames import Frame, Opcode

from serve_app.protocols.http.server import unix_listener
from serve_app.protocols.http.server.http_protocol import HttpProtocol
from serve_app.protocols.http.server.websocket_protocol import ON_STOP, WebSocketProtocol
from tests.support.wire_client import RecordingTransport, wait_until

HANDSHAKE = (
    b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


def connect_http(state: ServerState) -> tuple[HttpProtocol, RecordingTransport]:
    """Return the server's end of a new connection to an application that never answers."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    config = uvicorn.Config(app, http=HttpProtocol, ws=WebSocketProtocol, lifespan="off", log_config=None)
    config.load()
    protocol, transport = HttpProtocol(config, state, {}), RecordingTransport()
    protocol.connection_made(transport)
    return protocol, transport


def assert_refused(transport: RecordingTransport) -> None:
    head = bytes(transport.written).lower()
    assert head.startswith(b"http/1.1 503") and b"retry-after: 1\r\n" in head
    assert transport.is_closed


def test_handshakes_are_refused_while_the_server_stops() -> None:
    async def run() -> None:
        protocol, transport = connect_http(ServerState())
        protocol.shutdown()  # it is idle, and is read for a moment longer
        protocol.data_received(HANDSHAKE)
        assert_refused(transport)
        protocol, transport = connect_http(ServerState())
        protocol.data_received(HANDSHAKE)
        transport.protocol.shutdown()
        assert_refused(transport)

    asyncio.run(run())


def test_connections_that_a_stopping_server_accepts_late_are_closed() -> None:
    async def run() -> None:
        server = unix_listener.Server(uvicorn.Config(lambda: None, lifespan="off"))
        server.force_exit = True
        server.servers = []
        await server.shutdown()
        _, transport = connect_http(server.server_state)
        await wait_until(lambda: transport.is_closed)

    asyncio.run(run())


def encode(opcode: Opcode, data: bytes, fin: bool = True) -> bytes:
    return Frame(opcode, data, fin).serialize(mask=True)


def talk(check: Callable[[WebSocketProtocol, RecordingTransport, list[Any]], Awaitable[None]]) -> None:
    """Run ``check`` with an open connection and the list of received messages."""
    messages: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept", "headers": []})
        while (message := await receive())["type"] != "websocket.disconnect":
            messages.append(message)

    async def run() -> None:
        config = uvicorn.Config(app, ws=WebSocketProtocol, lifespan="off", log_config=None)
        config.load()
        protocol, transport = WebSocketProtocol(config, ServerState(), {}), RecordingTransport()
        protocol.connection_made(transport)
        protocol.data_received(HANDSHAKE)
        await wait_until(lambda: protocol.handshake_complete)
        transport.written.clear()
        await check(protocol, transport, messages)
        protocol.connection_lost(None)
        await wait_until(lambda: not protocol.tasks)

    asyncio.run(run())


def test_pings_of_a_client_that_does_not_read_are_not_answered() -> None:
    async def check(protocol: WebSocketProtocol, transport: RecordingTransport, _: list[Any]) -> None:
        transport.unread = 1 << 20
        protocol.data_received(encode(Opcode.PING, b"unread") * 1_000)
        assert not transport.written
        transport.unread = 0
        protocol.data_received(encode(Opcode.PING, b"read"))
        assert transport.written.endswith(b"read")

    talk(check)


@pytest.mark.parametrize("part", [b"", b"x"])
def test_small_fragments_of_a_message_are_joined(part: bytes) -> None:
    async def check(protocol: WebSocketProtocol, _: RecordingTransport, messages: list[Any]) -> None:
        protocol.data_received(encode(Opcode.TEXT, b"a", fin=False))
        for _ in range(10):
            protocol.data_received(encode(Opcode.CONT, part, fin=False) * 1_000)
            assert len(protocol.frames) <= 1_024
        protocol.data_received(encode(Opcode.CONT, b"b"))
        await wait_until(lambda: messages)
        assert messages[0]["text"] == "a" + part.decode() * 10_000 + "b"

    talk(check)


def test_the_scope_can_be_sent_to_another_process() -> None:
    """Ray Serve's own proxy pickles it, for a gateway that HAProxy does not reach itself."""
    scopes: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(pickle.loads(pickle.dumps(scope)))

    async def run() -> None:
        config = uvicorn.Config(app, http=HttpProtocol, ws=WebSocketProtocol, lifespan="off", log_config=None)
        config.load()
        protocol = HttpProtocol(config, ServerState(), {})
        protocol.connection_made(RecordingTransport())
        protocol.data_received(HANDSHAKE)
        await wait_until(lambda: bool(scopes))
        scopes[0]["extensions"][ON_STOP](lambda: None)

    asyncio.run(run())
