"""HTTP/2 connections: frames cut anywhere, flow control, keepalive, and protocol errors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from typing import Any

import grpc
import h2.config
import h2.connection
import h2.events
import h2.settings
import hpack
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.http2.frames import (
    ACK,
    COMPRESSION_ERROR,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PRIORITY_FLAG,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    WINDOW_UPDATE,
    encode_frame,
)
from serve_app.http2.limits import Http2Limits
from tests.support.http2_peer import (
    EchoServer,
    Peer,
    StartServer,
    call_method,
    encode_message,
    request_fields,
)

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("step", [1, 3, 8, 1000])
def test_frames_may_be_cut_anywhere(start_server: StartServer, step: int) -> None:
    address = start_server().address
    with Peer(address, b"") as peer:
        data = (
            PREFACE
            + encode_frame(SETTINGS, 0, 0)
            + peer.encode_call(1, b"one")
            + peer.encode_call(3, b"three" * 100)
        )
        for position in range(0, len(data), step):
            peer.send(data[position : position + step])
        assert peer.read_response(1)[0] == encode_message(b"one")
        assert peer.read_response(3)[0] == encode_message(b"three" * 100)


def test_heads_may_have_continuations_padding_and_priority(start_server: StartServer) -> None:
    with Peer(start_server().address) as peer:
        block = peer.encoder.encode(request_fields())
        first = bytes((7,)) + b"\0\0\0\0\x10" + block[:5] + bytes(7)
        peer.send(
            encode_frame(HEADERS, PADDED | PRIORITY_FLAG, 1, first),
            encode_frame(CONTINUATION, 0, 1, block[5:9]),
        )
        peer.send(
            encode_frame(CONTINUATION, END_HEADERS, 1, block[9:]), encode_frame(PRIORITY, 0, 1, bytes(5))
        )
        body = encode_message(b"padded")
        peer.send(
            encode_frame(DATA, PADDED, 1, b"\x03" + body[:7] + b"..."),
            encode_frame(DATA, 0, 1),
            encode_frame(99, 0, 1, b"?"),
        )
        peer.send(encode_frame(DATA, PADDED | END_STREAM, 1, b"\x00" + body[7:]))
        data, trailers = peer.read_response(1)
        assert (data, trailers["grpc-status"]) == (body, "0")


def test_small_windows_of_the_peer_are_respected(start_server: StartServer) -> None:
    """h2 raises on any frame that violates a window, a setting or a stream's state."""
    host, _, port = start_server().address.partition(":")
    data = encode_message(b"0123456789" * 30_000)
    settings = {h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1000}
    peer = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        peer.initiate_connection()
        peer.update_settings(settings)
        sock.sendall(peer.data_to_send())
        started, received, ended, sent = False, b"", False, 0
        while not ended:
            for event in peer.receive_data(sock.recv(1 << 16)):
                if (
                    isinstance(event, h2.events.SettingsAcknowledged)
                    and event.changed_settings
                    and not started
                ):
                    started = True
                    peer.send_headers(1, request_fields())
                elif isinstance(event, h2.events.DataReceived):
                    received += event.data
                    peer.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                    # More data is in transit, so the window is negative for a while.
                    if settings and len(received) > 100_000:
                        peer.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 300})
                        settings = {}
                ended = ended or isinstance(event, h2.events.StreamEnded)
            while started and sent < len(data) and (window := peer.local_flow_control_window(1)):
                part = data[sent : sent + min(window, 16_384)]
                sent += len(part)
                peer.send_data(1, part, end_stream=sent == len(data))
            sock.sendall(peer.data_to_send())
    assert received == data


def test_silent_peers_are_pinged_and_then_disconnected(start_server: StartServer) -> None:
    server = start_server(keepalive_interval=0.5)  # seconds; a peer paused for as long counts as silent
    with Peer(server.address, b"") as silent:
        assert list(silent.frames()) == []
    with Peer(server.address) as unresponsive:
        unresponsive.send(unresponsive.encode_call(1, b"", "Wait"))
        assert unresponsive.wait_for(PING)
        assert server.cancelled.wait(60)
        assert unresponsive.read_goaway() == -1
    with grpc.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = channel.unary_unary("/test.Test/Wait")
        assert call(b"1.3", timeout=60) == b"late"


