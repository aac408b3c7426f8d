"""Unary gRPC calls as a load: so many streams on one connection, each sending its next call when it has its
answer.

The frames are written here, byte by byte: a gRPC library for Python costs as much as the servers that are
measured. Of HTTP/2 (RFC 9113) this is what a well-behaved server makes a client do: settings, pings, windows,
and no more.
"""

from __future__ import annotations

import asyncio
import gc
import math
import struct
import time
from array import array
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.client.prometheus_text import percentile
from serve_app.load_test.profile import LoadProfile, LoadResult

PREDICTIONS = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"

_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_WIDE = 2**30  # bytes of a window that nobody fills
_LARGEST = 16_000  # bytes of a message: it goes in one frame
_FRAME = struct.Struct(">I B I")  # length and type, flags, stream


@dataclass(frozen=True)
class Call:
    """What is called, over and over, at ``host:port``; a good answer is a message that holds ``holds``."""

    address: str
    message: bytes
    holds: bytes = b""
    path: str = PREDICTIONS

    def __post_init__(self) -> None:
        if len(self.message) > _LARGEST:
            raise ValueError(
                f"A message of {len(self.message)} bytes is too long for this client: {_LARGEST} at most."
            )

    @property
    def headers(self) -> bytes:
        """The header block, which no table of the connection's has a part in."""
        block = b"\x83\x86" + b"\x04" + _text(self.path) + b"\x01" + _text(self.address)  # POST, http
        for name, value in {
            "content-type": "application/grpc",
            "te": "trailers",
            "user-agent": "torchrelay",
        }.items():
            block += b"\x00" + _text(name) + _text(value)
        return block


def prediction(model: str, **parts: bytes) -> bytes:
    """TorchServe's PredictionsRequest as bytes."""
    message = _field(1, model.encode())
    for name, value in parts.items():
        message += _field(3, _field(1, name.encode()) + _field(2, value))
    return message


def run(call: Call, load: LoadProfile) -> LoadResult:
    """Run a closed loop of ``load.connections`` streams on an event loop of its own. Raises OSError."""
    if load.rate is not None or load.seconds is None:
        raise ValueError("Calls by gRPC are a closed loop for some seconds.")
    try:
        import uvloop

        loop = uvloop.new_event_loop()
    except ImportError:
        loop = asyncio.new_event_loop()
    gc.collect()
    gc.freeze()
    try:
        return loop.run_until_complete(_measure(call, load))
    finally:
        gc.unfreeze()
        loop.close()


async def _measure(call: Call, load: LoadProfile) -> LoadResult:
    assert load.seconds is not None
    loop = asyncio.get_running_loop()
    host, _, port = call.address.rpartition(":")
    _, channel = await loop.create_connection(lambda: _Channel(call, load), host, int(port))
    await asyncio.wait([channel.over], timeout=load.warmup + load.seconds + load.timeout)
    channel.close()
    held = sorted(channel.latencies)
    p50, p90, p99 = (percentile(held, share) for share in (0.5, 0.9, 0.99))
    errors: Mapping[str, int] = channel.errors
    mean = sum(held) / len(held) if held else math.nan
    largest = held[-1] if held else math.nan
    return LoadResult(
        "h2",
        load.connections,
        load.seconds,
        len(held),
        channel.completed,
        p50,
        p90,
        p99,
        largest,
        errors,
        mean=mean,
    )


