"""Limits of the gRPC port: timeouts, buffered bytes, waiting calls, and frames without progress."""

from __future__ import annotations

import contextlib
import gc
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from serve_app.http2 import server as http2_server
from serve_app.http2.connection import Http2Connection
from serve_app.http2.frames import (
    CANCEL,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    encode_frame,
)
from serve_app.http2.rpc import RpcContext
from tests.support.http2_peer import (
    EchoServer,
    Peer,
    StartServer,
    call_method,
    encode_message,
    request_fields,
)
from tests.support.requirements import needs_program

pytestmark = [pytest.mark.integration, pytest.mark.slow]

MIB = 1 << 20


def start_message(size: int) -> bytes:
    """Return the first bytes of a message of ``size`` bytes."""
    return struct.pack(">BI", 0, size) + bytes(16_000)


def read_status(peer: Peer, stream: int) -> str:
    return peer.read_response(stream)[1]["grpc-status"]


def read_goaway(peer: Peer) -> int:
    """Return the code of the GOAWAY; the connection may be reset before all is sent."""
    with contextlib.suppress(ConnectionError):
        return peer.read_goaway()
    return ENHANCE_YOUR_CALM


# Timeouts


@pytest.mark.parametrize("message", [b"", start_message(MIB)], ids=["none", "unfinished"])
def test_a_call_without_its_message_ends(start_server: StartServer, message: bytes) -> None:
    server = start_server(message_timeout=0.3)
    with Peer(server.address) as peer:
        peer.send(peer.encode_call(1, None))
        if message:
            peer.send(encode_frame(DATA, 0, 1, message))
        trailers = peer.read_response(1)[1]
        assert trailers["grpc-status"] == "4"
        assert trailers["grpc-message"] == "No message has come in grpc.message_timeout, 0.3 seconds."
        peer.send(peer.encode_call(3))
        assert peer.read_response(3)[0] == encode_message(b"x")
    assert server.server.budget.used == 0


def test_an_idle_stream_of_requests_ends(start_server: StartServer) -> None:
    with Peer(start_server(stream_idle_timeout=0.3).address) as peer:
        peer.send(peer.encode_call(1, None, "Count"), encode_frame(DATA, 0, 1, encode_message(b"x")))
        trailers = peer.read_response(1)[1]
        assert "grpc.stream_idle_timeout" in trailers["grpc-message"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        PREFACE[:10],
        PREFACE,
        PREFACE + encode_frame(SETTINGS, 0, 0) + encode_frame(HEADERS, 0, 1, b"\x83"),
        PREFACE + encode_frame(SETTINGS, 0, 0) + encode_frame(HEADERS, END_HEADERS, 1, b"\x83")[:9],
    ],
    ids=["no preface", "half of the preface", "no SETTINGS", "no CONTINUATION", "half of a frame"],
)
def test_an_unfinished_handshake_or_header_block_closes_the_connection(
    start_server: StartServer, data: bytes
) -> None:
    with Peer(start_server(header_timeout=0.3).address, data) as peer:
        assert peer.read_goaway() == ENHANCE_YOUR_CALM


def test_slow_parts_of_a_header_block_share_one_timeout(start_server: StartServer) -> None:
    with Peer(start_server(header_timeout=0.5).address) as peer:
        peer.send(encode_frame(HEADERS, 0, 1, b"\x83"))
        with contextlib.suppress(OSError):
            for _ in range(100):
                peer.send(encode_frame(CONTINUATION, 0, 1))
                time.sleep(0.05)
            pytest.fail("the connection is still open")


def test_a_finished_header_block_has_no_timeout(start_server: StartServer) -> None:
    with Peer(start_server(header_timeout=0.2).address) as peer:
        block = peer.encoder.encode(request_fields("Wait"))
        peer.send(encode_frame(HEADERS, 0, 1, block[:5]))
        peer.send(encode_frame(CONTINUATION, END_HEADERS, 1, block[5:]))
        peer.send(encode_frame(DATA, END_STREAM, 1, encode_message(b"0.6")))
        assert peer.read_response(1)[0] == encode_message(b"late")


