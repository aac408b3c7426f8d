"""The server's end of HTTP: what is written when, on a connection that notes it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from serve_app.protocols.http import uvicorn_http

ASK = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
BODY = b"x" * 1000


class Noted(asyncio.Transport):
    """A connection whose writes and whose end are noted, in order."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.writes: list[bytes] = []
        self.protocol: Any = None

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def writelines(self, pieces: Any) -> None:
        self.writes.append(b"".join(pieces))

    def is_closing(self) -> bool:
        return self.writes[-1:] == [b"closed"]

    def close(self) -> None:
        if not self.is_closing():
            self.writes.append(b"closed")

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


def noted(app: Any, talk: Callable[[Any, Noted], Awaitable[Any]]) -> list[bytes]:
    """Return what is written while ``talk(protocol, transport)`` runs."""

    async def run() -> list[bytes]:
        config = uvicorn.Config(app, http=uvicorn_http.HttpProtocol, lifespan="off", log_config=None)
        config.load()
        protocol, transport = uvicorn_http.HttpProtocol(config, ServerState(), {}), Noted()
        protocol.connection_made(transport)
        await asyncio.wait_for(talk(protocol, transport), 60)
        return transport.writes

    return asyncio.run(run())


async def whole(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1000")]})
    await send({"type": "http.response.body", "body": BODY})


async def until(true: Callable[[], Any]) -> None:
    while not true():
        await asyncio.sleep(0)


def test_response_is_one_write() -> None:
    async def talk(protocol: Any, transport: Noted) -> None:
        for count in (1, 2, 3):
            protocol.data_received(ASK)
            await until(lambda: len(transport.writes) == count)  # noqa: B023

    written = noted(whole, talk)
    assert all(one.startswith(b"HTTP/1.1 200 OK\r\n") and one.endswith(b"\r\n\r\n" + BODY) for one in written)


def test_pipelined_responses_are_sent_in_order_before_the_close() -> None:
    async def talk(protocol: Any, transport: Noted) -> None:
        protocol.data_received(ASK + ASK + b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n")
        await until(transport.is_closing)

    *answers, end = noted(whole, talk)
    assert b"".join(answers).count(BODY) == 3 and b"".join(answers).endswith(BODY) and end == b"closed"


def test_nothing_is_written_after_a_disconnect() -> None:
    async def talk(protocol: Any, transport: Noted) -> None:
        protocol.transport.write(b"too late")
        transport.close()
        protocol.connection_lost(ConnectionResetError())
        await asyncio.sleep(0)  # what was to leave has its turn
        await asyncio.sleep(0)

    assert noted(whole, talk) == [b"closed"]


def test_parse_error_follows_the_pending_response() -> None:
    async def unfinished(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        begun.set()
        await asyncio.Event().wait()

    begun = asyncio.Event()

    async def talk(protocol: Any, transport: Noted) -> None:
        protocol.data_received(ASK)
        await begun.wait()
        protocol.data_received(b"\0nothing that is HTTP\r\n\r\n")

    written = noted(unfinished, talk)
    assert b"".join(written).startswith(b"HTTP/1.1 200 OK") and written[-1] == b"closed"
    assert b"HTTP/1.1 400 Bad Request" in b"".join(written)


def test_stream_head_is_sent_before_the_first_chunk() -> None:
    first = asyncio.Event()

    async def streams(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await first.wait()
        for piece in (b"a", b"b", b""):
            await send({"type": "http.response.body", "body": piece, "more_body": bool(piece)})

    async def talk(protocol: Any, transport: Noted) -> None:
        protocol.data_received(ASK)
        await until(lambda: transport.writes)
        assert transport.writes[0].endswith(b"transfer-encoding: chunked\r\n\r\n")
        first.set()
        await until(lambda: transport.writes[-1].endswith(b"0\r\n\r\n"))

    assert noted(streams, talk)[1:] == [
        b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n"
    ]  # what is ready together leaves together


def test_chunks_of_a_slow_stream_are_sent_one_by_one() -> None:
    ready: asyncio.Queue[bytes] = asyncio.Queue()

    async def streams(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        piece = b"more"
        while piece:
            piece = await ready.get()
            await send({"type": "http.response.body", "body": piece, "more_body": bool(piece)})

    async def talk(protocol: Any, transport: Noted) -> None:
        protocol.data_received(ASK)
        for count, piece in enumerate((b"a", b"b", b"")):
            await until(lambda: len(transport.writes) > count)  # noqa: B023
            ready.put_nowait(piece)
        await until(lambda: transport.writes[-1].endswith(b"0\r\n\r\n"))

    assert noted(streams, talk)[1:] == [b"1\r\na\r\n", b"1\r\nb\r\n", b"0\r\n\r\n"]


def test_large_writes_are_not_buffered() -> None:
    async def large(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(100):
            await send({"type": "http.response.body", "body": bytes(10_000), "more_body": True})
        await send({"type": "http.response.body"})

    async def talk(protocol: Any, transport: Noted) -> None:
        protocol.data_received(ASK)
        await until(lambda: transport.writes and transport.writes[-1].endswith(b"0\r\n\r\n"))

    written = noted(large, talk)
    assert len(written) > 10 and max(map(len, written)) < 80_000


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(uvicorn.config.HTTP_PROTOCOLS, "auto", uvicorn.config.HTTP_PROTOCOLS["auto"])
    uvicorn_http.install()


@pytest.mark.usefixtures("installed")
def test_servers_of_this_process_use_the_protocol() -> None:
    config = uvicorn.Config(whole)
    config.load()
    assert config.http_protocol_class is uvicorn_http.HttpProtocol
