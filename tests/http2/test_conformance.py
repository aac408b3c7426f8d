"""Conformance to HTTP/2: for each rule, frames that violate or use it, and the error that is returned.

The cases follow the sections of RFC 9113 (HTTP/2) and RFC 7541 (HPACK).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import hpack
import pytest
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    PushPromiseFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from serve_app.http2.limits import Http2Limits
from tests.support.http2_peer import EchoServer, Peer, encode_message, request_fields
from tests.support.protocol_servers import serve_grpc

pytestmark = pytest.mark.integration

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
(NO_ERROR, PROTOCOL_ERROR, _, FLOW_CONTROL_ERROR, _, STREAM_CLOSED, FRAME_SIZE_ERROR) = range(7)
REFUSED_STREAM, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 7, 9, 11
FIELDS = request_fields()
MESSAGE = encode_message(b"x")
PONG = PingFrame(0, b"conform!").serialize()


class Closes(NamedTuple):
    """The server closes the connection with GOAWAY and ``code``."""

    code: int


class Resets(NamedTuple):
    """The server resets the stream with ``code``, and the connection stays."""

    code: int
    stream: int = 1


class Accepts(NamedTuple):
    """The server answers the call of the stream."""

    stream: int = 1


class Ignores(NamedTuple):
    """The server ignores the frames: it answers a ping after them."""


Expected = Closes | Resets | Accepts | Ignores
Part = Frame | bytes


def block(fields: Any = FIELDS) -> bytes:
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    return encoder.encode(fields)


def raw(kind: int, flags: int, stream: int, body: bytes = b"", size: int | None = None) -> bytes:
    """Return a frame with any values; ``size`` is the announced length."""
    length = len(body) if size is None else size
    return struct.pack(">I", length << 8 | kind)[0:4] + struct.pack(">BI", flags, stream) + body


def headers(stream: int = 1, *flags: str, fields: Any = FIELDS, **options: Any) -> HeadersFrame:
    return HeadersFrame(stream, block(fields), flags=["END_HEADERS", *flags], **options)


def with_fields(*extra: tuple[str, str], without: str = "") -> list[tuple[str, str]]:
    return [field for field in FIELDS if field[0] != without] + list(extra)


def malformed(*extra: tuple[str, str], without: str = "") -> tuple[Part, ...]:
    return headers(fields=with_fields(*extra, without=without)), end()


def end(stream: int = 1, data: bytes = MESSAGE) -> DataFrame:
    return DataFrame(stream, data, flags=["END_STREAM"])


def settings(key: int, value: int) -> bytes:
    return raw(4, 0, 0, struct.pack(">HI", key, value))


OPEN = headers()
WAIT = headers(fields=request_fields("Wait"))  # a call that stays open
WAITING = (WAIT, end())  # half closed by the client

CASES: dict[str, tuple[Expected, tuple[Part, ...]]] = {
    # Ordinary requests
    "5.1 a call": (Accepts(), (OPEN, end())),
    "5.1 a call whose stream ends with an empty DATA": (
        Accepts(),
        (OPEN, DataFrame(1, MESSAGE), DataFrame(1, b"", flags=["END_STREAM"])),
    ),
    "8.1 trailers end a request": (
        Accepts(),
        (OPEN, DataFrame(1, MESSAGE), headers(1, "END_STREAM", fields=[("x-trailer", "1")])),
    ),
    "4.1 unknown types of frames": (Accepts(), (raw(0xBE, 0xFF, 1, b"?"), OPEN, raw(0xEF, 0, 0), end())),
    "4.1 undefined flags": (Ignores(), (raw(6, 0x16, 0, bytes(8)),)),
    "4.1 the reserved bit of a stream's number": (Ignores(), (raw(6, 0, 1 << 31, bytes(8)),)),
    "5.1.1 streams may be left out": (Accepts(9), (headers(9), end(9))),
    "6.1 padded DATA": (
        Accepts(),
        (OPEN, DataFrame(1, MESSAGE, pad_length=9, flags=["PADDED", "END_STREAM"])),
    ),
    "6.2 padded HEADERS with a priority": (
        Accepts(),
        (
            HeadersFrame(
                1, block(), flags=["END_HEADERS", "PADDED", "PRIORITY"], pad_length=3, stream_weight=9
            ),
            end(),
        ),
    ),
    "6.3 PRIORITY of an idle stream": (Accepts(), (PriorityFrame(7, 1, 200), OPEN, end())),
    "6.3 PRIORITY of a closed stream": (
        Ignores(),
        (WAIT, RstStreamFrame(1, error_code=8), PriorityFrame(1, 0, 200)),
    ),
    "6.5 unknown settings": (Accepts(), (settings(0xFFF, 1), OPEN, end())),
    "6.5.2 no server push": (Accepts(), (settings(2, 0), OPEN, end())),
    "6.5 an acknowledgement": (Ignores(), (SettingsFrame(0, flags=["ACK"]),)),
    "6.7 an acknowledged ping": (Ignores(), (PingFrame(0, bytes(8), flags=["ACK"]),)),
    "6.9 WINDOW_UPDATE of a closed stream": (
        Ignores(),
        (WAIT, RstStreamFrame(1, error_code=8), WindowUpdateFrame(1, 1)),
    ),
    "6.10 CONTINUATION": (
        Accepts(),
        (
            HeadersFrame(1, block()[:3]),
            ContinuationFrame(1, block()[3:9]),
            ContinuationFrame(1, block()[9:], flags=["END_HEADERS"]),
            end(),
        ),
    ),
    "8.1.2 a content-length that matches": (
        Accepts(),
        (headers(fields=with_fields(("content-length", str(len(MESSAGE))))), end()),
    ),
    # 3 Starting HTTP/2
    "3.4 another preface": (Closes(PROTOCOL_ERROR), (b"INVALID CONNECTION PREFACE\r\n\r\n",)),
    "3.4 no SETTINGS behind the preface": (Closes(PROTOCOL_ERROR), (PREFACE, PONG)),
    "3.4 an acknowledgement instead of SETTINGS": (
        Closes(PROTOCOL_ERROR),
        (PREFACE, SettingsFrame(0, flags=["ACK"])),
    ),
    # 4 Frames
    "4.2 DATA over the maximum frame size": (Closes(FRAME_SIZE_ERROR), (OPEN, raw(0, 0, 1, size=65_537))),
    "4.2 HEADERS over the maximum frame size": (Closes(FRAME_SIZE_ERROR), (raw(1, 4, 1, size=65_537),)),
    "4.3 an invalid header block": (Closes(COMPRESSION_ERROR), (raw(1, 4, 1, b"\xff\xff\xff\xff\xff"),)),
    "4.3 PRIORITY within a header block": (
        Closes(PROTOCOL_ERROR),
        (HeadersFrame(1, block()[:5]), PriorityFrame(1, 0), ContinuationFrame(1, block()[5:])),
    ),
    "4.3 HEADERS of another stream within a header block": (
        Closes(PROTOCOL_ERROR),
        (HeadersFrame(1, block()[:5]), headers(3)),
    ),
    "4.3 an unknown frame within a header block": (
        Closes(PROTOCOL_ERROR),
        (HeadersFrame(1, block()[:5]), raw(0xBE, 0, 0)),
    ),
    # 5 Streams
    "5.1 idle: DATA": (Closes(PROTOCOL_ERROR), (end(),)),
    "5.1 idle: RST_STREAM": (Closes(PROTOCOL_ERROR), (RstStreamFrame(1, error_code=8),)),
    "5.1 idle: WINDOW_UPDATE": (Closes(PROTOCOL_ERROR), (WindowUpdateFrame(1, 100),)),
    "5.1 idle: CONTINUATION": (
        Closes(PROTOCOL_ERROR),
        (ContinuationFrame(1, block(), flags=["END_HEADERS"]),),
    ),
    "5.1 idle: RST_STREAM of an even stream": (
        Closes(PROTOCOL_ERROR),
        (headers(5), end(5), RstStreamFrame(2, error_code=8)),
    ),
    "5.1 idle: WINDOW_UPDATE of an even stream": (
        Closes(PROTOCOL_ERROR),
        (headers(5), end(5), WindowUpdateFrame(2, 8)),
    ),
    "5.1 half closed: DATA": (Resets(STREAM_CLOSED), (*WAITING, DataFrame(1, b"x"))),
    "5.1 half closed: HEADERS": (Resets(STREAM_CLOSED), (*WAITING, headers(1, "END_STREAM"))),
    "5.1 half closed: CONTINUATION": (
        Closes(PROTOCOL_ERROR),
        (*WAITING, ContinuationFrame(1, block(), flags=["END_HEADERS"])),
    ),
    "5.1 closed: DATA after RST_STREAM": (
        Resets(STREAM_CLOSED),
        (WAIT, RstStreamFrame(1, error_code=8), DataFrame(1, b"x")),
    ),
    "5.1 closed: HEADERS after RST_STREAM": (
        Closes(STREAM_CLOSED),
        (WAIT, RstStreamFrame(1, error_code=8), headers()),
    ),
    "5.1 closed: DATA after a stream error": (
        Ignores(),
        (WAIT, WindowUpdateFrame(1, 2**31 - 1), DataFrame(1, b"x")),
    ),
    "5.1.1 an even stream": (Closes(PROTOCOL_ERROR), (headers(2), end(2))),
    "5.1.1 HEADERS on stream 0": (Closes(PROTOCOL_ERROR), (raw(1, 4, 0, block()),)),
    "5.1.1 a stream with a lower number": (Closes(PROTOCOL_ERROR), (headers(5), end(5), headers(3))),
    "5.1.2 more streams than announced": (
        Resets(REFUSED_STREAM, 17),
        tuple(headers(1 + 2 * i, fields=request_fields("Wait")) for i in range(9)),
    ),
    "5.3.1 HEADERS that depend on themselves": (
        Closes(PROTOCOL_ERROR),
        (HeadersFrame(1, block(), flags=["END_HEADERS", "PRIORITY"], depends_on=1),),
    ),
    "5.3.1 PRIORITY that depends on itself": (Closes(PROTOCOL_ERROR), (raw(2, 0, 3, b"\0\0\0\3\1"),)),
    # 6 Frame definitions
    "6.1 DATA on stream 0": (Closes(PROTOCOL_ERROR), (raw(0, 0, 0, b"x"),)),
    "6.1 DATA with too much padding": (Closes(PROTOCOL_ERROR), (OPEN, raw(0, 8, 1, b"\x05data"))),
    "6.1 padded DATA without a length": (Closes(PROTOCOL_ERROR), (OPEN, raw(0, 8, 1))),
    "6.2 HEADERS with too much padding": (Closes(PROTOCOL_ERROR), (raw(1, 12, 1, b"\xff" + block()),)),
    "6.2 HEADERS too short for their priority": (Closes(FRAME_SIZE_ERROR), (raw(1, 0x24, 1, b"abc"),)),
    "6.3 PRIORITY on stream 0": (Closes(PROTOCOL_ERROR), (raw(2, 0, 0, bytes(5)),)),
    "6.3 PRIORITY of another length": (Closes(FRAME_SIZE_ERROR), (OPEN, raw(2, 0, 1, bytes(4)))),
    "6.4 RST_STREAM on stream 0": (Closes(PROTOCOL_ERROR), (raw(3, 0, 0, bytes(4)),)),
    "6.4 RST_STREAM of another length": (Closes(FRAME_SIZE_ERROR), (OPEN, raw(3, 0, 1, bytes(3)))),
    "6.5 an acknowledgement with entries": (Closes(FRAME_SIZE_ERROR), (raw(4, 1, 0, bytes(6)),)),
    "6.5 SETTINGS on a stream": (Closes(PROTOCOL_ERROR), (raw(4, 0, 1),)),
    "6.5 SETTINGS of another length": (Closes(FRAME_SIZE_ERROR), (raw(4, 0, 0, bytes(3)),)),
    "6.5.2 ENABLE_PUSH that is neither 0 nor 1": (Closes(PROTOCOL_ERROR), (settings(2, 2),)),
    "6.5.2 INITIAL_WINDOW_SIZE over the maximum": (Closes(FLOW_CONTROL_ERROR), (settings(4, 1 << 31),)),
    "6.5.2 MAX_FRAME_SIZE below the minimum": (Closes(PROTOCOL_ERROR), (settings(5, 16_383),)),
    "6.5.2 MAX_FRAME_SIZE over the maximum": (Closes(PROTOCOL_ERROR), (settings(5, 1 << 24),)),
    "6.5 dozens of entries": (Closes(ENHANCE_YOUR_CALM), (raw(4, 0, 0, bytes(6 * 65)),)),
    "6.6 PUSH_PROMISE": (
        Closes(PROTOCOL_ERROR),
        (OPEN, PushPromiseFrame(1, 2, block(), flags=["END_HEADERS"])),
    ),
    "6.7 PING on a stream": (Closes(PROTOCOL_ERROR), (raw(6, 0, 1, bytes(8)),)),
    "6.7 PING of another length": (Closes(FRAME_SIZE_ERROR), (raw(6, 0, 0, bytes(6)),)),
    "6.8 GOAWAY on a stream": (Closes(PROTOCOL_ERROR), (raw(7, 0, 1, bytes(8)),)),
    "6.8 GOAWAY too short": (Closes(FRAME_SIZE_ERROR), (raw(7, 0, 0, bytes(7)),)),
    "6.8 GOAWAY of a client": (Accepts(), (GoAwayFrame(0, 0, 0), OPEN, end())),
    "6.9 WINDOW_UPDATE of 0 for the connection": (Closes(PROTOCOL_ERROR), (raw(8, 0, 0, bytes(4)),)),
    "6.9 WINDOW_UPDATE of 0 for a stream": (Resets(PROTOCOL_ERROR), (*WAITING, raw(8, 0, 1, bytes(4)))),
    "6.9 WINDOW_UPDATE of another length": (Closes(FRAME_SIZE_ERROR), (raw(8, 0, 0, bytes(3)),)),
    "6.9.1 the connection's window overflows": (
        Closes(FLOW_CONTROL_ERROR),
        (WindowUpdateFrame(0, 2**31 - 1), WindowUpdateFrame(0, 2**31 - 1)),
    ),
    "6.9.1 a stream's window overflows": (
        Resets(FLOW_CONTROL_ERROR),
        (*WAITING, WindowUpdateFrame(1, 2**31 - 1)),
    ),
    "6.9.1 more DATA than the stream's window": (
        Resets(FLOW_CONTROL_ERROR),
        (
            headers(fields=request_fields("Ignore")),
            *[DataFrame(1, encode_message(bytes(16_000)))] * 20,
        ),
    ),
    "6.9.2 SETTINGS overflow a stream's window": (
        Closes(FLOW_CONTROL_ERROR),
        (*WAITING, WindowUpdateFrame(1, 2**31 - 65_536), settings(4, 65_536)),
    ),
    "6.10 CONTINUATION on stream 0": (
        Closes(PROTOCOL_ERROR),
        (HeadersFrame(1, block()[:5]), raw(9, 4, 0, block()[5:])),
    ),
    "6.10 CONTINUATION of another stream": (
        Closes(PROTOCOL_ERROR),
        (HeadersFrame(1, block()[:5]), ContinuationFrame(3, block()[5:], flags=["END_HEADERS"])),
    ),
    "6.10 CONTINUATION after the end of the block": (
        Closes(PROTOCOL_ERROR),
        (OPEN, ContinuationFrame(1, block(), flags=["END_HEADERS"])),
    ),
    "6.10 CONTINUATION after DATA": (
        Closes(PROTOCOL_ERROR),
        (OPEN, DataFrame(1, b"\0"), ContinuationFrame(1, block(), flags=["END_HEADERS"])),
    ),
    "6.10 a header block without an end": (
        Closes(ENHANCE_YOUR_CALM),
        (HeadersFrame(1, block()), *[ContinuationFrame(1, bytes(16_000))] * 5),
    ),
    # 8 HTTP messages
    "8.1 a second HEADERS without END_STREAM": (Resets(PROTOCOL_ERROR), (OPEN, headers())),
    "8.1 pseudo-header fields in trailers": (
        Resets(PROTOCOL_ERROR),
        (OPEN, DataFrame(1, MESSAGE), headers(1, "END_STREAM")),
    ),
    "8.1.1 more DATA than content-length": (
        Resets(PROTOCOL_ERROR),
        malformed(("content-length", str(len(MESSAGE) - 1))),
    ),
    "8.1.1 less DATA than content-length": (
        Resets(PROTOCOL_ERROR),
        malformed(("content-length", str(len(MESSAGE) + 1))),
    ),
    "8.1.1 content-length without DATA": (
        Resets(PROTOCOL_ERROR),
        (headers(1, "END_STREAM", fields=with_fields(("content-length", "1"))),),
    ),
    "8.1.1 two different values of content-length": (
        Resets(PROTOCOL_ERROR),
        malformed(("content-length", "6"), ("content-length", "7")),
    ),
    "8.1.1 a content-length that is no number": (Resets(PROTOCOL_ERROR), malformed(("content-length", "-6"))),
    "8.2.1 an upper-case name": (Resets(PROTOCOL_ERROR), malformed(("X-Test", "ok"))),
    "8.2.1 a name with a blank": (Resets(PROTOCOL_ERROR), malformed(("x test", "ok"))),
    "8.2.1 a name with a colon": (Resets(PROTOCOL_ERROR), malformed(("x:test", "ok"))),
    "8.2.1 an empty name": (Resets(PROTOCOL_ERROR), malformed(("", "ok"))),
    "8.2.1 a value with a line break": (Resets(PROTOCOL_ERROR), malformed(("x-test", "ok\r\nx-other: 1"))),
    "8.2.1 a value with NUL": (Resets(PROTOCOL_ERROR), malformed(("x-test", "o\0k"))),
    "8.2.2 connection": (Resets(PROTOCOL_ERROR), malformed(("connection", "keep-alive"))),
    "8.2.2 keep-alive": (Resets(PROTOCOL_ERROR), malformed(("keep-alive", "1"))),
    "8.2.2 proxy-connection": (Resets(PROTOCOL_ERROR), malformed(("proxy-connection", "close"))),
    "8.2.2 transfer-encoding": (Resets(PROTOCOL_ERROR), malformed(("transfer-encoding", "chunked"))),
    "8.2.2 upgrade": (Resets(PROTOCOL_ERROR), malformed(("upgrade", "h2c"))),
    "8.2.2 te that is not trailers": (Resets(PROTOCOL_ERROR), malformed(("te", "trailers, deflate"))),
    "8.3 an unknown pseudo-header field": (
        Resets(PROTOCOL_ERROR),
        (headers(fields=[(":test", "ok"), *FIELDS]), end()),
    ),
    "8.3 a pseudo-header field of responses": (
        Resets(PROTOCOL_ERROR),
        (headers(fields=[(":status", "200"), *FIELDS]), end()),
    ),
    "8.3 a pseudo-header field behind others": (
        Resets(PROTOCOL_ERROR),
        (headers(fields=[*with_fields(without=":path"), (":path", "/test.Test/Echo")]), end()),
    ),
    "8.3.1 an empty path": (
        Resets(PROTOCOL_ERROR),
        (headers(fields=[(":path", ""), *with_fields(without=":path")]), end()),
    ),
    "8.3.1 no method": (Resets(PROTOCOL_ERROR), malformed(without=":method")),
    "8.3.1 no scheme": (Resets(PROTOCOL_ERROR), malformed(without=":scheme")),
    "8.3.1 no path": (Resets(PROTOCOL_ERROR), malformed(without=":path")),
    "8.3.1 two methods": (Resets(PROTOCOL_ERROR), (headers(fields=[(":method", "POST"), *FIELDS]), end())),
    "8.3.1 two schemes": (Resets(PROTOCOL_ERROR), (headers(fields=[(":scheme", "http"), *FIELDS]), end())),
    "8.3.1 two paths": (Resets(PROTOCOL_ERROR), (headers(fields=[(":path", "/"), *FIELDS]), end())),
    # HPACK
    "hpack 2.3.3 an index out of the table": (Closes(COMPRESSION_ERROR), (raw(1, 4, 1, b"\xbf" + block()),)),
    "hpack 4.2 a change of the table's size behind fields": (
        Closes(COMPRESSION_ERROR),
        (raw(1, 4, 1, block() + b"\x20"),),
    ),
    "hpack 5.2 a string with wrong padding": (
        Closes(COMPRESSION_ERROR),
        (raw(1, 4, 1, block() + b"\x00\x85\xf2\xb2\x4a\x84\xff\x84\x49\x50\x9f\xff"),),
    ),
    "hpack 5.2 a string that ends too soon": (
        Closes(COMPRESSION_ERROR),
        (raw(1, 4, 1, block() + b"\x00\x7f"),),
    ),
    "hpack 6.1 the index 0": (Closes(COMPRESSION_ERROR), (raw(1, 4, 1, b"\x80" + block()),)),
    "hpack 6.3 a table larger than announced": (
        Closes(COMPRESSION_ERROR),
        (raw(1, 4, 1, b"\x3f\xe2\x1f" + block()),),
    ),
}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = EchoServer(Http2Limits(max_concurrent_streams=8))
    with serve_grpc(lambda: server.server) as address:
        yield address


def serialize(parts: tuple[Part, ...]) -> bytes:
    return b"".join(part if isinstance(part, bytes) else part.serialize() for part in parts)


def expect_close(peer: Peer, expected: Closes) -> None:
    assert peer.read_goaway() == expected.code


def expect_reset(peer: Peer, expected: Resets) -> None:
    assert int.from_bytes(peer.wait_for(3, expected.stream)[1], "big") == expected.code
    expect_pong(peer, Ignores())


def expect_response(peer: Peer, expected: Accepts) -> None:
    data, trailers = peer.read_response(expected.stream)
    assert (data, trailers["grpc-status"]) == (MESSAGE, "0")


def expect_pong(peer: Peer, expected: Ignores) -> None:
    peer.send(PONG)
    while peer.wait_for(6)[1] != b"conform!":
        pass


CHECKS: dict[type, Callable[[Peer, Any], None]] = {
    Closes: expect_close,
    Resets: expect_reset,
    Accepts: expect_response,
    Ignores: expect_pong,
}


@pytest.mark.parametrize("case", CASES)
def test_rules_of_http2(address: str, case: str) -> None:
    expected, parts = CASES[case]
    data = serialize(parts)
    starts_itself = case.startswith("3.4")
    with Peer(address, b"" if starts_itself else PREFACE + SettingsFrame(0).serialize()) as peer:
        peer.send(data)
        CHECKS[type(expected)](peer, expected)
