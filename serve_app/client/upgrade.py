"""The handshake of a WebSocket as an exchange of httpx: keys, further attempts and refusals are those of all calls.

A request to ``ws://`` or ``wss://`` is answered with 101, and the connection is the answer's extension ``line``; what a
server says instead is an answer as ever. The timeout of a request is that of its whole handshake.
"""

from __future__ import annotations

import asyncio
import ssl
from functools import cached_property
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection as AsyncLine
from websockets.asyncio.client import connect as connect_async
from websockets.exceptions import InvalidHandshake, InvalidStatus
from websockets.http11 import Response
from websockets.sync.client import ClientConnection as Line
from websockets.sync.client import connect

__all__ = ["AsyncLine", "AsyncUpgrade", "Line", "Upgrade"]

_OF_THE_HANDSHAKE = ("host", "connection")  # which websockets writes itself
# Seconds for the server's part of closing, which stands behind all that it has sent and nobody reads any more.
_CLOSING = 1.0
_Failures = (InvalidHandshake, OSError, asyncio.TimeoutError)


class _Upgrade:
    def __init__(self, verify: ssl.SSLContext | bool) -> None:
        self._verify = verify

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return httpx.create_ssl_context(self._verify)

    def _how(self, request: httpx.Request) -> dict[str, Any]:
        """How to connect. The seconds of silence are the client's to measure, and so are sizes the server's."""
        secure = {"ssl": self._tls} if request.url.scheme == "wss" else {}
        return {
            "additional_headers": [pair for pair in request.headers.items() if pair[0] not in _OF_THE_HANDSHAKE],
            "open_timeout": request.extensions["timeout"]["connect"],
            "ping_timeout": None,
            "close_timeout": _CLOSING,
            "max_size": None,
            "compression": None,
            **secure,
        }


class Upgrade(_Upgrade, httpx.BaseTransport):
    """For ``httpx.Client``."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        try:
            line = connect(str(request.url), **self._how(request))
        except _Failures as failure:
            return _refused(failure, request)
        return _open(line, line.response)


class AsyncUpgrade(_Upgrade, httpx.AsyncBaseTransport):
    """For ``httpx.AsyncClient``."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            line = await connect_async(str(request.url), **self._how(request))
        except _Failures as failure:
            return _refused(failure, request)
        return _open(line, line.response)


def _open(line: Line | AsyncLine, said: Response | None) -> httpx.Response:
    assert said is not None
    return httpx.Response(said.status_code, headers=list(said.headers.raw_items()), extensions={"line": line})


def _refused(failure: Exception, request: httpx.Request) -> httpx.Response:
    """What the server said instead. Raises httpx.TransportError where nobody said anything."""
    if isinstance(failure, InvalidStatus):
        said = failure.response
        if 200 <= said.status_code < 300:
            raise httpx.RemoteProtocolError(f"{request.url} is no WebSocket: {said.status_code}", request=request)
        return httpx.Response(said.status_code, headers=list(said.headers.raw_items()), content=bytes(said.body or b""))
    if isinstance(failure, (TimeoutError, asyncio.TimeoutError)):
        raise httpx.ConnectTimeout(str(failure), request=request) from failure
    if isinstance(failure, OSError):
        raise httpx.ConnectError(str(failure), request=request) from failure
    raise httpx.RemoteProtocolError(str(failure), request=request) from failure