def test_a_response_that_the_client_does_not_read_is_reset(start_server: StartServer) -> None:
    server = start_server(send_timeout=0.3)
    closed_window = PREFACE + encode_frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 0))
    with Peer(server.address, closed_window) as peer:
        peer.send(peer.encode_call(1, b"x" * 1000))
        assert peer.read_response(1)[1] == {"reset": str(CANCEL)}
    assert server.server.budget.used == 0


def test_a_connection_without_calls_ends_gracefully(start_server: StartServer) -> None:
    server = start_server(max_connection_idle=0.2, keepalive_interval=0.5)
    with Peer(server.address) as peer:
        peer.send(peer.encode_call(1, b"0.7", "Wait"))
        assert peer.read_response(1)[0] == encode_message(b"late")
        assert peer.wait_for(GOAWAY)[1][:4] == struct.pack(">I", 2**31 - 1)


# Buffered bytes


def test_messages_over_the_budget_wait_or_are_refused(start_server: StartServer) -> None:
    """One connection holds half of the budget at most, and all room returns when its calls end."""
    server = start_server(max_message_size=2 * MIB, max_buffered_bytes=8 * MIB, max_concurrent_streams=100)
    budget = server.server.budget
    with Peer(server.address) as peer:
        for i in range(90):  # each of them may send 64 KiB at once: together 5.6 MiB
            peer.send(peer.encode_call(2 * i + 1, None))
            peer.send(*[encode_frame(DATA, 0, 2 * i + 1, part) for part in unfinished_parts(2 * MIB)])
        assert read_status(peer, 179) == "8"
        assert 2 * MIB < budget.used <= 4 * MIB
        with Peer(server.address) as other:  # another connection still has room
            other.send(other.encode_call(1, None), *unfinished_frames(1, bytes(60_000)))
            assert other.read_response(1)[0] == encode_message(bytes(60_000))
    assert call_method(server.address) == b"x"
    wait_until_released(server)


def unfinished_parts(size: int) -> Iterator[bytes]:
    yield start_message(size)
    yield from [bytes(16_000)] * 3


def unfinished_frames(stream: int, data: bytes) -> list[bytes]:
    message = encode_message(data)
    parts = [message[i : i + 16_000] for i in range(0, len(message), 16_000)]
    frames = [encode_frame(DATA, 0, stream, part) for part in parts[:-1]]
    return [*frames, encode_frame(DATA, END_STREAM, stream, parts[-1])]


def wait_until_released(server: EchoServer) -> None:
    end = time.monotonic() + 30
    while server.server.budget.used and time.monotonic() < end:
        time.sleep(0.01)
    assert server.server.budget.used == 0


def test_concurrent_large_messages_are_received_in_turn(start_server: StartServer) -> None:
    """Sixteen messages, three times as large as the budget, are all answered: flow control delays them."""
    server = start_server(max_message_size=4 * MIB, max_buffered_bytes=16 * MIB)
    data = bytes(3 * MIB)
    with grpc.insecure_channel(server.address) as channel:
        echo = channel.unary_unary("/test.Test/Measure")
        futures = [echo.future(data, timeout=60) for _ in range(16)]
        assert [future.result() for future in futures] == [b"%d" % len(data)] * 16
    wait_until_released(server)


def test_messages_larger_than_the_budget_are_received_one_at_a_time(start_server: StartServer) -> None:
    server = start_server(max_message_size=8 * MIB, max_buffered_bytes=4 * MIB)
    data = bytes(6 * MIB)
    with grpc.insecure_channel(server.address) as channel:
        measure = channel.unary_unary("/test.Test/Measure")
        futures = [measure.future(data, timeout=60) for _ in range(4)]
        assert [future.result() for future in futures] == [b"%d" % len(data)] * 4
    wait_until_released(server)
    assert server.server.large_messages.used == 0


