"""Streamed predictions as server-sent events, and over a WebSocket, against a real server and real
clients.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any

import pytest
import uvicorn
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync import client

from serve_app.domain.access import AccessTable, KeyGrant
from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.errors import HandlerRejected, QueueFull
from serve_app.protocols.http import sse
from serve_app.protocols.http.server import ray_bypass, websocket_protocol
from serve_app.protocols.http.sse import encode_event
from tests.support.protocol_servers import serve_app_over_http

pytestmark = pytest.mark.integration


connect = partial(client.connect, open_timeout=60)
EVENTS = {"accept": "text/event-stream"}


def streams(*pieces: bytes, error: Exception | None = None, content_type: str | None = None) -> Any:
    async def infer(call: InferenceRequest) -> ResponseStream:
        async def reported() -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece
            if error is not None:
                raise error

        return ResponseStream(InferenceResponse(b"", content_type, version="1.0"), reported())

    return infer


def read(body: bytes) -> list[tuple[str, str]]:
    """Name and data of each event, as the standard has it (html.spec.whatwg.org, 9.2.6)."""
    found = []
    for block in body.decode().split("\n\n")[:-1]:
        name, data = "message", []
        for line in block.split("\n"):
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "event":
                name = value
            elif field == "data":
                data.append(value)
        if data:
            found.append((name, "\n".join(data)))
    return found


@pytest.mark.parametrize(
    "piece",
    [
        b"one ",
        b" a\nb\n\n",
        b"\n",
        "é…".encode(),
        b"\xff\x00",
        b"a\r\nb",
        b"a\0b",
        b"data: x",
        bytes(range(256)),
    ],
)
def test_chunk_survives_event_encoding(piece: bytes) -> None:
    [(name, data)] = read(encode_event(piece))
    assert (base64.b64decode(data) if name == "base64" else data.encode()) == piece


def test_chunks_are_sent_as_events(inference: Any) -> None:
    app = inference(streams(b"one ", b"", b"two\nthree", b"\xff"))
    answer = app("POST", "/predictions/m", b"x", EVENTS)
    assert (answer.status, answer["content-type"], answer["x-model-version"]) == (
        200,
        "text/event-stream",
        "1.0",
    )
    end = {"request_id": answer["x-request-id"], "version": "1.0"}
    assert read(answer.body) == [
        ("message", "one "),
        ("message", "two\nthree"),
        ("base64", base64.b64encode(b"\xff").decode()),
        ("end", json.dumps(end, separators=(",", ":"))),
    ]
    assert len(answer.chunks) == 5, "each piece leaves by itself, and then the end of the body"
    plain = app("POST", "/predictions/m", b"x", {"accept": "*/*"})
    assert (plain.body, plain["ts_stream_next"]) == (b"one two\nthree\xff", "true")


def test_an_error_in_mid_stream_is_an_event(inference: Any) -> None:
    answer = inference(streams(b"one", error=HandlerRejected("no more", 503)))(
        "POST", "/predictions/m/1.0", b"x", EVENTS
    )
    first, (name, data) = read(answer.body)
    assert (first, name, answer.ended) == (("message", "one"), "error", True)
    assert json.loads(data) == {"code": 503, "type": "InternalServerException", "message": "no more"}


def test_error_before_the_stream_is_an_ordinary_response(inference: Any) -> None:
    async def full(call: InferenceRequest) -> InferenceResponse:
        raise QueueFull("m", None)

    answer = inference(full)("POST", "/predictions/m", b"x", EVENTS)
    assert (answer.status, answer["x-torchrelay-reason"]) == (503, "queue_full")
    assert json.loads(answer.body)["type"] == "ServiceUnavailableException"


def test_single_response_is_an_event_only_where_nothing_else_is_accepted(inference: Any) -> None:
    app = inference()
    assert read(app("POST", "/predictions/m", b"hi", EVENTS).body)[0] == ("message", "hi")
    assert (
        app("POST", "/predictions/m", b"hi", {"accept": "application/json, text/event-stream"}).body == b"hi"
    )


def test_handler_events_are_sent_unchanged(inference: Any) -> None:
    app = inference(streams(b"data: 1\n\n", content_type="text/event-stream"))
    assert app("POST", "/predictions/m", b"x", EVENTS).body == b"data: 1\n\n"


def test_comments_are_sent_while_idle(inference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse.KeepAlive.__init__, "__defaults__", (0.05,))
    sent, next_chunk = asyncio.Event(), sse.KeepAlive.__anext__

    async def record_comment(keep_alive: Any) -> bytes:
        if (chunk := await next_chunk(keep_alive)) == sse.KEEP_ALIVE_COMMENT:
            sent.set()
        return chunk

    monkeypatch.setattr(sse.KeepAlive, "__anext__", record_comment)

    async def slow(call: InferenceRequest) -> ResponseStream:
        async def pieces() -> AsyncIterator[bytes]:
            await sent.wait()
            yield b"late"

        return ResponseStream(InferenceResponse(b"", version="1.0"), pieces())

    app = inference(slow)
    app.compares = False  # the number of comments depends on the machine
    answer = app("POST", "/predictions/m", b"x", EVENTS)
    assert answer.chunks[0] == b": keep-alive\n\n"
    assert [name for name, _ in read(answer.body)] == ["message", "end"]


# WebSocket


@contextlib.contextmanager
def listening(app: Any) -> Iterator[str]:
    """Serve the app on a port of its own; return the address."""
    with serve_app_over_http(app, timeout_graceful_shutdown=60) as address:
        yield address.replace("http", "ws")


def received(line: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the chunks of one response, and its end message."""
    pieces: list[Any] = []
    while True:
        message = line.recv(60)
        if isinstance(message, str) and message.startswith('{"end"'):
            return pieces, json.loads(message)["end"]
        pieces.append(message)


