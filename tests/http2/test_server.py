"""Calls: statuses, deadlines, cancellation, streams and shutdown."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import time
from typing import Any

import grpc
import pytest

from serve_app.http2.frames import (
    ACK,
    CANCEL,
    DATA,
    END_HEADERS,
    END_STREAM,
    FLOW_CONTROL_ERROR,
    GOAWAY,
    HEADERS,
    PING,
    RST_STREAM,
    encode_frame,
)
from serve_app.http2.limits import Http2Limits
from tests.support.http2_peer import EchoServer, Peer, StartServer, call_method, encode_message


def test_statuses_of_aborted_failed_and_unknown_methods(
    start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    address = start_server().address
    with pytest.raises(grpc.RpcError) as raised:
        call_method(address, b"abort")
    assert raised.value.code() is grpc.StatusCode.ABORTED
    assert len(raised.value.details()) > 200
    assert set(raised.value.details().split()[:-1]) == {"ünsäglich"}  # cut between characters
    with pytest.raises(grpc.RpcError) as raised:
        call_method(address, b"fail")
    assert (raised.value.code(), raised.value.details()) == (
        grpc.StatusCode.UNKNOWN,
        "A fault of this server.",
    )
    assert "RuntimeError: broken" in caplog.text
    with pytest.raises(grpc.RpcError) as raised:
        call_method(address, method="Guess")
    assert raised.value.details() == "There is no method /test.Test/Guess here."


def test_other_protocols_get_an_http_error(start_server: StartServer) -> None:
    address = start_server().address
    with Peer(address, b"GET / HTTP/1.1\r\nHost: here\r\n\r\n") as peer:
        data = b"".join(iter(lambda: peer.socket.recv(4096), b""))
    assert data.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert data.endswith(b"This port serves gRPC over HTTP/2; plain HTTP has its own port.\n")
    with Peer(address) as peer:
        get = [(":method", "GET"), (":scheme", "http"), (":path", "/")]
        for i, (head, status) in enumerate(
            ((get, "405"), ([(":method", "POST"), *get[1:], ("content-type", "application/json")], "415"))
        ):
            number = 2 * i + 1
            peer.send(encode_frame(HEADERS, END_HEADERS | END_STREAM, number, peer.encoder.encode(head)))
            assert peer.read_response(number)[1][":status"] == status


def test_deadlines_cancel_calls(start_server: StartServer) -> None:
    server = start_server()
    with Peer(server.address) as peer:
        peer.send(peer.encode_call(1, b"", "Wait", grpc_timeout="50m"))
        assert peer.read_response(1)[1]["grpc-status"] == "4"
    assert server.cancelled.wait(60)


@pytest.mark.parametrize("end", ["reset", "disconnect"])
def test_calls_are_cancelled_with_their_caller(start_server: StartServer, end: str) -> None:
    server = start_server()
    with Peer(server.address) as peer:
        peer.send(peer.encode_call(1, b"", "Wait"))
        assert server.waiting.wait(60)
        if end == "reset":
            peer.send(encode_frame(RST_STREAM, 0, 1, struct.pack(">I", CANCEL)))
            assert server.cancelled.wait(60)
            peer.send(peer.encode_call(3))
            assert peer.read_response(3)[0] == encode_message(b"x")
    assert server.cancelled.wait(60)


def event_loop(server: EchoServer) -> asyncio.AbstractEventLoop:
    """Return the event loop that the server runs on."""
    [listener] = server.server._listeners
    return listener.get_loop()


def test_shutdown_waits_for_calls_in_progress(start_server: StartServer, grpc_listening: Any) -> None:
    server = EchoServer(Http2Limits())
    with grpc_listening(lambda: server.server) as address, Peer(address) as peer:
        peer.send(peer.encode_call(1, b"released", "Wait"), peer.encode_call(3, b"", "Wait"))
        assert server.waiting.wait(60)
        loop = event_loop(server)
        stopping = asyncio.run_coroutine_threadsafe(server.server.stop(3.0), loop)
        assert peer.wait_for(GOAWAY)[1] == struct.pack(">II", 2**31 - 1, 0)
        peer.send(encode_frame(PING, ACK, 0, peer.wait_for(PING)[1]))
        assert peer.wait_for(GOAWAY)[1] == struct.pack(">II", 3, 0)
        peer.send(peer.encode_call(5))  # too late: it is ignored
        server.released.set()
        assert peer.read_response(1)[0] == encode_message(b"late")
        assert peer.read_response(3)[1]["grpc-status"] == "14"
        stopping.result(60)
        assert list(peer.frames()) == []
        with pytest.raises(OSError):
            Peer(address)


def test_shutdown_closes_connections_without_a_handshake(
    start_server: StartServer, grpc_listening: Any
) -> None:
    server = EchoServer(Http2Limits())
    with grpc_listening(lambda: server.server) as address, Peer(address) as peer:
        peer.send(peer.encode_call(1, b"", "Wait"))
        assert server.waiting.wait(60)
        host, port = address.split(":")
        with socket.create_connection((host, int(port))) as silent:
            loop = event_loop(server)
            while len(server.server._connections) < 2:
                time.sleep(0.01)
            stopping = asyncio.run_coroutine_threadsafe(server.server.stop(0.2), loop)
            assert silent.recv(100) == b"", "the first frame of a server is SETTINGS, not GOAWAY"
            stopping.result(60)


def test_the_maximum_connection_age_loses_no_call(start_server: StartServer) -> None:
    address = start_server(max_connection_age=0.05).address
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = channel.unary_unary("/test.Test/Echo")
        end = time.monotonic() + 0.6
        count = 0
        while count < 11 or time.monotonic() < end:
            assert call(b"x", timeout=60) == b"x"
            count += 1


def test_flow_control_limits_senders_to_methods_that_do_not_read(start_server: StartServer) -> None:
    server = start_server()
    with Peer(server.address) as peer:
        peer.send(peer.encode_call(1, None, "Ignore"))
        assert server.waiting.wait(60)
        data = encode_frame(DATA, 0, 1, encode_message(bytes(16_000)))
        peer.send(data * 150)  # more than the buffer of a method plus its window, which is not renewed
        assert peer.read_response(1)[1] == {"reset": str(FLOW_CONTROL_ERROR)}


def test_long_streams_are_complete_in_both_directions(start_server: StartServer) -> None:
    address = start_server().address
    with grpc.insecure_channel(address) as channel:
        sent = (bytes(random.Random(i).randrange(50_000)) for i in range(300))
        assert channel.stream_unary("/test.Test/Count")(sent, timeout=60) == b"300"
        responses = channel.unary_stream("/test.Test/Many")(b"200", timeout=60)
        assert [response[:3] for response in responses] == [(b"%d" % i * 3)[:3] for i in range(200)]
