"""A gRPC port of our own inside a replica."""

from __future__ import annotations

import ssl

from serve_app.net.bind import BIND_TIMEOUT, bind
from serve_app.protocols.grpc.http2.server import Http2Server

_SHUTDOWN_TIMEOUT_S = 5.0  # seconds in which running calls may end


class GrpcListener:
    """A listener of gRPC on ``host:port``; ``setting`` is the setting of the port.

    ``shared``: it binds beside others that share the port, such as the gateway that this one replaces; the
    kernel distributes connections among them.
    """

    def __init__(
        self,
        server: Http2Server,
        host: str,
        port: int,
        setting: str,
        tls: ssl.SSLContext | None = None,
        shared: bool = False,
    ) -> None:
        self._server = server
        self._host = host
        self.port = port
        self._setting = setting
        self._tls = tls
        self._shared = shared

    async def open(self, timeout: float = BIND_TIMEOUT) -> None:
        """Bind and serve; wait at most ``timeout`` seconds for a port that cannot be shared.

        Raises ConfigurationError, which names the holder of the port and the setting that moves it.
        """
        sock = await bind(self._host, self.port, self._setting, timeout, self._shared)
        self.port = sock.getsockname()[1]
        await self._server.serve(sock, self._tls)

    async def close(self, timeout: float = _SHUTDOWN_TIMEOUT_S) -> None:
        """Refuse further calls, and wait at most ``timeout`` seconds for running ones."""
        await self._server.stop(timeout)
