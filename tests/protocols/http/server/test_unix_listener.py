"""The Unix socket beside an HTTP port."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from serve_app.protocols.http.server import http_protocol, unix_listener


@pytest.fixture(autouse=True)
def sockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Use a folder of the test; the path of a test's own folder is too long for a socket.

    That one is created before, or all later ones would be in the folder of this test.
    """
    with tempfile.TemporaryDirectory(prefix="http-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


async def send_client(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
    await send({"type": "http.response.body", "body": scope["client"][0].encode()})


def run_server(scenario: Callable[[int], Awaitable[None]]) -> None:
    """Run ``scenario(port)`` while a server listens."""

    async def run() -> None:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            config = uvicorn.Config(
                send_client, http=http_protocol.HttpProtocol, lifespan="off", log_config=None
            )
            server = unix_listener.Server(config)
            task = asyncio.create_task(server._serve([bound]))
            while not server.started:
                await asyncio.sleep(0.01)
            await scenario(bound.getsockname()[1])
            server.should_exit = True
            await task

    asyncio.run(asyncio.wait_for(run(), 60))


def test_requests_arrive_over_tcp_and_over_the_socket_until_the_server_stops() -> None:
    ports = []

    async def scenario(port: int) -> None:
        path = unix_listener.find_socket("127.0.0.1", port)
        assert path is not None and path.parent.stat().st_mode & 0o077 == 0
        for transport in (None, httpx.AsyncHTTPTransport(uds=str(path))):
            async with httpx.AsyncClient(transport=transport, timeout=60) as client:
                answer = await client.get(f"http://127.0.0.1:{port}/")
                assert (answer.status_code, answer.text) == (200, "127.0.0.1")
        assert unix_listener.find_socket("192.0.2.1", port) is None, "another host's port"
        ports.append(port)

    run_server(scenario)
    path = unix_listener.get_socket_path(ports[0])
    assert path is not None and not path.exists()


def test_the_file_of_a_killed_process_is_ignored_and_replaced() -> None:
    def leave_file(port: int) -> None:
        path = unix_listener.get_socket_path(port)
        assert path is not None
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(str(path))

    leave_file(1)
    assert unix_listener.find_socket("127.0.0.1", 1) is None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    leave_file(port)

    async def scenario(port: int) -> None:
        assert unix_listener.find_socket("127.0.0.1", port) is not None

    run_server(scenario)


def test_a_path_that_is_too_long_leaves_tcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert unix_listener.get_socket_path(8080) is None

    async def scenario(port: int) -> None:
        assert unix_listener.find_socket("127.0.0.1", port) is None

    run_server(scenario)
