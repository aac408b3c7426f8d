"""Refused streams, long header blocks and empty messages: what a peer may send without progress."""

from __future__ import annotations

import contextlib
import struct
import time
from functools import cache

import grpc
import hpack
import pytest

from serve_app.http2.connection import Http2Connection
from serve_app.http2.frames import (
    ACK,
    CANCEL,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    GOAWAY,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    encode_frame,
)
from serve_app.http2.rpc import RpcContext
from tests.support.http2_peer import EchoServer, Peer, StartServer, encode_message, request_fields

pytestmark = pytest.mark.integration


def malformed_head(stream: int) -> bytes:
    return encode_frame(HEADERS, END_HEADERS, stream, b"\x83")  # :method POST, and no path


def find_connection(server: EchoServer) -> Http2Connection:
    [connection] = server.server._connections
    return connection


def synchronize(peer: Peer) -> None:
    """Wait until the server has processed all frames."""
    peer.send(encode_frame(PING, 0, 0, b"wait for"))
    while peer.wait_for(PING)[1] != b"wait for":
        pass


@pytest.mark.parametrize("reason", ["malformed", "too many streams", "shutting down"])
def test_refused_streams_are_forgotten(start_server: StartServer, reason: str) -> None:
    server = start_server(max_connection_age=0.1 if reason == "shutting down" else 0.0)
    with Peer(server.address) as peer:
        count = 128 if reason == "too many streams" else 1
        peer.send(*[peer.encode_call(2 * i + 1, None) for i in range(count)])
        if reason == "shutting down":
            peer.send(encode_frame(PING, ACK, 0, peer.wait_for(PING)[1]))  # no further streams
            peer.wait_for(GOAWAY)
        for number in range(2 * count + 1, 2 * count + 3_001, 2):
            peer.send(malformed_head(number) if reason == "malformed" else peer.encode_call(number, None))
        synchronize(peer)
        connection = find_connection(server)
        assert connection._last_stream >= 3_001
        assert 0 < len(connection._closed) <= 512


def test_refused_streams_do_not_keep_a_connection(start_server: StartServer) -> None:
    with (
        Peer(start_server(max_connection_idle=0.2, keepalive_interval=0.2).address) as peer,
        contextlib.suppress(ConnectionError),  # the server closes a second after its GOAWAY
    ):
        for i in range(1_000):
            peer.send(malformed_head(2 * i + 1))
            if next(peer.frames(), (GOAWAY,))[0] == GOAWAY:
                return
            time.sleep(0.01)
        pytest.fail("the connection is still open")


def encode_long_head(stream: int, size: int, method: str = "Echo") -> bytes:
    """Return a head with ``size`` characters of metadata, nearly twice as many bytes."""
    return encode_frame(HEADERS, END_HEADERS, stream, _encode_long_block(size, method))


@cache
def _encode_long_block(size: int, method: str) -> bytes:
    encoder = hpack.Encoder()
    encoder.header_table_size = 0  # the blocks are independent of each other
    # A character of 15 bits in Huffman's code.
    return encoder.encode(request_fields(method, metadata="{" * size), huffman=True)


@pytest.mark.parametrize("kind", ["unknown method", "no key", "trailers", "reset"])
def test_long_header_blocks_count_by_their_size(start_server: StartServer, kind: str) -> None:
    server = start_server()
    if kind == "no key":
        server.server._authorize = refuse
    size = 7_000 if kind == "reset" else 30_000
    count = 0
    with Peer(server.address) as peer, contextlib.suppress(OSError):
        peer.wait_for(SETTINGS)
        while count < 100:
            number = 2 * count + 1
            head = encode_long_head(number, size, "None" if kind == "unknown method" else "Echo")
            if kind == "trailers":
                peer.send(encode_long_head(number, 1))
            peer.send(head)
            if kind == "reset":
                peer.send(encode_frame(RST_STREAM, 0, number, struct.pack(">I", CANCEL)))
            count += 1
            if find_goaway(peer):
                break
    assert count < 30


def find_goaway(peer: Peer) -> bool:
    """Return whether the server closes the connection, once it has processed all frames."""
    peer.send(encode_frame(PING, 0, 0, b"wait for"))
    for kind, _, _, body in peer.frames():
        if kind == GOAWAY:
            assert int.from_bytes(body[4:8], "big") == ENHANCE_YOUR_CALM
            return True
        if kind == PING and body == b"wait for":
            return False
    return True


def refuse(path: str, context: RpcContext) -> None:
    context.send_status(grpc.StatusCode.PERMISSION_DENIED)


def test_calls_with_long_metadata_are_answered(start_server: StartServer) -> None:
    """Forty at a time, on one connection, such as those with a large token."""
    with Peer(start_server().address) as peer:
        numbers = range(1, 81, 2)
        peer.send(*[encode_long_head(number, 7_000) for number in numbers])
        for number in numbers:
            peer.send(encode_frame(DATA, END_STREAM, number, encode_message(b"x")))
        assert {peer.read_response(number)[0] for number in numbers} == {encode_message(b"x")}


def test_refused_calls_earn_no_credit(start_server: StartServer) -> None:
    """A client without a key could pay for resets with them."""
    server = start_server()
    server.server._authorize = refuse
    with Peer(server.address) as peer:
        block = peer.encoder.encode(request_fields())
        synchronize(peer)
        before = find_connection(server)._rate.level
        for number in range(1, 201, 2):
            peer.send(encode_frame(HEADERS, END_HEADERS | END_STREAM, number, block))
        synchronize(peer)
        assert find_connection(server)._rate.level >= before + 100


def test_empty_messages_of_a_stream_of_requests_count(start_server: StartServer) -> None:
    """Their sender waits as that of large messages, while the method takes none."""
    server = start_server()
    with Peer(server.address) as peer:
        parts = [encode_frame(DATA, 0, 1, encode_message(b"") * 3_200)] * 4
        peer.send(peer.encode_call(1, None, "Ignore"), *parts)
        synchronize(peer)
        call = next(iter(server.server._calls))
        assert call._stream.receive_window < 65_536 // 2
        assert server.server.budget.used > 4 * 3_200 * 32
