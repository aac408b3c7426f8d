"""When a request is sent again: only where nothing of it has run, and while its time lasts."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import httpx

from serve_app.client import errors
from serve_app.client.ask import Ask

# Refusals that say that nothing has run.
_NOTHING_RAN = ("queue_full", "loading", "no_replica", "quota", "sequences", "asynchronous_full")
_GRACE = 1.0  # seconds for the answer that the time is over to arrive


@dataclass(frozen=True)
class Retries:
    """A request is sent ``most`` times; before each further one passes what the server asks for, or more.

    Where it says nothing, or nobody is there to say it, the first wait is up to ``first`` seconds and each further one
    up to twice as long, at random, so that many clients do not come at once. A wait that would be longer than
    ``longest`` seconds, or than what is left of the request's own time, is not begun: the error is raised instead.
    """

    most: int = 4
    first: float = 0.1
    longest: float = 5.0


NEVER = Retries(most=1)


class Attempts:
    """One request, to be sent until ``wait`` says None."""

    def __init__(self, ask: Ask, address: str, retries: Retries, silence: float | None) -> None:
        self._ask = ask
        self._url = address.rstrip("/") + ask.path
        self._retries = NEVER if ask.once else retries
        self._silence = silence  # seconds in which something must come
        limit = ask.within if ask.within is not None or not ask.hurries else silence
        self._until = time.monotonic() + limit if limit is not None else None
        self._sent = 0

    def request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        """The request as it is to be sent now: how long its caller still waits stands in a header."""
        ask, headers, silence = self._ask, dict(self._ask.headers), self._silence
        if ask.silence is not ...:
            silence = ask.silence
        if self._until is not None:
            left = max(0.001, self._until - time.monotonic())
            headers["x-request-timeout-seconds"] = f"{left:.3f}"
            silence = left + _GRACE if silence is None else min(silence, left) + _GRACE
        self._sent += 1
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
        asked = 0.0
        if isinstance(outcome, httpx.Response):
            headers = outcome.headers
            if headers.get("x-torchrelay-reason") not in _NOTHING_RAN or "x-torchrelay-step" in headers:
                return None
            asked = errors.seconds(headers.get("retry-after")) or 0.0
        elif not isinstance(outcome, (httpx.ConnectError, httpx.ConnectTimeout)):
            return None
        if self._sent >= self._retries.most:
            return None
        wait = asked + random.uniform(0, self._retries.first * 2 ** (self._sent - 1))
        left = self._until - time.monotonic() if self._until is not None else wait + 1
        return wait if asked <= self._retries.longest and wait < left else None


def _word(value: object) -> str | list[str]:
    if isinstance(value, (list, tuple)):
        return [str(item) for item in value]
    return str(value).lower() if isinstance(value, bool) else str(value)
