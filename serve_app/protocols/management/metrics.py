"""The route ``/metrics``, which Prometheus reads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated
from urllib.parse import parse_qsl

from typing_extensions import TypedDict

from serve_app.domain.access import AccessTable
from serve_app.domain.validation import documented
from serve_app.errors import MethodNotAllowed, ModelNotAllowed, ResourceNotFound
from serve_app.protocols.http import auth, json_errors
from serve_app.protocols.http.endpoints import API, Content, get
from serve_app.protocols.http.exchange import HttpExchange
from serve_app.protocols.http.json_errors import ERRORS
from serve_app.protocols.torchserve import openapi
from serve_app.settings import Settings

_TEXT = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")

MetricsParameters = TypedDict(
    "MetricsParameters", {"name[]": Annotated[list[str], documented("Only metrics with these names.")]}
)
Render = Callable[[frozenset[str] | None], Awaitable[bytes]]
"""Renders the metrics page; with names, only the samples that have them."""


METRICS = API(
    "Metrics",
    "For Prometheus.",
    ERRORS,
    (
        get(
            "/metrics",
            "metrics",
            "Get the metrics of the whole cluster.",
            Content({"text/plain; version=0.0.4; charset=utf-8": str}),
            query=MetricsParameters,
        ),
    ),
)


class MetricsRoutes:
    """The route ``/metrics``, which sends the page that ``render`` returns, whatever the method.

    It requires a key unless ``auth.metrics`` is ``open``.
    """

    def __init__(self, render: Render, settings: Settings, access: Callable[[], AccessTable | None]) -> None:
        self._render = render
        self._access = access
        self._is_open = settings.auth.metrics == "open"

    send_error = staticmethod(json_errors.send_error)

    def matches(self, exchange: HttpExchange) -> bool:
        return exchange.segments[:1] == ["metrics"]

    async def handle(self, exchange: HttpExchange) -> None:
        match exchange.segments:
            case ["metrics", *_]:
                await self._send_page(exchange)
            case ["api-description"]:
                await json_errors.send_json(exchange, openapi.METRICS)
            case [] if exchange.method == "OPTIONS":
                await json_errors.send_json(exchange, openapi.METRICS)
            case []:
                raise MethodNotAllowed()
            case _:
                raise ResourceNotFound()

    async def _send_page(self, exchange: HttpExchange) -> None:
        if not self._is_open:
            auth.authorize(self._access(), exchange, "observe")
            if exchange.grant is not None and "*" not in exchange.grant.models:
                raise ModelNotAllowed("*")  # the page has metrics of every model
        await exchange.send_response(200, [_TEXT], await self._render(_parse_names(exchange)))


def _parse_names(exchange: HttpExchange) -> frozenset[str] | None:
    """Return the values of ``name[]``; None for the whole page."""
    query = exchange.scope.get("query_string", b"").decode("latin-1")
    if "name" not in query:
        return None
    names = frozenset(value for key, value in parse_qsl(query, keep_blank_values=True) if key == "name[]")
    return names or None
