"""The server's end of HTTP: what is written when, on a connection that notes it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from serve_app.protocols.http.server import http_protocol
from tests.support.wire_client import RecordingTransport, connect

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
        config = uvicorn.Config(app, http=http_protocol.HttpProtocol, lifespan="off", log_config=None)
        config.load()
        protocol, transport = http_protocol.HttpProtocol(config, ServerState(), {}), Noted()
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


def test_nothing_is_read_while_pipelined_requests_wait() -> None:
    class Readable(RecordingTransport):
        """A connection that records whether it is read."""

        is_read = True

        def pause_reading(self) -> None:
            self.is_read = False

        def resume_reading(self) -> None:
            self.is_read = True

    async def run() -> None:
        transport = Readable()
        protocol = connect(reads, transport)  # it receives its body, which would resume reading
        for _ in range(50):
            if transport.is_read:
                protocol.data_received(ASK * 100)
            await asyncio.sleep(0)
            assert len(protocol.pipeline) < 100
        await until(lambda: transport.is_read and not protocol.tasks)
        protocol.connection_lost(None)

    asyncio.run(run())


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
    http_protocol.install()


@pytest.mark.usefixtures("installed")
def test_servers_of_this_process_use_the_protocol() -> None:
    config = uvicorn.Config(whole)
    config.load()
    assert config.http_protocol_class is http_protocol.HttpProtocol


POST = b"POST / HTTP/1.1\r\nhost: x\r\n"


class Slow(Noted):
    """A connection whose client has not read the last ``unsent`` bytes."""

    unsent = 0

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.writes.append(b"aborted")


async def reads(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await whole(scope, receive, send)


def watched(steps: list[tuple[float, bytes]], end: float, app: Any = reads, unsent: int = 0) -> list[bytes]:
    """Return what is written when the steps' data arrive at their times, with a check every second."""

    async def run() -> list[bytes]:
        config = uvicorn.Config(app, http=http_protocol.HttpProtocol, lifespan="off", log_config=None)
        config.load()
        protocol, transport = http_protocol.HttpProtocol(config, ServerState(), {}), Slow()
        transport.unsent = unsent
        protocol.connection_made(transport)
        pending = list(steps)
        for now in range(int(end)):
            while pending and pending[0][0] <= now:
                protocol.data_received(pending.pop(0)[1])
            for _ in range(5):
                await asyncio.sleep(0)
            protocol.check_progress(float(now))
        for _ in range(3):
            await asyncio.sleep(0)
        transport.close()
        return transport.writes

    return asyncio.run(run())


def test_a_connection_without_a_request_is_closed() -> None:
    assert watched([], 10) == [b"closed"]
    assert watched([(0, ASK)], 80)[-1] == b"closed"
    assert len(watched([(0, ASK)], 80)) == 2


@pytest.mark.parametrize("head", [POST, ASK + POST, POST + b"content-length: 1\r\n\r\nx" + POST])
def test_an_unfinished_head_times_out(head: bytes) -> None:
    *_, answer, end = watched([(0, head)], 15)
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n") and end == b"closed"
    assert not any(b"408" in written for written in watched([(0, head)], 10))
    # Bytes that do not end the head do not prolong it.
    trickled = watched([(0, head), *((now, b"a: b\r\n") for now in range(14))], 15)
    assert trickled[-2].startswith(b"HTTP/1.1 408 ")


def test_a_body_must_make_progress() -> None:
    body = POST + b"content-length: 1000000\r\n\r\n"
    slow = watched([(0, body), *((now, b"x" * 100) for now in range(25))], 25)
    assert slow[-2].startswith(b"HTTP/1.1 408 ") and b"4096 bytes" in slow[-2]
    assert watched([(0, body), *((now, b"x" * 250) for now in range(100))], 100) == [b"closed"]


def test_the_rest_of_a_body_that_is_already_answered_must_make_progress() -> None:
    written = watched([(0, POST + b"content-length: 1000000\r\n\r\n")], 25, app=whole)
    assert BODY in written[0] and b"408" not in b"".join(written) and written[-1] == b"closed"


def test_a_long_request_does_not_time_out() -> None:
    async def long(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    assert watched([(0, ASK)], 500, app=long) == [b"closed"]
    assert watched([(0, POST + b"content-length: 100000\r\n\r\n" + b"x" * 80_000)], 500, app=long) == [
        b"closed"
    ]


def test_a_client_that_does_not_read_its_response_is_aborted() -> None:
    assert b"aborted" in watched([(0, ASK)], 63, unsent=10)
    assert b"aborted" not in watched([(0, ASK)], 60, unsent=10)


def answer_to(data: bytes) -> bytes:
    """Return what is written for data that arrive in reads of 64 KiB."""

    async def talk(protocol: Any, transport: Noted) -> None:
        for start in range(0, len(data), 1 << 16):
            protocol.data_received(data[start : start + (1 << 16)])
        for _ in range(200):
            await asyncio.sleep(0)

    return b"".join(noted(reads, talk))


@pytest.mark.parametrize(
    "head",
    [
        ASK[:-2] + b"a: b\r\n" * 100 + b"\r\n",
        ASK[:-2] + b"a: b\r\n" * 100_000,
        ASK[:-2] + b"a: " + b"b" * (1 << 16) + b"\r\n\r\n",
        ASK[:-2] + b"a: " + b"b" * (1 << 20),
        ASK + ASK[:-2] + b"".join(b"a%d: " % n + b"b" * 10_000 + b"\r\n" for n in range(8)),
        b"GET /" + b"a" * (1 << 17),
    ],
    ids=["101 headers", "100,000 headers", "64 KiB", "1 MiB", "after another request", "URL"],
)
def test_a_head_beyond_the_limits_is_431(head: bytes) -> None:
    answer = answer_to(head)
    assert answer.count(b"HTTP/1.1 431 Request Header Fields Too Large\r\n") == 1
    assert b"exceeds 64 KiB or 100 headers" in answer


def test_a_head_within_the_limits_is_served() -> None:
    head = ASK[:-2] + b"".join(b"a%d: " % n + b"b" * 600 + b"\r\n" for n in range(99)) + b"\r\n"
    assert b"431" not in answer_to(head * 20) and answer_to(head * 20).count(BODY) == 20


def test_the_framing_of_a_body_is_limited_too() -> None:
    chunked = POST + b"transfer-encoding: chunked\r\n\r\n"
    for large in (b"1;" + b"e" * (1 << 19), b"0\r\n" + b"t: x\r\n" * 100_000):
        assert b"HTTP/1.1 400 Bad Request\r\n" in answer_to(chunked + large)
    assert BODY in answer_to(chunked + b"1\r\nx\r\n" * 200_000 + b"0\r\n\r\n")


def test_connections_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "max_connections", lambda: 1)

    async def run() -> list[list[bytes]]:
        config = uvicorn.Config(whole, http=http_protocol.HttpProtocol, lifespan="off", log_config=None)
        config.load()
        state = ServerState()
        transports = [Noted(), Noted()]
        for transport in transports:
            http_protocol.HttpProtocol(config, state, {}).connection_made(transport)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return [transport.writes for transport in transports]

    first, second = asyncio.run(run())
    assert not first and second[0].startswith(b"HTTP/1.1 503 ") and b"retry-after: 1\r\n" in second[0]
