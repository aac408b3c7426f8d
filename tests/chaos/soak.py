"""A long run at 70 % of the measured capacity, with registrations and clients that come and go.

``python -m tests.chaos.soak --minutes 30`` samples memory, descriptors, threads and the database every five
seconds, writes them as CSV, JSON and a plot, and exits with 1 where a figure grows faster than its bound.
``--features`` adds capture, an experiment, rollouts, autoscaling and a pool; ``--image`` runs the server in a
container.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import math
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import httpx
import numpy as np
import psutil

from serve_app.load_test import LoadProfile, LoadRequest, send
from tests.chaos.container_server import ContainerServer
from tests.chaos.report import describe_machine
from tests.chaos.soak_features import Features
from tests.support.archives import ECHO, make_archive
from tests.support.server import Server

LOAD_SHARE = 0.7  # of the measured capacity
SAMPLE_PERIOD_S = 5.0
WARM_UP_SHARE = 0.25  # of the samples, which the slope leaves out: caches and pools fill
_CAPACITY_S = 10.0
_CONNECTIONS = 16
_SEGMENT_S = 20.0  # after which all connections of the load are new
_CYCLE_S = 4.0  # between two registrations
_SLOW_CLIENTS = 4  # of the autoscaled model


@dataclass(frozen=True)
class Bound:
    """The most that a figure of a process type may grow in an hour."""

    uss: float  # MiB
    descriptors: float = 30.0
    threads: float = 20.0


# A model that is registered and removed 900 times an hour leaves traces in the processes of Ray; a process of
# ours keeps the histories of its last changes and then stays.
OURS = Bound(uss=24.0)
RAYS = Bound(uss=60.0)
TRANSIENT = {"cycled", "IDLE", "default_worker"}  # processes that come and go
# It opens the log of every process and keeps at most 200 files, then it closes those of ended processes.
LOG_MONITOR = Bound(uss=60.0, descriptors=math.inf)
BOUNDS = {
    "Management": OURS,
    "Gateway": OURS,
    "replica": OURS,
    "haproxy": OURS,
    "log_monitor": LOG_MONITOR,
}
DATABASE_BOUND_MIB = 8.0  # an hour


@dataclass
class Sample:
    """The figures of one process type at one moment."""

    seconds: float
    type: str
    processes: int
    uss: float  # MiB
    descriptors: int
    threads: int


@dataclass
class Soak:
    """The samples and the counts of a run."""

    samples: list[Sample] = field(default_factory=list)
    database: list[tuple[float, float]] = field(default_factory=list)  # seconds, MiB
    answers: Counter[str] = field(default_factory=Counter)
    cycles: int = 0
    rate: float = 0.0
    capacity: float = 0.0
    rollouts: Counter[str] = field(default_factory=Counter)  # ended ones by state
    most_replicas: int = 0  # of the autoscaled model


def process_type(process: psutil.Process) -> str:
    """Return the type of a server's process: a class of ours, an actor of Ray's, or a program."""
    line = process.cmdline() or [process.name()]
    if not (title := line[0]).startswith("ray::"):
        scripts = [Path(word).stem for word in line[1:3] if word.endswith(".py")]
        return scripts[0] if scripts else process.name().removeprefix("ray-dashboard-")
    return actor_type(title)


def actor_type(title: str) -> str:
    """Return the type of an actor by the title of its process."""
    # An idle actor is titled by its class, a busy one by its method, a replica by its application, too.
    title = title.removeprefix("ray::")
    application = re.match(r"ServeReplica:(\w[\w.-]*):(\w+)|SERVE_REPLICA::(\w[\w.-]*)#(\w+)", title)
    if application is None:
        return re.split(r"[.\s]", title)[0]
    name, deployment = (part for part in application.groups() if part)
    if name == "torchrelay":
        return deployment
    # One type for all models: those of the cycles, of rollouts and of autoscaling come and go.
    return "replica" if name.startswith(("echo", "captured", "split")) else "cycled"


def take_samples(server: Server, began: float) -> list[Sample]:
    """Return the present figures of all process types of a server."""
    figures: dict[str, Sample] = {}
    now = time.monotonic() - began
    for process in server.process.processes():
        with contextlib.suppress(psutil.Error, OSError):
            sample = figures.setdefault(process_type(process), Sample(round(now, 1), "", 0, 0.0, 0, 0))
            sample.uss += process.memory_full_info().uss / (1 << 20)
            sample.descriptors += process.num_fds()
            sample.threads += process.num_threads()
            sample.processes += 1
    for type, sample in figures.items():
        sample.type = type
    return list(figures.values())


def theil_sen(points: Sequence[tuple[float, float]]) -> float:
    """Return the median slope over all pairs of points; a few outliers do not change it."""
    x, y = np.array(points).T
    first, second = np.triu_indices(len(x), 1)
    distance = x[second] - x[first]
    slopes = (y[second] - y[first])[distance > 0] / distance[distance > 0]
    return float(np.median(slopes)) if len(slopes) else 0.0


def hourly_growth(points: Sequence[tuple[float, float]]) -> float:
    """Return the growth of a figure in an hour, without the warm-up."""
    settled = points[int(len(points) * WARM_UP_SHARE) :]
    return theil_sen(settled) * 3600 if len(settled) > 2 else 0.0


def judge(soak: Soak) -> tuple[list[dict[str, object]], list[str]]:
    """Return the growth of every process type, and the bounds that were exceeded."""
    rows: list[dict[str, object]] = []
    problems = []
    for type in sorted({sample.type for sample in soak.samples} - TRANSIENT):
        bound = BOUNDS.get(type, RAYS)
        samples = [sample for sample in soak.samples if sample.type == type]
        row: dict[str, object] = {"type": type, "processes": samples[-1].processes}
        for name in ("uss", "descriptors", "threads"):
            values = [(sample.seconds, float(getattr(sample, name))) for sample in samples]
            growth = hourly_growth(values)
            row |= {name: round(values[-1][1], 1), f"{name}_per_hour": round(growth, 1)}
            if growth > getattr(bound, name):
                problems.append(f"{type}: {name} grows by {growth:.1f} an hour ({getattr(bound, name)})")
        rows.append(row)
    if (growth := hourly_growth(soak.database)) > DATABASE_BOUND_MIB:
        problems.append(f"the database grows by {growth:.1f} MiB an hour ({DATABASE_BOUND_MIB})")
    if failed := {kind: count for kind, count in soak.answers.items() if kind != "ok"}:
        problems.append(f"failed requests: {failed}")
    return rows, problems


class _Background:
    """A function that a thread repeats until the end of the block."""

    def __init__(self, function: Callable[[], None], period: float) -> None:
        self._function, self._period = function, period
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.error: BaseException | None = None

    def __enter__(self) -> _Background:
        self._thread.start()
        return self

    def __exit__(
        self, type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        if self.error is not None and error is None:
            raise self.error

    def _run(self) -> None:
        try:
            while not self._over.wait(self._period):
                self._function()
        except BaseException as error:
            self.error = error


def run(
    server: Server,
    seconds: float,
    rate: float | None,
    cycle: float = _CYCLE_S,
    has_features: bool = False,
) -> Soak:
    """Soak a running server; ``rate`` is in requests per second, None for the share of its capacity."""
    assert server.register(make_archive(server.store, "echo", ECHO), initial_workers=2).status_code == 200
    archive = make_archive(server.store, "cycled", ECHO)
    request = LoadRequest(f"{server.url}/predictions/echo", body=b"x", check=b"x".__eq__)
    soak = Soak()
    if rate is None:
        closed = LoadProfile(connections=_CONNECTIONS, seconds=_CAPACITY_S)
        soak.capacity = send(request, closed, "asyncio").throughput
        rate = LOAD_SHARE * soak.capacity
    soak.rate = rate
    features = Features(server) if has_features else None
    began = time.monotonic()
    database = server.home / "state/registry.db"

    def sample() -> None:
        soak.samples.extend(take_samples(server, began))
        size = sum(file.stat().st_size for file in database.parent.glob("registry.db*")) / (1 << 20)
        soak.database.append((time.monotonic() - began, size))

    def register_and_remove() -> None:
        assert server.register(archive).status_code == 200
        answer = server.http.post("/predictions/cycled", content=b"x")
        assert (answer.status_code, answer.content) == (200, b"x"), answer.text
        assert server.management.delete("/models/cycled").status_code == 200
        soak.cycles += 1

    def connect_once() -> None:
        answer = httpx.post(f"{server.url}/predictions/echo", content=b"x", timeout=30)
        soak.answers["ok" if answer.content == b"x" else f"status {answer.status_code}"] += 1

    tasks = [(sample, SAMPLE_PERIOD_S), (register_and_remove, cycle), (connect_once, 0.2)]
    if features is not None:
        slow = [(lambda: features.send_slow(time.monotonic() - began), 0.05)] * _SLOW_CLIENTS
        tasks += [(features.send, 0.2), (features.manage, 2.0), *slow]
    with contextlib.ExitStack() as stack:
        for function, period in tasks:
            stack.enter_context(_Background(function, period))
        while (left := began + seconds - time.monotonic()) > 1:
            profile = LoadProfile(
                connections=4 * _CONNECTIONS, rate=rate, seconds=min(_SEGMENT_S, left), warmup=0.0
            )
            result = send(request, profile, "asyncio")
            soak.answers["ok"] += result.requests
            soak.answers.update(result.errors)
    sample()
    if features is not None:
        soak.answers.update(features.answers)
        soak.rollouts, soak.most_replicas = features.rollouts, features.most_replicas
    return soak


def write(folder: Path, soak: Soak, rows: list[dict[str, object]], problems: list[str]) -> None:
    """Write the samples as CSV, the verdict as JSON, and the plot."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "soak.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(vars(soak.samples[0])))
        writer.writeheader()
        writer.writerows(vars(sample) for sample in soak.samples)
    document = {
        "machine": describe_machine(),
        "capacity": round(soak.capacity, 1),
        "rate": round(soak.rate, 1),
        "cycles": soak.cycles,
        "answers": soak.answers,
        "rollouts": soak.rollouts,
        "most_replicas": soak.most_replicas,
        "database_per_hour": round(hourly_growth(soak.database), 2),
        "types": rows,
        "problems": problems,
    }
    (folder / "soak.json").write_text(json.dumps(document, indent=1))
    _plot(folder / "soak.png", soak)


