"""Memory, idle CPU and start of a server, per process.

``python -m tests.benchmarks.footprint`` starts a Torchrelay of its own with a small model. It prints tables
of the processes, of the start, of a further replica, and of the load times of weights by size.
``--dashboard`` starts Ray's dashboard, too. Run it in an environment of the extra ``server``: with packages
for development, each import of Ray takes up to a second and 40 MiB more.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from serve_app.cli.server_process import ServerProcess
from serve_app.client import Client
from tests.benchmarks.servers import free_ports

ROOT = Path(__file__).parents[2]
_SETTLE_S = 20.0  # seconds after the last change, in which the processes come to rest
_MIB = 1 << 20
_MODEL = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.empty(%d))
"""


@dataclass(frozen=True)
class Use:
    """What a process uses while nothing happens: MiB of PSS, and thousandths of a core."""

    name: str
    memory: float
    cpu: float


@dataclass(frozen=True)
class Footprint:
    """A server at rest, and the seconds of its start."""

    uses: Sequence[Use]
    ready: float
    first_response: float
    start_cpu: float  # CPU seconds of all processes until the first response
    further_replica: float
    replica_memory: float  # MiB of the further replica, of all processes together

    def markdown(self) -> str:
        """Return the tables of the page."""
        lines = ["| process | MiB (PSS) | idle, thousandths of a core |", "| :-- | --: | --: |"]
        ordered = sorted(self.uses, key=lambda use: -use.memory)
        total = Use("**total**", sum(u.memory for u in ordered), sum(u.cpu for u in ordered))
        lines += [f"| {u.name} | {u.memory:,.0f} | {u.cpu:.1f} |" for u in (*ordered, total)]
        lines += ["", "| start | |", "| :-- | --: |"]
        seconds = {
            "ready, s": self.ready,
            "first response, s": self.first_response,
            "CPU seconds until then": self.start_cpu,
            "further replica, s": self.further_replica,
        }
        lines += [f"| {name} | {value:.1f} |" for name, value in seconds.items()]
        return "\n".join([*lines, f"| further replica, MiB | {self.replica_memory:,.0f} |"])


def title(command: Sequence[str]) -> str:
    """Return the name of a process from its command line."""
    text = " ".join(command).strip()
    if match := re.match(r"ray::ServeReplica:[^:]*:([\w.-]+)", text) or re.match(r"ray::(\w+)", text):
        return match[1]
    if match := re.match(r"(ray-dashboard-\w+?)-\d", text):
        return match[1]
    if match := re.search(r"-m serve_app\.(?:\w+\.)*(\w+)", text):
        return "torchrelay start" if match[1] == "cli" else match[1].replace("_", " ")
    for name in ("gcs_server", "raylet", "haproxy", "dashboard.py", "resource_tracker", "forkserver"):
        if name in text:
            return name.removesuffix(".py")
    return Path(command[0]).name if command else "?"


def cpu_seconds(processes: Sequence[psutil.Process]) -> dict[int, float]:
    """Return the CPU seconds of processes until now, by process id."""
    result = {}
    for process in processes:
        with suppress(psutil.Error):
            times = process.cpu_times()
            result[process.pid] = times.user + times.system + times.children_user + times.children_system
    return result


def measure_uses(processes: Sequence[psutil.Process], seconds: float) -> list[Use]:
    """Return what processes use in so many seconds; several of one name are added up."""
    before, started = cpu_seconds(processes), time.monotonic()
    time.sleep(seconds)
    after, passed = cpu_seconds(processes), time.monotonic() - started
    sums: dict[str, tuple[float, float]] = {}
    for process in processes:
        with suppress(psutil.Error):
            memory = process.memory_full_info().pss / _MIB
            cpu = (after[process.pid] - before[process.pid]) / passed * 1000
            name = title(process.cmdline())
            known = sums.get(name, (0.0, 0.0))
            sums[name] = known[0] + memory, known[1] + cpu
    return [Use(name, *values) for name, values in sums.items()]


def _memory(processes: Sequence[psutil.Process]) -> float:
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total / _MIB


