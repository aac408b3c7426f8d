"""The server side of an HTTP/2 connection for gRPC (RFC 9113): frames, streams, and limits for the peer.

gRPC's own asyncio server spends most of a small call on switches between its threads and the event loop.
Here a frame is parsed in the event loop that receives it.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any, Protocol

from serve_app.protocols.grpc.http2.frame_writer import FrameWriter
from serve_app.protocols.grpc.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME_HEADER,
    FRAME_SIZE_ERROR,
    FRAME_SIZE_LIMIT,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_SIZE,
    MAX_HEADER_LIST_SIZE,
    MAX_WINDOW,
    NO_ERROR,
    PADDED,
    PING,
    PREFACE,
    PROTOCOL_ERROR,
    REFUSED_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    STREAM_WINDOW,
    Http2ProtocolError,
    encode_frame,
    encode_goaway,
    encode_rst_stream,
    encode_settings,
    encode_window_update,
    strip_padding,
)
from serve_app.protocols.grpc.http2.header_blocks import HeaderBlockReader
from serve_app.protocols.grpc.http2.hpack_headers import RequestHead
from serve_app.protocols.grpc.http2.keepalive import Keepalive
from serve_app.protocols.grpc.http2.stream import Http2Stream

_CONNECTION_WINDOW = 2**30  # so large that only the windows of the streams limit the peer
_MAX_IDLE_FRAMES = 10_000  # in a row without progress of any call
_SHUTDOWN_PING = b"farewell"
_SHUTDOWN_PING_TIMEOUT = 1.0  # seconds
_HTTP_1_RESPONSE = (
    b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: text/plain\r\n\r\n"
    b"This port serves gRPC over HTTP/2; plain HTTP has its own port.\n"
)

# The peer's handshake (§3.4) and the graceful shutdown (§6.8). Plain integers: they are compared per frame.
_AWAITS_PREFACE, _AWAITS_SETTINGS, _HANDSHAKE_COMPLETE = range(3)
# After the first GOAWAY the peer may still open streams; after the second they are ignored.
_RUNNING, _SHUTDOWN_ANNOUNCED, _SHUTDOWN_CONFIRMED = range(3)


class ConnectionOwner(Protocol):
    """A receiver of a connection's events."""

    def on_connected(self, connection: Http2Connection) -> None:
        """Register the connection."""

    def on_request(self, connection: Http2Connection, stream: Http2Stream, head: RequestHead) -> None:
        """Set the receiver of ``stream``, or end it."""

    def on_disconnected(self, connection: Http2Connection) -> None:
        """Unregister the connection."""


