"""The limits of this replica, and its requests to be replaced."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable

import psutil

from serve_app.domain.recycling import Recycling, RecyclingReason

log = logging.getLogger(__name__)

CHECK_PERIOD_S = 10.0
_JITTER = 0.1  # share of the limits of age and requests by which replicas differ
MIB = 1 << 20


class RecyclingWatch:
    """The limits of one replica, which is ready from now on.

    ``count_rows`` and ``measure_memory`` return the rows that it has run, and its resident bytes. Replicas
    that have started together have different limits of age and requests, so that they end one by one.

    A limit of memory that a new replica exceeds would replace replicas without end: it is ignored, and
    ``report`` is called with the figures.
    """

    def __init__(
        self,
        limits: Recycling,
        count_rows: Callable[[], int],
        *,
        report: Callable[[str], object] = lambda problem: None,
        measure_memory: Callable[[], int] = lambda: int(psutil.Process().memory_info().rss),
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        share = 1 - _JITTER * jitter()
        self._max_age = limits.max_age_s * share
        self._max_rows = limits.max_requests * share
        self._max_memory = limits.max_memory_mib * MIB
        self._count_rows = count_rows
        self._measure_memory = measure_memory
        self._clock = clock
        self._ready_at = clock()
        if self._max_memory and (memory := measure_memory()) > self._max_memory:
            self._max_memory = 0
            problem = (
                f"recycling.max_memory_mib ({limits.max_memory_mib}) is ignored: a new replica has "
                f"{memory // MIB} MiB; raise it"
            )
            log.warning(problem)
            report(problem)

    @property
    def age(self) -> float:
        """The seconds since this replica was ready."""
        return self._clock() - self._ready_at

    def find_reason(self) -> tuple[RecyclingReason, str] | None:
        """Return which limit this replica has reached, with the figures; None where it has reached none."""
        age, rows = self.age, self._count_rows()
        if self._max_age and age >= self._max_age:
            return "age", f"it is {age:.0f} s old, and its limit is {self._max_age:.0f} s"
        if self._max_rows and rows >= self._max_rows:
            return "requests", f"it has run {rows} rows, and its limit is {self._max_rows:.0f}"
        if self._max_memory and (memory := self._measure_memory()) > self._max_memory:
            limit = self._max_memory // MIB
            return "memory", f"it has {memory // MIB} MiB of resident memory, and its limit is {limit} MiB"
        return None

    async def run(
        self, request: Callable[[RecyclingReason, str, float], None], period: float = CHECK_PERIOD_S
    ) -> None:
        """Call ``request`` in each period in which a limit is reached: Management may forget it.

        Its arguments are the reason, the figures, and the age of this replica.
        """
        while True:
            await asyncio.sleep(period)
            try:
                if (reason := self.find_reason()) is not None:
                    request(*reason, self.age)
            except Exception:  # Management is being replaced; without this loop the limits would end
                log.exception("the replacement of this replica could not be requested; it is repeated")
