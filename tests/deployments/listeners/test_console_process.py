"""The console's process: it starts with the first visit, and ends when it is unused or its parent ends."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from serve_app.deployments.listeners.console_process import ConsoleProcess
from serve_app.errors import Unavailable
from serve_app.settings import load

pytestmark = pytest.mark.integration


def wait_until_gone(process: psutil.Process, timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.05)


async def get(socket: str, path: str = "/login") -> int:
    # httpx's synchronous transport leaves its socket open where the connection is refused.
    async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=socket)) as client:
        return (await client.get(f"http://console{path}")).status_code


async def start(console: ConsoleProcess) -> str:
    """Start the console; ten seconds may be too few where other tests run."""
    while True:
        with contextlib.suppress(Unavailable):
            return await console.start()


async def visit(console: ConsoleProcess) -> int:
    """Return the status of a page; an idle console may end before the request."""
    while True:
        socket = await start(console)
        with contextlib.suppress(httpx.TransportError):
            return await get(socket)


def children() -> set[psutil.Process]:
    return set(psutil.Process().children())


@pytest.mark.slow
def test_the_console_starts_once_ends_when_idle_and_starts_again() -> None:
    before = children()

    async def main() -> None:
        console = ConsoleProcess(load({"console": {"idle_timeout": 2}}), 8080)
        first, second = await asyncio.gather(start(console), start(console))
        assert first == second
        assert await visit(console) == 200
        [process] = children() - before
        await asyncio.to_thread(wait_until_gone, process)
        assert await visit(console) == 200
        [process] = children() - before
        console.close()
        assert not process.is_running()

    asyncio.run(main())


def test_only_the_servers_user_may_connect_and_no_secret_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHRELAY_SECRET_KEY", "secret")
    before = children()

    async def main() -> None:
        console = ConsoleProcess(load({}), 8080)
        socket = Path(await start(console))
        assert (await asyncio.to_thread(socket.parent.stat)).st_mode & 0o077 == 0
        [process] = children() - before
        assert "secret" not in process.environ().values()
        console.close()
        assert not process.is_running()
        assert not await asyncio.to_thread(socket.exists)

    asyncio.run(main())


def test_the_console_ends_with_a_parent_that_is_killed() -> None:
    source = """
import asyncio, time
from serve_app.deployments.listeners.console_process import ConsoleProcess
from serve_app.settings import load
from serve_app.errors import Unavailable
console = ConsoleProcess(load({}), 8080)
while True:
    try:
        asyncio.run(console.start())
        break
    except Unavailable:  # ten seconds may be too few where other tests run
        continue
print(console._process.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        process = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    wait_until_gone(process)
