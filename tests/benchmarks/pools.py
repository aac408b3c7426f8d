"""1,000 models in a pool: memory, hits and loads, management, and propagation of changes.

    python -m tests.benchmarks.pools [--models 1000] [--seconds 120]

starts a server of its own, registers MLPs of 0.1 to 20 MB whose pool has a tenth of their size, and sends
requests by Zipf's law for the given time. It prints a table, and ends with 1 where a request failed. 1,000
models take 8 GB of disk.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import random
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
import yaml
from rich.console import Console
from rich.progress import track

from tests.benchmarks import pool_peer
from tests.benchmarks.environments import PeerFailed
from tests.benchmarks.pool_load import INPUTS, ZipfLoad, quantiles
from tests.support.server import Server

OUTPUTS = 10
MIN_BYTES, MAX_BYTES = 100_000, 20_000_000
_MIB = 1 << 20
# Its responses mark the first call since the load, so that a client can tell a load from a hit.
_HANDLER = Path(__file__).parents[2] / "examples" / "22_many_models" / "h.py"
HELPER = """
from torch import nn

NAME = {name!r}

def build():
    return nn.Sequential(nn.Linear({inputs}, {hidden}), nn.ReLU(), nn.Linear({hidden}, {outputs}))
"""


@dataclass
class Figures:
    """The figures of a run; times in seconds, memory in MiB."""

    models: int = 0
    total_mib: float = 0.0
    budget_mib: int = 0
    registered_per_s: float = 0.0
    memory: dict[str, float] = field(default_factory=dict)  # PSS of all processes, by moment
    requests: int = 0
    requests_per_s: float = 0.0
    failed: dict[str, int] = field(default_factory=dict)
    hit_rate: float = 0.0
    hits: list[float] = field(default_factory=list)  # p50, p99
    loads: list[float] = field(default_factory=list)
    load_seconds: float = 0.0  # mean, in the host
    management: dict[str, list[float]] = field(default_factory=dict)
    propagation: float = 0.0  # from a registration's request to the first answer of the model
    start: float = 0.0  # from the command until ready, with all versions registered
    pooled_to_dedicated: float = 0.0
    peer: str = ""  # the same load on MLServer, in words


def draw_sizes(count: int) -> list[int]:
    """Return sizes of models in bytes, log-uniform, always the same."""
    draw = random.Random(0)
    return [int(MIN_BYTES * (MAX_BYTES / MIN_BYTES) ** draw.random()) for _ in range(count)]


def make_archive(path: Path, name: str, size: int, config: dict[str, Any]) -> None:
    """Write the archive of an MLP with ``size`` bytes of weights."""
    hidden = max(1, size // 4 // (INPUTS + OUTPUTS + 1))
    torch.manual_seed(size)
    model = torch.nn.Sequential(
        torch.nn.Linear(INPUTS, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, OUTPUTS)
    )
    weights = io.BytesIO()
    torch.save(model.state_dict(), weights)
    manifest = {
        "runtime": "python",
        "model": {
            "modelName": name,
            "modelVersion": "1.0",
            "handler": "h.py",
            "configFile": "model-config.yaml",
        },
    }
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        archive.write(_HANDLER, "h.py")
        archive.writestr("helper.py", HELPER.format(name=name, inputs=INPUTS, hidden=hidden, outputs=OUTPUTS))
        archive.writestr("weights.pt", weights.getvalue())
        archive.writestr("model-config.yaml", yaml.safe_dump(config))


def measure_memory(server: Server) -> float:
    """Return the MiB of all processes of a server; pages that several map are divided among them."""
    total = 0
    for process in server.process.processes():
        with contextlib.suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total / _MIB


async def register_all(server: Server, names: Sequence[str], at_once: int) -> list[float]:
    """Register archives of the model store, some at once; return the seconds of each."""
    seconds: list[float] = []
    waiting = list(reversed(names))

    async def work(client: httpx.AsyncClient) -> None:
        while waiting:
            name = waiting.pop()
            started_at = time.perf_counter()
            response = await client.post("/models", params={"url": f"{name}-1.0.mar", "initial_workers": 0})
            response.raise_for_status()
            seconds.append(time.perf_counter() - started_at)

    async with httpx.AsyncClient(base_url=server.process.management, timeout=120) as client:
        await asyncio.gather(*(work(client) for _ in range(at_once)))
    return seconds


async def watch_management(server: Server, names: Sequence[str], seconds: float) -> dict[str, list[float]]:
    """Return the latencies of management requests, one after another for so many seconds."""
    draw, latencies = random.Random(2), {"describe": list[float](), "list": list[float]()}
    end = time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=server.process.management, timeout=60) as client:
        while time.monotonic() < end:
            for kind, path in (("describe", f"/models/{draw.choice(names)}"), ("list", "/models?limit=100")):
                started_at = time.perf_counter()
                (await client.get(path)).raise_for_status()
                latencies[kind].append(time.perf_counter() - started_at)
            await asyncio.sleep(0.1)
    return latencies


async def throughput(url: str, name: str, seconds: float) -> float:
    """Return the requests per second of one model over eight connections."""
    load = ZipfLoad(url, [name])
    await load.run(seconds)
    assert not load.failed, load.failed
    return len(load.hits) / seconds


def compare_with_dedicated(server: Server, rounds: int, seconds: float) -> float:
    """Return the throughput of a loaded pooled version over that of a dedicated replica, in turns."""
    for name, config in (("pooled-mlp", {"pool": "bench"}), ("dedicated-mlp", {"pool": ""})):
        make_archive(server.store / f"{name}-1.0.mar", name, 1_000_000, config)
        parameters: dict[str, str | int] = {"url": f"{name}-1.0.mar", "initial_workers": 1}
        server.management.post("/models", params=parameters).raise_for_status()
    routes = "pooled-mlp", "dedicated-mlp"
    totals = dict.fromkeys(routes, 0.0)
    for round_ in range(rounds + 1):
        for name in routes:
            figure = asyncio.run(throughput(server.url, name, seconds))
            totals[name] += figure if round_ else 0.0  # the first round warms up
    for name in routes:
        server.management.delete(f"/models/{name}").raise_for_status()
    return totals["pooled-mlp"] / totals["dedicated-mlp"]


def measure_propagation(server: Server, name: str) -> float:
    """Return the seconds from a registration's request until the model answers."""
    started_at = time.perf_counter()
    parameters: dict[str, str | int] = {"url": f"{name}-1.0.mar", "initial_workers": 0}
    server.management.post("/models", params=parameters).raise_for_status()
    while (response := server.http.post(f"/predictions/{name}", json=[0.0] * INPUTS)).status_code == 404:
        assert time.perf_counter() - started_at < 60, response.text
        time.sleep(0.005)
    response.raise_for_status()
    return time.perf_counter() - started_at


