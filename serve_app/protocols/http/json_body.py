"""A request's body as a JSON document."""

from __future__ import annotations

from typing import Any

import orjson

from serve_app.domain import exact_json
from serve_app.errors import InvalidBody
from serve_app.protocols.http import large_body
from serve_app.protocols.http.exchange import HttpExchange


async def read(exchange: HttpExchange, limit: int) -> Any:
    """Parse the body as JSON, whatever its Content-Type; it has at most ``limit`` bytes.

    Raises InvalidBody, RequestTooLarge and ClientDisconnected.
    """
    body = await exchange.read_body(limit)
    if not body.strip():
        raise InvalidBody("The body is empty; send a JSON document.")
    return await large_body.parse_body(body, parse, body)


def parse(body: bytes, error_class: type[InvalidBody] = InvalidBody) -> Any:
    """Return the JSON document in ``body``. Raises ``error_class``."""
    try:
        return exact_json.loads(body)
    except orjson.JSONDecodeError as error:
        raise error_class(f"The body is not JSON: {error}") from None


def parse_object(body: bytes, error_class: type[InvalidBody] = InvalidBody) -> dict[str, Any]:
    """Return the JSON object in ``body``. Raises ``error_class``."""
    document = parse(body, error_class)
    if not isinstance(document, dict):
        raise error_class(f"The body must be a JSON object, and is a {type(document).__name__}.")
    return document
