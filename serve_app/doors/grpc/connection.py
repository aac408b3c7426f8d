"""One connection of HTTP/2 (RFC 9113), as a server of gRPC keeps it: frames, windows, and what a peer may not do.

gRPC's own server for asyncio spends most of a small call in passing it between its threads and the event loop; here a
frame is read where it arrives.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any, Protocol

from serve_app.doors.grpc.frames import (
    ACK,
    COMPRESSION_ERROR,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FIRST_WINDOW,
    FLOW_CONTROL_ERROR,
    FRAME,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    LARGEST_WINDOW,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_SIZE,
    MAX_HEADER_LIST_SIZE,
    NO_ERROR,
    PADDED,
    PING,
    PREFACE,
    PRIORITISED,
    PROTOCOL_ERROR,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    STREAM_WINDOW,
    WINDOW_UPDATE,
    Fault,
    frame,
    unpadded,
)
from serve_app.doors.grpc.headers import BadHeaders, Head, Reader, TooManyHeaders
from serve_app.doors.grpc.stream import Stream

_CONNECTION_WINDOW = 2**30  # what the streams' own windows leave open is never closed by that of the connection
_FRAME_SIZE = 1 << 16
_BLOCK_SIZE = 1 << 16  # bytes of a header block, in as many frames as it likes
_AT_ONCE = 1 << 16  # bytes that are gathered before they are written
_HIGH_WATER = 1 << 20  # bytes that wait for the socket before streams wait too
_IDLE_TALK = 10_000  # frames in a row that bring no call further, before the peer is told to calm down
_FAREWELL = b"farewell"
_PATIENCE = 1.0  # seconds in which a peer acknowledges that it is left
_OLD_HTTP = (
    b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: text/plain\r\n\r\n"
    b"This port speaks gRPC, which is HTTP/2; plain HTTP has a port of its own.\n"
)


class Owner(Protocol):
    """What a connection is for."""

    def connected(self, connection: Connection) -> None:
        """It is there."""

    def begun(self, connection: Connection, stream: Stream, head: Head) -> None:
        """A call has begun: ``stream`` is given its receiver, or ended."""

    def disconnected(self, connection: Connection) -> None:
        """It is there no more."""


class Connection(asyncio.Protocol):
    """``most_streams`` and ``most_metadata`` (bytes) are told the peer as its limits; a head that is larger is left to
    the ``owner``, one of four times the size ends the connection. A peer that is silent for ``keepalive`` seconds is
    asked for a sign of life, and has left when it gives none in as many.
    """

    def __init__(
        self,
        owner: Owner,
        most_streams: int,
        most_metadata: int,
        keepalive: float,
    ) -> None:
        self._owner = owner
        self._most_streams = most_streams
        self._most_metadata = most_metadata
        self._keepalive = keepalive
        self._reader = Reader(4 * most_metadata)
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self.peer = ""  # the address and the port of who is there
        self._buffer: bytes | bytearray = b""
        self._greeted = 0  # 1: the preface has come, 2: the peer's settings too
        self._block: tuple[int, int, bytearray] | None = None  # a header block whose rest is to come: stream, flags
        self._streams: dict[int, Stream] = {}
        self._newest = 0
        self._credit = _CONNECTION_WINDOW
        self._window = FIRST_WINDOW
        self._stream_window = FIRST_WINDOW
        self._frame_size = 16_384
        self._blocked: dict[int, Stream] = {}
        self._out: list[bytes] = []
        self._gathered = 0
        self._paused = False
        self._idle_talk = 0
        self._leaving = 0  # 1: the peer has been told, 2: what it begins now is not taken
        self._heard = False
        self._asked = False
        self._look: asyncio.TimerHandle | None = None

    # What asyncio tells

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        host, port = (transport.get_extra_info("peername") or ("", 0))[:2]
        self.peer = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        transport.set_write_buffer_limits(high=_HIGH_WATER)
        self._look = self._loop.call_later(self._keepalive, self._listen)
        self._owner.connected(self)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        buffer: Any = data
        if self._buffer:
            self._buffer += data
            buffer = self._buffer
        try:
            place = self._take(buffer) if self._greeted else self._greet(buffer)
        except Fault as fault:
            self._fail(fault.code, str(fault))
            return
        if place == len(buffer):
            self._buffer = b""
        elif buffer is self._buffer:
            del self._buffer[:place]
        else:
            self._buffer = bytearray(data[place:])

    def pause_writing(self) -> None:
        """The peer does not read: nothing is read of it either, so that no answers pile up here."""
        self._paused = True
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        if not self._transport.is_closing():
            self._transport.resume_reading()
            self._unblock()

    def connection_lost(self, error: Exception | None) -> None:
        if self._look is not None:
            self._look.cancel()
        self._out.clear()
        self._blocked.clear()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.dropped()
        self._owner.disconnected(self)

    # What comes

    def _greet(self, buffer: bytes) -> int:
        if len(buffer) < len(PREFACE) and PREFACE.startswith(buffer):
            return 0
        if not buffer.startswith(PREFACE):
            if bytes(buffer).partition(b"\r\n")[0].endswith((b" HTTP/1.1", b" HTTP/1.0")):
                self.write(_OLD_HTTP)
                self.close()
                return len(buffer)
            raise Fault(PROTOCOL_ERROR, "no preface of HTTP/2")
        self._greeted = 1
        settings = {
            MAX_CONCURRENT_STREAMS: self._most_streams,
            INITIAL_WINDOW_SIZE: STREAM_WINDOW,
            MAX_FRAME_SIZE: _FRAME_SIZE,
            MAX_HEADER_LIST_SIZE: self._most_metadata,
        }
        self.write(frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *pair) for pair in settings.items())))
        more = _CONNECTION_WINDOW - FIRST_WINDOW
        self.write(frame(WINDOW_UPDATE, 0, 0, more.to_bytes(4, "big")))
        size = len(PREFACE)
        return size + self._take(buffer[size:])

    def _take(self, buffer: bytes) -> int:
        """Take each frame that is whole; the place where the rest begins. Raises Fault."""
        place, size = 0, len(buffer)
        while size - place >= 9:
            if self._transport.is_closing():
                return size
            head, flags, stream = FRAME.unpack_from(buffer, place)
            length, kind = head >> 8, head & 0xFF
            if length > _FRAME_SIZE:
                raise Fault(FRAME_SIZE_ERROR, f"a frame of {length} bytes; {_FRAME_SIZE} at most")
            begin = place + 9
            place = begin + length
            if place > size:
                return begin - 9
            body = bytes(buffer[begin:place])
            stream &= LARGEST_WINDOW
            if self._block is not None and kind != CONTINUATION:
                raise Fault(PROTOCOL_ERROR, "a header block is not ended")
            if self._greeted == 1 and (kind != SETTINGS or flags & ACK):
                raise Fault(PROTOCOL_ERROR, "no SETTINGS behind the preface")
            if kind == DATA:
                self._data(flags, stream, body)
            elif kind == HEADERS:
                self._headers(flags, stream, body)
            else:
                self._idle_talk += 1
                if kind < len(_OTHERS):  # others are to be ignored (§5.5)
                    _OTHERS[kind](self, flags, stream, body)
            if self._idle_talk > _IDLE_TALK:
                raise Fault(ENHANCE_YOUR_CALM, f"{_IDLE_TALK} frames that bring no call further")
        return place

    def _data(self, flags: int, number: int, body: bytes) -> None:
        stream = self._streams.get(number)
        if stream is None and (number > self._newest or not number & 1):
            raise Fault(PROTOCOL_ERROR, f"DATA on stream {number}, which nobody opened")
        size = len(body)
        self._credit -= size
        if self._credit < 0:
            raise Fault(FLOW_CONTROL_ERROR, "more data than the connection's window has room for")
        if self._credit < _CONNECTION_WINDOW // 2:
            self.write(frame(WINDOW_UPDATE, 0, 0, (_CONNECTION_WINDOW - self._credit).to_bytes(4, "big")))
            self._credit = _CONNECTION_WINDOW
        if flags & PADDED:
            body = unpadded(body)
        if stream is None:
            self._idle_talk += 1  # of a call that is over
            return None
        if stream.half_closed:
            return self.reset(stream, STREAM_CLOSED)
        stream.credit -= size
        if stream.credit < 0:
            return self.reset(stream, FLOW_CONTROL_ERROR)
        stream.owed += size - len(body)
        ended = bool(flags & END_STREAM)
        if ended:
            stream.half_closed = True
        self._idle_talk = self._idle_talk + 1 if not body and not ended else 0
        if stream.receiver is not None:
            stream.receiver.received(body, ended)
        return None

    def _headers(self, flags: int, number: int, body: bytes) -> None:
        if not number & 1:
            raise Fault(PROTOCOL_ERROR, f"HEADERS on stream {number}")
        if flags & PADDED:
            body = unpadded(body)
        if flags & PRIORITISED:
            if len(body) < 5:
                raise Fault(FRAME_SIZE_ERROR, "HEADERS too short for their priority")
            body = body[5:]
        if flags & END_HEADERS:
            self._opened(number, flags, body)
        else:
            self._block = (number, flags, bytearray(body))

    def _continuation(self, flags: int, number: int, body: bytes) -> None:
        if self._block is None or self._block[0] != number:
            raise Fault(PROTOCOL_ERROR, "CONTINUATION of nothing")
        gathered = self._block[2]
        gathered += body
        if len(gathered) > _BLOCK_SIZE:
            raise Fault(ENHANCE_YOUR_CALM, f"a header block of more than {_BLOCK_SIZE} bytes")
        if flags & END_HEADERS:
            first, self._block = self._block[1], None
            self._opened(number, first, bytes(gathered))

    def _opened(self, number: int, flags: int, block: bytes) -> None:
        """A call begins, or the peer's side of one ends with fields that gRPC has no use for."""
        try:
            head = self._reader.read(block)
        except TooManyHeaders as error:
            raise Fault(ENHANCE_YOUR_CALM, str(error)) from None
        except BadHeaders as error:
            raise Fault(COMPRESSION_ERROR, str(error)) from None
        ended = bool(flags & END_STREAM)
        stream = self._streams.get(number)
        if stream is not None:
            if stream.half_closed or not ended:
                return self.reset(stream, STREAM_CLOSED if stream.half_closed else PROTOCOL_ERROR)
            stream.half_closed = True
            if stream.receiver is not None:
                stream.receiver.received(b"", True)
            return None
        if number <= self._newest or self._leaving == 2:  # of a call that is over, or that will not be
            self._idle_talk += 1
            self._newest = max(self._newest, number)
            return None
        self._newest = number
        if len(self._streams) >= self._most_streams or head.malformed:
            self._idle_talk += 1
            code = PROTOCOL_ERROR if head.malformed else REFUSED_STREAM
            return self.write(frame(RST_STREAM, 0, number, code.to_bytes(4, "big")))
        stream = self._streams[number] = Stream(self, number, self._stream_window)
        stream.half_closed = ended
        self._owner.begun(self, stream, head)
        if ended and stream.receiver is not None and number in self._streams:
            stream.receiver.received(b"", True)
        return None

    def _priority(self, flags: int, number: int, body: bytes) -> None:
        if not number or len(body) != 5:
            raise Fault(PROTOCOL_ERROR if not number else FRAME_SIZE_ERROR, "PRIORITY")

    def _rst_stream(self, flags: int, number: int, body: bytes) -> None:
        if len(body) != 4:
            raise Fault(FRAME_SIZE_ERROR, "RST_STREAM")
        if not number or number > self._newest:
            raise Fault(PROTOCOL_ERROR, f"RST_STREAM of stream {number}, which nobody opened")
        stream = self._streams.get(number)
        if stream is not None:
            self._forget(stream)
            stream.dropped()

    def _settings(self, flags: int, number: int, body: bytes) -> None:
        if number or (flags & ACK and body) or len(body) % 6:
            raise Fault(PROTOCOL_ERROR if number else FRAME_SIZE_ERROR, "SETTINGS")
        self._greeted = 2
        if flags & ACK:
            return
        for key, value in struct.iter_unpack(">HI", body):
            if key == INITIAL_WINDOW_SIZE:
                if value > LARGEST_WINDOW:
                    raise Fault(FLOW_CONTROL_ERROR, f"a window of {value} bytes")
                for stream in self._streams.values():
                    stream.window += value - self._stream_window
                self._stream_window = value
            elif key == MAX_FRAME_SIZE:
                if not 16_384 <= value < 1 << 24:
                    raise Fault(PROTOCOL_ERROR, f"frames of {value} bytes")
                self._frame_size = min(value, _FRAME_SIZE)
        self.write(frame(SETTINGS, ACK, 0))
        self._unblock()

    def _push_promise(self, flags: int, number: int, body: bytes) -> None:
        raise Fault(PROTOCOL_ERROR, "PUSH_PROMISE from a client")

    def _ping(self, flags: int, number: int, body: bytes) -> None:
        if number or len(body) != 8:
            raise Fault(PROTOCOL_ERROR if number else FRAME_SIZE_ERROR, "PING")
        if not flags & ACK:
            self.write(frame(PING, ACK, 0, body))
        elif body == _FAREWELL:
            self._left()

    def _goaway(self, flags: int, number: int, body: bytes) -> None:
        if number:
            raise Fault(PROTOCOL_ERROR, "GOAWAY on a stream")

    def _window_update(self, flags: int, number: int, body: bytes) -> None:
        if len(body) != 4:
            raise Fault(FRAME_SIZE_ERROR, "WINDOW_UPDATE")
        more = int.from_bytes(body, "big") & LARGEST_WINDOW
        if not number:
            self._window += more
            if not more or self._window > LARGEST_WINDOW:
                raise Fault(FLOW_CONTROL_ERROR if more else PROTOCOL_ERROR, f"WINDOW_UPDATE of {more}")
            return self._unblock()
        stream = self._streams.get(number)
        if stream is None:
            if number > self._newest:
                raise Fault(PROTOCOL_ERROR, f"WINDOW_UPDATE of stream {number}, which nobody opened")
            return None
        stream.window += more
        if not more or stream.window > LARGEST_WINDOW:
            return self.reset(stream, FLOW_CONTROL_ERROR if more else PROTOCOL_ERROR)
        if stream.unsent:
            self.pump(stream)
        return None

    # What is sent

    def write(self, data: bytes) -> None:
        """Send ``data`` with everything else of this turn of the event loop."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(data)
        self._gathered += len(data)
        if self._gathered > _AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        if self._out:
            out, self._out, self._gathered = self._out, [], 0
            if not self._transport.is_closing():
                self._transport.write(b"".join(out))

    def pump(self, stream: Stream) -> None:
        """Send of ``stream`` what the windows and the socket have room for; the rest when there is more."""
        unsent = stream.unsent
        while unsent:
            room = min(stream.window, self._window, self._frame_size)
            if room <= 0 or self._paused:
                self._blocked[stream.id] = stream
                return
            data = unsent[0]
            if len(data) <= room:
                unsent.popleft()
            else:
                rest = memoryview(data)
                data, unsent[0] = rest[:room], rest[room:]
            size = len(data)
            stream.window -= size
            self._window -= size
            self._idle_talk = 0
            self.write(FRAME.pack(size << 8 | DATA, 0, stream.id))
            self.write(data)
        self._blocked.pop(stream.id, None)
        stream.sent()

    def _unblock(self) -> None:
        """There may be room again: for each stream in its turn."""
        for stream in list(self._blocked.values()):
            if self._paused or self._window <= 0:
                return
            del self._blocked[stream.id]  # and to the end of the row, if it has to wait again
            self.pump(stream)

    def ended(self, stream: Stream, block: bytes) -> None:
        """The answer of ``stream`` is whole: its last header block is written."""
        self.write(frame(HEADERS, END_HEADERS | END_STREAM, stream.id, block))
        if not stream.half_closed:
            self.write(frame(RST_STREAM, 0, stream.id, NO_ERROR.to_bytes(4, "big")))
        self._idle_talk = 0
        self._forget(stream)

    def reset(self, stream: Stream, code: int) -> None:
        if self._streams.get(stream.id) is stream:
            self._idle_talk += 1
            self.write(frame(RST_STREAM, 0, stream.id, code.to_bytes(4, "big")))
            self._forget(stream)
            stream.dropped()

    def _forget(self, stream: Stream) -> None:
        self._streams.pop(stream.id, None)
        self._blocked.pop(stream.id, None)
        if self._leaving == 2 and not self._streams:
            self.close()

    # How it ends

    def leave(self) -> None:
        """Take no further call, and end when those that are under way have ended."""
        if not self._leaving and not self._transport.is_closing():
            self._leaving = 1
            self.write(frame(GOAWAY, 0, 0, struct.pack(">II", LARGEST_WINDOW, NO_ERROR)))
            self.write(frame(PING, 0, 0, _FAREWELL))  # when it is back, the peer begins nothing more
            self._loop.call_later(_PATIENCE, self._left)

    def _left(self) -> None:
        if self._leaving == 1 and not self._transport.is_closing():
            self._leaving = 2
            self.write(frame(GOAWAY, 0, 0, struct.pack(">II", self._newest, NO_ERROR)))
            if not self._streams:
                self.close()

    def close(self) -> None:
        """Take no further call, and end as soon as what was written is sent."""
        self._flush()
        self._transport.close()

    def drop(self) -> None:
        """End at once, with the calls that are under way."""
        self._transport.abort()

    def _fail(self, code: int, words: str) -> None:
        self.write(frame(GOAWAY, 0, 0, struct.pack(">II", self._newest, code) + words.encode()))
        self.close()

    def _listen(self) -> None:
        """Whether somebody is there still."""
        silent = not self._heard and not self._paused
        if self._transport.is_closing() or (silent and (self._asked or self._greeted < 2)):
            return self._transport.abort()
        self._asked = silent
        if self._asked:
            self.write(frame(PING, 0, 0, b"are you?"))
        self._heard = False
        self._look = self._loop.call_later(self._keepalive, self._listen)
        return None


_OTHERS: tuple[Callable[[Connection, int, int, bytes], None], ...] = (
    Connection._data,
    Connection._headers,
    Connection._priority,
    Connection._rst_stream,
    Connection._settings,
    Connection._push_promise,
    Connection._ping,
    Connection._goaway,
    Connection._window_update,
    Connection._continuation,
)
