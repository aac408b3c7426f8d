"""When a replica requests its replacement."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import pytest

from serve_app.deployments.serving_process.recycling import MIB, RecyclingWatch
from serve_app.domain.recycling import Recycling


class Process:
    """A process with an age, rows and memory that the test sets."""

    age = 0.0
    rows = 0
    memory = 100 * MIB

    def __init__(self) -> None:
        self.problems: list[str] = []

    def watch(self, limits: Recycling, jitter: Callable[[], float] = lambda: 0.0) -> RecyclingWatch:
        return RecyclingWatch(
            limits,
            lambda: self.rows,
            report=self.problems.append,
            measure_memory=lambda: self.memory,
            clock=lambda: self.age,
            jitter=jitter,
        )


def test_each_limit_has_a_reason_with_figures() -> None:
    process = Process()
    watch = process.watch(Recycling(3600, 1000, 200))
    assert watch.find_reason() is None
    process.memory = 201 * MIB
    assert watch.find_reason() == (
        "memory",
        "it has 201 MiB of resident memory, and its limit is 200 MiB",
    )
    process.rows = 1000
    assert watch.find_reason() == ("requests", "it has run 1000 rows, and its limit is 1000")
    process.age = 3600
    assert watch.find_reason() == ("age", "it is 3600 s old, and its limit is 3600 s")


def test_limits_that_are_not_set_are_never_reached() -> None:
    process = Process()
    watch = process.watch(Recycling(max_requests=5))
    process.age, process.memory = 1e9, 1 << 50
    assert watch.find_reason() is None


def test_replicas_that_start_together_have_different_limits() -> None:
    process = Process()
    early = process.watch(Recycling(1000, 1000), lambda: 1.0)
    late = process.watch(Recycling(1000, 1000), lambda: 0.0)
    process.age = process.rows = 950
    assert early.find_reason() == ("age", "it is 950 s old, and its limit is 900 s")
    assert late.find_reason() is None


def test_a_memory_limit_below_a_new_replicas_memory_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    process = Process()
    watch = process.watch(Recycling(max_memory_mib=50))
    process.memory = 200 * MIB
    assert watch.find_reason() is None
    [problem] = process.problems
    assert problem == "recycling.max_memory_mib (50) is ignored: a new replica has 100 MiB; raise it"
    assert problem in caplog.text


def test_the_resident_memory_of_this_process_is_measured() -> None:
    watch = RecyclingWatch(Recycling(max_memory_mib=1 << 20), lambda: 0)
    assert watch.find_reason() is None


def test_the_request_is_repeated_until_the_replica_stops() -> None:
    process = Process()
    watch = process.watch(Recycling(max_requests=1))
    process.rows, process.age = 2, 7

    async def run() -> list[str]:
        requests: list[str] = []
        twice = asyncio.Event()

        def request(reason: str, detail: str, age: float) -> None:
            assert age == 7
            requests.append(reason)
            if len(requests) == 2:
                twice.set()
            raise ConnectionResetError  # as while Management is replaced

        task = asyncio.create_task(watch.run(request, period=0.001))
        await asyncio.wait_for(twice.wait(), 60)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return requests

    assert asyncio.run(run())[:2] == ["requests", "requests"]
