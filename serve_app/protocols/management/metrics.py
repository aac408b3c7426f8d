"""The door that Prometheus comes in by."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from urllib.parse import parse_qsl

from serve_app.doors import auth
from serve_app.doors.exchange import Exchange
from serve_app.doors.torchserve import errors, openapi
from serve_app.errors import MethodNotAllowed, ResourceNotFound, WrongModel
from serve_app.settings import Settings
from serve_app.types import Access

_TEXT = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")

Render = Callable[[frozenset[str] | None], Awaitable[bytes]]
"""The page; with names, only the samples that are called so."""


class MetricsDoor:
    """``/metrics`` is what ``render`` gives, whatever the method. It wants a key where ``auth.metrics`` says so."""

    def __init__(self, render: Render, settings: Settings, access: Callable[[], Access | None]) -> None:
        self._render = render
        self._access = access
        self._open = settings.auth.metrics == "open"

    refuse = staticmethod(errors.refuse)

    def knows(self, exchange: Exchange) -> bool:
        return exchange.segments[:1] == ["metrics"]

    async def answer(self, exchange: Exchange) -> None:
        segments = exchange.segments
        if segments == ["api-description"] or (not segments and exchange.method == "OPTIONS"):
            return await errors.reply_json(exchange, openapi.METRICS)
        if not segments:
            raise MethodNotAllowed()
        if not self.knows(exchange):
            raise ResourceNotFound()
        if not self._open:
            auth.admit(self._access(), exchange, "observe")
            if exchange.grant is not None and "*" not in exchange.grant.models:
                raise WrongModel("*")  # the metrics speak of every model
        await exchange.reply(200, [_TEXT], await self._render(_names(exchange)))


def _names(exchange: Exchange) -> frozenset[str] | None:
    """The values of ``name[]``; None where nobody asked for some of the page only."""
    query = exchange.scope.get("query_string", b"").decode("latin-1")
    if "name" not in query:
        return None
    names = frozenset(value for key, value in parse_qsl(query, keep_blank_values=True) if key == "name[]")
    return names or None
