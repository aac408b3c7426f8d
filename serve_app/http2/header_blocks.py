"""Reassembly of header blocks from HEADERS and CONTINUATION frames (RFC 9113 §4.3)."""

from __future__ import annotations

from serve_app.http2.frames import (
    COMPRESSION_ERROR,
    END_HEADERS,
    ENHANCE_YOUR_CALM,
    PADDED,
    PRIORITY_FLAG,
    PROTOCOL_ERROR,
    Http2ProtocolError,
    check_priority,
    strip_padding,
)
from serve_app.http2.hpack_headers import (
    HeaderDecoder,
    InvalidHeaders,
    RequestHead,
    TooManyHeaders,
)

_MAX_BLOCK_SIZE = 1 << 16  # bytes, in any number of frames


class HeaderBlockReader:
    """A reader of the header blocks of one connection.

    A block with more than ``max_size`` bytes of headers is a protocol error.
    """

    def __init__(self, max_size: int) -> None:
        self._decoder = HeaderDecoder(max_size)
        self._stream = 0
        self._flags = 0
        self._fragments: bytearray | None = None

    @property
    def partial(self) -> bool:
        """Return whether a header block awaits its CONTINUATION."""
        return self._fragments is not None

    @property
    def buffered(self) -> int:
        """Return the bytes of the unfinished block."""
        return len(self._fragments or b"")

    def read_headers(self, flags: int, stream: int, body: bytes) -> tuple[int, RequestHead] | None:
        """Process a HEADERS frame; return its flags and the head, or None if a CONTINUATION follows.

        Raises Http2ProtocolError.
        """
        if not stream & 1:
            raise Http2ProtocolError(PROTOCOL_ERROR, f"HEADERS on stream {stream}")
        if flags & PADDED:
            body = strip_padding(body)
        if flags & PRIORITY_FLAG:
            check_priority(stream, body[:5])
            body = body[5:]
        if flags & END_HEADERS:
            return flags, self._decode(body)
        self._stream, self._flags, self._fragments = stream, flags, bytearray(body)
        return None

    def read_continuation(self, flags: int, stream: int, body: bytes) -> tuple[int, RequestHead] | None:
        """Process a CONTINUATION frame; return the flags of the HEADERS frame and the head, or None.

        Raises Http2ProtocolError.
        """
        if self._fragments is None or self._stream != stream:
            raise Http2ProtocolError(PROTOCOL_ERROR, "CONTINUATION of nothing")
        self._fragments += body
        if len(self._fragments) > _MAX_BLOCK_SIZE:
            raise Http2ProtocolError(
                ENHANCE_YOUR_CALM, f"a header block of more than {_MAX_BLOCK_SIZE} bytes"
            )
        if not flags & END_HEADERS:
            return None
        block, self._fragments = bytes(self._fragments), None
        return self._flags, self._decode(block)

    def _decode(self, block: bytes) -> RequestHead:
        try:
            return self._decoder.decode(block)
        except TooManyHeaders as error:
            raise Http2ProtocolError(ENHANCE_YOUR_CALM, str(error)) from None
        except InvalidHeaders as error:
            raise Http2ProtocolError(COMPRESSION_ERROR, str(error)) from None
