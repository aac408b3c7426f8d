"""HTTP/2 as the gRPC ports speak it: with a strict peer, with frames cut anywhere, and with peers that mean harm."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import logging
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
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

from serve_app.doors.grpc.frames import (
    ACK,
    CANCEL,
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
    PRIORITISED,
    PRIORITY,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    WINDOW_UPDATE,
    frame,
)
from serve_app.doors.grpc.headers import Reader
from serve_app.doors.grpc.messages import Messages, Refused
from serve_app.doors.grpc.server import Context, Limits, Server

Made = Callable[..., "Served"]


class Served:
    """A server with four methods; ``cancelled`` is set when a call of Wait is."""

    def __init__(self, limits: Limits) -> None:
        self.server = Server(limits)
        self.address = ""
        self.waiting = threading.Event()
        self.cancelled = threading.Event()
        many = grpc.unary_stream_rpc_method_handler(self._many)
        methods = {
            "Echo": grpc.unary_unary_rpc_method_handler(self._echo),
            "Wait": grpc.unary_unary_rpc_method_handler(self._wait),
            "Many": many,
            "Shut": grpc.stream_stream_rpc_method_handler(self._shut),
            "Count": grpc.stream_unary_rpc_method_handler(self._count),
        }
        self.server.add_registered_method_handlers("test.Test", methods)

    async def _echo(self, data: bytes, context: Context) -> bytes:
        if data == b"refuse":
            await context.abort(grpc.StatusCode.ABORTED, "ünsäglich " * 1000)
        if data == b"break":
            raise RuntimeError("broken")
        return data

    async def _wait(self, data: bytes, context: Context) -> bytes:
        self.waiting.set()
        try:
            await asyncio.sleep(30 if not data else float(data))
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return b"late"

    async def _many(self, data: bytes, context: Context) -> None:
        for i in range(int(data)):
            await context.write(b"%d" % i * 1000)

    async def _shut(self, requests: Any, context: Context) -> None:
        await self._wait(b"", context)

    async def _count(self, requests: Any, context: Context) -> bytes:
        return b"%d" % len([each async for each in requests])


@pytest.fixture
def served(grpc_listening: Any) -> Iterator[Made]:
    with contextlib.ExitStack() as stack:

        def make(**limits: Any) -> Served:
            made = Served(Limits(**limits))
            made.address = stack.enter_context(grpc_listening(lambda: made.server))
            return made

        yield make


def say(address: str, data: bytes = b"x", method: str = "Echo", **more: Any) -> bytes:
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        return channel.unary_unary(f"/test.Test/{method}")(data, timeout=60, **more)


def message(data: bytes) -> bytes:
    return struct.pack(">BI", 0, len(data)) + data


def fields(method: str = "Echo", **more: str) -> list[tuple[str, str]]:
    head = {":method": "POST", ":scheme": "http", ":path": f"/test.Test/{method}", ":authority": "here"}
    return [
        *head.items(),
        ("content-type", "application/grpc"),
        *[(name.replace("_", "-"), value) for name, value in more.items()],
    ]


class Peer:
    """A client that writes its frames itself."""

    def __init__(self, address: str, hello: bytes = PREFACE + frame(SETTINGS, 0, 0)) -> None:
        host, _, port = address.partition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=60)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.encoder, self.decoder = hpack.Encoder(), hpack.Decoder()
        self._come = b""
        self.socket.sendall(hello)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *frames: bytes) -> None:
        self.socket.sendall(b"".join(frames))

    def call(self, stream: int, data: bytes | None = b"x", method: str = "Echo", **more: str) -> bytes:
        """The frames of a call; without ``data`` only its head, and its end is open."""
        block = self.encoder.encode(fields(method, **more))
        head = frame(HEADERS, END_HEADERS, stream, block)
        return head if data is None else head + frame(DATA, END_STREAM, stream, message(data))

    def frames(self) -> Iterator[tuple[int, int, int, bytes]]:
        """Those that come, until the server hangs up."""
        while True:
            while len(self._come) >= 9:
                size = int.from_bytes(self._come[:3], "big")
                if len(self._come) < 9 + size:
                    break
                kind, flags = self._come[3], self._come[4]
                stream, body = int.from_bytes(self._come[5:9], "big"), self._come[9 : 9 + size]
                self._come = self._come[9 + size :]
                yield kind, flags, stream, body
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:
                return
            if not data:
                return
            self._come += data

    def until(self, kind: int, stream: int = 0) -> tuple[int, bytes]:
        """The flags and the body of the next frame of that kind."""
        for found, flags, number, body in self.frames():
            if found == kind and number == stream:
                return flags, body
        raise AssertionError(f"the server hung up before frame {kind}")

    def answer(self, stream: int) -> tuple[bytes, dict[str, str]]:
        """What came on a stream, and its last fields."""
        data = b""
        for kind, flags, number, body in self.frames():
            assert kind != GOAWAY, body
            if number == stream and kind == RST_STREAM:
                return data, {"reset": str(int.from_bytes(body, "big"))}
            if number == stream and kind == DATA:
                data += body
            if kind == HEADERS:
                last = dict(self.decoder.decode(body))
                if number == stream and flags & END_STREAM:
                    return data, last
        raise AssertionError("the server hung up before the answer was whole")

    def gone(self) -> int:
        """The code of the GOAWAY with which the server hangs up."""
        code = -1
        for kind, _, _, body in self.frames():
            if kind == GOAWAY:
                code = int.from_bytes(body[4:8], "big")
        return code


# What all is well with


@pytest.mark.parametrize("step", [1, 3, 8, 1000])
def test_frames_are_cut_anywhere(served: Made, step: int) -> None:
    address = served().address
    with Peer(address, b"") as peer:
        said = PREFACE + frame(SETTINGS, 0, 0) + peer.call(1, b"one") + peer.call(3, b"three" * 100)
        for place in range(0, len(said), step):
            peer.send(said[place : place + step])
        assert peer.answer(1)[0] == message(b"one")
        assert peer.answer(3)[0] == message(b"three" * 100)


def test_a_head_in_pieces_with_padding_and_priority(served: Made) -> None:
    with Peer(served().address) as peer:
        block = peer.encoder.encode(fields())
        first = bytes((7,)) + b"\0\0\0\0\x10" + block[:5] + bytes(7)
        peer.send(frame(HEADERS, PADDED | PRIORITISED, 1, first), frame(CONTINUATION, 0, 1, block[5:9]))
        peer.send(frame(CONTINUATION, END_HEADERS, 1, block[9:]), frame(PRIORITY, 0, 1, bytes(5)))
        body = message(b"padded")
        peer.send(frame(DATA, PADDED, 1, b"\x03" + body[:7] + b"..."), frame(DATA, 0, 1), frame(99, 0, 1, b"?"))
        peer.send(frame(DATA, PADDED | END_STREAM, 1, b"\x00" + body[7:]))
        data, last = peer.answer(1)
        assert (data, last["grpc-status"]) == (body, "0")


def test_a_strict_peer_with_narrow_windows(served: Made) -> None:
    """h2 raises on any frame that a window, a setting or a stream's state has no room for."""
    host, _, port = served().address.partition(":")
    said = message(b"0123456789" * 30_000)
    narrow = {h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1000}
    peer = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        peer.initiate_connection()
        peer.update_settings(narrow)
        sock.sendall(peer.data_to_send())
        begun, come, ended = False, b"", False
        while not ended:
            for event in peer.receive_data(sock.recv(1 << 16)):
                if isinstance(event, h2.events.SettingsAcknowledged) and event.changed_settings and not begun:
                    begun = True
                    peer.send_headers(1, fields())
                    for place in range(0, len(said), 16_384):
                        peer.send_data(1, said[place : place + 16_384], end_stream=place + 16_384 >= len(said))
                elif isinstance(event, h2.events.DataReceived):
                    come += event.data
                    peer.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                    if narrow and len(come) > 100_000:  # what is under way is more: the window is below 0 for a while
                        peer.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 10})
                        narrow = {}
                ended = ended or isinstance(event, h2.events.StreamEnded)
            sock.sendall(peer.data_to_send())
    assert come == said


