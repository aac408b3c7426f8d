"""A port of our own inside a replica, beside Ray Serve's."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from typing import Any

import uvicorn

from serve_app.errors import ConfigurationError
from serve_app.ports import holder

log = logging.getLogger("torchrelay.listener")


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

    async def open(self, patience: float = 15.0) -> None:
        """Bind and serve. A port that a predecessor still holds is waited for, ``patience`` seconds at most.

        Raises ConfigurationError, which names who holds the port and which setting moves it.
        """
        sock = await self._bind(patience)
        config = uvicorn.Config(self._app, lifespan="off", access_log=False, log_config=None, timeout_keep_alive=75)
        config.load()
        config.ssl = self._tls
        self._server = _Server(config)
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[sock]))

    async def close(self) -> None:
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            self._server.force_exit = True
            await self._task

    async def _bind(self, patience: float) -> socket.socket:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience
        waited = False
        while True:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((self._host, self._port))
                return sock
            except OSError as error:
                sock.close()
                where = f"{self._host}:{self._port}"
                if error.errno != errno.EADDRINUSE or loop.time() > deadline:
                    cure = f"set {self._setting} to another one"
                    raise ConfigurationError(where, f"{error.strerror}{holder(self._port)}; {cure}") from None
                if not waited:
                    log.warning("%s is in use%s; waiting for it", where, holder(self._port))
                    waited = True
                await asyncio.sleep(0.1)
