"""What is asked for as a request of httpx, each time that it is sent."""

from __future__ import annotations

import httpx

from serve_app.client.ask import Ask
from serve_app.client.retries import NEVER, Attempts, Retries

_GRACE = 1.0  # seconds for the answer that the time is over to arrive


class Sending(Attempts):
    """One request, to be sent until ``wait`` says None."""

    def __init__(self, ask: Ask, address: str, retries: Retries, silence: float | None) -> None:
        within = ask.within if ask.within is not None or not ask.hurries else silence
        super().__init__(NEVER if ask.once else retries, within)
        self._ask = ask
        self._url = address.rstrip("/") + ask.path
        self._silence = silence  # seconds in which something must come

    def request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        """The request as it is to be sent now: how long its caller still waits stands in a header."""
        ask, headers, silence, left = self._ask, dict(self._ask.headers), self._silence, self.begin()
        if ask.silence is not ...:
            silence = ask.silence
        if left is not None:
            headers["x-request-timeout-seconds"] = f"{left:.3f}"
            silence = left + _GRACE if silence is None else min(silence, left) + _GRACE
        return http.build_request(
            ask.method,
            self._url,
            params={key: _word(value) for key, value in ask.query.items() if value is not None},
            headers=headers,
            content=ask.content,
            timeout=silence,
        )

    def wait(self, outcome: httpx.Response | httpx.TransportError) -> float | None:
        """Seconds after which to send the request again; None: ``outcome`` is what became of it."""
        if isinstance(outcome, httpx.Response):
            return self.refused(outcome.headers)
        return self.again() if isinstance(outcome, (httpx.ConnectError, httpx.ConnectTimeout)) else None


def _word(value: object) -> str | list[str]:
    if isinstance(value, (list, tuple)):
        return [str(item) for item in value]
    return str(value).lower() if isinstance(value, bool) else str(value)
