"""A request's body as a JSON document."""

from __future__ import annotations

from typing import Any

import orjson

from serve_app.errors import InvalidBody
from serve_app.protocols.http.exchange import HttpExchange


async def read(exchange: HttpExchange, limit: int) -> Any:
    """Parse the body as JSON, whatever its Content-Type; it has at most ``limit`` bytes.

    Raises InvalidBody, RequestTooLarge and ClientDisconnected.
    """
    body = await exchange.read_body(limit)
    if not body.strip():
        raise InvalidBody("The body is empty; send a JSON document.")
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidBody(f"The body is not JSON: {error}") from None
