"""Fuzzed servers: the applications of both HTTP ports, and the HTTP/2 server of the inference port."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

from serve_app.control.api import ControlPlane
from serve_app.dataplane.data_plane import DataPlane, RoutingTableReader
from serve_app.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    SETTINGS,
    encode_frame,
)
from serve_app.http2.server import Http2Server
from serve_app.protocols.grpc_app import inference_server
from serve_app.protocols.http_app import ASGIApp, inference_app, management_app
from serve_app.settings import InferenceSettings, Settings
from serve_app.telemetry.metrics import Meters
from tests.fuzz.documents import ByteReader
from tests.fuzz.target import target
from tests.support.http2_peer import encode_message
from tests.support.protocol_fakes import FakeBackend, FakeControlAPI, echo, send_request, two_versions

_PATHS = (
    *("/predictions/m", "/predictions/m/1.0", "/explanations/m", "/v1/models/m:predict", "/invocations"),
    *("/v2/models/m/infer", "/v2/models/m/generate", "/v2/models/m/generate_stream", "/v2/models/m"),
    *(
        "/v2/repository/index",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/rerank",
        "/tei/m",
        "/tei/m/embed",
        "/v1/models",
    ),
    *("/v2/models/stats", "/ping", "/", "/api-description", "/openapi.json", "/docs", "/predictions/../x"),
    *("/models", "/models/m", "/models/m/1.0", "/models/m/1.0/set-default", "/workflows", "/workflows/w"),
    *("/v2/health/ready", "/wfpredict/w", "/metrics", "/predictions//", "/predictions/%00", "/nowhere"),
)
_HEADERS = (
    *("content-type: application/json", "content-type: multipart/form-data; boundary=b", "expect: x"),
    *("content-type: application/x-www-form-urlencoded", "inference-header-content-length: 10"),
    *("content-encoding: gzip", "content-encoding: deflate", "accept-encoding: gzip, deflate"),
    *("x-request-timeout-seconds: 1e400", "x-torchrelay-priority: high", "prefer: wait=1"),
    *("content-length: -1", "ts_request_sequence_id: x", "idempotency-key: a", "accept: text/event-stream"),
    *("authorization: Bearer x", "range: bytes=0-", "traceparent: 00", "content-type: \xff", "cookie: a=b"),
)
_QUERIES = ("", "url=m.mar", "min_worker=2&synchronous=true", "batch_size=-1", "limit=x", "a=%ff", "&&=&")
_METHODS = ("POST", "GET", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "BREW")


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


@cache
def _apps() -> tuple[ASGIApp, ASGIApp]:
    settings = Settings(inference=InferenceSettings(max_request_size=1 << 16))
    control = ControlPlane(FakeControlAPI(), settings, lambda: None)
    plane = DataPlane(
        RoutingTableReader(two_versions()), Meters(), lambda ref, row: FakeBackend(echo).at(ref)
    )
    return inference_app(plane, settings, Meters(), control=control), management_app(control, settings)


@target(
    [
        bytes([0, path, 0, 1, header, 0]) + body
        for path in range(0, 16, 3)
        for header in range(0, 9, 4)
        for body in (b'{"inputs": [], "data": [1]}', b"--b--\r\n", b"a=1&b=2", b"")
    ],
    [b'"model"', b'"messages"', b'"prompt"', b'"inputs"', b'"instances"', b'"text_input"', b"--b\r\n"],
)
def http_requests(data: bytes) -> None:
    """Send a request to one of the ports; it is answered, and never by an error of the server."""
    reader = ByteReader(data)
    app = _apps()[reader.byte() & 1]
    path = reader.pick(_PATHS)
    method = reader.pick(_METHODS)
    headers = {}
    for _ in range(reader.byte() % 4):
        name, _, value = reader.pick(_HEADERS).partition(": ")
        headers[name] = value
    query = reader.pick(_QUERIES)
    url = f"{path}?{query}" if query else path
    response = send_request(app, method, url, reader.rest(), headers, loop=_loop())
    assert response.status, "no response"
    assert response.status != 500, f"{method} {url}: {response.body[:300]!r}"
    assert response.ended or method == "HEAD"


class _Transport:
    """A transport that keeps what the server writes."""

    def __init__(self) -> None:
        self.written = bytearray()
        self._closing = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else default

    def write(self, data: bytes) -> None:
        self.written += data

    def writelines(self, chunks: list[bytes]) -> None:
        self.written += b"".join(chunks)

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading

    def close(self) -> None:
        self._closing = True

    abort = close


@cache
def _server() -> Http2Server:
    settings = Settings()
    plane = DataPlane(
        RoutingTableReader(two_versions()), Meters(), lambda ref, row: FakeBackend(echo).at(ref)
    )
    control = ControlPlane(FakeControlAPI(), settings, lambda: None)
    return inference_server(plane, control, settings, Meters())


_PATHS_OF_RPC = (
    b"/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions",
    b"/org.pytorch.serve.grpc.inference.InferenceAPIsService/StreamPredictions2",
    b"/inference.GRPCInferenceService/ModelInfer",
    b"/inference.GRPCInferenceService/ModelStreamInfer",
    b"/inference.GRPCInferenceService/ModelMetadata",
    b"/grpc.health.v1.Health/Check",
    b"/nowhere",
)


def _encode_head(path: bytes) -> bytes:
    """Encode a request's headers as literals without indexing (RFC 7541 §6.2.2)."""
    fields = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"a"))
    block = b""
    for name, value in (*fields, (b"content-type", b"application/grpc"), (b"te", b"trailers")):
        block += b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value
    return block