class Http2Connection(asyncio.Protocol):
    """An HTTP/2 connection.

    ``max_streams`` and ``max_metadata`` (bytes) are announced to the peer. A larger head is left to the
    ``owner``; one of more than four times the size closes the connection. A peer that is silent for
    ``keepalive_interval`` seconds is pinged; after as many more seconds of silence the connection is aborted.
    """

    def __init__(
        self,
        owner: ConnectionOwner,
        max_streams: int,
        max_metadata: int,
        keepalive_interval: float,
    ) -> None:
        self._owner = owner
        self._max_streams = max_streams
        self._max_metadata = max_metadata
        self._headers = HeaderBlockReader(4 * max_metadata)
        self._loop = asyncio.get_running_loop()
        self._writer = FrameWriter(self._loop, self._record_progress)
        self._keepalive = Keepalive(keepalive_interval, self._writer)
        self._transport: Any = None
        self.peer = ""  # address and port
        self._buffer: bytes | bytearray = b""
        self._handshake = _AWAITS_PREFACE
        self._streams: dict[int, Http2Stream] = {}
        self._last_stream = 0
        self._receive_window = _CONNECTION_WINDOW
        self._initial_send_window = DEFAULT_WINDOW
        self._idle_frames = 0
        self._shutdown = _RUNNING

    # Events of asyncio

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        host, port = (transport.get_extra_info("peername") or ("", 0))[:2]
        self.peer = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._writer.connect(transport)
        self._keepalive.start(transport)
        self._owner.on_connected(self)

    def data_received(self, data: bytes) -> None:
        self._keepalive.data_received = True
        buffer: Any = data
        if self._buffer:
            self._buffer += data
            buffer = self._buffer
        try:
            consumed = self._process_frames(buffer) if self._handshake else self._process_preface(buffer)
        except Http2ProtocolError as error:
            self._fail(error.code, str(error))
            return
        if consumed == len(buffer):
            self._buffer = b""
        elif buffer is self._buffer:
            del self._buffer[:consumed]
        else:
            self._buffer = bytearray(data[consumed:])

    def pause_writing(self) -> None:
        """Stop reading while the peer does not read, so that no responses pile up."""
        self._writer.paused = True
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._writer.paused = False
        if not self._transport.is_closing():
            self._transport.resume_reading()
            self._writer.send_blocked()

    def connection_lost(self, error: Exception | None) -> None:
        self._keepalive.stop()
        self._writer.clear()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.on_closed()
        self._owner.on_disconnected(self)

    # Received frames

    def _process_preface(self, buffer: bytes) -> int:
        if len(buffer) < len(PREFACE) and PREFACE.startswith(buffer):
            return 0
        if not buffer.startswith(PREFACE):
            if bytes(buffer).partition(b"\r\n")[0].endswith((b" HTTP/1.1", b" HTTP/1.0")):
                self._writer.write(_HTTP_1_RESPONSE)
                self.close()
                return len(buffer)
            raise Http2ProtocolError(PROTOCOL_ERROR, "no preface of HTTP/2")
        self._handshake = _AWAITS_SETTINGS
        settings = {
            MAX_CONCURRENT_STREAMS: self._max_streams,
            INITIAL_WINDOW_SIZE: STREAM_WINDOW,
            MAX_FRAME_SIZE: FRAME_SIZE_LIMIT,
            MAX_HEADER_LIST_SIZE: self._max_metadata,
        }
        self._writer.write(encode_settings(settings))
        self._writer.write(encode_window_update(0, _CONNECTION_WINDOW - DEFAULT_WINDOW))
        return len(PREFACE) + self._process_frames(buffer[len(PREFACE) :])

    def _process_frames(self, buffer: bytes) -> int:
        """Process each complete frame; return the number of consumed bytes. Raises Http2ProtocolError."""
        position, size = 0, len(buffer)
        while size - position >= 9:
            if self._transport.is_closing():
                return size
            head, flags, stream = FRAME_HEADER.unpack_from(buffer, position)
            length, kind = head >> 8, head & 0xFF
            if length > FRAME_SIZE_LIMIT:
                raise Http2ProtocolError(
                    FRAME_SIZE_ERROR, f"a frame of {length} bytes; {FRAME_SIZE_LIMIT} at most"
                )
            start = position + 9
            position = start + length
            if position > size:
                return start - 9
            body = bytes(buffer[start:position])
            stream &= MAX_WINDOW
            if self._headers.partial and kind != CONTINUATION:
                raise Http2ProtocolError(PROTOCOL_ERROR, "a header block is not ended")
            if self._handshake == _AWAITS_SETTINGS and (kind != SETTINGS or flags & ACK):
                raise Http2ProtocolError(PROTOCOL_ERROR, "no SETTINGS behind the preface")
            if kind == DATA:
                self._on_data(flags, stream, body)
            elif kind == HEADERS:
                self._on_headers(flags, stream, body)
            else:
                self._idle_frames += 1
                if kind < len(_FRAME_HANDLERS):  # unknown types are ignored (§5.5)
                    _FRAME_HANDLERS[kind](self, flags, stream, body)
            if self._idle_frames > _MAX_IDLE_FRAMES:
                raise Http2ProtocolError(
                    ENHANCE_YOUR_CALM, f"{_MAX_IDLE_FRAMES} frames in a row without progress of a call"
                )
        return position

    def _on_data(self, flags: int, number: int, body: bytes) -> None:
        stream = self._streams.get(number)
        if stream is None and (number > self._last_stream or not number & 1):
            raise Http2ProtocolError(PROTOCOL_ERROR, f"DATA on stream {number}, which is idle")
        size = len(body)
        self._receive_window -= size
        if self._receive_window < 0:
            raise Http2ProtocolError(FLOW_CONTROL_ERROR, "more data than the connection's window allows")
        if self._receive_window < _CONNECTION_WINDOW // 2:
            self._writer.write(encode_window_update(0, _CONNECTION_WINDOW - self._receive_window))
            self._receive_window = _CONNECTION_WINDOW
        if flags & PADDED:
            body = strip_padding(body)
        if stream is None:
            self._idle_frames += 1  # of a finished call
            return None
        if stream.half_closed:
            return self.reset_stream(stream, STREAM_CLOSED)
        stream.receive_window -= size
        if stream.receive_window < 0:
            return self.reset_stream(stream, FLOW_CONTROL_ERROR)
        stream.unacknowledged += size - len(body)
        ended = bool(flags & END_STREAM)
        if ended:
            stream.half_closed = True
        self._idle_frames = self._idle_frames + 1 if not body and not ended else 0
        if stream.receiver is not None:
            stream.receiver.on_data(body, ended)
        return None

    def _on_headers(self, flags: int, number: int, body: bytes) -> None:
        block = self._headers.read_headers(flags, number, body)
        if block is not None:
            self._on_header_block(number, *block)

    def _on_continuation(self, flags: int, number: int, body: bytes) -> None:
        block = self._headers.read_continuation(flags, number, body)
        if block is not None:
            self._on_header_block(number, *block)

    def _on_header_block(self, number: int, flags: int, head: RequestHead) -> None:
        """Start a call, or end the peer's side of one; gRPC does not use the fields of request trailers."""
        ended = bool(flags & END_STREAM)
        stream = self._streams.get(number)
        if stream is None:
            self._open_stream(number, head, ended)
        elif stream.half_closed or not ended:
            self.reset_stream(stream, STREAM_CLOSED if stream.half_closed else PROTOCOL_ERROR)
        else:
            stream.half_closed = True
            if stream.receiver is not None:
                stream.receiver.on_data(b"", True)

    def _open_stream(self, number: int, head: RequestHead, ended: bool) -> None:
        if number <= self._last_stream or self._shutdown == _SHUTDOWN_CONFIRMED:
            self._idle_frames += 1  # of a finished call, or of one after the last GOAWAY
            self._last_stream = max(self._last_stream, number)
            return
        self._last_stream = number
        if len(self._streams) >= self._max_streams or head.malformed:
            self._idle_frames += 1
            code = PROTOCOL_ERROR if head.malformed else REFUSED_STREAM
            self._writer.write(encode_rst_stream(number, code))
            return
        stream = Http2Stream(self, self._writer, number, self._initial_send_window)
        self._streams[number] = stream
        stream.half_closed = ended
        self._owner.on_request(self, stream, head)
        if ended and stream.receiver is not None and number in self._streams:
            stream.receiver.on_data(b"", True)

    def _on_priority(self, flags: int, number: int, body: bytes) -> None:
        if not number or len(body) != 5:
            raise Http2ProtocolError(PROTOCOL_ERROR if not number else FRAME_SIZE_ERROR, "PRIORITY")

    def _on_rst_stream(self, flags: int, number: int, body: bytes) -> None:
        if len(body) != 4:
            raise Http2ProtocolError(FRAME_SIZE_ERROR, "RST_STREAM")
        if not number or number > self._last_stream:
            raise Http2ProtocolError(PROTOCOL_ERROR, f"RST_STREAM of stream {number}, which is idle")
        stream = self._streams.get(number)
        if stream is not None:
            self._remove_stream(stream)
            stream.on_closed()

    def _on_settings(self, flags: int, number: int, body: bytes) -> None:
        if number or (flags & ACK and body) or len(body) % 6:
            raise Http2ProtocolError(PROTOCOL_ERROR if number else FRAME_SIZE_ERROR, "SETTINGS")
        self._handshake = _HANDSHAKE_COMPLETE
        self._keepalive.handshake_complete = True
        if flags & ACK:
            return
        for key, value in struct.iter_unpack(">HI", body):
            if key == INITIAL_WINDOW_SIZE:
                if value > MAX_WINDOW:
                    raise Http2ProtocolError(FLOW_CONTROL_ERROR, f"a window of {value} bytes")
                for stream in self._streams.values():
                    stream.send_window += value - self._initial_send_window
                self._initial_send_window = value
            elif key == MAX_FRAME_SIZE:
                if not 16_384 <= value < 1 << 24:
                    raise Http2ProtocolError(PROTOCOL_ERROR, f"frames of {value} bytes")
                self._writer.limit_frame_size(value)
        self._writer.write(encode_frame(SETTINGS, ACK, 0))
        self._writer.send_blocked()

    def _on_push_promise(self, flags: int, number: int, body: bytes) -> None:
        raise Http2ProtocolError(PROTOCOL_ERROR, "PUSH_PROMISE from a client")

    def _on_ping(self, flags: int, number: int, body: bytes) -> None:
        if number or len(body) != 8:
            raise Http2ProtocolError(PROTOCOL_ERROR if number else FRAME_SIZE_ERROR, "PING")
        if not flags & ACK:
            self._writer.write(encode_frame(PING, ACK, 0, body))
        elif body == _SHUTDOWN_PING:
            self._confirm_shutdown()

    def _on_goaway(self, flags: int, number: int, body: bytes) -> None:
        if number:
            raise Http2ProtocolError(PROTOCOL_ERROR, "GOAWAY on a stream")

    def _on_window_update(self, flags: int, number: int, body: bytes) -> None:
        if len(body) != 4:
            raise Http2ProtocolError(FRAME_SIZE_ERROR, "WINDOW_UPDATE")
        increment = int.from_bytes(body, "big") & MAX_WINDOW
        if not number:
            valid = self._writer.widen_window(increment)
            if not increment or not valid:
                raise Http2ProtocolError(
                    FLOW_CONTROL_ERROR if increment else PROTOCOL_ERROR, f"WINDOW_UPDATE of {increment}"
                )
            return self._writer.send_blocked()
        stream = self._streams.get(number)
        if stream is None:
            if number > self._last_stream:
                raise Http2ProtocolError(PROTOCOL_ERROR, f"WINDOW_UPDATE of stream {number}, which is idle")
            return None
        stream.send_window += increment
        if not increment or stream.send_window > MAX_WINDOW:
            return self.reset_stream(stream, FLOW_CONTROL_ERROR if increment else PROTOCOL_ERROR)
        if stream.unsent:
            self._writer.send_unsent(stream)
        return None

    # Ends of streams

    def finish_stream(self, stream: Http2Stream, block: bytes) -> None:
        """Write the trailers of a complete response and remove its stream."""
        self._writer.write(encode_frame(HEADERS, END_HEADERS | END_STREAM, stream.id, block))
        if not stream.half_closed:
            self._writer.write(encode_rst_stream(stream.id, NO_ERROR))
        self._record_progress()
        self._remove_stream(stream)

    def reset_stream(self, stream: Http2Stream, code: int) -> None:
        """Write RST_STREAM, and remove and close the stream."""
        if self._streams.get(stream.id) is stream:
            self._idle_frames += 1
            self._writer.write(encode_rst_stream(stream.id, code))
            self._remove_stream(stream)
            stream.on_closed()

    def _record_progress(self) -> None:
        self._idle_frames = 0

    def _remove_stream(self, stream: Http2Stream) -> None:
        self._streams.pop(stream.id, None)
        self._writer.remove(stream)
        if self._shutdown == _SHUTDOWN_CONFIRMED and not self._streams:
            self.close()

    # End of the connection

    def shut_down(self) -> None:
        """Accept no further calls, and close after the calls in progress have ended (§6.8)."""
        if not self._shutdown and not self._transport.is_closing():
            self._shutdown = _SHUTDOWN_ANNOUNCED
            self._writer.write(encode_goaway(MAX_WINDOW, NO_ERROR))
            # The peer opens no more streams once its acknowledgement is back.
            self._writer.write(encode_frame(PING, 0, 0, _SHUTDOWN_PING))
            self._loop.call_later(_SHUTDOWN_PING_TIMEOUT, self._confirm_shutdown)

    def _confirm_shutdown(self) -> None:
        if self._shutdown == _SHUTDOWN_ANNOUNCED and not self._transport.is_closing():
            self._shutdown = _SHUTDOWN_CONFIRMED
            self._writer.write(encode_goaway(self._last_stream, NO_ERROR))
            if not self._streams:
                self.close()

    def close(self) -> None:
        """Accept no further calls, and close after the written data is sent."""
        self._writer.flush()
        self._transport.close()

    def abort(self) -> None:
        """Close at once and cancel the calls in progress."""
        self._transport.abort()

    def _fail(self, code: int, message: str) -> None:
        self._writer.write(encode_goaway(self._last_stream, code, message))
        self.close()


_FRAME_HANDLERS: tuple[Callable[[Http2Connection, int, int, bytes], None], ...] = (
    Http2Connection._on_data,
    Http2Connection._on_headers,
    Http2Connection._on_priority,
    Http2Connection._on_rst_stream,
    Http2Connection._on_settings,
    Http2Connection._on_push_promise,
    Http2Connection._on_ping,
    Http2Connection._on_goaway,
    Http2Connection._on_window_update,
    Http2Connection._on_continuation,
)