BLOCK = hpack.Encoder().encode(request_fields())
CALL = encode_frame(HEADERS, END_HEADERS, 1, BLOCK)
UNKNOWN_METHOD = b"\x83\x86\x04\x06/guess\x0f\x10\x10application/grpc"  # POST, http, and literals
ERRORS = {
    "no preface": (PROTOCOL_ERROR, None),
    "no settings": (PROTOCOL_ERROR, encode_frame(PING, 0, 0, bytes(8))),
    "an oversized frame": (FRAME_SIZE_ERROR, struct.pack(">I", (1 << 24) - 1 << 8)[:4] + bytes(5)),
    "data on an idle stream": (PROTOCOL_ERROR, encode_frame(DATA, 0, 1, b"x")),
    "data on the connection": (PROTOCOL_ERROR, encode_frame(DATA, 0, 0, b"x")),
    "an even stream": (PROTOCOL_ERROR, encode_frame(HEADERS, END_HEADERS, 2, BLOCK)),
    "an invalid table index": (COMPRESSION_ERROR, encode_frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff")),
    "a truncated block": (COMPRESSION_ERROR, encode_frame(HEADERS, END_HEADERS, 1, BLOCK[:-1])),
    "priority too short": (FRAME_SIZE_ERROR, encode_frame(HEADERS, END_HEADERS | PRIORITY_FLAG, 1, b"abc")),
    "more padding than frame": (PROTOCOL_ERROR, encode_frame(HEADERS, END_HEADERS | PADDED, 1, b"\x09abc")),
    "a frame within a block": (
        PROTOCOL_ERROR,
        encode_frame(HEADERS, 0, 1, BLOCK[:5]) + encode_frame(PING, 0, 0, bytes(8)),
    ),
    "a continuation without headers": (PROTOCOL_ERROR, encode_frame(CONTINUATION, END_HEADERS, 1, BLOCK)),
    "a reset of an idle stream": (PROTOCOL_ERROR, encode_frame(RST_STREAM, 0, 1, bytes(4))),
    "a reset too short": (FRAME_SIZE_ERROR, CALL + encode_frame(RST_STREAM, 0, 1, bytes(3))),
    "settings too short": (FRAME_SIZE_ERROR, encode_frame(SETTINGS, 0, 0, bytes(5))),
    "settings on a stream": (PROTOCOL_ERROR, encode_frame(SETTINGS, 0, 1)),
    "an oversized window in the settings": (
        FLOW_CONTROL_ERROR,
        encode_frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 1 << 31)),
    ),
    "an invalid frame size in the settings": (
        PROTOCOL_ERROR,
        encode_frame(SETTINGS, 0, 0, struct.pack(">HI", 5, 1)),
    ),
    "a push promise": (PROTOCOL_ERROR, encode_frame(PUSH_PROMISE, END_HEADERS, 1, bytes(4) + BLOCK)),
    "a short ping": (FRAME_SIZE_ERROR, encode_frame(PING, 0, 0, bytes(7))),
    "a goaway on a stream": (PROTOCOL_ERROR, encode_frame(GOAWAY, 0, 1, bytes(8))),
    "a priority on stream 0": (PROTOCOL_ERROR, encode_frame(PRIORITY, 0, 0, bytes(5))),
    "a window update of 0": (PROTOCOL_ERROR, encode_frame(WINDOW_UPDATE, 0, 0, bytes(4))),
    "an overflowing window": (
        FLOW_CONTROL_ERROR,
        encode_frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 2**31 - 1)),
    ),
    "a window update on an idle stream": (
        PROTOCOL_ERROR,
        encode_frame(WINDOW_UPDATE, 0, 7, struct.pack(">I", 1)),
    ),
    "a short window update": (FRAME_SIZE_ERROR, encode_frame(WINDOW_UPDATE, 0, 0, bytes(3))),
    "oversized headers": (
        ENHANCE_YOUR_CALM,
        encode_frame(HEADERS, END_HEADERS, 1, b"\x40\x01a\x7f\xa1\x1e" + b"b" * 4000 + b"\xbe" * 60),
    ),
    "an oversized block": (
        ENHANCE_YOUR_CALM,
        encode_frame(HEADERS, 0, 1, BLOCK) + encode_frame(CONTINUATION, 0, 1, bytes(60_000)) * 2,
    ),
    "empty continuations": (
        ENHANCE_YOUR_CALM,
        encode_frame(HEADERS, 0, 1, BLOCK) + encode_frame(CONTINUATION, 0, 1) * 10_001,
    ),
    "pings": (ENHANCE_YOUR_CALM, encode_frame(PING, 0, 0, bytes(8)) * 10_001),
    "settings": (ENHANCE_YOUR_CALM, encode_frame(SETTINGS, 0, 0) * 10_001),
    "empty data": (ENHANCE_YOUR_CALM, CALL + encode_frame(DATA, 0, 1) * 10_001),
    "unknown frames": (ENHANCE_YOUR_CALM, encode_frame(200, 0, 0) * 10_001),
    "reset calls": (
        ENHANCE_YOUR_CALM,
        b"".join(
            encode_frame(
                HEADERS, END_HEADERS, i, BLOCK if i == 1 else hpack.Encoder().encode(request_fields())
            )
            + encode_frame(RST_STREAM, 0, i, bytes(4))
            for i in range(1, 20_007, 2)
        ),
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_protocol_errors_close_the_connection_with_a_code(start_server: StartServer, case: str) -> None:
    address = start_server().address
    code, frames = ERRORS[case]
    preface = (
        PREFACE
        if case == "no settings"
        else b"no preface of anything"
        if frames is None
        else PREFACE + encode_frame(SETTINGS, 0, 0)
    )
    with Peer(address, preface) as peer:
        with contextlib.suppress(OSError):  # the server closes before all is sent
            peer.send(frames or b"")
        assert peer.read_goaway() in (code, -1 if len(frames or b"") > 1 << 17 else code)
    assert call_method(address) == b"x"


STREAM_ERRORS = {
    "a window update of 0": (PROTOCOL_ERROR, encode_frame(WINDOW_UPDATE, 0, 1, bytes(4))),
    "an overflowing window": (
        FLOW_CONTROL_ERROR,
        encode_frame(WINDOW_UPDATE, 0, 1, struct.pack(">I", 2**31 - 1)),
    ),
    "data after the end": (
        STREAM_CLOSED,
        encode_frame(DATA, END_STREAM, 1, encode_message(b"")) + encode_frame(DATA, 0, 1, b"x"),
    ),
    "trailers without END_STREAM": (PROTOCOL_ERROR, encode_frame(HEADERS, END_HEADERS, 1, BLOCK)),
}


@pytest.mark.parametrize("case", STREAM_ERRORS)
def test_stream_errors_reset_only_that_stream(start_server: StartServer, case: str) -> None:
    server = start_server()
    code, frames = STREAM_ERRORS[case]
    with Peer(server.address) as peer:
        peer.send(peer.encode_call(1, None, "Wait"), frames)
        assert peer.read_response(1)[1] == {"reset": str(code)}
        peer.send(peer.encode_call(3))
        assert peer.read_response(3)[0] == encode_message(b"x")


def test_malformed_heads_reset_the_stream(start_server: StartServer) -> None:
    with Peer(start_server().address) as peer:
        for i, invalid in enumerate(
            ({":path": ""}, {"connection": "close"}, {"Upper": "x"}, {"grpc-timeout": "1 hour"})
        ):
            head = [field for field in request_fields() if field[0] not in invalid] + [
                field for field in invalid.items() if field[1]
            ]
            peer.send(encode_frame(HEADERS, END_HEADERS, 2 * i + 1, peer.encoder.encode(head)))
            assert peer.read_response(2 * i + 1)[1] == {"reset": str(PROTOCOL_ERROR)}, invalid
        peer.send(peer.encode_call(99))
        assert peer.read_response(99)[0] == encode_message(b"x")


def test_streams_over_the_announced_limit_are_refused(start_server: StartServer) -> None:
    server = start_server(max_concurrent_streams=100)
    with Peer(server.address) as peer:
        peer.send(*[peer.encode_call(2 * i + 1, b"", "Wait") for i in range(101)])
        assert peer.read_response(201)[1] == {"reset": str(REFUSED_STREAM)}


def test_memory_is_bounded_while_a_peer_does_not_read(start_server: StartServer) -> None:
    address = start_server().address
    before = psutil.Process().memory_info().rss
    with Peer(address) as peer:
        peer.socket.settimeout(0.5)
        with pytest.raises(OSError):  # the server stops reading, or closes after too many rejections
            for number in range(1, 4_000_000, 2000):  # 70 MB: twice the kernel's buffers of a connection
                frames = [
                    encode_frame(HEADERS, END_HEADERS | END_STREAM, number + 2 * i, UNKNOWN_METHOD)
                    for i in range(1000)
                ]
                peer.send(*frames)
        assert call_method(address) == b"x"
    assert psutil.Process().memory_info().rss - before < 60 << 20


class FakeTransport(asyncio.Transport):
    """A transport without a socket that records what is written."""

    def __init__(self, peer: tuple[str, int] = ("127.0.0.1", 5000)) -> None:
        super().__init__({"peername": peer})
        self.written, self.closed = b"", False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close


@pytest.mark.parametrize(("host", "expected"), [("127.0.0.1", "127.0.0.1:5000"), ("::1", "[::1]:5000")])
def test_peer_is_address_and_port(host: str, expected: str) -> None:
    async def main() -> str:
        connection = EchoServer(Http2Limits()).server._create_connection()
        connection.connection_made(FakeTransport((host, 5000)))
        connection.connection_lost(None)
        return connection.peer

    assert asyncio.run(main()) == expected


@given(
    st.lists(
        st.tuples(st.integers(0, 11), st.integers(0, 255), st.integers(0, 7), st.binary(max_size=40)),
        max_size=30,
    )
)
def test_arbitrary_frames_raise_only_protocol_errors(frames: list[tuple[int, int, int, bytes]]) -> None:
    """After any frames nothing else is raised, and a connection that is open still answers pings."""

    async def main() -> None:
        errors: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
        server = EchoServer(Http2Limits())
        connection, transport = server.server._create_connection(), FakeTransport()
        connection.connection_made(transport)
        connection.data_received(PREFACE + encode_frame(SETTINGS, 0, 0) + CALL)
        for kind, flags, stream, body in frames:
            if not transport.closed:
                connection.data_received(encode_frame(kind, flags, stream, body))
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        if not transport.closed and not connection._headers.partial:
            connection.data_received(encode_frame(PING, 0, 0, b"ping me!"))
            await asyncio.sleep(0)
            assert transport.written.endswith(encode_frame(PING, ACK, 0, b"ping me!"))
        connection.connection_lost(None)
        await asyncio.sleep(0)
        assert not errors and not server.server._calls and not server.server._connections

    logging.getLogger("asyncio").setLevel(logging.WARNING)
    asyncio.run(main())