def configure(folder: Path, archive: Path) -> tuple[Path, Path]:
    """Write the configuration of a server with one archive; return the paths of app.yaml and serve.env."""
    import yaml

    (folder / "model_store").mkdir()
    shutil.copy(archive, folder / "model_store")
    document = yaml.safe_load((ROOT / "configs/app.yaml").read_text())
    inference, management, metrics, grpc, grpc_management = free_ports(5)
    document["http_options"]["port"] = inference
    document["applications"][0]["args"] = {
        "home": str(folder),
        "management": {"port": management, "metrics_port": metrics},
        "grpc": {"port": grpc, "management_port": grpc_management},
    }
    config = folder / "app.yaml"
    config.write_text(yaml.safe_dump(document))
    return config, Path(shutil.copy(ROOT / "configs/serve.env", folder / "serve.env"))


def measure(archive: Path, body: bytes, seconds: float, dashboard: bool = False) -> Footprint:
    """Start a server with an archive, measure it, and end it."""
    with tempfile.TemporaryDirectory(prefix="footprint-") as name:
        server = ServerProcess(*configure(Path(name), archive))
        started = time.monotonic()
        server.start(dashboard=dashboard)
        try:
            with Client(server.inference, server.management, timeout=120) as client:
                return _measure(server, client, archive.stem, body, seconds, started)
        finally:
            server.stop()


def _measure(
    server: ServerProcess, client: Client, model: str, body: bytes, seconds: float, started: float
) -> Footprint:
    url, responded = f"{server.inference}/predictions/{model}", False
    ready = 0.0
    for _ in server.poll(300, "no response"):
        ready = ready or (time.monotonic() - started if client.ready() else 0.0)
        with suppress(httpx.HTTPError):
            responded = httpx.post(url, content=body, timeout=60).status_code == 200
        if responded:
            break
    first, cpu = time.monotonic() - started, sum(cpu_seconds(server.processes()).values())
    time.sleep(_SETTLE_S)
    uses = measure_uses(server.processes(), seconds)
    before = _memory(server.processes())
    began = time.monotonic()
    _scale(server, model, 2)
    further = time.monotonic() - began
    time.sleep(_SETTLE_S)
    return Footprint(uses, ready or first, first, cpu, further, _memory(server.processes()) - before)


def load_times(sizes: Sequence[int] = (10, 100, 500)) -> str:
    """Return a table of the seconds in which a model takes its weights from a file, by their MiB."""
    import torch
    from safetensors.torch import save_file

    from handlers.loading.weights import load_eager

    lines = ["| weights, MiB | safetensors, s | state dict of torch.save, s |", "| --: | --: | --: |"]
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="footprint-") as name:
            folder, seconds = Path(name), []
            (folder / "footprint_model.py").write_text(_MODEL % (size * _MIB // 4))
            state = {"weights": torch.ones(size * _MIB // 4)}
            save_file(state, folder / "model.safetensors")
            torch.save(state, folder / "model.pt")
            for file in ("model.safetensors", "model.pt"):
                started = time.perf_counter()
                load_eager(folder / "footprint_model.py", folder / file)
                seconds.append(time.perf_counter() - started)
            lines.append(f"| {size} | {seconds[0]:.3f} | {seconds[1]:.3f} |")
    return "\n".join(lines)


def _scale(server: ServerProcess, model: str, workers: int) -> None:
    query: Mapping[str, str | int] = {"min_worker": workers, "max_worker": workers, "synchronous": "true"}
    httpx.put(f"{server.management}/models/{model}", params=query, timeout=120).raise_for_status()


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--archive", type=Path, default=ROOT / "model_store/digits.mar")
    parser.add_argument("--body", type=Path, default=ROOT / "examples/01_first_model/three.png")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the measurement of idle CPU")
    parser.add_argument("--dashboard", action="store_true")
    options = parser.parse_args()
    result = measure(options.archive, options.body.read_bytes(), options.seconds, options.dashboard)
    print(result.markdown(), load_times(), sep="\n\n")


if __name__ == "__main__":
    main()