@given(st.lists(st.lists(st.tuples(st.sampled_from("abcdef"), st.text("xyz", max_size=30)), max_size=6), max_size=12))
def test_heads_that_are_remembered_mean_what_the_table_says_now(calls: list[list[tuple[str, str]]]) -> None:
    encoder, reader, plain = hpack.Encoder(), Reader(65_536), hpack.Decoder()
    for i, said in enumerate(calls):
        if i == 4:
            encoder.header_table_size = 100
        block = encoder.encode([*fields(), *said])
        expected = {name: value for name, value in plain.decode(block) if name in set("abcdef")}
        assert reader.read(block).headers == expected
        if all(byte & 0x80 for byte in block):  # nothing but what stands in the table, which it leaves as it is
            assert reader.read(block) is reader.read(block)


def test_messages_that_are_compressed(served: Made) -> None:
    address = served(message=10_000).address
    for compression in (grpc.Compression.Gzip, grpc.Compression.Deflate):
        assert say(address, b"0123456789" * 500, compression=compression) == b"0123456789" * 500
    with Peer(address) as peer:
        bomb = gzip.compress(bytes(20_000_000))
        sent = [bomb, b"nonsense", gzip.compress(b"cut")[:-4]]
        for i, data in enumerate(sent):
            head = peer.call(2 * i + 1, None, grpc_encoding="gzip")
            peer.send(
                head, frame(DATA, END_STREAM, 2 * i + 1, struct.pack(">BI", 1, min(len(data), 9_999)) + data[:9_999])
            )
        said = [peer.answer(2 * i + 1)[1] for i in range(len(sent))]
        peer.send(peer.call(9, b"x", grpc_encoding="snappy"))
        said.append(peer.answer(9)[1])
        peer.send(peer.call(11, None), frame(DATA, END_STREAM, 11, struct.pack(">BI", 1, 1) + b"x"))
        said.append(peer.answer(11)[1])
    assert [(last["grpc-status"], last["grpc-message"]) for last in said] == [
        ("8", "The message is inflated and is larger than inference.max_request_size, 10000 bytes."),
        ("13", "The message is not gzip."),
        ("13", "The message's gzip ends too soon."),
        ("12", "Messages may be identity, deflate, gzip, not snappy."),
        ("13", "The message is marked as compressed, and its call names no encoding."),
    ]


