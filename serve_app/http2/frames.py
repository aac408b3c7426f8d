"""HTTP/2 frames (RFC 9113): types, flags, error codes, and their encoding."""

from __future__ import annotations

import struct
from collections.abc import Mapping

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    range(10)
)
END_STREAM, END_HEADERS, PADDED, PRIORITY_FLAG, ACK = 0x1, 0x4, 0x8, 0x20, 0x1

# §7
NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED, FRAME_SIZE_ERROR = 0, 1, 3, 5, 6
REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 7, 8, 9, 11

# §6.5.2
ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE = 2, 3, 4
MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 5, 6

FRAME_HEADER = struct.Struct(">I B I")  # length and type, flags, stream
FRAME_SIZE_LIMIT = 1 << 16  # bytes of a frame's payload, in both directions
MAX_WINDOW = 2**31 - 1
DEFAULT_WINDOW = 65_535  # bytes, in both directions, until SETTINGS change it
STREAM_WINDOW = 1 << 16  # bytes that a peer may send on a stream before a WINDOW_UPDATE
_MAX_SETTINGS = 64  # entries of one frame; clients send ten at most


class Http2ProtocolError(Exception):
    """A violation of the protocol by the peer, which closes the connection with ``code``."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def encode_frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return FRAME_HEADER.pack(len(body) << 8 | kind, flags, stream) + body


def encode_settings(settings: Mapping[int, int]) -> bytes:
    return encode_frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *item) for item in settings.items()))


def decode_settings(body: bytes) -> dict[int, int]:
    """Return the last value of each setting (§6.5). Raises Http2ProtocolError."""
    if len(body) % 6:
        raise Http2ProtocolError(FRAME_SIZE_ERROR, f"SETTINGS of {len(body)} bytes")
    if len(body) > 6 * _MAX_SETTINGS:
        raise Http2ProtocolError(ENHANCE_YOUR_CALM, f"SETTINGS with more than {_MAX_SETTINGS} entries")
    settings: dict[int, int] = {}
    for key, value in struct.iter_unpack(">HI", body):
        if key == ENABLE_PUSH and value > 1:
            raise Http2ProtocolError(PROTOCOL_ERROR, f"ENABLE_PUSH is {value}")
        if key == INITIAL_WINDOW_SIZE and value > MAX_WINDOW:
            raise Http2ProtocolError(FLOW_CONTROL_ERROR, f"a window of {value} bytes")
        if key == MAX_FRAME_SIZE and not 16_384 <= value < 1 << 24:
            raise Http2ProtocolError(PROTOCOL_ERROR, f"frames of {value} bytes")
        settings[key] = value
    return settings


def encode_window_update(stream: int, increment: int) -> bytes:
    return encode_frame(WINDOW_UPDATE, 0, stream, increment.to_bytes(4, "big"))


def encode_rst_stream(stream: int, code: int) -> bytes:
    return encode_frame(RST_STREAM, 0, stream, code.to_bytes(4, "big"))


def encode_goaway(last_stream: int, code: int, message: str = "") -> bytes:
    return encode_frame(GOAWAY, 0, 0, struct.pack(">II", last_stream, code) + message.encode())


def strip_padding(body: bytes) -> bytes:
    """Return ``body`` without its padding (§6.1). Raises Http2ProtocolError."""
    if not body or body[0] >= len(body):
        raise Http2ProtocolError(PROTOCOL_ERROR, "more padding than frame")
    return body[1 : len(body) - body[0]]


def check_priority(stream: int, body: bytes) -> None:
    """Check the fields of a priority, which is not used (RFC 7540 §5.3). Raises Http2ProtocolError."""
    if len(body) != 5:
        raise Http2ProtocolError(FRAME_SIZE_ERROR, f"a priority of {len(body)} bytes")
    if not stream or int.from_bytes(body[:4], "big") & MAX_WINDOW == stream:
        raise Http2ProtocolError(PROTOCOL_ERROR, f"a priority of stream {stream} that depends on itself")
