"""Free ports, which no two test processes allocate."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Iterator

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
ALLOCATED_PORTS: set[int] = set()


def free_port() -> int:
    """Return a port that is not in use, and that neither the kernel, Ray nor another call allocates."""
    while True:
        port = random.randrange(20_000 + WORKER, 29_000, WORKERS)
        with socket.socket() as probe:
            if port not in ALLOCATED_PORTS and probe.connect_ex(("127.0.0.1", port)):
                ALLOCATED_PORTS.add(port)
                return port


@contextlib.contextmanager
def refusing_port() -> Iterator[int]:
    """Yield a port that refuses connections, until a server of this block binds it with SO_REUSEADDR.

    It stays bound here, so the kernel gives it to no other process.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