async def echo(call: InferenceRequest) -> InferenceResponse | ResponseStream:
    part = call.inputs[0]
    if part.content_type == "application/json":
        return await streams(*(str(number).encode() for number in range(json.loads(part.value)["count"])))(
            call
        )
    if part.value == b"wrong":
        raise HandlerRejected("that was wrong", 422)
    if part.value == b"half":
        return await streams(b"one", error=QueueFull("m", None))(call)
    return InferenceResponse(part.value + (part.content_type or "").encode(), version=call.version or "1.0")


def test_websocket_requests_are_processed_in_order(inference: Any) -> None:
    app = inference(echo)
    with listening(app.app) as address, connect(f"{address}/predictions/m") as line:
        line.send("hello")
        pieces, end = received(line)
        assert (pieces, end["status"], end["version"], end["chunks"]) == (["hellotext/plain"], 200, "1.0", 1)
        line.send(b"\xff")
        assert received(line)[0] == [b"\xff"], "bytes stay bytes"
        for count in (3, 2):
            line.send(json.dumps({"count": count}))  # not waiting for the one before
        first, second = received(line), received(line)
        assert (first[0], second[0]) == (["0", "1", "2"], ["0", "1"])
        assert len({end["request_id"], first[1]["request_id"], second[1]["request_id"]}) == 3
        line.send("wrong")
        pieces, end = received(line)
        assert (pieces, end["status"], end["reason"]) == ([], 422, "handler_rejected")
        assert end["error"] == {"code": 422, "type": "InternalServerException", "message": "that was wrong"}
        line.send("half")
        pieces, end = received(line)
        assert (pieces, end["status"], end["reason"], end["retry_after"]) == (["one"], 503, "queue_full", 1)
    assert [call.headers["url_path"] for call in app.backend.requests] == [""] * 6
    assert [line[1:3] + line[4:5] for line in app.access_log] == [
        ("WEBSOCKET", "/predictions/m", status) for status in (200, 200, 200, 200, 422, 503)
    ]


def test_a_version_and_the_handshakes_headers(inference: Any) -> None:
    app = inference(echo)
    headers = {
        "Content-Type": "application/x-own",
        "X-Request-Priority": "low",
        "X-Request-Timeout-Seconds": "30",
    }
    with (
        listening(app.app) as address,
        connect(f"{address}/predictions/m/2.0/deep/er", additional_headers=headers) as line,
    ):
        line.send("a")
        assert received(line)[0] == ["aapplication/x-own"]
    [call] = app.backend.requests
    assert (app.backend.ref.version, call.priority, call.headers["url_path"]) == ("2.0", "low", "deep/er")
    assert call.deadline is not None


def test_bidirectional_stream_of_sagemaker(inference: Any) -> None:
    rows = {"1.0": VersionRoute("1.0", "ready", 1, loaded_at_startup=True)}
    only = RoutingTable(1, {"m": ModelRoute("1.0", rows)}, startup_complete=True)
    stream = "/invocations-bidirectional-stream"
    app = inference(echo, table=only)
    with listening(app.app) as address:
        for path in (stream, f"{stream}?model_name=m"):
            with connect(address + path) as line:
                assert line.ping().wait(60), "SageMaker closes a connection that does not answer"
                line.send("hello")
                assert received(line)[0] == ["hellotext/plain"]
                line.send(b"\xff")
                assert received(line)[0] == [b"\xff"]
    assert [request.model for request in app.backend.requests] == ["m"] * 4
    with (
        listening(inference(echo).app) as address,
        pytest.raises(InvalidStatus) as refused,
        connect(address + stream),
    ):
        pass
    assert refused.value.response.status_code == 400, "no model was loaded at startup"


