"""The routes ``/openapi.json``, which serves a port's document, and ``/docs``, which shows it."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import orjson

from serve_app.errors import MethodNotAllowed
from serve_app.protocols.http import json_errors
from serve_app.protocols.http.endpoints import Content, get
from serve_app.protocols.http.exchange import JSON, HttpExchange
from serve_app.protocols.openapi.api_page import send_page
from serve_app.protocols.openapi.document import Document
from serve_app.protocols.torchserve.openapi import DESCRIPTION, OpenAPIDocument

_PAGE = Content({"text/html; charset=utf-8": str})
SELF_DESCRIPTION = replace(
    DESCRIPTION,
    endpoints=(
        get("/openapi.json", "openapi", "Get this document.", OpenAPIDocument),
        get("/docs", "api_page", "Get a page that shows this document and sends requests.", _PAGE),
    ),
)


class OpenAPIRoutes:
    """The routes, which need no key because the document describes no model."""

    def __init__(self, document: Document) -> None:
        self._document = document

    send_error = staticmethod(json_errors.send_error)

    def matches(self, exchange: HttpExchange) -> bool:
        return exchange.segments == ["openapi.json"] or exchange.segments[:1] == ["docs"]

    async def handle(self, exchange: HttpExchange) -> None:
        if exchange.method not in ("GET", "HEAD"):
            raise MethodNotAllowed()
        if exchange.segments[0] == "docs":
            return await send_page(exchange)
        await exchange.send_response(200, [JSON], self._encoded_document)

    @cached_property
    def _encoded_document(self) -> bytes:
        return orjson.dumps(self._document.content)