def test_undelivered_responses_count(start_server: StartServer) -> None:
    server = start_server(max_message_size=MIB, max_buffered_bytes=4 * MIB)
    closed_window = PREFACE + encode_frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 0))
    with Peer(server.address, closed_window) as peer:
        peer.send(*[peer.encode_call(2 * i + 1, b"1000000", "Make") for i in range(8)])
        assert read_status(peer, 15) == "8"
        assert server.server.budget.used <= 4 * MIB
        assert call_method(server.address) == b"x"
    wait_until_released(server)


def test_unfinished_header_blocks_count(start_server: StartServer) -> None:
    server = start_server()
    with Peer(server.address) as peer:
        peer.send(encode_frame(HEADERS, 0, 1, bytes(16_000)), encode_frame(CONTINUATION, 0, 1, bytes(16_000)))
        deadline = time.monotonic() + 30
        while server.server.budget.used < 32_000 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.server.budget.used == 32_000
    wait_until_released(server)


# Waiting calls


def test_calls_without_a_message_yield_to_others(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2_server, "_MIN_STALL", 3600.0)
    server = start_server(max_concurrent_calls=10)
    with Peer(server.address) as peer:
        peer.send(*[peer.encode_call(2 * i + 1, None) for i in range(10)])
        peer.wait_for(SETTINGS)
        with pytest.raises(grpc.RpcError) as raised:
            call_method(server.address)
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # they are new
        monkeypatch.setattr(http2_server, "_MIN_STALL", 0.1)
        time.sleep(0.2)
        assert call_method(server.address) == b"x"
        assert read_status(peer, 1) == "8"


def test_the_permission_is_checked_before_the_message(start_server: StartServer) -> None:
    def authorize(path: str, context: RpcContext) -> None:
        if "authorization" not in context.headers:
            context.send_status(grpc.StatusCode.PERMISSION_DENIED, f"no key for {path}")

    server = start_server()
    server.server._authorize = authorize
    with Peer(server.address) as peer:
        peer.send(peer.encode_call(1, None), peer.encode_call(3, None, "Count"))
        for stream, method in ((1, "Echo"), (3, "Count")):
            trailers = peer.read_response(stream)[1]
            assert (trailers["grpc-status"], trailers["grpc-message"]) == (
                "7",
                f"no key for /test.Test/{method}",
            )
        peer.send(*unfinished_frames(1, bytes(60_000)))  # what was on its way is discarded
        assert server.server.budget.used == 0
        peer.send(peer.encode_call(5, authorization="Bearer key"))
        assert peer.read_response(5)[0] == encode_message(b"x")


# Frames without progress, between parts of one message that do progress

OPEN_MESSAGE = encode_frame(DATA, 0, 1, start_message(3 * MIB))
PROGRESS = encode_frame(DATA, 0, 1, bytes(300))


def flood(kind: str, peer: Peer) -> Iterator[bytes]:
    frames = {
        "PING": encode_frame(PING, 0, 0, bytes(8)) * 20,
        "SETTINGS": encode_frame(SETTINGS, 0, 0) * 20,
        "WINDOW_UPDATE": encode_frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1)) * 20,
        "PRIORITY": encode_frame(PRIORITY, 0, 3, bytes(5)) * 20,
        "empty DATA": encode_frame(DATA, 0, 1) * 20,
        "DATA of one byte": encode_frame(DATA, 0, 1, b"x") * 20,
        "unknown frames": encode_frame(99, 0, 0) * 20,
    }
    for i in range(1_000):
        if kind == "calls and resets":
            number = 2 * i + 3
            yield peer.encode_call(number) + encode_frame(RST_STREAM, 0, number, struct.pack(">I", CANCEL))
        elif kind == "CONTINUATION":
            block = peer.encoder.encode(request_fields())
            yield encode_frame(HEADERS, 0, 2 * i + 3, block) + encode_frame(CONTINUATION, 0, 2 * i + 3) * 20
            yield encode_frame(CONTINUATION, END_HEADERS, 2 * i + 3)
            yield encode_frame(DATA, END_STREAM, 2 * i + 3, encode_message(b""))
        elif kind == "streams that the server resets":
            yield peer.encode_call(2 * i + 3, None) + encode_frame(WINDOW_UPDATE, 0, 2 * i + 3, bytes(4))
        else:
            yield frames[kind]
        yield PROGRESS


