"""A request descriptor as a request of httpx, for each attempt."""

from __future__ import annotations

import httpx

from serve_app.client._operations import RequestDescriptor
from serve_app.client.retries import NO_RETRIES, Retries, RetryAttempts

_GRACE = 1.0  # seconds for the server's own timeout response to arrive


class RetryLoop(RetryAttempts):
    """The attempts of one request, which is sent until ``retry_delay`` returns None."""

    def __init__(
        self, request: RequestDescriptor, address: str, retries: Retries, idle_timeout: float | None
    ) -> None:
        timeout = request.timeout
        if timeout is None and request.use_client_timeout:
            timeout = idle_timeout
        super().__init__(retries if request.retryable else NO_RETRIES, timeout)
        self._request = request
        self._url = address.rstrip("/") + request.path
        self._idle_timeout = idle_timeout  # seconds in which some data must arrive

    def build_request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        """Return the request of the next attempt, with the time that is left for it in a header."""
        request, headers, idle_timeout = self._request, dict(self._request.headers), self._idle_timeout
        remaining = self.start_attempt()
        if request.idle_timeout is not ...:
            idle_timeout = request.idle_timeout
        if remaining is not None:
            headers["x-request-timeout-seconds"] = f"{remaining:.3f}"
            idle_timeout = (remaining if idle_timeout is None else min(idle_timeout, remaining)) + _GRACE
        return http.build_request(
            request.method,
            self._url,
            params={key: _query_value(value) for key, value in request.query.items() if value is not None},
            headers=headers,
            content=request.content,
            timeout=idle_timeout,
        )

    def retry_delay(self, outcome: httpx.Response | httpx.TransportError) -> float | None:
        """Return the seconds after which to send the request again; None where ``outcome`` is final."""
        if isinstance(outcome, httpx.Response):
            return self.delay_after_refusal(outcome.headers)
        if isinstance(outcome, (httpx.ConnectError, httpx.ConnectTimeout)):
            return self.next_delay()
        return None


def _query_value(value: object) -> str | list[str]:
    if isinstance(value, (list, tuple)):
        return [str(item) for item in value]
    return str(value).lower() if isinstance(value, bool) else str(value)
