"""Numbers in query strings and headers."""

from __future__ import annotations

import re

from serve_app.errors import BadRequest

# Python refuses to parse more than 4,300 digits, leading zeros included.
_DECIMAL = re.compile(r"0*(\d{1,18})", re.ASCII)


def parse_decimal(text: str) -> int | None:
    """Return the number that decimal digits write; None for other text and for more than 18 digits."""
    match = _DECIMAL.fullmatch(text)
    return int(match[1]) if match is not None else None


def parse_limit(text: str, maximum: int) -> int:
    """Return the query parameter ``limit``. Raises BadRequest where it is not from 1 to ``maximum``."""
    limit = parse_decimal(text)
    if limit is None or not 1 <= limit <= maximum:
        raise BadRequest(f"limit is {text[:80]!r}; it must be an integer from 1 to {maximum}.")
    return limit


def exceeds(content_length: str | None, limit: int) -> bool:
    """Return whether a Content-Length header announces more than ``limit`` bytes."""
    if content_length is None or not content_length.isdecimal():
        return False
    size = parse_decimal(content_length)
    return size is None or size > limit
