"""The server's end of a WebSocket: what a client that ignores the answers can make it keep in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState
from websockets.frames import Frame, Opcode

from serve_app.protocols.http.server.websocket_protocol import WebSocketProtocol
from tests.support.wire_client import RecordingTransport, wait_until

HANDSHAKE = (
    b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


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
