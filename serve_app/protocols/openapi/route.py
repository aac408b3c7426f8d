"""``/openapi.json``: the document of a port."""

from __future__ import annotations

from functools import cached_property

import orjson

from serve_app.doors.exchange import JSON, Exchange
from serve_app.doors.openapi.words import Json
from serve_app.doors.torchserve import errors
from serve_app.errors import MethodNotAllowed


class OpenAPIDoor:
    """No key is wanted: the document says nothing of any model."""

    def __init__(self, document: Json) -> None:
        self._document = document

    refuse = staticmethod(errors.refuse)

    def knows(self, exchange: Exchange) -> bool:
        return exchange.segments == ["openapi.json"]

    async def answer(self, exchange: Exchange) -> None:
        if exchange.method not in ("GET", "HEAD"):
            raise MethodNotAllowed()
        await exchange.reply(200, [JSON], self._bytes)

    @cached_property
    def _bytes(self) -> bytes:
        return orjson.dumps(self._document)
