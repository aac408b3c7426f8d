"""A port of our own inside a replica, beside Ray Serve's."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Any

import uvicorn

from serve_app.net.bind import BIND_TIMEOUT, bind
from serve_app.protocols.http.server.http_protocol import HttpProtocol


class _UvicornServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):
        """Leave signals to the replica's process."""
        yield


class HttpListener:
    """A listener of an ASGI app on ``host:port``; ``setting`` is the setting of the port."""

    def __init__(
        self, app: Any, host: str, port: int, setting: str, tls: ssl.SSLContext | None = None
    ) -> None:
        self._app = app
        self._host = host
        self._port = port
        self._setting = setting
        self._tls = tls
        self._server: _UvicornServer | None = None
        self._task: asyncio.Task[None] | None = None

    async def open(self, timeout: float = BIND_TIMEOUT) -> None:
        """Bind and serve; wait at most ``timeout`` seconds for a port that a predecessor still holds.

        Raises ConfigurationError, which names the holder of the port and the setting that moves it.
        """
        sock = await bind(self._host, self._port, self._setting, timeout)
        config = uvicorn.Config(
            self._app,
            http=HttpProtocol,
            lifespan="off",
            access_log=False,
            log_config=None,
            proxy_headers=False,  # see net/request_origin.py
            timeout_keep_alive=75,
        )
        config.load()
        config.ssl = self._tls
        self._server = _UvicornServer(config)
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[sock]))

    async def close(self) -> None:
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            self._server.force_exit = True
            await self._task
