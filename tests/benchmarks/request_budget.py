"""CPU time of one request in a replica by stage, without sockets and without Ray.

``python -m tests.benchmarks.request_budget [--model echo|mlp] [--connections 32] [--requests 20000]`` feeds
uvicorn's protocol with whole requests, in this process, on the path of callbacks and on that of ASGI tasks.
CPU time is that of each thread (``/proc/self/task``): other programs of the machine hardly disturb it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from serve_app.dataplane.capture.recorder import CaptureRecorder
from serve_app.dataplane.capture.tap import CaptureTap
from serve_app.dataplane.data_plane import DataPlane, RoutingTableReader
from serve_app.domain.access import AccessTable, KeyGrant
from serve_app.domain.capture import CapturePolicy
from serve_app.domain.model import ModelRef, ModelSpec
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.protocols.http_app import inference_app
from serve_app.runtime.backends import Backend
from serve_app.runtime.batching.admission_control import ConcurrencyLimit
from serve_app.runtime.batching.batcher import Batcher
from serve_app.runtime.handler_thread import HandlerThread
from serve_app.runtime.runner import Runner
from serve_app.settings import RuntimeSettings, Settings, TelemetrySettings
from serve_app.telemetry import torchserve, tracing
from serve_app.telemetry.access_log import AccessLog
from serve_app.telemetry.metrics import Meters
from tests.benchmarks.archives import MODELS
from tests.support.otlp_receiver import collect_grpc
from tests.support.wire_client import RecordingTransport, connect, use_callbacks

_STAGES = ("parse and admit", "respond and record", "handler thread", "access log", "total")
_PATHS = (("tasks", False, False), ("callbacks", True, False), ("callbacks, with a key", True, True))
_PART = 200  # requests in a row with traces, or without: the load of other programs falls on both alike
_EXPORT_PARTS = 50  # parts with traces between two exports: 400 spans, as in a server
_TURN = 10_000  # requests of a turn with capture
_KEY = "0123456789abcdef"
_SOURCES = Path(__file__).parent / "models"


class Load:
    """Connections that send their next request as soon as they have a response."""

    def __init__(self, app: Any, request: bytes, connections: int) -> None:
        self._request = request
        self._idle = [self._connect(app) for _ in range(connections)]
        self._wake: asyncio.Future[None] | None = None
        self.backends: dict[tuple[str, str], Backend] = {}

    def _connect(self, app: Any) -> Any:
        load = self

        class Transport(RecordingTransport):
            def write(self, data: Any) -> None:
                load._idle.append(protocol)
                if load._wake is not None and not load._wake.done():
                    load._wake.set_result(None)

        protocol = connect(app, Transport())
        return protocol

    async def run(self, requests: int) -> tuple[int, float]:
        """Send requests; return their number and the CPU seconds until they were admitted."""
        sent, seconds = 0, 0.0
        while sent < requests:
            idle, self._idle = self._idle, []
            started_at = time.thread_time()
            for protocol in idle:
                protocol.data_received(self._request)
            seconds += time.thread_time() - started_at
            sent += len(idle)
            if not self._idle:
                self._wake = asyncio.get_running_loop().create_future()
                await self._wake
        return sent, seconds


def measure(
    name: str, connections: int, requests: int, callbacks: bool, key: bool = False
) -> dict[str, float]:
    """Return the CPU time of a request in microseconds by stage; ``key``: requests need and have a key."""
    return uvloop.run(_measure(name, connections, requests, callbacks, key))


def measure_traces(name: str, connections: int, requests: int, share: float) -> float:
    """Return the CPU time in microseconds that traces of a share of the requests add to each.

    Half of the requests run with tracing and half without, in short turns; the tenth with the largest
    difference and that with the smallest are left out. A collector runs in another process.
    """
    context = multiprocessing.get_context("spawn")
    endpoint, end = context.Queue(), context.Event()
    collector = context.Process(target=_collect, args=(endpoint, end))
    collector.start()
    telemetry = TelemetrySettings(otlp_endpoint=endpoint.get(), trace_sampling=share)
    tracing.configure(Settings(telemetry=telemetry), "replica")
    try:
        return uvloop.run(_measure_traces(name, connections, requests))
    finally:
        end.set()
        collector.join()


def _collect(endpoint: Any, end: Any) -> None:
    with collect_grpc() as (_, address):
        endpoint.put(address)
        end.wait()


async def _measure_traces(name: str, connections: int, requests: int) -> float:
    tracer = tracing._tracer
    assert tracer is not None
    differences, export = [], 0.0
    async with open_connections(name, connections, True, False) as load:
        await load.run(requests // 10)
        for part in range(requests // (2 * _PART)):
            seconds = {}
            for is_on in (True, False) if part % 2 else (False, True):
                tracing._tracer = tracer if is_on else None
                before = sum(_thread_seconds().values())
                await load.run(_PART)
                seconds[is_on] = sum(_thread_seconds().values()) - before
            differences.append(seconds[True] - seconds[False])
            if part % _EXPORT_PARTS == _EXPORT_PARTS - 1:
                before = sum(_thread_seconds().values())
                tracer.processor.force_flush()
                export += sum(_thread_seconds().values()) - before
        tracing._tracer = tracer
    trimmed = sorted(differences)[len(differences) // 10 : -len(differences) // 10]
    return statistics.mean(trimmed) / _PART * 1e6 + export / len(differences) / _PART * 1e6


def measure_capture(name: str, connections: int, requests: int, share: float) -> tuple[float, float]:
    """Return the CPU time in microseconds that capture of a share of the requests adds to each.

    The first number is that of the event loop, the second that of all threads. Half of the requests are
    captured and half are not, in turns.
    """
    return uvloop.run(_measure_capture(name, connections, requests, share))


async def _measure_capture(name: str, connections: int, requests: int, share: float) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        policy, ref = CapturePolicy(sample=share), ModelRef(name, "1.0")
        recorder = CaptureRecorder(ref, "", policy, Path(folder), "benchmark")
        differences = []
        async with open_connections(name, connections, True, False) as load:
            limit = load.backends[ref.name, ref.version]
            await load.run(requests // 10)
            for _ in range(requests // (2 * _TURN)):
                turns = []
                for requests_of in (limit, CaptureTap(limit, recorder)):
                    load.backends[ref.name, ref.version] = requests_of
                    before, loop = sum(_thread_seconds().values()), time.thread_time()
                    await load.run(_TURN)
                    loop = time.thread_time() - loop
                    while recorder.queued:  # storing belongs to the turn
                        await asyncio.sleep(0.05)
                    turns.append((loop, sum(_thread_seconds().values()) - before))
                differences.append([(b - a) / _TURN * 1e6 for a, b in zip(*turns)])
        await asyncio.to_thread(recorder.close)
    assert recorder.counts.captured or not share
    if recorder.counts.queue_full:
        print(f"{recorder.counts.queue_full} of {recorder.counts.captured} requests were dropped")
    loop, total = (statistics.median(column) for column in zip(*differences))
    return loop, total


async def _measure(
    name: str, connections: int, requests: int, callbacks: bool, key: bool
) -> dict[str, float]:
    async with open_connections(name, connections, callbacks, key) as load:
        await load.run(requests // 10)
        before = _thread_seconds()
        sent, admitted = await load.run(requests)
        after = _thread_seconds()
    spent = {thread: (after[thread] - before.get(thread, 0.0)) / sent * 1e6 for thread in after}
    loop = spent["MainThread"]
    admit = admitted / sent * 1e6
    figures = (admit, loop - admit, spent["handler"], spent["access log"], sum(spent.values()))
    return dict(zip(_STAGES, figures, strict=True))


@asynccontextmanager
async def open_connections(name: str, connections: int, callbacks: bool, key: bool) -> AsyncIterator[Load]:
    """Yield the connections to a replica's application in this process."""
    thread, meters, model = HandlerThread(), Meters(torchserve.create_recorders(Settings())), MODELS[name]
    spec = ModelSpec(name, "1.0", f"{name}.mar", "", f"{name}.mar", batch_size=model.batch_size)
    with tempfile.TemporaryDirectory() as folder:
        runner = _load(Path(folder), spec, meters)
        await asyncio.get_running_loop().run_in_executor(thread, runner.load)
        batcher = Batcher(
            runner.run,
            spec.ref,
            meters,
            max_batch_size=spec.batch_size,
            handler_thread=thread,
            queue_size=100,
        )
        limit = ConcurrencyLimit(batcher, spec.ref)
        route = ModelRoute("1.0", {"1.0": VersionRoute("1.0", "ready", 1)})
        table = RoutingTable(1, {name: route}, startup_complete=True, on_loopback=True)
        if key:
            grant = KeyGrant(frozenset(("infer",)), name="benchmark")
            table = replace(table, access=AccessTable({sha256(_KEY.encode()).digest(): grant}))
        reader = RoutingTableReader(table)
        backends: dict[tuple[str, str], Backend] = {(spec.name, spec.version): limit}
        plane = DataPlane(reader, meters, lambda ref, route: limit, backends)
        access_log = AccessLog(Path(folder, "access.log"))
        app = inference_app(plane, Settings(), meters, access_log)
        head = (
            f"POST /predictions/{name} HTTP/1.1\r\nhost: 127.0.0.1:8080\r\ncontent-type: application/json\r\n"
        )
        head += f"authorization: Bearer {_KEY}\r\n" if key else ""
        head += f"x-forwarded-for: 127.0.0.1\r\ncontent-length: {len(model.body)}\r\n\r\n"
        with use_callbacks(app, callbacks):
            gc.collect()
            gc.freeze()  # as replicas do
            load = Load(app, head.encode() + model.body, connections)
            load.backends = backends
            yield load
        access_log.close()


