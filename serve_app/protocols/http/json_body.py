"""A request's body as a JSON document."""

from __future__ import annotations

from typing import Any

import orjson

from serve_app.doors.exchange import Exchange
from serve_app.errors import InvalidBody


async def read(exchange: Exchange, limit: int) -> Any:
    """What the body says, of at most ``limit`` bytes, whatever its content type is called.

    Raises InvalidBody, TooLarge and CallerLeft.
    """
    body = await exchange.body(limit)
    if not body.strip():
        raise InvalidBody("The body is empty; send a JSON document.")
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidBody(f"The body is not JSON: {error}") from None