@contextlib.contextmanager
def started(folder: Path, budget_mib: int) -> Iterator[Server]:
    """Start a server with the pool ``bench``."""
    server = Server(folder, pools={"bench": {"memory": budget_mib}}, control={"load_models": "none"})
    try:
        server.start()
        yield server
    finally:
        server.close()


def measure(folder: Path, count: int, seconds: float, console: Console) -> Figures:
    """Return the figures of one run."""
    sizes = draw_sizes(count)
    budget = max(64, sum(sizes) // 10 // _MIB)
    names = [f"mlp{number}" for number in range(count)]
    figures = Figures(count, sum(sizes) / _MIB, budget)
    with started(folder, budget) as server:
        for name, size in track(list(zip(names, sizes)), "Making archives", console=console):
            make_archive(server.store / f"{name}-1.0.mar", name, size, {"pool": "bench"})
        figures.memory["started"] = measure_memory(server)
        console.print(f"Registering {count} models")
        started_at = time.perf_counter()
        last = count // 10  # one at a time, for the latency with all others registered
        asyncio.run(register_all(server, names[:-last], 8))
        figures.registered_per_s = (count - last) / (time.perf_counter() - started_at)
        figures.management["register"] = quantiles(asyncio.run(register_all(server, names[-last:], 1)))
        figures.memory["registered"] = measure_memory(server)
        _measure_load(server, names, seconds, figures, console)
        figures.memory["loaded"] = measure_memory(server)
        make_archive(server.store / "late-1.0.mar", "late", 1_000_000, {"pool": "bench"})
        figures.propagation = measure_propagation(server, "late")
        console.print("Comparing a pooled with a dedicated version")
        figures.pooled_to_dedicated = compare_with_dedicated(server, 3, min(10.0, seconds / 4))
        figures.peer = _measure_peer(folder, server, names, seconds, figures.memory["loaded"], console)
        console.print("Restarting")
        server.stop()
        started_at = time.perf_counter()
        server.start()
        figures.start = time.perf_counter() - started_at
    return figures


def _measure_peer(
    folder: Path, server: Server, names: Sequence[str], seconds: float, limit_mib: float, console: Console
) -> str:
    """Return what MLServer does with the same memory, by the most popular models first."""
    console.print("Starting MLServer with as many models as fit the same memory")
    home = folder / "mlserver"
    home.mkdir()
    popular = ZipfLoad("", names).names
    try:
        count, mib, load = pool_peer.measure(home, server.store, popular, limit_mib, seconds)
    except PeerFailed as error:
        return f"not measured: {error}"
    p50, p99 = (seconds * 1e3 for seconds in quantiles(load.hits))
    failed = sum(load.failed.values())
    return (
        f"{count:,} models in {mib:,.0f} MiB, {len(load.hits) / seconds:,.0f} requests/s on these, "
        f"{p50:,.0f} and {p99:,.0f} ms, {failed} failed"
    )


def _measure_load(
    server: Server, names: Sequence[str], seconds: float, figures: Figures, console: Console
) -> None:
    console.print(f"Sending requests for {seconds:.0f} s")
    load = ZipfLoad(server.url, names)

    async def run() -> dict[str, list[float]]:
        _, latencies = await asyncio.gather(load.run(seconds), watch_management(server, names, seconds))
        return latencies

    latencies = asyncio.run(run())
    figures.management |= {kind: quantiles(values) for kind, values in latencies.items()}
    figures.requests = len(load.hits) + len(load.loads)
    figures.requests_per_s = figures.requests / seconds
    figures.failed = load.failed
    figures.hits, figures.loads = quantiles(load.hits), quantiles(load.loads)
    figures.hit_rate = len(load.hits) / max(1, figures.requests)
    loads = server.metric("torchrelay_pool_load_seconds_count", pool="bench")
    figures.load_seconds = server.metric("torchrelay_pool_load_seconds_sum", pool="bench") / max(1, loads)


def to_markdown(figures: Figures) -> str:
    """Return the figures as a table with their targets."""

    def both(values: Sequence[float]) -> str:
        return " and ".join(f"{seconds * 1e3:,.0f} ms" for seconds in values)

    memory = ", ".join(f"{mib:,.0f} MiB {moment}" for moment, mib in figures.memory.items())
    failed = sum(figures.failed.values())
    rows = [
        (
            "models",
            f"{figures.models:,} of {figures.total_mib:,.0f} MiB, budget {figures.budget_mib} MiB",
            "",
        ),
        ("memory of all processes", memory, "4 GiB"),
        ("registrations, eight at once", f"{figures.registered_per_s:.0f}/s", ""),
        ("requests", f"{figures.requests:,}, {figures.requests_per_s:,.0f}/s, {failed} failed", "0 failed"),
        ("hit rate", f"{figures.hit_rate:.1%}", ""),
        ("hits, p50 and p99", both(figures.hits), ""),
        ("requests that load, p50 and p99", both(figures.loads), ""),
        ("a load in the host, mean", f"{figures.load_seconds * 1e3:.0f} ms", "50 ms for 1 MB"),
        *(
            (f"{kind}, p50 and p99", both(values), "p99 100 ms")
            for kind, values in figures.management.items()
        ),
        ("registration until the first answer", both([figures.propagation]), "1 s"),
        ("start with all versions", f"{figures.start:.1f} s", "30 s"),
        ("throughput of a pooled version over a dedicated one", f"{figures.pooled_to_dedicated:.2f}", "0.8"),
        ("MLServer with the same memory", figures.peer, ""),
    ]
    lines = ["| | | target |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    lines += [f"- {reason}: {count}" for reason, count in figures.failed.items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=120.0)
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="pool-bench-") as folder:
        figures = measure(Path(folder), options.models, options.seconds, console)
    print(to_markdown(figures))
    return 1 if figures.failed else 0


if __name__ == "__main__":
    sys.exit(main())
