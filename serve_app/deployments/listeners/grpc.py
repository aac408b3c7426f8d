"""The gRPC ports of our own inside replicas."""

from __future__ import annotations

import socket
import ssl
from typing import Protocol

import grpc
import grpc.aio

from serve_app.net import tls
from serve_app.net.bind import BIND_TIMEOUT, bind
from serve_app.settings import Settings

_SHUTDOWN_TIMEOUT_S = 5.0  # seconds in which running calls may end


class GrpcServer(Protocol):
    """A server that accepts connections on sockets that are already bound."""

    @property
    def calls(self) -> int:
        """The number of running calls."""

    async def serve(self, sock: socket.socket, tls: ssl.SSLContext | None = None) -> None: ...

    async def stop(self, grace: float) -> None: ...


class GrpcListener:
    """A listener of the inference API on ``host:port``; ``setting`` is the setting of the port.

    ``shared``: it binds beside others that share the port, such as the gateway that this one replaces; the
    kernel distributes connections among them.
    """

    def __init__(
        self,
        server: GrpcServer,
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

    @property
    def calls(self) -> int:
        """The number of running calls."""
        return self._server.calls

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


class ManagementGrpcListener:
    """A listener of gRPC's own server on ``host:port``; ``setting`` is the setting of the port."""

    def __init__(
        self,
        server: grpc.aio.Server,
        host: str,
        port: int,
        setting: str,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        self._server = server
        self._host = host
        self.port = port
        self._setting = setting
        self._credentials = credentials

    async def open(self, timeout: float = BIND_TIMEOUT) -> None:
        """Bind and serve; wait at most ``timeout`` seconds for a port that a predecessor still holds.

        Raises ConfigurationError, which names the holder of the port and the setting that moves it.
        """
        # The server takes no bound socket; this one waits for the port and has the better error.
        sock = await bind(self._host, self.port, self._setting, timeout)
        self.port = sock.getsockname()[1]
        sock.close()
        address = f"[{self._host}]:{self.port}" if ":" in self._host else f"{self._host}:{self.port}"
        if self._credentials is None:
            self._server.add_insecure_port(address)
        else:
            self._server.add_secure_port(address, self._credentials)
        await self._server.start()

    async def close(self, timeout: float = _SHUTDOWN_TIMEOUT_S) -> None:
        """Refuse further calls, and wait at most ``timeout`` seconds for running ones."""
        await self._server.stop(timeout)


def load_credentials(settings: Settings) -> grpc.ServerCredentials | None:
    """Return the credentials of gRPC's own server; None without a certificate.

    Raises ConfigurationError, which names the setting, the file and the remedy.
    """
    if tls.grpc_context(settings) is None:  # it checks the files
        return None
    g, root = settings.grpc, settings.root
    pair = (root / g.private_key_file).read_bytes(), (root / g.certificate_file).read_bytes()
    return grpc.ssl_server_credentials([pair])