@pytest.mark.parametrize(
    "kind",
    [
        "PING",
        "SETTINGS",
        "WINDOW_UPDATE",
        "PRIORITY",
        "empty DATA",
        "DATA of one byte",
        "unknown frames",
        "calls and resets",
        "CONTINUATION",
        "streams that the server resets",
    ],
)
def test_floods_close_the_connection_however_they_are_mixed(start_server: StartServer, kind: str) -> None:
    address = start_server().address
    with Peer(address) as peer:
        peer.send(peer.encode_call(1, None), OPEN_MESSAGE)
        with contextlib.suppress(OSError):  # the server closes before all is sent
            for part in flood(kind, peer):
                peer.send(part)
        assert read_goaway(peer) in (ENHANCE_YOUR_CALM, -1)
    assert call_method(address) == b"x"


@pytest.mark.parametrize("kind", ["PING", "CONTINUATION", "calls and resets"])
def test_closed_connections_are_freed_without_garbage_collection(
    start_server: StartServer, kind: str
) -> None:
    server = start_server()
    gc.collect()
    gc.disable()  # a collection comes late: 3,000 connections with 128 KiB each were 290 MB
    try:
        for _ in range(3):
            with Peer(server.address) as peer:
                peer.send(peer.encode_call(1, None), OPEN_MESSAGE)
                with contextlib.suppress(OSError):
                    for part in flood(kind, peer):
                        peer.send(part)
                read_goaway(peer)
        deadline = time.monotonic() + 20
        while any(type(one) is Http2Connection and one._owner is server.server for one in gc.get_objects()):
            assert time.monotonic() < deadline, "a closed connection waits for a collection"
            time.sleep(0.1)
    finally:
        gc.enable()


def test_settings_of_the_largest_size_change_windows_once(start_server: StartServer) -> None:
    """The last value of each setting counts, and an acknowledgement answers each frame."""
    with Peer(start_server().address) as peer:
        entries = b"".join(struct.pack(">HI", 4, 1000 + i) for i in range(63)) + struct.pack(">HI", 4, 5)
        peer.send(encode_frame(SETTINGS, 0, 0, entries), peer.encode_call(1, b"0123456789"))
        assert next(body for kind, _, _, body in peer.frames() if kind == DATA) == bytes(4) + b"\x0a"
        peer.send(encode_frame(WINDOW_UPDATE, 0, 1, struct.pack(">I", 100)))
        assert peer.read_response(1)[0] == b"0123456789"


def test_ordinary_clients_with_many_calls_stay_connected(start_server: StartServer) -> None:
    """4,000 calls on one connection, 400 at a time, are all answered."""
    address = start_server().address
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address, options=options) as channel:
        echo = channel.unary_unary("/test.Test/Echo")
        for _ in range(10):
            futures = [echo.future(b"x", timeout=60) for _ in range(400)]
            assert {future.result() for future in futures} == {b"x"}


@needs_program("h2load")
def test_h2load_completes_all_calls(start_server: StartServer, tmp_path: Path) -> None:
    (tmp_path / "body").write_bytes(encode_message(b"x" * 1000))
    command = ["h2load", "-n", "4000", "-c", "4", "-m", "100", "-d", str(tmp_path / "body")]
    command += ["-H", "content-type: application/grpc", "-H", "te: trailers"]
    url = f"http://{start_server().address}/test.Test/Echo"
    output = subprocess.run([*command, url], capture_output=True, text=True, timeout=120, check=True).stdout
    assert "4000 succeeded, 0 failed, 0 errored, 0 timeout" in output
