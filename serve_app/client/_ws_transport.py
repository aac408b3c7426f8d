"""The handshake of a WebSocket as a transport of httpx.

Keys, retries and errors of a handshake are therefore those of every request. A request to ``ws://`` or
``wss://`` is answered with 101, and the connection is the extension ``websocket`` of the response. Any other
response of the server is returned as it is. The timeout of a request covers its whole handshake.
"""

from __future__ import annotations

import asyncio
import ssl
from functools import cached_property
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection as AsyncConnection
from websockets.asyncio.client import connect as connect_async
from websockets.exceptions import InvalidHandshake, InvalidStatus
from websockets.http11 import Response
from websockets.sync.client import ClientConnection as Connection
from websockets.sync.client import connect

__all__ = ["AsyncConnection", "AsyncUpgradeTransport", "Connection", "UpgradeTransport"]

_HANDSHAKE_HEADERS = ("host", "connection")  # written by websockets itself
# Seconds for the server's close frame, which follows everything that it has sent and nobody reads any more.
_CLOSE_TIMEOUT = 1.0
_Failures = (InvalidHandshake, OSError, asyncio.TimeoutError)


class _UpgradeTransport:
    def __init__(self, verify: ssl.SSLContext | bool) -> None:
        self._verify = verify

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return httpx.create_ssl_context(self._verify)

    def _connect_options(self, request: httpx.Request) -> dict[str, Any]:
        """Return the options for ``connect``.

        Pings and size limits are off: the client measures idle time, and the server limits sizes.
        """
        tls_options = {"ssl": self._tls} if request.url.scheme == "wss" else {}
        return {
            "additional_headers": [
                pair for pair in request.headers.items() if pair[0] not in _HANDSHAKE_HEADERS
            ],
            "open_timeout": request.extensions["timeout"]["connect"],
            "ping_timeout": None,
            "close_timeout": _CLOSE_TIMEOUT,
            "max_size": None,
            "compression": None,
            **tls_options,
        }


class UpgradeTransport(_UpgradeTransport, httpx.BaseTransport):
    """A transport of ``httpx.Client`` for WebSocket handshakes."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        try:
            connection = connect(str(request.url), **self._connect_options(request))
        except _Failures as failure:
            return _failed_handshake(failure, request)
        return _successful_handshake(connection, connection.response)


class AsyncUpgradeTransport(_UpgradeTransport, httpx.AsyncBaseTransport):
    """A transport of ``httpx.AsyncClient`` for WebSocket handshakes."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            connection = await connect_async(str(request.url), **self._connect_options(request))
        except _Failures as failure:
            return _failed_handshake(failure, request)
        return _successful_handshake(connection, connection.response)


def _successful_handshake(
    connection: Connection | AsyncConnection, response: Response | None
) -> httpx.Response:
    assert response is not None
    return httpx.Response(
        response.status_code,
        headers=list(response.headers.raw_items()),
        extensions={"websocket": connection},
    )


def _failed_handshake(failure: Exception, request: httpx.Request) -> httpx.Response:
    """Return the server's response to a refused handshake.

    Raises httpx.TransportError where there is no response.
    """
    if isinstance(failure, InvalidStatus):
        response = failure.response
        if 200 <= response.status_code < 300:
            raise httpx.RemoteProtocolError(
                f"{request.url} is no WebSocket: {response.status_code}", request=request
            )
        return httpx.Response(
            response.status_code,
            headers=list(response.headers.raw_items()),
            content=bytes(response.body or b""),
        )
    if isinstance(failure, (TimeoutError, asyncio.TimeoutError)):
        raise httpx.ConnectTimeout(str(failure), request=request) from failure
    if isinstance(failure, OSError):
        raise httpx.ConnectError(str(failure), request=request) from failure
    raise httpx.RemoteProtocolError(str(failure), request=request) from failure
