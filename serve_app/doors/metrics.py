"""The door that Prometheus comes in by."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from serve_app.doors import auth
from serve_app.doors.exchange import Exchange
from serve_app.doors.torchserve import errors
from serve_app.errors import ResourceNotFound, WrongModel
from serve_app.settings import Settings
from serve_app.types import Access

_TEXT = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")


class MetricsDoor:
    """``/metrics`` is what ``render`` gives. It wants a key where ``auth.metrics`` says so."""

    def __init__(
        self, render: Callable[[], Awaitable[bytes]], settings: Settings, access: Callable[[], Access | None]
    ) -> None:
        self._render = render
        self._access = access
        self._open = settings.auth.metrics == "open"

    refuse = staticmethod(errors.refuse)

    def knows(self, exchange: Exchange) -> bool:
        return exchange.segments == ["metrics"]

    async def answer(self, exchange: Exchange) -> None:
        if not self.knows(exchange):
            raise ResourceNotFound()
        if not self._open:
            auth.admit(self._access(), exchange, "observe")
            if exchange.grant is not None and "*" not in exchange.grant.models:
                raise WrongModel("*")  # the metrics speak of every model
        await exchange.reply(200, [_TEXT], await self._render())
