"""Recent load and latency of a replica, for Ray Serve's autoscaler."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection

_MAX_ROWS = 5_000  # rows whose latency is kept


class AutoscalingStats:
    """The statistics of the last ``period`` seconds, updated by every batch; ``clock`` counts seconds."""

    def __init__(self, period: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.period = period
        self._clock = clock
        self._rows: deque[tuple[float, float]] = deque(maxlen=_MAX_ROWS)  # completion time, latency
        self._counts = deque([(clock(), 0)])  # time of a report, rows completed by then
        self.total_rows = 0  # of all batches, those of shadow requests too
        self._completed = 0
        self._total_latency = 0.0  # total latency of rows since the last report
        self._last_report = clock()

    def record_batch(self, seconds: float, waits: Collection[float], live: bool = True) -> None:
        """Record a batch that ran for ``seconds``; ``waits`` are its rows' times in the queue.

        Batches of shadow requests (not ``live``) count for the load only.
        """
        now = self._clock()
        self.total_rows += len(waits)
        self._total_latency += seconds * len(waits)
        if not live:
            return
        self._completed += len(waits)
        for wait in waits:
            self._total_latency += wait
            self._rows.append((now, wait + seconds))

    def stats(self, ongoing: int) -> dict[str, float]:
        """Return the statistics for the autoscaling policies; ``ongoing`` are the pending and running rows.

        ``rows`` is the mean of ongoing rows since the last call. By Little's law it is the total latency
        divided by the elapsed time; without a completed row it is ``ongoing``.
        """
        now = self._clock()
        elapsed = now - self._last_report
        rows = self._total_latency / elapsed if self._total_latency and elapsed > 0 else float(ongoing)
        self._last_report, self._total_latency = now, 0.0
        counts = self._counts
        counts.append((now, self._completed))
        while counts[0][0] < now and (
            counts[1][0] <= now - self.period or counts[0][0] < now - 2 * self.period
        ):
            counts.popleft()
        while self._rows and self._rows[0][0] < now - self.period:
            self._rows.popleft()
        answered = self._completed - counts[0][1]
        latencies = sorted(seconds for _, seconds in self._rows)
        p95 = latencies[min(len(latencies) - 1, int(0.95 * len(latencies)))] if latencies else 0.0
        return {"rows": rows, "answered": float(answered), "p95_ms": p95 * 1000}
