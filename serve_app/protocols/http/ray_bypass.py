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

import os
from typing import Any

from starlette.middleware import Middleware

from serve_app.errors import ReplicaDied
from serve_app.net.private_files import restrict_umask
from serve_app.protocols.http import uvicorn_callbacks, uvicorn_http, uvicorn_websocket
from serve_app.protocols.http.callback_app import CallbackApp
from serve_app.protocols.http.exchange import DEFAULT_HEADERS
from serve_app.protocols.torchserve import errors

_app: Any = None


def set_app(app: Any, max_message_size: int, callback_app: CallbackApp | None = None) -> None:
    """Answer all requests at this process's port with ``app``, an ASGI application.

    ``callback_app`` answers some of them before it. ``max_message_size``: the limit of a WebSocket message in
    bytes.
    """
    global _app
    _app = app
    uvicorn_callbacks.set_callback_app(callback_app)
    uvicorn_websocket.set_max_message_size(max_message_size)


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
            await self._ray_app(scope, receive, _normalize(send))
        elif _app is None or kind not in ("http", "websocket") or scope["path"].startswith("/-/"):
            await self._ray_app(scope, receive, send)
        else:
            await _app(scope, receive, send)


def _normalize(send: Any) -> Any:
    """Wrap ``send`` so that the response has one request id, and Ray's own errors our form.

    Our id comes first; a second one is Ray's. A 5xx response without our default headers is Ray's own:
    the replica died while it processed the request.
    """
    is_ray_error = False

    async def send_normalized(message: Any) -> None:
        nonlocal is_ray_error
        if message["type"] == "http.response.start":
            ids = [pair for pair in message["headers"] if pair[0].lower() == b"x-request-id"]
            for extra in ids[1:]:
                message["headers"].remove(extra)
            is_ray_error = message["status"] >= 500 and all(
                name.lower() != b"pragma" for name, _ in message["headers"]
            )
            if is_ray_error:
                status, headers, body = _REPLICA_DIED
                await send({"type": "http.response.start", "status": status, "headers": [*headers, *ids[:1]]})
                await send({"type": "http.response.body", "body": body})
                return
        if not is_ray_error:
            await send(message)

    return send_normalized


def _replica_died() -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    error = ReplicaDied()
    body = errors.encode_json(errors.to_document(error))
    headers = [
        errors.JSON,
        (b"content-length", b"%d" % len(body)),
        (b"x-torchrelay-reason", error.reason.encode()),
        *DEFAULT_HEADERS,
    ]
    return errors.look_up(error)[0], headers, body


_REPLICA_DIED = _replica_died()


def build() -> list[Middleware]:
    """Return the middlewares of an HTTP server; Ray Serve calls this before it starts one.

    The process that starts HAProxy is one of those.
    """
    restrict_umask()
    # uvicorn trusts X-Forwarded-For of the loopback by default; see net/client_address.py.
    os.environ["FORWARDED_ALLOW_IPS"] = ""
    uvicorn_http.install()
    uvicorn_websocket.install()
    return [Middleware(BypassMiddleware)]
