"""Servers that the tests of several files share: each starts with its first test, and ends after its last.

An idle server takes a fifth of a core, which the other tests need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from tests.support.ports import free_port
from tests.support.server import POOL_MIB, Server


@contextmanager
def run_plain(home: Path) -> Iterator[Server]:
    """Start a server with the defaults, a limit of bodies that tests can exceed quickly, and two pools.

    It expects a Prometheus at ``server.prometheus_port``, where a test may start one.
    """
    port = free_port()
    server = Server(
        home,
        control={"prometheus_url": f"http://127.0.0.1:{port}"},
        inference={"max_request_size": 6_553_500},
        pools={"p": {"memory": POOL_MIB}, "two": {"memory": 100, "hosts": 2}},
    )
    server.prometheus_port = port
    with closing(server):
        server.start()
        yield server


class SharedServers:
    """The running servers, by the name of their fixture."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[Any, ExitStack]] = {}

    def get(self, name: str, start: Callable[[], AbstractContextManager[Any]]) -> Any:
        """Return the server of that name; start it where it does not run."""
        if name not in self._running:
            stack = ExitStack()
            self._running[name] = (stack.enter_context(start()), stack)
        return self._running[name][0]

    def close(self, name: str | None = None) -> None:
        """Stop a server, or all."""
        for each in [name] if name else list(self._running):
            if each in self._running:
                self._running.pop(each)[1].close()


SHARED_SERVERS = SharedServers()
