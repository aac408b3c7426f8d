"""The CPU time that a server's processes take for a request, by their part in it.

It is read from /proc, where the kernel counts ticks of 10 ms. Other processes of the machine change it far
less than they change the throughput.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import psutil

HAPROXY, GATEWAY, REPLICA, OTHER = PARTS = ("HAProxy", "gateway", "replica", "other")
# Of the command line; TorchServe's frontend and its workers have the same parts. Ray replaces a replica's
# command line while it runs some methods of its actor.
_RAY = r"ray::(?:SERVE_REPLICA::\S*:)?ServeReplica:"
_PATTERNS = {
    HAPROXY: re.compile(r"\S*haproxy -db "),
    GATEWAY: re.compile(_RAY + r"torchrelay:Gateway|.*org\.pytorch\.serve\.ModelServer"),
    REPLICA: re.compile(
        _RAY + r"(?!torchrelay:)|.*model_service_worker\.py|.*tests\.benchmarks\.bare_parser "
    ),
}

Parts = Mapping[str, float]  # part -> seconds


def part_of(command: str) -> str:
    """Return the part of the process with this command line."""
    return next((part for part, pattern in _PATTERNS.items() if pattern.match(command)), OTHER)


def read(processes: Sequence[psutil.Process]) -> dict[int, tuple[str, float]]:
    """Return each process's part and the seconds of CPU time that it has had so far."""
    found = {}
    for process in processes:
        try:
            times, command = process.cpu_times(), " ".join(process.cmdline())
        except psutil.Error:
            continue
        found[process.pid] = part_of(f"{command} "), times.user + times.system
    return found


def spent(before: Mapping[int, tuple[str, float]], after: Mapping[int, tuple[str, float]]) -> Parts:
    """Return the seconds that the processes of each part had between two readings."""
    parts: dict[str, float] = {}
    for pid, (part, seconds) in after.items():
        earlier, start = before.get(pid, (part, 0.0))
        known = earlier if part == OTHER else part
        parts[known] = parts.get(known, 0.0) + seconds - start
    return parts
