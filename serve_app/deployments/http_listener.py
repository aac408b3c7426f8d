"""A port of our own inside a replica, beside Ray Serve's."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Any

import uvicorn

from serve_app.deployments.port import PATIENCE, bind
from serve_app.doors.http import Protocol


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):
        """Signals belong to the replica's process, not to a port in it."""
        yield


class Listener:
    """Serves an ASGI app on ``host:port``; ``setting`` is where an operator changes the port."""

    def __init__(self, app: Any, host: str, port: int, setting: str, tls: ssl.SSLContext | None = None) -> None:
        self._app = app
        self._host = host
        self._port = port
        self._setting = setting
        self._tls = tls
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def open(self, patience: float = PATIENCE) -> None:
        """Bind and serve. A port that a predecessor still holds is waited for, ``patience`` seconds at most.

        Raises ConfigurationError, which names who holds the port and which setting moves it.
        """
        sock = await bind(self._host, self._port, self._setting, patience)
        config = uvicorn.Config(
            self._app, http=Protocol, lifespan="off", access_log=False, log_config=None, timeout_keep_alive=75
        )
        config.load()
        config.ssl = self._tls
        self._server = _Server(config)
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[sock]))

    async def close(self) -> None:
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            self._server.force_exit = True
            await self._task
