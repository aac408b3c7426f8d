"""Model of a batch's latency, learnt from the batches that ran."""

from __future__ import annotations

_LATEST_WEIGHT = 0.2  # of the latest batch
_OUTLIER = 8.0  # a batch that takes longer than this many times the estimate counts as this many times
_FAST = 4.0  # a batch this many times faster than the estimate halves the estimate
_MIN_RUNS = 5  # batches after which the estimate may refuse a row


class BatchLatencyModel:
    """A linear model of seconds over rows, fitted with exponentially falling weights.

    A batch costs something between the same for any size and the same for every row. Where batches of only
    one size were seen, the model takes the smaller of the two. In doubt the estimate is low: a row that is
    admitted and comes too late costs one row, but an estimate that stays high would refuse all of them.
    """

    __slots__ = ("_covariance", "_rows", "_seconds", "_variance", "runs")

    def __init__(self) -> None:
        self.runs = 0
        self._rows = 1.0  # of a batch, in the mean, as the next
        self._seconds = 0.0
        self._variance = 0.0  # of the rows
        self._covariance = 0.0

    @property
    def is_ready(self) -> bool:
        """True when enough batches ran to refuse rows by the estimate."""
        return self.runs >= _MIN_RUNS

    def record(self, rows: int, seconds: float) -> None:
        """Record that a batch of ``rows`` rows took ``seconds``."""
        self.runs += 1
        if self.runs == 1:
            self._rows, self._seconds = float(rows), seconds
            return
        more = rows - self._rows
        expected = self.estimate(rows) if more else self._seconds
        weight = 0.5 if seconds * _FAST < expected else _LATEST_WEIGHT
        if seconds > _OUTLIER * expected > 0:
            seconds = _OUTLIER * expected
        longer = seconds - self._seconds
        self._seconds += weight * longer
        if more or self._variance:
            self._rows += weight * more
            self._variance = (1 - weight) * (self._variance + weight * more * more)
            self._covariance = (1 - weight) * (self._covariance + weight * more * longer)

    def estimate(self, rows: int) -> float:
        """Return the estimated seconds of a batch of ``rows`` rows; 0.0 before the first has run."""
        if rows == self._rows:
            return self._seconds
        per_row = self._seconds / self._rows
        if self._variance > 1e-6:
            slope = min(max(self._covariance / self._variance, 0.0), per_row)
        else:
            slope = per_row if rows < self._rows else 0.0
        return self._seconds + slope * (rows - self._rows)
