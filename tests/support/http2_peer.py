"""A gRPC server with test methods, and an HTTP/2 client that writes its own frames."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import hpack

from serve_app.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    encode_frame,
)
from serve_app.http2.limits import Http2Limits
from serve_app.http2.rpc import RpcContext
from serve_app.http2.server import Http2Server


class EchoServer:
    """A server with seven methods; ``cancelled`` is set when a call of Wait is cancelled.

    A call of Wait with the message ``released`` ends once the test sets the event of that name.
    """

    def __init__(self, limits: Http2Limits) -> None:
        self.server = Http2Server(limits)
        self.address = ""
        self.waiting = threading.Event()
        self.cancelled = threading.Event()
        self.released = threading.Event()
        methods = {
            "Echo": grpc.unary_unary_rpc_method_handler(self._echo),
            "Wait": grpc.unary_unary_rpc_method_handler(self._wait),
            "Many": grpc.unary_stream_rpc_method_handler(self._many),
            "Ignore": grpc.stream_stream_rpc_method_handler(self._ignore),
            "Count": grpc.stream_unary_rpc_method_handler(self._count),
            "Measure": grpc.unary_unary_rpc_method_handler(self._measure),
            "Make": grpc.unary_unary_rpc_method_handler(self._make),
        }
        self.server.add_registered_method_handlers("test.Test", methods)

    async def _echo(self, data: bytes, context: RpcContext) -> bytes:
        if data == b"abort":
            await context.abort(grpc.StatusCode.ABORTED, "ünsäglich " * 1000)
        if data == b"fail":
            raise RuntimeError("broken")
        return data

    async def _wait(self, data: bytes, context: RpcContext) -> bytes:
        self.waiting.set()
        try:
            if data == b"released":
                while not self.released.is_set():
                    await asyncio.sleep(0.005)
            else:
                await asyncio.sleep(30 if not data else float(data))
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return b"late"

    async def _many(self, data: bytes, context: RpcContext) -> None:
        for i in range(int(data)):
            await context.write(b"%d" % i * 1000)

    async def _ignore(self, requests: Any, context: RpcContext) -> None:
        await self._wait(b"", context)

    async def _count(self, requests: Any, context: RpcContext) -> bytes:
        return b"%d" % len([request async for request in requests])

    async def _measure(self, data: bytes, context: RpcContext) -> bytes:
        return b"%d" % len(data)

    async def _make(self, data: bytes, context: RpcContext) -> bytes:
        return bytes(int(data))


StartServer = Callable[..., "EchoServer"]


def call_method(address: str, data: bytes = b"x", method: str = "Echo", **options: Any) -> bytes:
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        return channel.unary_unary(f"/test.Test/{method}")(data, timeout=60, **options)


def encode_message(data: bytes) -> bytes:
    return struct.pack(">BI", 0, len(data)) + data


def request_fields(method: str = "Echo", **headers: str) -> list[tuple[str, str]]:
    head = {":method": "POST", ":scheme": "http", ":path": f"/test.Test/{method}", ":authority": "here"}
    return [
        *head.items(),
        ("content-type", "application/grpc"),
        *[(name.replace("_", "-"), value) for name, value in headers.items()],
    ]


class Peer:
    """A client that writes its frames itself."""

    def __init__(self, address: str, preface: bytes = PREFACE + encode_frame(SETTINGS, 0, 0)) -> None:
        host, _, port = address.partition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=60)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.encoder, self.decoder = hpack.Encoder(), hpack.Decoder()
        self._received = b""
        self.socket.sendall(preface)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *frames: bytes) -> None:
        self.socket.sendall(b"".join(frames))

    def encode_call(
        self, stream: int, data: bytes | None = b"x", method: str = "Echo", **headers: str
    ) -> bytes:
        """Encode a call; without ``data`` only its head, and the stream stays open."""
        block = self.encoder.encode(request_fields(method, **headers))
        head = encode_frame(HEADERS, END_HEADERS, stream, block)
        return head if data is None else head + encode_frame(DATA, END_STREAM, stream, encode_message(data))

    def frames(self) -> Iterator[tuple[int, int, int, bytes]]:
        """Yield the received frames until the server closes the connection."""
        while True:
            while len(self._received) >= 9:
                size = int.from_bytes(self._received[:3], "big")
                if len(self._received) < 9 + size:
                    break
                kind, flags = self._received[3], self._received[4]
                stream, body = int.from_bytes(self._received[5:9], "big"), self._received[9 : 9 + size]
                self._received = self._received[9 + size :]
                yield kind, flags, stream, body
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:
                return
            if not data:
                return
            self._received += data

    def wait_for(self, kind: int, stream: int = 0) -> tuple[int, bytes]:
        """Return the flags and the body of the next frame of that type."""
        for frame_kind, flags, number, body in self.frames():
            if frame_kind == kind and number == stream:
                return flags, body
        raise AssertionError(f"the server closed the connection before frame {kind}")

    def read_response(self, stream: int) -> tuple[bytes, dict[str, str]]:
        """Return the data and the trailers of a stream, or ``reset`` with the code of its RST_STREAM."""
        data = b""
        for kind, flags, number, body in self.frames():
            assert kind != GOAWAY, body
            if number == stream and kind == RST_STREAM:
                return data, {"reset": str(int.from_bytes(body, "big"))}
            if number == stream and kind == DATA:
                data += body
            if kind == HEADERS:
                fields = dict(self.decoder.decode(body))
                if number == stream and flags & END_STREAM:
                    return data, fields
        raise AssertionError("the server closed the connection before the response was complete")

    def read_goaway(self) -> int:
        """Return the code of the GOAWAY with which the server closes the connection, or -1 without one."""
        code = -1
        for kind, _, _, body in self.frames():
            if kind == GOAWAY:
                code = int.from_bytes(body[4:8], "big")
        return code
