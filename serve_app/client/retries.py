"""The rules for sending a request again: only where nothing of it has run, and within its timeout."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import httpx

from serve_app.client import errors
from serve_app.client._operations import RequestDescriptor

_GRACE = 1.0  # seconds for the server's own timeout response to arrive

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
    server's ``Retry-After`` states, plus a random delay. The random delay is at most ``initial_delay``
    before the first retry and doubles with each further one, so that many clients do not retry at once.
    Where ``Retry-After`` exceeds ``max_delay``, or the wait exceeds the rest of the request's timeout, the
    error is raised at once.
    """

    max_attempts: int = 4
    initial_delay: float = 0.1
    max_delay: float = 5.0


DEFAULT_RETRIES = Retries()
NO_RETRIES = Retries(max_attempts=1)


class RetryLoop:
    """The attempts of one request, which is sent until ``retry_delay`` returns None.

    The request's timeout limits all of them together.
    """

    def __init__(
        self, request: RequestDescriptor, address: str, retries: Retries, idle_timeout: float | None
    ) -> None:
        timeout = request.timeout
        if timeout is None and request.use_client_timeout:
            timeout = idle_timeout
        self._request = request
        self._url = address.rstrip("/") + request.path
        self._retries = retries if request.retryable else NO_RETRIES
        self._idle_timeout = idle_timeout if request.idle_timeout is ... else request.idle_timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._attempts = 0

    def build_request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        """Return the request of the next attempt, with the time that is left for it in a header."""
        self._attempts += 1
        request, headers, idle_timeout = self._request, dict(self._request.headers), self._idle_timeout
        if self._deadline is not None:
            remaining = max(0.001, self._deadline - time.monotonic())
            headers["x-request-timeout-seconds"] = f"{remaining:.3f}"
            idle_timeout = (remaining if idle_timeout is None else min(idle_timeout, remaining)) + _GRACE
        return http.build_request(
            request.method,
            self._url,
            params={key: value for key, value in request.query.items() if value is not None},
            headers=headers,
            content=request.content,
            timeout=idle_timeout,
        )

    def retry_delay(self, outcome: httpx.Response | httpx.TransportError) -> float | None:
        """Return the seconds after which to send the request again; None where ``outcome`` is final."""
        if isinstance(outcome, (httpx.ConnectError, httpx.ConnectTimeout)):
            return self._next_delay(0.0)
        if isinstance(outcome, httpx.TransportError):
            return None
        headers = outcome.headers
        if headers.get("x-torchrelay-reason") not in _NOTHING_RAN or "x-torchrelay-step" in headers:
            return None
        return self._next_delay(errors.parse_retry_after(headers.get("retry-after")) or 0.0)

    def _next_delay(self, min_delay: float) -> float | None:
        """Return the seconds before the next attempt, at least ``min_delay``; None where there is none."""
        if self._attempts >= self._retries.max_attempts:
            return None
        delay = min_delay + random.uniform(0, self._retries.initial_delay * 2 ** (self._attempts - 1))
        remaining = self._deadline - time.monotonic() if self._deadline is not None else delay + 1
        return delay if min_delay <= self._retries.max_delay and delay < remaining else None