@given(
    st.lists(st.tuples(st.booleans(), st.binary(max_size=300).map(lambda data: data * 40)), max_size=6),
    st.lists(st.integers(1, 200), min_size=1, max_size=20),
)
def test_messages_are_the_same_however_they_are_cut(sent: list[tuple[bool, bytes]], cuts: list[int]) -> None:
    framed = [gzip.compress(data) if compressed else data for compressed, data in sent]
    wire = b"".join(
        struct.pack(">BI", compressed, len(data)) + data for (compressed, _), data in zip(sent, framed, strict=True)
    )
    messages, got = Messages("gzip", 100_000), []
    for cut in itertools.cycle(cuts):
        if not wire:
            break
        got += messages.feed(wire[:cut])
        wire = wire[cut:]
        assert messages.partial or wire or len(got) == len(sent)
    assert got == [data for _, data in sent]


def test_a_message_is_inflated_as_it_comes() -> None:
    bomb = gzip.compress(bytes(20_000_000))
    messages = Messages("gzip", 10_000_000)
    assert messages.feed(struct.pack(">BI", 1, len(bomb)) + bomb[: len(bomb) // 4]) == []
    with pytest.raises(Refused, match="is inflated and is larger than inference.max_request_size"):
        messages.feed(bomb[len(bomb) // 4 : -len(bomb) // 4])  # nobody waits for its end


def test_what_is_too_large_names_its_setting(served: Made) -> None:
    address = served(message=1000, answer=100, calls=1).address
    for data, words in (
        (bytes(1001), "The message of 1001 bytes is larger than inference.max_request_size, 1000 bytes."),
        (bytes(101), "The answer of 101 bytes is larger than runtime.max_response_size, 100 bytes."),
    ):
        with pytest.raises(grpc.RpcError) as raised:
            say(address, data)
        assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, words)
    with pytest.raises(grpc.RpcError) as raised:
        say(address, metadata=[("a-token", "x" * 16_500)])
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert say(address) == b"x"


def test_what_a_method_says_and_what_it_does_not(served: Made, caplog: pytest.LogCaptureFixture) -> None:
    address = served().address
    with pytest.raises(grpc.RpcError) as raised:
        say(address, b"refuse")
    assert raised.value.code() is grpc.StatusCode.ABORTED
    assert len(raised.value.details()) > 200
    assert set(raised.value.details().split()[:-1]) == {"ünsäglich"}  # cut, and not in the middle of a letter
    with pytest.raises(grpc.RpcError) as raised:
        say(address, b"break")
    assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.UNKNOWN, "A fault of this server.")
    assert "RuntimeError: broken" in caplog.text
    with pytest.raises(grpc.RpcError) as raised:
        say(address, method="Guess")
    assert raised.value.details() == "There is no method /test.Test/Guess here."


def test_one_message_and_no_other_number(served: Made) -> None:
    with Peer(served().address) as peer:
        peer.send(peer.call(1, None), frame(DATA, END_STREAM, 1))
        peer.send(peer.call(3, None), frame(DATA, 0, 3, message(b"a") + message(b"b")))
        peer.send(peer.call(5, None), frame(DATA, END_STREAM, 5, message(b"abc")[:-1]))
        peer.send(frame(HEADERS, END_HEADERS | END_STREAM, 7, peer.encoder.encode(fields())))
        said = [peer.answer(i)[1] for i in (1, 3, 5, 7)]
    assert [(last["grpc-status"], last["grpc-message"]) for last in said] == [
        ("12", "The method takes one message, and none has come."),
        ("12", "The method takes one message, and more have come."),
        ("13", "The stream ended in the middle of a message."),
        ("12", "The method takes one message, and none has come."),
    ]


def test_whoever_speaks_something_else_is_told(served: Made) -> None:
    address = served().address
    with Peer(address, b"GET / HTTP/1.1\r\nHost: here\r\n\r\n") as old:
        said = b"".join(iter(lambda: old.socket.recv(4096), b""))
    assert said.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert said.endswith(b"This port speaks gRPC, which is HTTP/2; plain HTTP has a port of its own.\n")
    with Peer(address) as peer:
        get = [(":method", "GET"), (":scheme", "http"), (":path", "/")]
        for i, (head, status) in enumerate(
            ((get, "405"), ([(":method", "POST"), *get[1:], ("content-type", "application/json")], "415"))
        ):
            number = 2 * i + 1
            peer.send(frame(HEADERS, END_HEADERS | END_STREAM, number, peer.encoder.encode(head)))
            assert peer.answer(number)[1][":status"] == status


def test_a_deadline_ends_a_call_that_does_not_end_itself(served: Made) -> None:
    made = served()
    with Peer(made.address) as peer:
        peer.send(peer.call(1, b"", "Wait", grpc_timeout="50m"))
        assert peer.answer(1)[1]["grpc-status"] == "4"
    assert made.cancelled.wait(60)


# How it ends


@pytest.mark.parametrize("leave", ["reset", "hang up"])
def test_a_caller_who_leaves(served: Made, leave: str) -> None:
    made = served()
    with Peer(made.address) as peer:
        peer.send(peer.call(1, b"", "Wait"))
        assert made.waiting.wait(60)
        if leave == "reset":
            peer.send(frame(RST_STREAM, 0, 1, struct.pack(">I", CANCEL)))
            assert made.cancelled.wait(60)
            peer.send(peer.call(3))
            assert peer.answer(3)[0] == message(b"x")
    assert made.cancelled.wait(60)


def test_calls_under_way_end_before_the_server_does(served: Made, grpc_listening: Any) -> None:
    made = Served(Limits())
    with grpc_listening(lambda: made.server) as address, Peer(address) as peer:
        peer.send(peer.call(1, b"0.2", "Wait"), peer.call(3, b"", "Wait"))
        assert made.waiting.wait(60)
        loop = peer_loop(made)
        stopping = asyncio.run_coroutine_threadsafe(made.server.stop(1.0), loop)
        assert peer.until(GOAWAY)[1] == struct.pack(">II", 2**31 - 1, 0)
        peer.send(frame(PING, ACK, 0, peer.until(PING)[1]))
        assert peer.until(GOAWAY)[1] == struct.pack(">II", 3, 0)
        peer.send(peer.call(5))  # too late: nobody answers it
        assert peer.answer(1)[0] == message(b"late")
        assert peer.answer(3)[1]["grpc-status"] == "14"
        stopping.result(60)
        assert list(peer.frames()) == []
        with pytest.raises(OSError):
            Peer(address)


def peer_loop(made: Served) -> asyncio.AbstractEventLoop:
    """The event loop that the server runs on."""
    [listening] = made.server._listening
    return listening.get_loop()


def test_connections_of_an_age_end_without_a_lost_call(served: Made) -> None:
    address = served(age=0.05).address
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        ask = channel.unary_unary("/test.Test/Echo")
        until = time.monotonic() + 0.6
        asked = 0
        while asked < 11 or time.monotonic() < until:
            assert ask(b"x", timeout=60) == b"x"
            asked += 1


def test_the_silent_are_asked_and_then_dropped(served: Made) -> None:
    made = served(keepalive=0.5)  # seconds: a peer that stands still for as long is taken for silent
    with Peer(made.address, b"") as mute:
        assert list(mute.frames()) == []
    with Peer(made.address) as deaf:
        deaf.send(deaf.call(1, b"", "Wait"))
        assert deaf.until(PING)
        assert made.cancelled.wait(60)
        assert deaf.gone() == -1
    with grpc.insecure_channel(made.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        ask = channel.unary_unary("/test.Test/Wait")
        assert ask(b"1.3", timeout=60) == b"late"


# Who means harm

BLOCK = hpack.Encoder().encode(fields())
CALL = frame(HEADERS, END_HEADERS, 1, BLOCK)
FAULTS = {
    "no preface": (PROTOCOL_ERROR, None),
    "no settings": (PROTOCOL_ERROR, frame(PING, 0, 0, bytes(8))),
    "a frame that is too large": (FRAME_SIZE_ERROR, struct.pack(">I", (1 << 24) - 1 << 8)[:4] + bytes(5)),
    "data of nobody": (PROTOCOL_ERROR, frame(DATA, 0, 1, b"x")),
    "data on the connection": (PROTOCOL_ERROR, frame(DATA, 0, 0, b"x")),
    "an even stream": (PROTOCOL_ERROR, frame(HEADERS, END_HEADERS, 2, BLOCK)),
    "no table": (COMPRESSION_ERROR, frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff")),
    "a block cut short": (COMPRESSION_ERROR, frame(HEADERS, END_HEADERS, 1, BLOCK[:-1])),
    "priority too short": (FRAME_SIZE_ERROR, frame(HEADERS, END_HEADERS | PRIORITISED, 1, b"abc")),
    "more padding than frame": (PROTOCOL_ERROR, frame(HEADERS, END_HEADERS | PADDED, 1, b"\x09abc")),
    "something within a block": (PROTOCOL_ERROR, frame(HEADERS, 0, 1, BLOCK[:5]) + frame(PING, 0, 0, bytes(8))),
    "a continuation of nothing": (PROTOCOL_ERROR, frame(CONTINUATION, END_HEADERS, 1, BLOCK)),
    "a reset of nobody": (PROTOCOL_ERROR, frame(RST_STREAM, 0, 1, bytes(4))),
    "a reset too short": (FRAME_SIZE_ERROR, CALL + frame(RST_STREAM, 0, 1, bytes(3))),
    "settings too short": (FRAME_SIZE_ERROR, frame(SETTINGS, 0, 0, bytes(5))),
    "settings of a stream": (PROTOCOL_ERROR, frame(SETTINGS, 0, 1)),
    "a window in the settings": (FLOW_CONTROL_ERROR, frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 1 << 31))),
    "frames in the settings": (PROTOCOL_ERROR, frame(SETTINGS, 0, 0, struct.pack(">HI", 5, 1))),
    "a promise": (PROTOCOL_ERROR, frame(PUSH_PROMISE, END_HEADERS, 1, bytes(4) + BLOCK)),
    "a short ping": (FRAME_SIZE_ERROR, frame(PING, 0, 0, bytes(7))),
    "a goaway on a stream": (PROTOCOL_ERROR, frame(GOAWAY, 0, 1, bytes(8))),
    "a priority of nothing": (PROTOCOL_ERROR, frame(PRIORITY, 0, 0, bytes(5))),
    "no window": (PROTOCOL_ERROR, frame(WINDOW_UPDATE, 0, 0, bytes(4))),
    "too wide a window": (FLOW_CONTROL_ERROR, frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 2**31 - 1))),
    "a window of nobody": (PROTOCOL_ERROR, frame(WINDOW_UPDATE, 0, 7, struct.pack(">I", 1))),
    "a window too short": (FRAME_SIZE_ERROR, frame(WINDOW_UPDATE, 0, 0, bytes(3))),
    "far too many headers": (
        ENHANCE_YOUR_CALM,
        frame(HEADERS, END_HEADERS, 1, b"\x40\x01a\x7f\xa1\x1e" + b"b" * 4000 + b"\xbe" * 60),
    ),
    "a block without end": (
        ENHANCE_YOUR_CALM,
        frame(HEADERS, 0, 1, BLOCK) + frame(CONTINUATION, 0, 1, bytes(60_000)) * 2,
    ),
    "empty continuations": (ENHANCE_YOUR_CALM, frame(HEADERS, 0, 1, BLOCK) + frame(CONTINUATION, 0, 1) * 10_001),
    "pings": (ENHANCE_YOUR_CALM, frame(PING, 0, 0, bytes(8)) * 10_001),
    "settings": (ENHANCE_YOUR_CALM, frame(SETTINGS, 0, 0) * 10_001),
    "empty data": (ENHANCE_YOUR_CALM, CALL + frame(DATA, 0, 1) * 10_001),
    "frames of the future": (ENHANCE_YOUR_CALM, frame(200, 0, 0) * 10_001),
    "calls taken back": (
        ENHANCE_YOUR_CALM,
        b"".join(
            frame(HEADERS, END_HEADERS, i, BLOCK if i == 1 else hpack.Encoder().encode(fields()))
            + frame(RST_STREAM, 0, i, bytes(4))
            for i in range(1, 20_007, 2)
        ),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_peer_that_breaks_the_protocol_is_told_and_left(served: Made, fault: str) -> None:
    address = served().address
    code, frames = FAULTS[fault]
    hello = (
        PREFACE
        if fault == "no settings"
        else b"no preface of anything"
        if frames is None
        else PREFACE + frame(SETTINGS, 0, 0)
    )
    with Peer(address, hello) as peer:
        with contextlib.suppress(OSError):  # it is left before it has said everything
            peer.send(frames or b"")
        assert peer.gone() in (code, -1 if len(frames or b"") > 1 << 17 else code)
    assert say(address) == b"x"


STREAM_FAULTS = {
    "no window": (PROTOCOL_ERROR, frame(WINDOW_UPDATE, 0, 1, bytes(4))),
    "too wide a window": (FLOW_CONTROL_ERROR, frame(WINDOW_UPDATE, 0, 1, struct.pack(">I", 2**31 - 1))),
    "data behind the end": (STREAM_CLOSED, frame(DATA, END_STREAM, 1, message(b"")) + frame(DATA, 0, 1, b"x")),
    "fields that end nothing": (PROTOCOL_ERROR, frame(HEADERS, END_HEADERS, 1, BLOCK)),
}


@pytest.mark.parametrize("fault", STREAM_FAULTS)
def test_a_stream_that_breaks_the_protocol_costs_that_stream(served: Made, fault: str) -> None:
    made = served()
    code, frames = STREAM_FAULTS[fault]
    with Peer(made.address) as peer:
        peer.send(peer.call(1, None, "Wait"), frames)
        assert peer.answer(1)[1] == {"reset": str(code)}
        peer.send(peer.call(3))
        assert peer.answer(3)[0] == message(b"x")


def test_heads_that_no_request_has(served: Made) -> None:
    with Peer(served().address) as peer:
        for i, said in enumerate(({":path": ""}, {"connection": "close"}, {"Upper": "x"}, {"grpc-timeout": "1 hour"})):
            head = [field for field in fields() if field[0] not in said] + [field for field in said.items() if field[1]]
            peer.send(frame(HEADERS, END_HEADERS, 2 * i + 1, peer.encoder.encode(head)))
            assert peer.answer(2 * i + 1)[1] == {"reset": str(PROTOCOL_ERROR)}, said
        peer.send(peer.call(99))
        assert peer.answer(99)[0] == message(b"x")


def test_more_streams_than_were_told(served: Made) -> None:
    made = served(calls=100)
    with Peer(made.address) as peer:
        peer.send(*[peer.call(2 * i + 1, b"", "Wait") for i in range(101)])
        assert peer.answer(201)[1] == {"reset": str(REFUSED_STREAM)}


def test_a_method_that_does_not_read_holds_up_its_sender(served: Made) -> None:
    made = served()
    with Peer(made.address) as peer:
        peer.send(peer.call(1, None, "Shut"))
        assert made.waiting.wait(60)
        one = frame(DATA, 0, 1, message(bytes(16_000)))
        peer.send(one * 150)  # more than is held for a method, and its window: nothing of that is given back
        assert peer.answer(1)[1] == {"reset": str(FLOW_CONTROL_ERROR)}


def test_a_stream_of_many_messages_is_read_whole(served: Made) -> None:
    address = served().address
    with grpc.insecure_channel(address) as channel:
        sent = (bytes(random.Random(i).randrange(50_000)) for i in range(300))
        assert channel.stream_unary("/test.Test/Count")(sent, timeout=60) == b"300"
        answers = channel.unary_stream("/test.Test/Many")(b"200", timeout=60)
        assert [each[:3] for each in answers] == [(b"%d" % i * 3)[:3] for i in range(200)]


def test_a_peer_that_does_not_read_is_not_read_either(served: Made) -> None:
    address = served().address
    before = psutil.Process().memory_info().rss
    with Peer(address) as peer:
        peer.socket.settimeout(0.5)
        with pytest.raises(TimeoutError):
            for number in range(1, 4_000_000, 2000):  # 70 MB: twice what a kernel lends to a connection
                frames = [frame(HEADERS, END_HEADERS | END_STREAM, number + 2 * i, GUESS) for i in range(1000)]
                peer.send(*frames)
        assert say(address) == b"x"
    assert psutil.Process().memory_info().rss - before < 60 << 20


GUESS = b"\x83\x86\x04\x06/guess\x0f\x10\x10application/grpc"  # POST, http, and literals


class Pipe(asyncio.Transport):
    """The server's side of a connection, without a socket."""

    def __init__(self, peer: tuple[str, int] = ("127.0.0.1", 5000)) -> None:
        super().__init__({"peername": peer})
        self.said, self.ended = b"", False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def write(self, data: Any) -> None:
        self.said += data

    def is_closing(self) -> bool:
        return self.ended

    def close(self) -> None:
        self.ended = True

    abort = close


@pytest.mark.parametrize(("host", "written"), [("127.0.0.1", "127.0.0.1:5000"), ("::1", "[::1]:5000")])
def test_who_calls(host: str, written: str) -> None:
    async def main() -> str:
        connection = Served(Limits()).server._connection()
        connection.connection_made(Pipe((host, 5000)))
        connection.connection_lost(None)
        return connection.peer

    assert asyncio.run(main()) == written


@given(
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 255), st.integers(0, 7), st.binary(max_size=40)), max_size=30)
)
def test_any_frames_end_in_words_of_the_protocol(frames: list[tuple[int, int, int, bytes]]) -> None:
    """Whatever comes, nothing else is raised, and a connection that is not left still answers pings."""

    async def main() -> None:
        failed: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: failed.append(context))
        made = Served(Limits())
        connection, pipe = made.server._connection(), Pipe()
        connection.connection_made(pipe)
        connection.data_received(PREFACE + frame(SETTINGS, 0, 0) + CALL)
        for kind, flags, stream, body in frames:
            if not pipe.ended:
                connection.data_received(frame(kind, flags, stream, body))
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        if not pipe.ended and connection._block is None:
            connection.data_received(frame(PING, 0, 0, b"at last?"))
            await asyncio.sleep(0)
            assert pipe.said.endswith(frame(PING, ACK, 0, b"at last?"))
        connection.connection_lost(None)
        await asyncio.sleep(0)
        assert not failed and not made.server._calls and not made.server._connections

    logging.getLogger("asyncio").setLevel(logging.WARNING)
    asyncio.run(main())
