"""The rules for sending a request again: only where nothing of it has run, and within its timeout."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass

from serve_app.client import errors

# Reasons of refusals that guarantee that nothing has run.
_NOTHING_RAN = frozenset(
    (
        "queue_full",
        "loading",
        "no_replica",
        "quota_exceeded",
        "too_many_sequences",
        "async_queue_full",
        "result_store_unavailable",
    )
)


@dataclass(frozen=True)
class Retries:
    """The number of attempts of a request and the delays between them, in seconds.

    A request is sent at most ``max_attempts`` times. Before each retry the client waits as long as the
    server's ``Retry-After`` asks for, plus a random delay. The random delay is at most ``initial_delay``
    before the first retry and doubles with each further one, so that many clients do not retry at once.
    Where ``Retry-After`` exceeds ``max_delay``, or the wait exceeds the rest of the request's timeout, the
    error is raised at once.
    """

    max_attempts: int = 4
    initial_delay: float = 0.1
    max_delay: float = 5.0


DEFAULT_RETRIES = Retries()
NO_RETRIES = Retries(max_attempts=1)


class RetryAttempts:
    """The attempts of one request; ``timeout`` limits all of them together, in seconds."""

    def __init__(self, retries: Retries, timeout: float | None) -> None:
        self._retries = retries
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._attempts = 0

    def start_attempt(self) -> float | None:
        """Count an attempt; return the seconds that are left for it, None where there is no limit."""
        self._attempts += 1
        return None if self._deadline is None else max(0.001, self._deadline - time.monotonic())

    def delay_after_refusal(self, headers: Mapping[str, str]) -> float | None:
        """Return the seconds after which to retry a refused request; None where it must not be retried.

        ``headers`` are those of the refusal.
        """
        if headers.get("x-torchrelay-reason") not in _NOTHING_RAN or "x-torchrelay-step" in headers:
            return None
        return self.next_delay(errors.parse_retry_after(headers.get("retry-after")) or 0.0)

    def next_delay(self, min_delay: float = 0.0) -> float | None:
        """Return the seconds before the next attempt, at least ``min_delay``; None where there is none."""
        if self._attempts >= self._retries.max_attempts:
            return None
        delay = min_delay + random.uniform(0, self._retries.initial_delay * 2 ** (self._attempts - 1))
        remaining = self._deadline - time.monotonic() if self._deadline is not None else delay + 1
        return delay if min_delay <= self._retries.max_delay and delay < remaining else None
