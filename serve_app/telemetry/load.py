"""What a replica has to do and how fast it answers of late, as Ray Serve's autoscaler is told."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection

_MOST = 5_000  # rows whose latency is kept


class Load:
    """Fed with every batch that ran. ``period`` is how far back it looks, in seconds; ``clock`` counts seconds."""

    def __init__(self, period: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.period = period
        self._clock = clock
        self._rows: deque[tuple[float, float]] = deque(maxlen=_MOST)  # when answered, and how long after it came
        self._counts = deque([(clock(), 0)])  # when it was asked, and how many it had answered by then
        self._count = 0
        self._seconds = 0.0  # of the rows answered since it was last asked, as the next
        self._since = clock()

    def batch(self, seconds: float, waits: Collection[float], live: bool = True) -> None:
        """A batch ran for ``seconds``; ``waits`` are its rows' times in the queue. Shadows' do not matter."""
        now = self._clock()
        self._seconds += seconds * len(waits)
        if not live:
            return
        self._count += len(waits)
        for wait in waits:
            self._seconds += wait
            self._rows.append((now, wait + seconds))

    def stats(self, ongoing: int) -> dict[str, float]:
        """The numbers that scaling.py reads; ``ongoing`` are the rows that wait and run now.

        ``rows`` is their mean since it was last asked: by Little's law the time that rows took for the time that
        went by, or those of this moment where none was answered.
        """
        now = self._clock()
        elapsed = now - self._since
        rows = self._seconds / elapsed if self._seconds and elapsed > 0 else float(ongoing)
        self._since, self._seconds = now, 0.0
        counts = self._counts
        counts.append((now, self._count))
        while counts[0][0] < now and (counts[1][0] <= now - self.period or counts[0][0] < now - 2 * self.period):
            counts.popleft()
        while self._rows and self._rows[0][0] < now - self.period:
            self._rows.popleft()
        answered = self._count - counts[0][1]
        latencies = sorted(seconds for _, seconds in self._rows)
        p95 = latencies[min(len(latencies) - 1, int(0.95 * len(latencies)))] if latencies else 0.0
        return {"rows": rows, "answered": float(answered), "p95_ms": p95 * 1000}