class _Channel(asyncio.Protocol):
    """The connection: its streams, and what came of those that are over."""

    def __init__(self, call: Call, load: LoadProfile) -> None:
        block, message = call.headers, b"\x00" + struct.pack(">I", len(call.message)) + call.message
        self._head = struct.pack(">I", len(block) << 8 | _HEADERS) + bytes([_END_HEADERS])
        self._block = block
        self._data_head = struct.pack(">I", len(message) << 8 | _DATA) + bytes([_END_STREAM])
        self._message = message
        self._holds = call.holds
        self._load = load
        self._next = 1
        self._window = 65_535  # bytes that may be sent
        self._streams: dict[int, list] = {}  # when it began, what came
        self._waiting: deque[float] = deque()  # for room in the window
        self._buffer = b""
        self._start = self._end = math.inf
        self._read = 0
        self.latencies = array("d")
        self.errors: Counter[str] = Counter()
        self.completed = 0
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        settings = struct.pack(">HIHIHI", 1, 0, 2, 0, 4, _WIDE)  # no header table, no push, wide windows
        hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, settings)
        self._start = time.perf_counter() + self._load.warmup
        self._end = self._start + (self._load.seconds or 0)
        self._transport.write(hello + _frame(_WINDOW, 0, 0, struct.pack(">I", _WIDE)))
        self._transport.write(
            b"".join(self._open(time.perf_counter()) for _ in range(self._load.connections))
        )

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer + data if self._buffer else data
        place, size = 0, len(buffer)
        answer: list[bytes] = []
        while size - place >= 9:
            head, flags, stream = _FRAME.unpack_from(buffer, place)
            length, kind = head >> 8, head & 0xFF
            if size - place - 9 < length:
                break
            self._take(kind, flags, stream & 0x7FFFFFFF, buffer[place + 9 : place + 9 + length], answer)
            place += 9 + length
        self._buffer = buffer[place:]
        if self._read > _WIDE // 2:
            answer.append(_frame(_WINDOW, 0, 0, struct.pack(">I", self._read)))
            self._read = 0
        if answer:
            self._transport.write(b"".join(answer))

    def _take(self, kind: int, flags: int, stream: int, body: bytes, answer: list[bytes]) -> None:
        if kind == _DATA:
            self._read += len(body)
            if stream in self._streams:
                self._streams[stream][1] += body
        elif kind == _RESET:
            self._ended(stream, "reset", answer)
        elif kind == _SETTINGS and not flags & _ACK:
            answer.append(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            answer.append(_frame(_PING, _ACK, 0, body))
        elif kind == _WINDOW and stream == 0:
            self._window += struct.unpack(">I", body)[0]
            while self._waiting and self._window >= len(self._message):
                answer.append(self._open(self._waiting.popleft()))
        elif kind == _GOAWAY:
            self._fail("goaway")
        if kind in (_DATA, _HEADERS) and flags & _END_STREAM:
            self._ended(stream, "", answer)

    def _open(self, now: float) -> bytes:
        """Send the next request, or nothing while the window has no room for it."""
        if self._window < len(self._message):
            self._waiting.append(now)
            return b""
        self._window -= len(self._message)
        stream, self._next = self._next, self._next + 2
        self._streams[stream] = [now, b""]
        number = struct.pack(">I", stream)
        return b"".join((self._head, number, self._block, self._data_head, number, self._message))

    def _ended(self, stream: int, error: str, answer: list[bytes]) -> None:
        found = self._streams.pop(stream, None)
        if found is None:
            return
        now = time.perf_counter()
        began, body = found
        error = error or ("refused" if len(body) < 5 else "" if self._holds in body else "body")
        if began >= self._start and began < self._end:
            if error:
                self.errors[error] += 1
            else:
                self.latencies.append(now - began)
        if not error and self._start <= now < self._end:
            self.completed += 1
        if now < self._end:
            answer.append(self._open(now))
        elif not self._streams and not self.over.done():
            self.over.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail("disconnect")

    def _fail(self, kind: str) -> None:
        """Everything that is under way has failed."""
        if self._streams and not self.over.done():
            self.errors[kind] += len(self._streams)
        self._streams.clear()
        if not self.over.done():
            self.over.set_result(None)

    def close(self) -> None:
        self._fail("unanswered")
        self._transport.close()


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return _FRAME.pack(len(body) << 8 | kind, flags, stream) + body


def _text(text: str) -> bytes:
    raw = text.encode()
    if len(raw) > 126:
        raise ValueError(f"{text!r} is too long for this client's headers: 126 bytes at most.")
    return bytes([len(raw)]) + raw


def _field(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(value)) + value


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
