"""What makes moving a route between live applications lose no request.

HAProxy brings a request to a replica by the table of some generation; by the time it arrives, the
replica's own route may have moved, and Ray Serve would answer 404. Whatever reaches a replica's
port was meant for it, so this middleware always shows Ray the replica's explicit route, which
begins with either of the two routes that it can ever own, and keeps the client's path beside it
for the doors.

Installed in every Ray Serve HTTP server by ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``.
"""

from __future__ import annotations

from typing import Any

from starlette.middleware import Middleware

CLIENT_PATH = "torchrelay.path"  # the key of the ASGI scope under which the doors find the client's path

_ours = False  # this process runs our doors; otherwise it is one of Ray's proxies
_route: str | None = None


def serve_at(route: str | None) -> None:
    """This process runs our doors: as a replica whose explicit route is ``route``, or as a gateway (None)."""
    global _ours, _route
    _ours, _route = True, route


class ReplicaRoute:
    """Pure ASGI. In a replica it keeps the route; in Ray's proxy it keeps the answer's request id single."""

    def __init__(self, app: Any) -> None:
        self._app = app
        # Ray puts a layer innermost that makes request ids. Our doors make them themselves, so in their
        # processes a request goes past that layer; Ray's proxy relies on it.
        self._inner = app._app if _ours and type(app).__name__ == "RequestIdMiddleware" else app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if not _ours:
            await self._app(scope, receive, _one_request_id(send) if scope["type"] == "http" else send)
            return
        if _route is not None and scope["type"] == "http":
            path = scope["path"]
            if not path.startswith("/-/"):
                scope[CLIENT_PATH] = path
                scope["path"] = _route
        await self._inner(scope, receive, send)


def _one_request_id(send: Any) -> Any:
    """The door's id came first; what Ray's layer adds behind it is left out."""

    async def once(message: Any) -> None:
        if message["type"] == "http.response.start":
            ids = [pair for pair in message["headers"] if pair[0].lower() == b"x-request-id"]
            for extra in ids[1:]:
                message["headers"].remove(extra)
        await send(message)

    return once


def build() -> list[Middleware]:
    """Ray Serve's callback: the middlewares of its HTTP servers."""
    return [Middleware(ReplicaRoute)]
