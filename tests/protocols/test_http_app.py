"""The applications as an ASGI server meets them, and over a real one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import uuid
from collections.abc import AsyncIterator

import httpx
import pytest
import uvicorn

from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream
from serve_app.errors import ReplicaDied
from serve_app.protocols.http.exchange import uuid4


def test_lifespan_is_acknowledged(inference) -> None:
    reported = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    result = []

    async def receive():
        return reported.pop(0)

    async def send(message):
        result.append(message["type"])

    asyncio.run(inference().app({"type": "lifespan"}, receive, send))
    assert result == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


def test_websocket_is_closed_where_unsupported(management) -> None:
    result = []

    async def receive():
        return {"type": "websocket.connect"}

    async def send(message):
        result.append(message["type"])

    asyncio.run(management().app({"type": "websocket", "path": "/"}, receive, send))
    assert result == ["websocket.close"]


def test_request_ids_are_random_version_4_uuids() -> None:
    ids = {uuid4() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(uuid.UUID(id_).version == 4 and uuid.UUID(id_).variant == uuid.RFC_4122 for id_ in ids)
    assert all(str(uuid.UUID(id_)) == id_ for id_ in ids)


async def _post(app, path: str, body: bytes = b"") -> None:
    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        pass

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [],
        "http_version": "1.1",
    }
    await app(scope, receive, send)


def test_the_url_of_a_registration_is_logged_without_credentials(asgi_inference) -> None:
    app = asgi_inference()
    app("POST", "/models?url=https%3A%2F%2Fuser%3Asecret%40host%2Fm.mar%3Fk%3Dsecret&synchronous=true")
    assert [line[2] for line in app.access_log] == ["/models?url=https://host/m.mar&synchronous=true"]


def test_cancellation_reaches_the_backend(inference) -> None:
    async def run() -> None:
        waiting, cancelled = asyncio.Event(), asyncio.Event()

        async def wait(call: InferenceRequest) -> InferenceResponse:
            waiting.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise
            raise AssertionError

        app = inference(wait)
        request = asyncio.ensure_future(_post(app.app, "/predictions/m"))
        await waiting.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert cancelled.is_set()
        assert [line[4] for line in app.access_log] == [499]
        assert not [s for s in app.meters.samples() if s[0] == "torchrelay_http_responses_total"]

    asyncio.run(run())


def test_cancelling_the_request_closes_its_stream(inference) -> None:
    async def run() -> None:
        waiting, closed = asyncio.Event(), asyncio.Event()

        async def pieces() -> AsyncIterator[bytes]:
            try:
                yield b"a"
                waiting.set()
                await asyncio.Event().wait()
            finally:
                closed.set()

        async def stream(call: InferenceRequest) -> ResponseStream:
            return ResponseStream(InferenceResponse(b""), pieces())

        request = asyncio.ensure_future(_post(inference(stream).app, "/predictions/m"))
        await waiting.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert closed.is_set()

    asyncio.run(run())


@contextlib.asynccontextmanager
async def serving(app) -> AsyncIterator[int]:
    """``app`` on a port of the loopback, behind the server that Ray Serve uses too."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(app, ws="none", lifespan="on", log_level="critical", access_log=False)
    )
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task
        listener.close()


async def raw(port: int, request: bytes) -> bytes:
    """Return the data of a connection until the server closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


def post(path: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: m",
        "Connection: close",
        f"Content-Length: {len(body)}",
        *headers,
        "",
        "",
    ]
    return "\r\n".join(lines).encode() + body


def test_real_server_sends_each_chunk_separately(inference) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for piece in (b"one", b"four"):
            yield piece

    async def stream(call: InferenceRequest) -> ResponseStream:
        return ResponseStream(InferenceResponse(b""), pieces())

    async def run() -> bytes:
        async with serving(inference(stream).app) as port:
            return await raw(port, post("/predictions/m"))

    head, _, body = asyncio.run(run()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"transfer-encoding: chunked" in head
    assert b"ts_stream_next: true" in head
    assert body == b"3\r\none\r\n4\r\nfour\r\n0\r\n\r\n"


def test_a_real_server_ends_a_broken_stream_without_its_last_chunk(inference) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"one"
        raise ReplicaDied("killed")

    async def stream(call: InferenceRequest) -> ResponseStream:
        return ResponseStream(InferenceResponse(b""), pieces())

    async def run() -> bytes:
        async with serving(inference(stream).app) as port:
            return await raw(port, post("/predictions/m"))

    assert asyncio.run(run()).partition(b"\r\n\r\n")[2] == b"3\r\none\r\n"


def test_a_real_server_answers_a_body_that_is_too_large_and_goes_on(inference) -> None:
    async def run() -> list[int]:
        async with (
            serving(inference(max_request_size=1000).app) as port,
            httpx.AsyncClient(trust_env=False, timeout=60) as client,
        ):
            url = f"http://127.0.0.1:{port}/predictions/m"
            refused = await client.post(url, content=b"x" * 200_000)
            assert refused.content == b""
            served = await client.post(url, content=b"x" * 1000)
            return [refused.status_code, served.status_code]

    assert asyncio.run(run()) == [413, 200]


def test_a_real_server_takes_every_header_of_a_handler(inference) -> None:
    async def reply(call: InferenceRequest) -> InferenceResponse:
        return InferenceResponse(
            b"hi", "text/plain\r\nx: y", 207, headers=(("X-Größe", "1"), ("X-Odd", "\r\na\x00b ü €"))
        )

    async def run() -> bytes:
        async with serving(inference(reply).app) as port:
            return await raw(port, post("/predictions/m"))

    head, _, body = asyncio.run(run()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 207 ")
    assert b"\r\ncontent-type: text/plain  x: y\r\n" in head
    assert "\r\nx-odd: a b ü ?\r\n".encode("latin-1") in head
    assert body == b"hi"