@pytest.mark.parametrize(
    ("path", "headers", "status", "reason"),
    [
        ("/predictions/none", {}, 404, "model_not_found"),
        ("/invocations-bidirectional-stream?model_name=none", {}, 404, "model_not_found"),
        ("/invocations-bidirectional-stream/m", {}, 404, "no_route"),
        ("/predictions/m/9", {}, 404, "version_not_found"),
        ("/predictions", {}, 404, "no_route"),
        ("/ping", {}, 404, "no_route"),
        ("/predictions/m", {"X-Request-Priority": "now"}, 400, "bad_request"),
        ("/predictions/m", {"Origin": "https://elsewhere.example"}, 403, "cross_site"),
    ],
)
def test_handshake_is_refused(
    inference: Any, path: str, headers: dict[str, str], status: int, reason: str
) -> None:
    with (
        listening(inference(echo).app) as address,
        pytest.raises(InvalidStatus) as refused,
        connect(address + path, additional_headers=headers),
    ):
        pass
    answer = refused.value.response
    assert (answer.status_code, answer.headers["x-torchrelay-reason"]) == (status, reason)
    assert json.loads(answer.body)["code"] == status


def test_origin_is_checked(inference: Any) -> None:
    app = inference(echo, cors_allowed_origin="https://ours.example")
    with listening(app.app) as address:
        for origin in ("https://ours.example", address.replace("ws", "http")):
            with connect(f"{address}/predictions/m", additional_headers={"Origin": origin}) as line:
                line.send("a")
                assert received(line)[1]["status"] == 200


def test_key_is_checked_at_the_handshake_and_for_every_message(inference: Any) -> None:
    rows = {"1.0": VersionRoute("1.0", "ready", 1)}
    access = AccessTable({sha256(b"good").digest(): KeyGrant(frozenset(("infer",)), ("m",))})
    table = RoutingTable(1, {"m": ModelRoute("1.0", rows), "n": ModelRoute("1.0", rows)}, access=access)
    app = inference(echo, table=table)
    key = {"Authorization": "Bearer good"}
    with listening(app.app) as address:
        for path, headers, reason in (
            ("/predictions/m", {}, "missing_token"),
            ("/predictions/n", key, "model_not_allowed"),
        ):
            with pytest.raises(InvalidStatus) as refused, connect(address + path, additional_headers=headers):
                pass
            assert refused.value.response.headers["x-torchrelay-reason"] == reason
        with connect(f"{address}/predictions/m", additional_headers=key) as line:
            line.send("a")
            assert received(line)[1]["status"] == 200
            assert "authorization" not in app.backend.requests[0].headers
            app.reader.update(replace(table, generation=2, access=AccessTable({})))
            line.send("a")
            assert received(line)[1]["reason"] == "invalid_token"


def test_closing_cancels_the_running_request(inference: Any) -> None:
    cancelled = threading.Event()

    async def endless(call: InferenceRequest) -> ResponseStream:
        async def pieces() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"again"
                    await asyncio.sleep(0.01)
            finally:
                cancelled.set()

        return ResponseStream(InferenceResponse(b"", version="1.0"), pieces())

    app = inference(endless)
    with listening(app.app) as address:
        with connect(f"{address}/predictions/m") as line:
            line.send("go")
            assert line.recv(60) == "again"
        assert cancelled.wait(60)
    assert [line[4] for line in app.access_log] == [499]


@pytest.fixture
def rays_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the protocols of Ray Serve's servers in those of a test."""
    monkeypatch.setitem(uvicorn.config.WS_PROTOCOLS, "auto", uvicorn.config.WS_PROTOCOLS["auto"])
    monkeypatch.setitem(uvicorn.config.HTTP_PROTOCOLS, "auto", uvicorn.config.HTTP_PROTOCOLS["auto"])
    monkeypatch.setattr(websocket_protocol, "_max_message_size", None)
    monkeypatch.setattr(ray_bypass, "_app", None)
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "127.0.0.1")
    umask = os.umask(0o022)
    ray_bypass.build()
    yield
    os.umask(umask)


