"""Attacks on the inference port of gRPC, each while other clients call a model on connections of their own.

The clients' p99 during an attack is compared with that just before and after it. It may double, and it may
always be 50 ms: attacker, clients and server share the cores of one machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio

from tests.benchmarks.grpc_load import PREDICTIONS, prediction
from tests.security.attack import Outcome, Target, attack

_ROOT = Path(__file__).parents[3]
_CLIENTS = 4
_SECONDS = 8.0  # of an attack
_MAX_MEMORY = 64 << 20  # bytes
_MIN_P99 = 0.05  # seconds, which are always permitted


@dataclass
class Latencies:
    """The seconds of the clients' calls, and the statuses of the failed ones."""

    seconds: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def p99(self) -> float:
        return sorted(self.seconds)[int(0.99 * len(self.seconds))] if self.seconds else 60.0


def measure(target: Target, seconds: float, latencies: Latencies) -> None:
    """Call the model ``echo`` from ordinary clients."""
    message = prediction("echo", data=b"x" * 100)
    metadata = list(target.headers().items())

    async def call(channel: grpc.aio.Channel, end: float) -> None:
        predict = channel.unary_unary(PREDICTIONS)
        while time.monotonic() < end:
            started_at = time.perf_counter()
            try:
                await predict(message, metadata=metadata, timeout=20)
            except grpc.RpcError as error:
                latencies.errors[error.code().name] += 1
                await asyncio.sleep(0.05)
            latencies.seconds.append(time.perf_counter() - started_at)
            await asyncio.sleep(0.005)

    async def main() -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(target.grpc, options=options) as channel:
            end = time.monotonic() + seconds
            await asyncio.gather(*[call(channel, end) for _ in range(_CLIENTS)])

    asyncio.run(main())


@contextlib.contextmanager
def memory_peak(target: Target) -> Iterator[Callable[[], int]]:
    """Sample the server's memory; yield a function that returns the peak."""
    peak, stopped = [0], threading.Event()

    def sample() -> None:
        while not stopped.wait(1.0):
            peak[0] = max(peak[0], target.memory())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield lambda: peak[0]
    finally:
        stopped.set()
        thread.join()


def replay(
    target: Target,
    name: str,
    *,
    key: bool = True,
    model: str = "echo",
    seconds: float = _SECONDS,
    max_memory: int = _MAX_MEMORY,
) -> Outcome:
    """Run an attack of ``http2_attacker`` in a process of its own while clients call the server.

    It may add ``max_memory`` bytes, of which half remain.
    """
    calm, attacked = Latencies(), Latencies()
    measure(target, 3.0, calm)
    before = target.memory()
    message = prediction(model, data=b"x").hex()
    arguments = [name, target.grpc, PREDICTIONS, target.keys.get("alpha", "") if key else "", str(seconds)]
    command = [sys.executable, "-m", "tests.security.http2_attacker", *arguments, message]
    with memory_peak(target) as peak:
        process = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE)
        try:
            time.sleep(1.5)
            measure(target, seconds - 3.0, attacked)
            output = process.communicate(timeout=60)[0]
        finally:
            process.kill()
            process.wait()
        added = peak() - before
    time.sleep(2.5)  # the memory returns one second after the last byte
    left = target.memory() - before
    measure(target, 2.0, calm)
    counts = json.loads(output)
    sent = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    failed = sum(attacked.errors.values())
    after = (
        f"p99 of others {1000 * calm.p99:.0f} → {1000 * attacked.p99:.0f} ms, {failed} of "
        f"{len(attacked.seconds)} calls failed, memory +{added >> 20} MB, then +{left >> 20} MB ({sent})"
    )
    within = attacked.p99 <= max(2 * calm.p99, _MIN_P99)
    return Outcome(after, within and not failed and added < max_memory and left < max_memory // 2)


@attack("grpc", "10,000 open header blocks", "all calls of others RESOURCE_EXHAUSTED")
def open_heads(target: Target) -> Outcome:
    return replay(target, "open_heads")


@attack("grpc", "10,000 open header blocks without a key", "all calls of others RESOURCE_EXHAUSTED")
def open_heads_without_key(target: Target) -> Outcome:
    return replay(target, "open_heads", key=False)


@attack("grpc", "150 unfinished messages of 6.5 MB", "memory +937 MB")
def unfinished_messages(target: Target) -> Outcome:
    return replay(target, "unfinished_messages")


@attack("grpc", "resets between DATA", "p50 of others 10.2 s, memory +198 MB")
def resets(target: Target) -> Outcome:
    return replay(target, "resets")


@attack("grpc", "196 KB of SETTINGS with 5,000 streams", "every call of others fails after 20 s")
def settings(target: Target) -> Outcome:
    return replay(target, "settings")


@attack("grpc", "PING, SETTINGS, WINDOW_UPDATE … between DATA", "p50 of others 6.8 s")
def control_frames(target: Target) -> Outcome:
    return replay(target, "control_frames")


@attack("grpc", "empty CONTINUATION", "p50 of others 8.2 s")
def continuations(target: Target) -> Outcome:
    return replay(target, "continuations")


@attack("grpc", "400 unread responses of 1 MiB", "memory +401 MB")
def unread_responses(target: Target) -> Outcome:
    return replay(target, "unread_responses", model="wide")


@attack("grpc", "unread acknowledgements of PING", "memory +5 MB")
def unread_acknowledgements(target: Target) -> Outcome:
    return replay(target, "unread_acknowledgements")


@attack("grpc", "500 unfinished header blocks of 60 KB", "memory +29 MB, as long as the attacker wants")
def unfinished_heads(target: Target) -> Outcome:
    return replay(target, "unfinished_heads")


@attack(
    "grpc", "refused streams at the permitted rate, without a key", "memory +24 MB in 23 s, without bound"
)
def refused_streams(target: Target) -> Outcome:
    return replay(target, "refused_streams", key=False, seconds=23.0, max_memory=16 << 20)
