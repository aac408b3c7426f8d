"""The load on the hosts while it runs, and the figures of its requests."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.hosts.host_load import PROTOCOLS
from tests.support.server import ROOT


@dataclass(frozen=True)
class Record:
    """One request: its host, the host of its replica, its times (time.monotonic), and its error."""

    host: str
    protocol: str
    start: float
    error: str
    replica: str
    end: float


class HostLoad:
    """A process that loads some hosts, between ``__enter__`` and ``__exit__``.

    ``targets`` are their addresses, as ``host_load.py`` takes them.
    """

    def __init__(self, folder: Path, targets: Iterable[str]) -> None:
        self._targets = list(targets)
        self._file = folder / "load.jsonl"

    def __enter__(self) -> HostLoad:
        command = [sys.executable, "-m", "tests.hosts.host_load", *self._targets]
        with self._file.open("wb") as output:
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=output)
        since = time.monotonic()
        self.wait(lambda: all(self.served(target, since, 5) for target in self._targets), "first responses")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        assert self._process.wait(60) == 0

    def records(self, since: float = 0.0) -> list[Record]:
        """Return the requests that have ended and that were sent after ``since``."""
        lines = self._file.read_text().rpartition("\n")[0].splitlines()
        return [record for line in lines if (record := Record(**json.loads(line))).start >= since]

    def served(self, host: str, since: float, count: int = 1) -> bool:
        """Return whether a host has answered ``count`` requests of every protocol."""
        served = [r.protocol for r in self.records(since) if r.host == host and not r.error]
        return all(served.count(protocol) >= count for protocol in PROTOCOLS)

    def used(self, replica: str, since: float) -> bool:
        """Return whether the replicas on a host have answered requests of every protocol."""
        return {r.protocol for r in self.records(since) if r.replica == replica} == set(PROTOCOLS)

    def wait(self, condition: Callable[[], bool], description: str, timeout: float = 90.0) -> float:
        """Wait for a condition; return the time at which it was true."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout:g} s: {description}\n{self.summary()}"
            time.sleep(0.2)
        return time.monotonic()

    def summary(self) -> str:
        failed = [record for record in self.records() if record.error]
        return f"{len(self.records())} requests, {len(failed)} failed; the last ones: {failed[-10:]}"


def describe(records: list[Record], since: float) -> str:
    """Return how many requests there were, which of them failed how long after ``since``, and the slowest."""
    failures = [record for record in records if record.error]
    last = max((record.start - since for record in failures), default=0.0)
    slowest = max(record.end - record.start for record in records)
    return (
        f"{len(failures)} of {len(records)} requests to other hosts failed, sent up to {last:.1f} s later; "
        f"the slowest took {slowest:.1f} s"
    )


def percentile_99(records: list[Record]) -> float:
    """Return the 99th percentile of the seconds of requests."""
    seconds = sorted(record.end - record.start for record in records)
    return seconds[int(0.99 * (len(seconds) - 1))]
