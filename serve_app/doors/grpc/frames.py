"""Frames of HTTP/2 (RFC 9113): their kinds and flags, the codes of errors, and how one is written."""

from __future__ import annotations

import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS, PADDED, PRIORITISED, ACK = 0x1, 0x4, 0x8, 0x20, 0x1

# §7
NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED, FRAME_SIZE_ERROR = 0, 1, 3, 5, 6
REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 7, 8, 9, 11

# §6.5.2
MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 3, 4, 5, 6

FRAME = struct.Struct(">I B I")  # length and kind, flags, stream
LARGEST_WINDOW = 2**31 - 1
FIRST_WINDOW = 65_535  # bytes, of either side, until it says otherwise
STREAM_WINDOW = 1 << 20  # bytes that a peer may send on a stream before it is given more


class Fault(Exception):
    """The peer broke the protocol: the connection ends, with ``code``."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(words)
        self.code = code


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return FRAME.pack(len(body) << 8 | kind, flags, stream) + body


def unpadded(body: bytes) -> bytes:
    """``body`` without its padding (§6.1). Raises Fault."""
    if not body or body[0] >= len(body):
        raise Fault(PROTOCOL_ERROR, "more padding than frame")
    return body[1 : len(body) - body[0]]
