"""The ASGI middleware that answers a replica's requests before Ray Serve's own request handling.

Ray Serve wraps each HTTP request of a replica in its accounting (route check, request context, ongoing
count, metrics, a log record), at more than twice the cost of our protocols. It lets an operator install ASGI
middlewares in every HTTP server that it starts, and this is one. In a process that called ``set_app`` it
passes requests to that application, and of Ray only the server itself (uvicorn) takes part.

The bypass is also the reason why no request is lost when a route moves between live applications. HAProxy
sends a request to a replica by the routes of some generation. The replica's route may have moved by the time
the request arrives, and Ray would answer 404. Our application looks at the client's path and at our own
routing table instead.

Ray still starts and stops the server (a stopping one finishes its requests), checks health (``/-/healthz``),
and passes requests of its own proxy to the same application. Ray no longer knows how many requests a
replica processes; the batcher bounds them.

The middleware is installed by ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``. Without it everything works,
at the cost of Ray's request handling.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

from starlette.middleware import Middleware

from serve_app.errors import ReplicaDied
from serve_app.net.private_files import restrict_umask
from serve_app.protocols.http import json_errors
from serve_app.protocols.http.exchange import DEFAULT_HEADERS
from serve_app.protocols.http.server import http_protocol, unix_listener, websocket_protocol
from serve_app.protocols.http.server.callback_app import CallbackApp

_log = logging.getLogger(__name__)

_app: Any = None


def set_app(app: Any, max_message_size: int, callback_app: CallbackApp | None = None) -> None:
    """Answer all requests at this process's port with ``app``, an ASGI application.

    ``callback_app`` answers some of them before it. ``max_message_size``: the limit of a WebSocket message in
    bytes.
    """
    global _app
    _app = app
    http_protocol.set_callback_app(callback_app)
    websocket_protocol.set_max_message_size(max_message_size)


class BypassMiddleware:
    """A pure ASGI middleware.

    In Ray's proxy, which has no application of ours, it keeps the response's request id single and replaces
    Ray's errors by ours.
    """

    def __init__(self, app: Any) -> None:
        self._ray_app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        kind = scope["type"]
        if kind == "http" and _app is None:
            await self._run_proxy(scope, receive, send)
        elif _app is None or kind not in ("http", "websocket") or scope["path"].startswith("/-/"):
            await self._ray_app(scope, receive, send)
        else:
            await _app(scope, receive, send)

    async def _run_proxy(self, scope: Any, receive: Any, send: Any) -> None:
        response = _ProxyResponse(send)
        try:
            await self._ray_app(scope, receive, response.send)
        except (Exception, asyncio.CancelledError):  # Ray cancels the requests of a replica that ends
            if response.started:  # uvicorn closes the connection, so that the client sees the truncation
                raise
            _log.exception("Ray's proxy failed on a request; its replica has probably died")
        if not response.started:
            # uvicorn's own response would be a plain 500, which does not name a reason.
            await response.send_replica_died([])


class _ProxyResponse:
    """A response of Ray's proxy with one request id, and our form in the place of Ray's own errors.

    Our id comes first; a second one is Ray's. A 5xx response without our default headers is Ray's own:
    the replica died while it processed the request.
    """

    def __init__(self, send: Any) -> None:
        self._send = send
        self._replaced = False
        self.started = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            ids = [pair for pair in message["headers"] if pair[0].lower() == b"x-request-id"]
            for extra in ids[1:]:
                message["headers"].remove(extra)
            self._replaced = message["status"] >= 500 and all(
                name.lower() != b"pragma" for name, _ in message["headers"]
            )
            if self._replaced:
                await self.send_replica_died(ids[:1])
        if not self._replaced:
            await self._send(message)

    async def send_replica_died(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the whole response of ReplicaDied."""
        status, own_headers, body = _REPLICA_DIED
        message = {"type": "http.response.start", "status": status, "headers": [*own_headers, *headers]}
        await self._send(message)
        await self._send({"type": "http.response.body", "body": body})


def _replica_died() -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    error = ReplicaDied()
    body = json_errors.encode_json(json_errors.to_document(error))
    headers = [
        json_errors.JSON,
        (b"content-length", b"%d" % len(body)),
        (b"x-torchrelay-reason", error.reason.encode()),
        *DEFAULT_HEADERS,
    ]
    return json_errors.look_up(error)[0], headers, body


_REPLICA_DIED = _replica_died()


def build() -> list[Middleware]:
    """Return the middlewares of an HTTP server; Ray Serve calls this before it starts one.

    The process that starts HAProxy is one of those.
    """
    restrict_umask()
    # uvicorn trusts X-Forwarded-For of the loopback by default; see net/request_origin.py.
    os.environ["FORWARDED_ALLOW_IPS"] = ""
    http_protocol.install()
    websocket_protocol.install()
    unix_listener.install()
    return [Middleware(BypassMiddleware)]
