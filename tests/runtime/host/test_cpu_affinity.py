"""Replicas on cores of their own: real processes and real locks."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serve_app.domain.model import ModelSpec
from serve_app.runtime.host import cpu_affinity, thread_limits
from serve_app.settings import RuntimeSettings

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs sched_setaffinity")
ALLOWED = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
several = pytest.mark.skipif(len(ALLOWED) < 2, reason="needs two cores")

REPLICA = """
import os, sys
from pathlib import Path
from serve_app.runtime.host.cpu_affinity import CpuClaim
claim = CpuClaim(int(sys.argv[2]), Path(sys.argv[1]), period=0.01)
print(*os.sched_getaffinity(0), flush=True)
sys.stdin.read()
"""
HANDLER = """
import os

def handle(data, context):
    return [sorted(os.sched_getaffinity(0))] * len(data or [])
"""


class Replica:
    def __init__(self, locks: Path, count: int) -> None:
        command = [sys.executable, "-c", REPLICA, str(locks), str(count)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.cores = set(map(int, self.process.stdout.readline().split()))

    @property
    def now(self) -> set[int]:
        return os.sched_getaffinity(self.process.pid)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Callable[[int], Replica]]:
    started: list[Replica] = []

    def start(count: int) -> Replica:
        started.append(Replica(tmp_path / "locks", count))
        return started[-1]

    yield start
    for each in started:
        each.kill()


@pytest.fixture
def unpinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the test locks of its own, and restore this process's cores afterwards."""
    monkeypatch.setattr(cpu_affinity, "lock_directory", lambda: tmp_path / "locks")
    yield
    os.sched_setaffinity(0, ALLOWED)


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another process does by itself."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@several
def test_two_replicas_have_a_core_each_and_a_killed_one_gives_its_back(
    replica: Callable[[int], Replica],
) -> None:
    first = replica(len(ALLOWED) - 1)
    second = replica(1)
    assert first.cores | second.cores == set(ALLOWED) and not first.cores & second.cores
    second.kill()
    assert replica(1).cores == second.cores


@several
def test_one_that_shares_moves_to_a_core_that_becomes_free(replica: Callable[[int], Replica]) -> None:
    others = [replica(1) for _ in ALLOWED]
    assert sorted(core for other in others for core in other.cores) == ALLOWED
    late = replica(1)  # shares with the first, and is there as that goes: or moves where the last one was
    assert late.cores <= set(ALLOWED)
    others[-1].kill()
    until(lambda: late.now == others[-1].cores)


def test_more_than_there_are_is_all_of_them(replica: Callable[[int], Replica]) -> None:
    assert replica(len(ALLOWED) + 3).cores == set(ALLOWED)
    assert replica(len(ALLOWED) + 3).cores == set(ALLOWED)


@several
def test_the_models_threads_are_pinned_and_the_servers_are_not(tmp_path: Path) -> None:
    seen: dict[str, set[int]] = {}

    def handler_thread() -> None:
        claim = cpu_affinity.CpuClaim(1, tmp_path)
        inner = threading.Thread(target=lambda: seen.update(model=os.sched_getaffinity(0)))
        inner.start()
        inner.join()
        seen["claimed"] = set(claim.cores)

    thread = threading.Thread(target=handler_thread)
    thread.start()
    thread.join()
    assert seen["model"] == seen["claimed"] and len(seen["model"]) == 1
    assert os.sched_getaffinity(0) == set(ALLOWED)


@pytest.mark.parametrize(
    ("config", "settings", "pinned"),
    [
        ({"pin": True, "threads": 1}, {}, 1),
        ({"pin": True}, {}, len(ALLOWED)),  # one replica: all of them
        ({"threads": 1}, {}, len(ALLOWED)),
        ({"threads": 1}, {"pin": True}, 1),
        ({"threads": 1, "pin": False}, {"pin": True}, len(ALLOWED)),
    ],
)
def test_a_handler_runs_on_the_cores_that_its_configuration_asks_for(
    make_runner, unpinned, config, settings, pinned
):
    import torch

    before = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    runner = make_runner(HANDLER, settings=RuntimeSettings(**settings), config=config)
    try:
        runner.load()
        assert len(os.sched_getaffinity(0)) == pinned
    finally:
        torch.set_num_threads(before[0])
        os.environ.pop("OMP_NUM_THREADS", None)
        if before[1] is not None:
            os.environ["OMP_NUM_THREADS"] = before[1]


def test_pinned_without_a_number_of_threads_the_cores_are_divided():
    spec = ModelSpec("m", "1.0", url="m.mar", digest="", archive="", min_workers=2, max_workers=2)
    assert thread_limits.intra_op_threads(spec, cores=8) is None
    assert thread_limits.intra_op_threads(spec, cores=8, pinned=True) == 4


def test_where_the_system_has_no_such_thing_one_warning_says_so(monkeypatch, caplog):
    monkeypatch.delattr(os, "sched_setaffinity")
    assert cpu_affinity.pin(1, "m--1.0") is None
    [record] = caplog.records
    assert record.levelno == logging.WARNING and "m--1.0 has pin" in record.getMessage()


def test_locks_that_cannot_be_had_cost_a_warning_and_no_start(monkeypatch, caplog, tmp_path, unpinned):
    (tmp_path / "file").touch()
    monkeypatch.setattr(cpu_affinity, "lock_directory", lambda: tmp_path / "file")
    assert cpu_affinity.pin(1, "m--1.0") is None
    assert "it runs unpinned" in caplog.text
    assert os.sched_getaffinity(0) == set(ALLOWED)
