"""The interface of a protocol, and the dispatcher that selects one of several by a request's path."""

from __future__ import annotations

from typing import Protocol

from serve_app.protocols.http.exchange import HttpExchange


class ProtocolRouter(Protocol):
    """A protocol that reads a request, calls a plane and writes the response."""

    def matches(self, exchange: HttpExchange) -> bool:
        """Return whether the path is one of this protocol's."""

    async def handle(self, exchange: HttpExchange) -> None:
        """Answer one request, or raise before the response has started."""

    async def send_error(self, exchange: HttpExchange, error: Exception) -> None:
        """Send ``error`` in this protocol's format."""


class Dispatcher:
    """A router over several protocols on one port.

    A request goes to the first protocol that matches its path, else to ``first``.
    """

    def __init__(self, first: ProtocolRouter, *others: ProtocolRouter) -> None:
        self._routers = (first, *others)

    def matches(self, exchange: HttpExchange) -> bool:
        return any(router.matches(exchange) for router in self._routers)

    async def handle(self, exchange: HttpExchange) -> None:
        await self._select(exchange).handle(exchange)

    async def send_error(self, exchange: HttpExchange, error: Exception) -> None:
        await self._select(exchange).send_error(exchange, error)

    def _select(self, exchange: HttpExchange) -> ProtocolRouter:
        for router in self._routers:
            if router.matches(exchange):
                return router
        return self._routers[0]
