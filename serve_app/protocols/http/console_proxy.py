"""``/ui`` on the management port: a reverse proxy of the console, which runs in a process of its own.

GET, HEAD and WebSocket are passed on; every other method is refused, so that no form of another site reaches
the console.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, Protocol

from serve_app.errors import MethodNotAllowed, RelayError, ResourceNotFound, Unavailable
from serve_app.net.request_origin import CrossSitePolicy
from serve_app.protocols.http import json_errors
from serve_app.protocols.http.exchange import Headers, HttpExchange, Receive, Scope, Send

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

# httpx and the WebSocket client are imported late: the gateway imports this module, and needs neither.

PREFIX = "/ui"
_MAX_MESSAGE_BYTES = 16 << 20
# Headers of one connection (RFC 9110, 7.6.1), and those that are set anew.
_UNFORWARDED = frozenset(
    (
        "connection",
        "host",
        "keep-alive",
        "te",
        "transfer-encoding",
        "upgrade",
        "content-length",
        "authorization",
    )
)
_OUTER_PREFIX = re.compile(r"(/[\w.~-]+)*")  # of a reverse proxy in front of the port


class ConsoleBackend(Protocol):
    """The console's process."""

    async def start(self) -> str:
        """Start the console unless it runs, and return its Unix socket. Raises Unavailable."""


class ConsoleRoutes:
    """The routes below ``/ui``; without a backend the console is disabled."""

    def __init__(self, backend: ConsoleBackend | None) -> None:
        self._backend = backend

    send_error = staticmethod(json_errors.send_error)

    def matches(self, exchange: HttpExchange) -> bool:
        return exchange.segments[:1] == [PREFIX[1:]]

    async def handle(self, exchange: HttpExchange) -> None:
        if self._backend is None:
            raise ResourceNotFound()
        if exchange.method not in ("GET", "HEAD"):
            raise MethodNotAllowed()
        socket = await self._backend.start()
        import httpx

        try:
            status, headers, body = await _fetch(socket, exchange)
        except httpx.TransportError as error:
            raise Unavailable(f"The console does not respond: {error!r}; load the page again.") from None
        exchange.override_defaults(headers)
        await exchange.send_response(status, headers, body)


async def _fetch(socket: str, exchange: HttpExchange) -> tuple[int, Headers, bytes]:
    """Send a request to the console, and return its response as it was encoded."""
    import httpx

    transport = httpx.AsyncHTTPTransport(uds=socket)
    async with httpx.AsyncClient(transport=transport, timeout=30.0) as client:
        url = f"http://console{_target(exchange)}"
        async with client.stream(exchange.method, url, headers=_forwarded(exchange)) as response:
            body = b"".join([chunk async for chunk in response.aiter_raw()])
    headers = [(name.lower(), value) for name, value in response.headers.raw]
    return response.status_code, [h for h in headers if h[0].decode("latin-1") not in _UNFORWARDED], body


def _target(exchange: HttpExchange) -> str:
    raw_path = exchange.scope.get("raw_path") or exchange.path.encode()
    path = raw_path.decode("latin-1").partition("?")[0].removeprefix(PREFIX)
    query = exchange.scope.get("query_string", b"").decode("latin-1")
    return f"{path or '/'}?{query}" if query else path or "/"


def _forwarded(exchange: HttpExchange) -> dict[str, str]:
    """Return the request's headers for the console; keys of the API are not among them."""
    headers = {name: value for name, value in exchange.headers.items() if name not in _UNFORWARDED}
    headers = {name: value for name, value in headers.items() if not name.startswith("sec-websocket-")}
    scheme = {"ws": "http", "wss": "https"}.get(exchange.scope["scheme"], exchange.scope["scheme"])
    headers.setdefault("x-forwarded-proto", scheme)
    headers.setdefault("accept-encoding", "identity")  # httpx would send its own
    headers["x-forwarded-prefix"] = _outer_prefix(exchange) + PREFIX
    headers["host"] = exchange.headers.get("host", "console")
    return headers


def _outer_prefix(exchange: HttpExchange) -> str:
    prefix = exchange.headers.get("x-forwarded-prefix", "").rstrip("/")
    return prefix if _OUTER_PREFIX.fullmatch(prefix) else ""


class ConsoleWebSocket:
    """The WebSocket connections below ``/ui``, whose origin must be a page of this server."""

    def __init__(self, backend: ConsoleBackend, cross_site: CrossSitePolicy) -> None:
        self._backend = backend
        self._cross_site = cross_site

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from websockets.asyncio.client import unix_connect
        from websockets.exceptions import InvalidHandshake

        exchange = HttpExchange({**scope, "method": "WEBSOCKET"}, receive, send)
        await receive()  # websocket.connect
        try:
            if exchange.segments[:1] != [PREFIX[1:]]:
                raise ResourceNotFound()
            self._cross_site.check("WEBSOCKET", exchange.path, exchange.headers)
            socket = await self._backend.start()
            headers = _forwarded(exchange)
            connection = await unix_connect(
                socket,
                f"ws://{headers.pop('host')}{_target(exchange)}",  # its host becomes the header Host
                additional_headers=headers,
                user_agent_header=None,
                compression=None,
                max_size=_MAX_MESSAGE_BYTES,
                ping_interval=None,  # the ends have pings of their own
            )
        except (RelayError, OSError, InvalidHandshake) as error:
            return await send({"type": "websocket.close", "code": 1008, "reason": str(error)[:100]})
        async with connection:
            await send({"type": "websocket.accept"})
            await _run_both(_send_messages(connection, receive), _receive_messages(connection, send))


async def _run_both(*pumps: Awaitable[None]) -> None:
    """Run both directions until one of them ends."""
    tasks = [asyncio.ensure_future(pump) for pump in pumps]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _send_messages(connection: ClientConnection, receive: Receive) -> None:
    while (message := await receive())["type"] == "websocket.receive":
        text = message.get("text")
        await connection.send(text if text is not None else message["bytes"])
    await connection.close(message.get("code") or 1000)


async def _receive_messages(connection: ClientConnection, send: Send) -> None:
    from websockets.exceptions import ConnectionClosed

    code = 1001
    try:
        async for data in connection:
            message: dict[str, Any] = {"type": "websocket.send"}
            message["text" if isinstance(data, str) else "bytes"] = data
            await send(message)
    except ConnectionClosed as closed:
        code = closed.rcvd.code if closed.rcvd is not None else code
    await send({"type": "websocket.close", "code": code})
