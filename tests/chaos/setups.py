"""The servers that faults need: plain, with PostgreSQL and Redis, on a small disk, with a shifted clock."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.chaos.chaos_server import ChaosServer
from tests.support.ports import free_port
from tests.support.postgres_server import MISSING, Postgres, find_postgres, running_postgres

_DISK_MIB = 192  # of state, logs and Ray's session; a start takes about 20


class Skipped(Exception):
    """An error: this machine cannot run a setup; the message is the reason."""


class Redis:
    """A Redis server of our own, which writes every change to its file before it answers."""

    def __init__(self, home: Path) -> None:
        self.port = free_port()
        self._home = home
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = ["--port", str(self.port), "--dir", str(self._home), "--save", ""]
        options += ["--bind", "127.0.0.1", "--appendonly", "yes", "--appendfsync", "always"]
        self._process = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)

    @property
    def process(self) -> psutil.Process:
        assert self._process is not None
        return psutil.Process(self._process.pid)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@dataclass
class Setup:
    """A running server with what belongs to it; a fault uses the parts that its setup has."""

    server: ChaosServer
    postgres: Postgres | None = None
    redis: Redis | None = None
    disk: Path | None = None  # the mount that is filled
    clock: Path | None = None  # the file with the seconds by which the clock is shifted
    kills: int = 5  # of Management, in the fault that kills it at random moments
    notes: list[str] = field(default_factory=list)


@contextlib.contextmanager
def _running(server: ChaosServer) -> Iterator[ChaosServer]:
    try:
        server.start()
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def _default() -> Iterator[Setup]:
    with (
        tempfile.TemporaryDirectory(prefix="chaos-") as folder,
        _running(ChaosServer(Path(folder))) as server,
    ):
        yield Setup(server)


@contextlib.contextmanager
def _cluster() -> Iterator[Setup]:
    if find_postgres() is None:
        raise Skipped(MISSING)
    if shutil.which("redis-server") is None:
        raise Skipped("Redis is not installed; on Debian and Ubuntu it is the package `redis-server`.")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        postgres = stack.enter_context(running_postgres())
        (folder / "redis").mkdir()
        redis = Redis(folder / "redis")
        stack.callback(redis.stop)
        redis.start()
        env = {"RAY_REDIS_ADDRESS": f"redis://127.0.0.1:{redis.port}"}
        server = ChaosServer(folder, env, control={"database_url": postgres.create("chaos")})
        yield Setup(stack.enter_context(_running(server)), postgres=postgres, redis=redis)


@contextlib.contextmanager
def _disk() -> Iterator[Setup]:
    if os.geteuid() != 0:
        raise Skipped("Only root can mount the small disk (tmpfs).")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cd-", dir="/tmp")))
        disk = folder / "d"
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_MIB}m", "chaos", str(disk)]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            raise Skipped("This machine does not permit a mount.")
        stack.callback(subprocess.run, ["umount", "--lazy", str(disk)], check=False)
        for name in ("home", "ray"):
            (disk / name).mkdir()
        server = ChaosServer(disk / "home", {"RAY_TMPDIR": str(disk / "ray")})
        yield Setup(stack.enter_context(_running(server)), disk=disk)


@contextlib.contextmanager
def _clock() -> Iterator[Setup]:
    if (compiler := shutil.which("cc")) is None:
        raise Skipped("No C compiler is installed, which builds the library that shifts the clock.")
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        clock, library = Path(folder) / "offset", Path(folder) / "clock.so"
        clock.write_bytes(bytes(8))
        source = Path(__file__).with_name("clock.c")
        subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
        env = {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(clock)}
        with _running(ChaosServer(Path(folder), env)) as server:
            yield Setup(server, clock=clock)


SETUPS: dict[str, Callable[[], contextlib.AbstractContextManager[Setup]]] = {
    "default": _default,
    "cluster": _cluster,
    "disk": _disk,
    "clock": _clock,
}
