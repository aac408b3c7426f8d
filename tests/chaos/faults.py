"""The faults: each a function that disturbs a running setup and returns once the disturbance has ended."""

from __future__ import annotations

import contextlib
import errno
import random
import signal
import sqlite3
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import psutil

from tests.chaos.chaos_server import PROCESSES
from tests.chaos.setups import Setup, Skipped

PAUSE_S = 5.0  # of a stopped process
SLOW_S = 8.0  # of a process that runs half of the time
LOCK_S = 20.0  # of the database's lock
HOLD_S = 8.0  # of a full disk, and of a false clock
_CYCLE_S = 0.1  # of a slow process: half of it stopped

HAPROXY_LIMIT_S = 2.0  # without an answer, once HAProxy has died
RESTART_LIMIT_S = 60.0  # without an answer, where the whole server starts again


@dataclass(frozen=True)
class Fault:
    """A fault of a setup.

    ``unavailable`` is the documented limit of seconds in which a stream may have no answer. ``replaces`` is
    the process type whose processes must be new afterwards. ``short`` selects the short form.
    """

    name: str
    setup: str
    apply: Callable[[Setup], None]
    unavailable: float = 30.0
    replaces: str = ""
    short: bool = False


def _each(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def _find(setup: Setup, type: str) -> list[psutil.Process]:
    found = PROCESSES[type](setup.server)
    assert found, f"no process of type {type} runs"
    return found


def kill(type: str, setup: Setup) -> None:
    """Kill the processes of a type."""
    _each(_find(setup, type), signal.SIGKILL)


@contextlib.contextmanager
def _continued(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """Continue stopped processes at the end of the block."""
    try:
        yield
    finally:
        _each(processes, signal.SIGCONT)


Find = Callable[[Setup], list[psutil.Process]]


def pause(find: Find, setup: Setup) -> None:
    """Stop processes for five seconds."""
    found = find(setup)
    with _continued(found):
        _each(found, signal.SIGSTOP)
        time.sleep(PAUSE_S)


def slow_down(find: Find, setup: Setup) -> None:
    """Give processes half of the time, in slices of 50 ms; no control group is needed."""
    found, until = find(setup), time.monotonic() + SLOW_S
    with _continued(found):
        while time.monotonic() < until:
            _each(found, signal.SIGSTOP)
            time.sleep(_CYCLE_S / 2)
            _each(found, signal.SIGCONT)
            time.sleep(_CYCLE_S / 2)


def _postgres(setup: Setup) -> list[psutil.Process]:
    assert setup.postgres is not None
    first = psutil.Process(setup.postgres.pid)
    return [first, *first.children()]


def _redis(setup: Setup) -> list[psutil.Process]:
    assert setup.redis is not None
    return [setup.redis.process]


def kill_postgres(setup: Setup) -> None:
    """Kill PostgreSQL's first process; the others end with it. Start it again after two seconds."""
    assert setup.postgres is not None
    first, *others = _postgres(setup)
    first.kill()
    psutil.wait_procs(others, timeout=10)
    time.sleep(2.0)
    setup.postgres.start()


def kill_redis(setup: Setup) -> None:
    """Kill Redis, and start it again after two seconds; the GCS ends once its retries have failed."""
    assert setup.redis is not None
    found = _find(setup, "GCS")
    setup.redis.stop()
    time.sleep(2.0)
    setup.redis.start()
    psutil.wait_procs(found, timeout=20)


def lock_database(setup: Setup) -> None:
    """Hold SQLite's lock for 20 seconds, twice as long as the server waits for it."""
    file = setup.server.home / "state/registry.db"
    with contextlib.closing(sqlite3.connect(file, timeout=10, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        time.sleep(LOCK_S)
        connection.execute("ROLLBACK")


def fill_disk(setup: Setup) -> None:
    """Fill the disk of state, logs and Ray's session, and free it again."""
    assert setup.disk is not None
    ballast = setup.disk / "ballast"
    try:
        with ballast.open("wb", buffering=0) as file:
            until = time.monotonic() + HOLD_S
            while time.monotonic() < until:  # what is freed meanwhile is filled, too
                try:
                    file.write(bytes(1 << 16))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    time.sleep(0.1)
    finally:
        ballast.unlink()


def shift_clock(seconds: int, setup: Setup) -> None:
    """Set the clock of all processes forward or back, and after eight seconds right again."""
    assert setup.clock is not None
    with setup.clock.open("r+b", buffering=0) as file:
        file.write(struct.pack("=q", seconds))
        time.sleep(HOLD_S)
        file.seek(0)
        file.write(struct.pack("=q", 0))


def exhaust_memory(setup: Setup) -> None:
    """Put the server into a control group whose memory one handler exceeds; the kernel kills its replica."""
    with _memory_group() as (group, limit):
        usage = 0
        for process in setup.server.process.processes():
            with contextlib.suppress(psutil.Error, OSError):
                (group / "cgroup.procs").write_text(str(process.pid))
                usage += process.memory_full_info().uss
        # The first version of control groups counts only what is allocated from here on.
        (group / limit).write_text(str((192 << 20) + (usage if limit == "memory.max" else 0)))
        with contextlib.suppress(httpx.HTTPError):
            setup.server.http.post("/predictions/hog", content=b"512", timeout=20)
        time.sleep(1.0)


@contextlib.contextmanager
def _memory_group() -> Iterator[tuple[Path, str]]:
    """Create a control group; yield its directory and the name of the file of its limit."""
    for root, limit in (
        (Path("/sys/fs/cgroup"), "memory.max"),
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    ):
        group = root / f"chaos-{time.monotonic_ns()}"
        try:
            group.mkdir()
        except OSError:
            continue
        if not (group / limit).exists():
            group.rmdir()
            continue
        try:
            yield group, limit
        finally:
            _remove_group(group)
        return
    raise Skipped("no control group of memory can be created here")


def _remove_group(group: Path) -> None:
    """Move the processes of a control group to its parent, also those that start meanwhile, and delete it."""
    for _ in range(50):
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (group.parent / "cgroup.procs").write_text(pid)
        with contextlib.suppress(OSError):
            return group.rmdir()
        time.sleep(0.1)


def kill_management_at_random_moments(setup: Setup) -> None:
    """Kill Management while changes are written, each time once it accepts changes again."""
    chance = random.Random(0)
    for _ in range(setup.kills):
        _each(_find(setup, "Management"), signal.SIGKILL)
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with contextlib.suppress(httpx.HTTPError):
                if setup.server.management.get("/models", timeout=2).status_code == 200:
                    break
            time.sleep(0.1)
        time.sleep(chance.uniform(0.0, 1.0))


# Ray ends the raylet with its agents.
_RESTARTS = {"runtime environment agent", "raylet", "GCS", "supervisor"}
# Nobody starts these again; the faults after theirs start the whole server again.
_NOT_REPLACED = {"fork servers"}


def _process_faults() -> Iterator[Fault]:
    short = {"replica", "gateway", "Management", "Serve controller", "HAProxy"}
    for type in PROCESSES:
        unavailable = RESTART_LIMIT_S if type in _RESTARTS else 30.0
        limit = HAPROXY_LIMIT_S if type == "HAProxy" else unavailable
        find = partial(_find, type=type)
        yield Fault(f"pause {type}", "default", partial(pause, find), unavailable)
        yield Fault(f"slow {type}", "default", partial(slow_down, find), unavailable)
        yield Fault(
            f"kill {type}",
            "default",
            partial(kill, type),
            limit,
            replaces="" if type in _NOT_REPLACED else type,
            short=type in short,
        )


FAULTS: tuple[Fault, ...] = (
    *_process_faults(),
    Fault("kill Management repeatedly", "default", kill_management_at_random_moments),
    Fault("locked database", "default", lock_database),
    Fault("memory pressure", "default", exhaust_memory, replaces=""),
    Fault("kill PostgreSQL", "cluster", kill_postgres),
    Fault("pause PostgreSQL", "cluster", partial(pause, _postgres)),
    Fault("slow PostgreSQL", "cluster", partial(slow_down, _postgres)),
    Fault("kill Redis", "cluster", kill_redis, RESTART_LIMIT_S),
    Fault("pause Redis", "cluster", partial(pause, _redis)),
    Fault("slow Redis", "cluster", partial(slow_down, _redis)),
    Fault("kill GCS with Redis", "cluster", partial(kill, "GCS"), RESTART_LIMIT_S, "GCS"),
    Fault("full disk", "disk", fill_disk),
    Fault("clock an hour ahead", "clock", partial(shift_clock, 3600)),
    Fault("clock an hour back", "clock", partial(shift_clock, -3600)),
)
