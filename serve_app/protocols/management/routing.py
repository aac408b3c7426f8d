"""The routes of the management and the metrics port, matched by Starlette's router."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.routing import Route, Router

from serve_app.errors import MethodNotAllowed, ResourceNotFound
from serve_app.protocols.http.exchange import METHODS, HttpExchange, Receive, Scope, Send
from serve_app.protocols.http.json_errors import send_json

Handler = Callable[..., Awaitable[Any]]
"""Takes the exchange and the parameters of the path; returns the JSON document of the response.

Returns None after it has sent a response itself.
"""


def route(path: str, **handlers: Handler) -> Route:
    """Return the route of ``path`` with its handlers by method; HEAD has none unless it is named."""
    return Route(path, MethodHandlers(handlers))


def any_method(path: str, handler: Handler) -> Route:
    """Return a route that serves every method alike."""
    return route(path, **dict.fromkeys(METHODS, handler))


class MethodHandlers:
    """The handlers of a path by method, as an ASGI application for Starlette's router."""

    def __init__(self, handlers: dict[str, Handler]) -> None:
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._handlers.get(scope["method"])
        if handler is None:
            raise MethodNotAllowed()
        exchange = scope["exchange"]
        document = await handler(exchange, **scope["path_params"])
        if document is not None:
            await send_json(exchange, document)


class RouteTable:
    """Routes in the order in which they are compared with a request's path."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self.paths = [route.path for route in routes]
        self._router = Router(routes, redirect_slashes=False, default=_raise_not_found)

    async def handle(self, exchange: HttpExchange) -> None:
        """Answer a request. Raises MethodNotAllowed, ResourceNotFound and the errors of the handlers."""
        path = "/" + "/".join(exchange.segments)
        if path.endswith("\n"):  # Starlette's patterns match in front of it, and keys are checked with it
            raise ResourceNotFound()
        await exchange.delegate(self._router, {"path": path, "root_path": "", "exchange": exchange})


async def _raise_not_found(scope: Scope, receive: Receive, send: Send) -> None:
    raise ResourceNotFound()