def _load(folder: Path, spec: ModelSpec, meters: Meters) -> Runner:
    """Return a runner of one of the benchmark's models, which is not loaded yet."""
    model, names = MODELS[spec.name], {"modelName": spec.name, "modelVersion": "1.0"}
    manifest = {**names, "handler": model.handler}
    shutil.copy(_SOURCES / model.handler, folder)
    if model.model_file:
        import torch

        shutil.copy(_SOURCES / model.model_file, folder)
        torch.save(model.build().state_dict(), folder / "weights.pt")
        manifest |= {"modelFile": model.model_file, "serializedFile": "weights.pt"}
    cache = meters.torchserve.cache(spec.name)
    return Runner(spec, folder, {"model": manifest}, RuntimeSettings(), None, cache)


def _thread_seconds() -> dict[str, float]:
    """Return the CPU seconds of the threads of this process, by name; those of torch are the handler's."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    seconds: dict[str, float] = {}
    for task in os.listdir("/proc/self/task"):
        name = names.get(int(task), "handler")
        used = int(Path(f"/proc/self/task/{task}/schedstat").read_text().split()[0]) / 1e9
        seconds[name] = seconds.get(name, 0.0) + used
    return seconds


def main() -> None:
    """Measure both paths, each in a process of its own, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.request_budget", description=__doc__)
    parser.add_argument("--model", choices=("echo", "mlp"), default="echo")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--traces", type=float, help="measure what traces of this share of requests cost")
    parser.add_argument("--capture", type=float, help="measure what capture of this share of requests costs")
    options = parser.parse_args()
    if options.capture is not None:
        loop, total = measure_capture(options.model, options.connections, options.requests, options.capture)
        print(
            f"{options.capture:.1%} captured: {loop:.2f} µs on the event loop, {total:.2f} µs in all threads"
        )
        return
    if options.traces is not None:
        added = measure_traces(options.model, options.connections, options.requests, options.traces)
        print(f"{options.traces:.1%} traced: {added:.2f} µs of CPU more for each request")
        return
    table = Table("path", *_STAGES, title=f"{options.model}, {options.connections} connections: µs of CPU")
    for path, *variant in _PATHS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            arguments = options.model, options.connections, options.requests, *variant
            figures = pool.apply(measure, arguments)
        table.add_row(path, *(f"{figures[stage]:.1f}" for stage in _STAGES))
    Console().print(table)


if __name__ == "__main__":
    main()
