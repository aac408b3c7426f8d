"""The errors of keys: limits that are reached, and keys that do not exist."""

from __future__ import annotations

from serve_app.errors import NotFound, RelayError


class RateLimited(RelayError, reason="rate_limited", fields=("key", "limit", "value")):
    """A request over a limit of its key; ``limit`` is the name of the limit, ``value`` its value."""

    retry_after: int | None = 1
    template = "The key {key!r} has reached its limit {limit} ({value:g})."


class KeyShareExceeded(RateLimited, reason="key_share_exceeded", fields=("key", "limit", "value")):
    retry_after = 10
    template = (
        "No more asynchronous predictions of the key {key!r} are taken now: its share of "
        "async_predictions.{limit} ({value:g}) is reached. Fetch and DELETE what has ended."
    )


class KeyNotFound(NotFound, reason="key_not_found", fields=("name",)):
    template = "Key not found: {name}"
