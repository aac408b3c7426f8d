"""URLs as they are shown and logged: without the parts that may hold credentials."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import quote, unquote_plus, urlsplit


def matches_any(patterns: Iterable[str], url: str) -> bool:
    """Return whether one of the regular expressions matches a URL in full."""
    return any(re.fullmatch(pattern, url) for pattern in patterns)


def redact_url(url: str) -> str:
    """Return a URL without user, password, query and fragment; a presigned URL has its key in the query."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "(a malformed URL)"
    # hf://name@revision has no user.
    authority = parts.netloc if parts.scheme == "hf" else parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=authority, query="", fragment="").geturl()


def redact_query(query: str) -> str:
    """Return a query string whose parameter ``url`` is redacted."""
    if "url" not in query and "%" not in query:
        return query
    return "&".join(_redact_parameter(part) for part in query.split("&"))


def _redact_parameter(part: str) -> str:
    name, equals, value = part.partition("=")
    if not equals or unquote_plus(name) != "url":
        return part
    plain = unquote_plus(value)
    redacted = redact_url(plain)
    return part if redacted == plain else f"{name}={quote(redacted, safe=':/@')}"
