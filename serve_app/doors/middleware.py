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

_route: str | None = None


def serve_at(route: str) -> None:
    """This process is a replica whose explicit route is ``route``."""
    global _route
    _route = route


class ReplicaRoute:
    """Pure ASGI; outside a model's replica it changes nothing."""

    def __init__(self, app: Any) -> None:
        # Ray puts its request-id middleware innermost. The doors make that id themselves (and would send
        # it twice), so a request skips the innermost layer where it is the one we know.
        self._app = app._app if type(app).__name__ == "RequestIdMiddleware" else app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if _route is not None and scope["type"] == "http":
            path = scope["path"]
            if not path.startswith("/-/"):
                scope[CLIENT_PATH] = path
                scope["path"] = _route
        await self._app(scope, receive, send)


def build() -> list[Middleware]:
    """Ray Serve's callback: the middlewares of its HTTP servers."""
    return [Middleware(ReplicaRoute)]