def _build_frames(reader: ByteReader) -> bytes:
    """Return frames whose types, flags, streams and bodies come from the fuzzer."""
    frames = encode_frame(SETTINGS, 0, 0) if reader.byte() & 1 else b""
    while not reader.empty:
        kind, flags, stream = reader.byte() % 12, reader.byte(), reader.byte() % 16
        body = reader.take(reader.byte() % 40)
        if kind == HEADERS and flags & 0x80:
            flags, body = flags & ~0x28, _encode_head(reader.pick(_PATHS_OF_RPC))
        elif kind == DATA and flags & 0x80:
            flags, body = flags & ~0x08, encode_message(body)
        frames += encode_frame(kind, flags & 0x7F, stream, body)
    return frames


_CALL = encode_frame(SETTINGS, 0, 0) + encode_frame(HEADERS, END_HEADERS, 1, _encode_head(_PATHS_OF_RPC[2]))


@target(
    [
        b"\x00" + _CALL + encode_frame(DATA, END_STREAM, 1, encode_message(b"\n\x01m")),
        b"\x01\x01" + bytes([HEADERS, 0x84, 1, 0, 2, DATA, 0x81, 1, 3, 10, 1, 109]),
        b"\x01\x01" + bytes(range(100)),
    ],
    [b"\x00\x00\x04\x08\x00", b"\x00\x00\x04\x03\x00", b"\x00\x00\x06\x04\x00", b"\x00\x00\x08\x06\x00"],
)
def grpc_frames(data: bytes) -> None:
    """Send frames to the HTTP/2 server; it writes whole frames only, and forgets a closed connection."""
    reader = ByteReader(data)
    received = reader.rest() if reader.byte() & 1 == 0 else _build_frames(reader)
    _loop().run_until_complete(_converse(PREFACE + received))


async def _converse(received: bytes) -> None:
    server, transport = _server(), _Transport()
    connection = server._create_connection()
    connection.connection_made(transport)
    for start in range(0, len(received), 1000):
        if not transport.is_closing():
            connection.data_received(received[start : start + 1000])
            await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    position, written = 0, transport.written
    while position < len(written):
        position += 9 + int.from_bytes(written[position : position + 3], "big")
    assert position == len(written), "the server wrote an incomplete frame"
    connection.connection_lost(None)
    deadline = asyncio.get_running_loop().time() + 5.0  # of calls that a thread is working on
    while server._calls and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0)
    assert not server._connections, "the server keeps a closed connection"
    assert not server._calls, "the server keeps the calls of a closed connection"
