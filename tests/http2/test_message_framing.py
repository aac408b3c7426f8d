"""Parsing, inflation and limits of messages."""

from __future__ import annotations

import gzip
import itertools
import struct

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    encode_frame,
)
from serve_app.http2.message_framing import InvalidMessage, MessageReader
from tests.support.http2_peer import Peer, StartServer, call_method, encode_message, request_fields


def test_compressed_messages_are_inflated_or_rejected(start_server: StartServer) -> None:
    address = start_server(max_message_size=10_000).address
    for compression in (grpc.Compression.Gzip, grpc.Compression.Deflate):
        assert call_method(address, b"0123456789" * 500, compression=compression) == b"0123456789" * 500
    with Peer(address) as peer:
        bomb = gzip.compress(bytes(20_000_000))
        sent = [bomb, b"nonsense", gzip.compress(b"cut")[:-4]]
        for i, data in enumerate(sent):
            head = peer.encode_call(2 * i + 1, None, grpc_encoding="gzip")
            peer.send(
                head,
                encode_frame(
                    DATA, END_STREAM, 2 * i + 1, struct.pack(">BI", 1, min(len(data), 9_999)) + data[:9_999]
                ),
            )
        trailers = [peer.read_response(2 * i + 1)[1] for i in range(len(sent))]
        peer.send(peer.encode_call(9, b"x", grpc_encoding="snappy"))
        trailers.append(peer.read_response(9)[1])
        peer.send(
            peer.encode_call(11, None), encode_frame(DATA, END_STREAM, 11, struct.pack(">BI", 1, 1) + b"x")
        )
        trailers.append(peer.read_response(11)[1])
    assert [(fields["grpc-status"], fields["grpc-message"]) for fields in trailers] == [
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
def test_messages_may_be_cut_anywhere(sent: list[tuple[bool, bytes]], cuts: list[int]) -> None:
    framed = [gzip.compress(data) if compressed else data for compressed, data in sent]
    wire = b"".join(
        struct.pack(">BI", compressed, len(data)) + data
        for (compressed, _), data in zip(sent, framed, strict=True)
    )
    reader, messages = MessageReader("gzip", 100_000), []
    for cut in itertools.cycle(cuts):
        if not wire:
            break
        messages += reader.feed(wire[:cut])
        wire = wire[cut:]
        assert reader.partial or wire or len(messages) == len(sent)
    assert messages == [data for _, data in sent]


def test_messages_are_inflated_incrementally() -> None:
    bomb = gzip.compress(bytes(20_000_000))
    reader = MessageReader("gzip", 10_000_000)
    assert reader.feed(struct.pack(">BI", 1, len(bomb)) + bomb[: len(bomb) // 4]) == []
    with pytest.raises(InvalidMessage, match=r"is inflated and is larger than inference\.max_request_size"):
        reader.feed(bomb[len(bomb) // 4 : -len(bomb) // 4])  # the limit applies before the end


def test_size_errors_name_the_setting(start_server: StartServer) -> None:
    address = start_server(max_message_size=1000, max_response_size=100, max_concurrent_calls=1).address
    for data, details in (
        (bytes(1001), "The message of 1001 bytes is larger than inference.max_request_size, 1000 bytes."),
        (bytes(101), "The answer of 101 bytes is larger than runtime.max_response_size, 100 bytes."),
    ):
        with pytest.raises(grpc.RpcError) as raised:
            call_method(address, data)
        assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, details)
    with pytest.raises(grpc.RpcError) as raised:
        call_method(address, metadata=[("a-token", "x" * 16_500)])
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert call_method(address) == b"x"


def test_unary_methods_take_exactly_one_message(start_server: StartServer) -> None:
    with Peer(start_server().address) as peer:
        peer.send(peer.encode_call(1, None), encode_frame(DATA, END_STREAM, 1))
        peer.send(
            peer.encode_call(3, None), encode_frame(DATA, 0, 3, encode_message(b"a") + encode_message(b"b"))
        )
        peer.send(peer.encode_call(5, None), encode_frame(DATA, END_STREAM, 5, encode_message(b"abc")[:-1]))
        peer.send(encode_frame(HEADERS, END_HEADERS | END_STREAM, 7, peer.encoder.encode(request_fields())))
        trailers = [peer.read_response(i)[1] for i in (1, 3, 5, 7)]
    assert [(fields["grpc-status"], fields["grpc-message"]) for fields in trailers] == [
        ("12", "The method takes one message, and none has come."),
        ("12", "The method takes one message, and more have come."),
        ("13", "The stream ended in the middle of a message."),
        ("12", "The method takes one message, and none has come."),
    ]
