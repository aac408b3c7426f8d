"""When a request is sent again: only where nothing of it has run, and while its time lasts."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass

from serve_app.client import errors

# Refusals that say that nothing has run.
_NOTHING_RAN = ("queue_full", "loading", "no_replica", "quota", "sequences")
_NOTHING_RAN += ("asynchronous_full", "asynchronous_results")


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


USUAL = Retries()
NEVER = Retries(most=1)


class Attempts:
    """One request, to be sent until it is not to be sent again. ``within`` are the seconds for all of it."""

    def __init__(self, retries: Retries, within: float | None) -> None:
        self._retries = retries
        self._until = None if within is None else time.monotonic() + within
        self._sent = 0

    def begin(self) -> float | None:
        """It is sent now; the seconds that are left for it."""
        self._sent += 1
        return None if self._until is None else max(0.001, self._until - time.monotonic())

    def refused(self, said: Mapping[str, str]) -> float | None:
        """Seconds after which to send it again, by the headers of a refusal; None: it is refused."""
        if said.get("x-torchrelay-reason") not in _NOTHING_RAN or "x-torchrelay-step" in said:
            return None
        return self.again(errors.seconds(said.get("retry-after")) or 0.0)

    def again(self, asked: float = 0.0) -> float | None:
        """The same where nobody listened, or where the server asks for a wait of so many seconds."""
        if self._sent >= self._retries.most:
            return None
        wait = asked + random.uniform(0, self._retries.first * 2 ** (self._sent - 1))
        left = self._until - time.monotonic() if self._until is not None else wait + 1
        return wait if asked <= self._retries.longest and wait < left else None