def _plot(file: Path, soak: Soak) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(4, 1, figsize=(10, 14), sharex=True)
    for axis, name in zip(axes, ("uss", "descriptors", "threads")):
        for type in sorted({sample.type for sample in soak.samples} - TRANSIENT):
            samples = [sample for sample in soak.samples if sample.type == type]
            values = [getattr(sample, name) for sample in samples]
            axis.plot([sample.seconds / 60 for sample in samples], values, label=type, linewidth=1)
        axis.set_ylabel("USS, MiB" if name == "uss" else name)
    axes[0].legend(fontsize=6, ncols=3)
    axes[3].plot([seconds / 60 for seconds, _ in soak.database], [size for _, size in soak.database])
    axes[3].set_ylabel("database, MiB")
    axes[3].set_xlabel("minutes")
    figure.savefig(file, dpi=100, bbox_inches="tight")
    pyplot.close(figure)


def main() -> int:
    """Start a server, soak it and print the growth of every process type."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=float, help="requests per second; 70 %% of the capacity by default")
    parser.add_argument("--cycle", type=float, default=_CYCLE_S, help="seconds between registrations")
    parser.add_argument("--env", action="append", default=[], help="NAME=VALUE of the server (repeatable)")
    parser.add_argument("--output", type=Path, default=Path("soak"), help="the folder of the reports")
    parser.add_argument("--features", action="store_true", help="use capture, traffic policies and a pool")
    parser.add_argument(
        "--image", help="run the server in a container of this image; its ports are 8080 to 8082"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which stops the server, too
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        env = dict(pair.split("=", 1) for pair in options.env)
        server = ContainerServer(Path(folder), options.image) if options.image else Server(Path(folder), env)
        try:
            server.start()
            soak = run(server, options.minutes * 60, options.rate, options.cycle, options.features)
        finally:
            server.close()
    rows, problems = judge(soak)
    write(options.output, soak, rows, problems)
    print(f"{sum(soak.answers.values()):,} requests at {soak.rate:.0f}/s, {soak.cycles} cycles")
    if options.features:
        print(
            f"rollouts: {dict(soak.rollouts)}; at most {soak.most_replicas} replicas of the autoscaled model"
        )
    for row in rows:
        print(row)
    print("\n".join(problems) or "every figure stayed within its bound")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
