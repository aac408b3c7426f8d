"""The shares of keys' limits: which part of a limit each process may admit.

Every process that receives requests of a key reports its demand twice a second. Its share is its part of the
demand of all processes, and at most what the other processes do not hold: the shares of a key never sum to
more than 1. A process without a share admits an equal part until its next report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from serve_app.domain.access import KeyDemand, KeyShare

_LIFETIME_S = 2.0  # longer than a process uses a share without a renewal
_CLEANUP_PERIOD_S = 60.0


@dataclass(slots=True)
class _Lease:
    rate: float
    share: float
    expires: float


class KeyShares:
    """The shares and the requests of the day of every key, by process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._leases: dict[str, dict[str, _Lease]] = {}
        self._days: dict[str, tuple[int, dict[str, int]]] = {}  # the day, and its requests by process
        self._cleaned_at = clock()

    def exchange(self, source: str, demands: Mapping[str, KeyDemand]) -> dict[str, KeyShare]:
        """Store the demand of the process ``source``, and return its shares by key."""
        now = self._clock()
        if now - self._cleaned_at > _CLEANUP_PERIOD_S:
            self._remove_expired(now)
        return {
            name: KeyShare(
                self._assign(name, source, demand.rate, now),
                demand.day,
                self._count_day(name, source, demand) if demand.day >= 0 else 0,
            )
            for name, demand in demands.items()
        }

    def _assign(self, name: str, source: str, rate: float, now: float) -> float:
        others = {
            other: lease
            for other, lease in self._leases.get(name, {}).items()
            if other != source and lease.expires > now
        }
        if not rate:
            share = 0.0
        else:
            total = rate + sum(lease.rate for lease in others.values())
            free = 1.0 - sum(lease.share for lease in others.values())
            share = max(0.0, min(rate / total, free))
            others[source] = _Lease(rate, share, now + _LIFETIME_S)
        if others:
            self._leases[name] = others
        else:
            self._leases.pop(name, None)
        return share

    def _remove_expired(self, now: float) -> None:
        """Remove what no process uses: subjects of tokens are many, and come back on no day."""
        self._cleaned_at = now
        self._leases = {
            name: leases
            for name, leases in self._leases.items()
            if any(lease.expires > now for lease in leases.values())
        }
        last = max((day for day, _ in self._days.values()), default=0)
        self._days = {name: entry for name, entry in self._days.items() if entry[0] >= last - 1}

    def _count_day(self, name: str, source: str, demand: KeyDemand) -> int:
        """Return the requests of a day. Processes report their totals, so a restart here loses none."""
        day, counts = self._days.get(name, (-1, {}))
        if demand.day > day:
            counts = {}
            self._days[name] = demand.day, counts
        elif demand.day < day:
            return demand.day_requests
        counts[source] = demand.day_requests
        return sum(counts.values())
