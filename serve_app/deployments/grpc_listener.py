"""A gRPC port of our own inside a replica."""

from __future__ import annotations

import ssl

from serve_app.deployments.port import PATIENCE, bind
from serve_app.doors.grpc.server import Server

_GRACE = 5.0  # seconds in which calls that are under way may end


class GrpcListener:
    """Serves gRPC on ``host:port``; ``setting`` is where an operator changes the port.

    ``shared``: it binds beside others that share the port too, such as the gateway that this one replaces; the
    kernel deals connections out among them.
    """

    def __init__(
        self,
        server: Server,
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

    async def open(self, patience: float = PATIENCE) -> None:
        """Bind and serve. A port that cannot be shared is waited for, ``patience`` seconds at most.

        Raises ConfigurationError, which names who holds the port and which setting moves it.
        """
        sock = await bind(self._host, self.port, self._setting, patience, self._shared)
        self.port = sock.getsockname()[1]
        await self._server.serve(sock, self._tls)

    async def close(self, grace: float = _GRACE) -> None:
        """Take no further call, and end when those that are under way have ended, ``grace`` seconds at most."""
        await self._server.stop(grace)