@pytest.mark.usefixtures("rays_server")
@pytest.mark.parametrize("limit", [100, 17 << 20])
def test_message_size_is_limited_by_the_setting(inference: Any, limit: int) -> None:
    app = inference(echo, max_request_size=limit).app
    ray_bypass.set_app(app, limit)
    with listening(ray_bypass.BypassMiddleware(app)) as address:
        with connect(f"{address}/predictions/m", compression=None, max_size=None) as line:
            line.send(b"x" * limit)
            assert len(line.recv(60)) == limit
        for pieces in (b"x" * (limit + 1), [b"x" * limit, b"y"], b"x" * (4 * limit)):
            with connect(f"{address}/predictions/m") as line, pytest.raises(ConnectionClosed) as large:
                line.send(pieces)
                line.recv(60)
            assert large.value.rcvd is not None
            assert large.value.rcvd.code == 1009
            assert f"max_request_size ({limit} bytes)" in large.value.rcvd.reason


@pytest.mark.usefixtures("rays_server")
def test_other_closes_use_the_server_defaults(inference: Any) -> None:
    app = inference(echo, max_request_size=100).app
    ray_bypass.set_app(app, 100)
    with listening(ray_bypass.BypassMiddleware(app)) as address, connect(f"{address}/predictions/m") as line:
        line.socket.sendall(b"\x8f\x80\0\0\0\0")  # no frame of the protocol's
        with pytest.raises(ConnectionClosed) as closed:
            line.recv(60)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1002


@pytest.mark.usefixtures("rays_server")
def test_stopping_server_ends_connections_after_their_requests(inference: Any) -> None:
    started, release = threading.Event(), threading.Event()

    async def waits(call: InferenceRequest) -> InferenceResponse:
        started.set()
        await asyncio.to_thread(release.wait, 60)
        return InferenceResponse(call.inputs[0].value, version="1.0")

    app = inference(waits).app
    ray_bypass.set_app(app, 100)
    with contextlib.ExitStack() as server:
        address = server.enter_context(listening(ray_bypass.BypassMiddleware(app)))
        with connect(f"{address}/predictions/m") as idle, connect(f"{address}/predictions/m") as busy:
            busy.send("first")
            busy.send("second")
            assert started.wait(60)
            stopping = threading.Thread(target=server.close)
            stopping.start()
            with pytest.raises(ConnectionClosed) as closed:
                idle.recv(60)
            busy.send("too late")
            release.set()
            assert [received(busy)[0], received(busy)[0]] == [["first"], ["second"]]
            with pytest.raises(ConnectionClosed) as closed_later:
                busy.recv(60)
            stopping.join(60)
    for error in (closed.value, closed_later.value):
        assert error.rcvd is not None
        assert (error.rcvd.code, error.rcvd.reason) == (1012, "The server stops. Connect again.")


def test_exceeded_limits_close_the_connection(inference: Any) -> None:
    never = threading.Event()

    async def waits(call: InferenceRequest) -> InferenceResponse:
        await asyncio.to_thread(never.wait, 60)
        return InferenceResponse(b"", version="1.0")

    app = inference(waits, max_request_size=100)
    with listening(app.app) as address:
        try:
            with connect(f"{address}/predictions/m") as line:
                line.send("x" * 101)
                with pytest.raises(ConnectionClosed) as large:
                    line.recv(60)
            assert large.value.rcvd.code == 1009
            assert "max_request_size (100 bytes)" in large.value.rcvd.reason
            with connect(f"{address}/predictions/m") as line, pytest.raises(ConnectionClosed) as many:
                for _ in range(30):
                    line.send("x")
                line.recv(60)
            assert many.value.rcvd.code == 1008
            assert "More than 16 requests, or 200 bytes of them, wait" in many.value.rcvd.reason
        finally:
            never.set()


def test_slow_reader_stops_only_its_own_stream(inference: Any) -> None:
    sent = 0

    async def floods(call: InferenceRequest) -> InferenceResponse | ResponseStream:
        nonlocal sent
        if call.inputs[0].value == b"other":
            return InferenceResponse(b"here", version="1.0")

        async def pieces() -> AsyncIterator[bytes]:
            nonlocal sent
            while True:
                sent += 1
                yield b"x" * 100_000

        return ResponseStream(InferenceResponse(b"", version="1.0"), pieces())

    app = inference(floods)
    with listening(app.app) as address:
        host, port = address.removeprefix("ws://").split(":")
        with socket.create_connection((host, int(port))) as line:
            requested = (
                "GET /predictions/m HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            )
            requested += "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
            line.sendall(requested.encode())
            assert line.recv(4096).startswith(b"HTTP/1.1 101")
            line.sendall(b"\x81\x82\0\0\0\0go")  # one masked frame of text; nothing is read after it
            before = 0
            while not sent or sent != before:  # until all buffers are full
                before = sent
                threading.Event().wait(0.3)
            assert sent < 1000
            with connect(f"{address}/predictions/m") as other:
                other.send("other")
                assert received(other)[0] == ["here"]
