"""The server side of an HTTP/2 connection for gRPC (RFC 9113): frames, streams, and limits for the peer.

gRPC's own asyncio server spends most of a small call on switches between its threads and the event loop.
Here a frame is parsed in the event loop that receives it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from serve_app.http2.frame_rate import BURST, RESET_COST, SETTINGS_COST
from serve_app.http2.frame_receiver import ConnectionOwner, FrameReceiver, PortState
from serve_app.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
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
    check_priority,
    decode_settings,
    encode_frame,
    encode_goaway,
    encode_rst_stream,
    encode_settings,
    encode_window_update,
    strip_padding,
)
from serve_app.http2.header_blocks import HeaderBlockReader
from serve_app.http2.hpack_headers import RequestHead
from serve_app.http2.stream import Http2Stream

_CONNECTION_WINDOW = 2**30  # so large that only the windows of the streams limit the peer
_FRAMES_PER_TURN = 128  # of the event loop, so that the connections take turns (1 ms)
_HEADERS_WEIGHT = 2  # frames; a call costs more than other frames
_MIN_DATA = 64  # bytes; smaller parts of a message are no progress
_CLOSED_STREAMS = 256  # that are remembered (§5.1); twice the default of concurrent ones
_CLOSE_TIMEOUT = 1.0  # seconds for the delivery of the last frames
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


class Http2Connection(FrameReceiver):
    """An HTTP/2 connection.

    ``max_metadata`` (bytes) is announced to the peer. A larger head is left to the ``owner``; one of more
    than four times the size closes the connection. A peer that is silent for ``keepalive_interval`` seconds
    is pinged; after as many more seconds of silence the connection is aborted.
    """

    def __init__(self, owner: ConnectionOwner, port: PortState, max_metadata: int) -> None:
        super().__init__(port)
        self._owner = owner
        self._max_metadata = max_metadata
        self._headers = HeaderBlockReader(4 * max_metadata)
        self.peer = ""  # address and port
        self._handshake = _AWAITS_PREFACE
        self._streams: dict[int, Http2Stream] = {}
        self._closed: dict[int, bool] = {}  # the last closed streams: whether frames may be in transit
        self._last_stream = 0
        self._receive_window = _CONNECTION_WINDOW
        self._initial_send_window = DEFAULT_WINDOW
        self._shutdown = _RUNNING
        self._idle_since = self._loop.time()
        self._last_call = self._last_checked_call = 0  # streams; those that were refused are no calls

    # Events of asyncio

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        host, port = (transport.get_extra_info("peername") or ("", 0))[:2]
        self.peer = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._owner.on_connected(self)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.on_closed()
        self._owner.on_disconnected(self)

    # Received frames

    def _count_unfinished_headers(self) -> int | None:
        if self._headers.partial or self._handshake != _HANDSHAKE_COMPLETE:
            return self._headers.buffered
        return None

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
            MAX_CONCURRENT_STREAMS: self._port.limits.max_concurrent_streams,
            INITIAL_WINDOW_SIZE: STREAM_WINDOW,
            MAX_FRAME_SIZE: FRAME_SIZE_LIMIT,
            MAX_HEADER_LIST_SIZE: self._max_metadata,
        }
        self._writer.write(encode_settings(settings))
        self._writer.write(encode_window_update(0, _CONNECTION_WINDOW - DEFAULT_WINDOW))
        return len(PREFACE) + self._process_bytes(buffer[len(PREFACE) :])

    def _process_bytes(self, buffer: bytes) -> int:
        if not self._handshake:
            return self._process_preface(buffer)
        position, size, rest, rate = 0, len(buffer), _FRAMES_PER_TURN, self._rate
        while size - position >= 9:
            if self._transport.is_closing():
                return size
            if rest <= 0 or self._writer.paused:
                self._deferred = True
                return position
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
            rest -= 1
            if kind == DATA:
                self._on_data(flags, stream, body)
            elif kind == HEADERS:
                rest -= _HEADERS_WEIGHT + (len(body) >> 10 << 5)  # as RequestHead.cost
                self._on_headers(flags, stream, body)
            else:
                level = rate.level
                rate.level += 1
                if kind < len(_FRAME_HANDLERS):  # unknown types are ignored (§5.5)
                    _FRAME_HANDLERS[kind](self, flags, stream, body)
                rest -= max(0, rate.level - level - 1)
            if rate.level > BURST:
                rate.check()
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
            return self._on_late_data(number)
        if stream.half_closed:
            return self.reset_stream(stream, STREAM_CLOSED)
        stream.receive_window -= size
        if stream.receive_window < 0:
            return self.reset_stream(stream, FLOW_CONTROL_ERROR)
        ended = bool(flags & END_STREAM)
        if stream.content_length is not None:
            stream.content_length -= len(body)
            if stream.content_length < 0 or (ended and stream.content_length):
                return self.reset_stream(stream, PROTOCOL_ERROR)
        if ended:
            stream.half_closed = True
        elif len(body) < _MIN_DATA:
            self._rate.level += 1
        if stream.receiver is not None:
            stream.receiver.on_data(body, ended)
        return None

    def _on_late_data(self, number: int) -> None:
        """Process DATA of a closed stream (§5.1)."""
        self._rate.level += 1
        if not self._closed.get(number) and self._shutdown != _SHUTDOWN_CONFIRMED:
            self._writer.write(encode_rst_stream(number, STREAM_CLOSED))

    def _on_headers(self, flags: int, number: int, body: bytes) -> None:
        block = self._headers.read_headers(flags, number, body)
        if block is None:
            self._awaits_rest = True
        else:
            self._on_header_block(number, *block)

    def _on_continuation(self, flags: int, number: int, body: bytes) -> None:
        block = self._headers.read_continuation(flags, number, body)
        if block is not None:
            self._on_header_block(number, *block)

    def _on_header_block(self, number: int, flags: int, head: RequestHead) -> None:
        """Start a call, or end the peer's side of one; gRPC does not use the fields of request trailers."""
        self._rate.level += head.cost
        ended = bool(flags & END_STREAM)
        stream = self._streams.get(number)
        if stream is None:
            self._open_stream(number, head, ended)
        elif stream.half_closed or not ended or head.has_pseudo_fields or stream.content_length:
            self.reset_stream(stream, STREAM_CLOSED if stream.half_closed else PROTOCOL_ERROR)
        else:
            stream.half_closed = True
            if stream.receiver is not None:
                stream.receiver.on_data(b"", True)

    def _open_stream(self, number: int, head: RequestHead, ended: bool) -> None:
        if number <= self._last_stream:
            self._rate.level += 1
            if self._closed.get(number):
                return
            is_closed = number in self._closed
            code = STREAM_CLOSED if is_closed else PROTOCOL_ERROR
            raise Http2ProtocolError(code, f"HEADERS on stream {number}, which is closed")
        self._last_stream = number
        if self._shutdown == _SHUTDOWN_CONFIRMED:
            self._rate.level += 1
            self._remember_closed(number, True)
            return
        malformed = head.malformed or (ended and head.content_length)
        if malformed or len(self._streams) >= self._port.limits.max_concurrent_streams:
            self._rate.level += 1
            self._remember_closed(number, True)
            self._writer.write(encode_rst_stream(number, PROTOCOL_ERROR if malformed else REFUSED_STREAM))
            return
        stream = Http2Stream(self, self._writer, number, self._initial_send_window)
        self._streams[number] = stream
        self._last_call = number
        stream.half_closed = ended
        stream.content_length = head.content_length
        self._owner.on_request(self, stream, head)
        if number not in self._streams:
            self._rate.level += 1  # it was rejected
            return
        stream.accepted, stream.head_cost = True, head.cost
        self._rate.level = max(0, self._rate.level - head.cost)
        if not ended:
            self._opened.append(stream)
        elif stream.receiver is not None:
            stream.receiver.on_data(b"", True)

    def _on_priority(self, flags: int, number: int, body: bytes) -> None:
        check_priority(number, body)

    def _on_rst_stream(self, flags: int, number: int, body: bytes) -> None:
        if len(body) != 4:
            raise Http2ProtocolError(FRAME_SIZE_ERROR, "RST_STREAM")
        if not number & 1 or number > self._last_stream:
            raise Http2ProtocolError(PROTOCOL_ERROR, f"RST_STREAM of stream {number}, which is idle")
        stream = self._streams.get(number)
        if stream is not None:
            self._rate.level += RESET_COST + stream.head_cost
            self._remove_stream(stream, False)
            stream.on_closed()

    def _on_settings(self, flags: int, number: int, body: bytes) -> None:
        if number or (flags & ACK and body):
            raise Http2ProtocolError(PROTOCOL_ERROR if number else FRAME_SIZE_ERROR, "SETTINGS")
        if flags & ACK:
            return
        if self._handshake == _HANDSHAKE_COMPLETE:
            self._rate.level += SETTINGS_COST
        else:
            self._handshake = _HANDSHAKE_COMPLETE
            self._keepalive.handshake_complete = True
            self.queues.connections.discard(self)
        settings = decode_settings(body)
        if MAX_FRAME_SIZE in settings:
            self._writer.limit_frame_size(settings[MAX_FRAME_SIZE])
        if INITIAL_WINDOW_SIZE in settings:
            self._change_windows(settings[INITIAL_WINDOW_SIZE])
        self._writer.write(encode_frame(SETTINGS, ACK, 0))

    def _change_windows(self, size: int) -> None:
        """Apply the peer's initial window to the open streams (§6.9.2), once per SETTINGS."""
        increment, self._initial_send_window = size - self._initial_send_window, size
        for stream in list(self._streams.values()) if increment else ():
            stream.send_window += increment
            if stream.send_window > MAX_WINDOW:
                raise Http2ProtocolError(FLOW_CONTROL_ERROR, f"a window of {stream.send_window} bytes")
            if stream.unsent and increment > 0:
                self._writer.send_unsent(stream)

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
        if number or len(body) < 8:
            raise Http2ProtocolError(PROTOCOL_ERROR if number else FRAME_SIZE_ERROR, "GOAWAY")

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
            if number > self._last_stream or not number & 1:
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
        elif self._rate.level and stream.accepted and stream.receiver is not None:
            self._rate.add_credit()
        self._remove_stream(stream, not stream.half_closed)

    def reset_stream(self, stream: Http2Stream, code: int) -> None:
        """Write RST_STREAM, and remove and close the stream."""
        if self._streams.get(stream.id) is stream:
            self._rate.level += RESET_COST
            self._writer.write(encode_rst_stream(stream.id, code))
            self._remove_stream(stream, True)
            stream.on_closed()

    def _remove_stream(self, stream: Http2Stream, may_receive: bool) -> None:
        del self._streams[stream.id]
        self._remember_closed(stream.id, may_receive)
        self._writer.remove(stream)
        if self._shutdown == _SHUTDOWN_CONFIRMED and not self._streams:
            self.close()

    def _remember_closed(self, number: int, may_receive: bool) -> None:
        self._closed[number] = may_receive
        if len(self._closed) > 2 * _CLOSED_STREAMS:
            self._closed = dict(list(self._closed.items())[-_CLOSED_STREAMS:])

    # End of the connection

    def shut_down(self) -> None:
        """Accept no further calls, and close after the calls in progress have ended (§6.8)."""
        if self._handshake == _AWAITS_PREFACE:  # the first frame of a server is SETTINGS
            self.close()
        elif not self._shutdown and not self._transport.is_closing():
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

    def _check_idle(self) -> None:
        """Shut down the connection after ``max_connection_idle`` seconds without a call."""
        now = self._loop.time()
        if self._streams or self._last_call != self._last_checked_call:
            self._idle_since, self._last_checked_call = now, self._last_call
        elif now - self._idle_since >= self._port.limits.max_connection_idle > 0:
            self.shut_down()

    def close(self) -> None:
        """Accept no further calls, and close after the written data is sent."""
        self._writer.flush()
        self._transport.close()

    def _fail(self, code: int, message: str) -> None:
        self._writer.write(encode_goaway(self._last_stream, code, message))
        self.close()
        self._loop.call_later(_CLOSE_TIMEOUT, self.abort)  # a peer that does not read would keep its calls


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
