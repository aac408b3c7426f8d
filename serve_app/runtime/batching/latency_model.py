"""How long a model's batches take, learnt from those that ran."""

from __future__ import annotations

_WEIGHT = 0.2  # of the latest batch
_OUTLIER = 8.0  # a batch that takes so many times what was expected counts as so many times, and no more
_FAST = 4.0  # one that takes so many times less pulls the estimate down by half
_ENOUGH = 5  # batches after which the estimate may refuse a row


class Pace:
    """Seconds as a straight line over a batch's rows, fitted with exponentially falling weights.

    A batch costs something between the same for any size and the same for every row; where batches of one size alone
    have been seen, it is whichever of the two is quicker. In doubt the estimate is low: a row that was let in and comes
    too late costs one row, a slow batch that nobody forgets would cost all of them.
    """

    __slots__ = ("_covariance", "_rows", "_seconds", "_variance", "runs")

    def __init__(self) -> None:
        self.runs = 0
        self._rows = 1.0  # of a batch, in the mean, as the next
        self._seconds = 0.0
        self._variance = 0.0  # of the rows
        self._covariance = 0.0

    @property
    def known(self) -> bool:
        """Whether enough batches ran for a row to be refused by it."""
        return self.runs >= _ENOUGH

    def note(self, rows: int, seconds: float) -> None:
        """A batch of so many rows took so long."""
        self.runs += 1
        if self.runs == 1:
            self._rows, self._seconds = float(rows), seconds
            return
        more = rows - self._rows
        expected = self.seconds(rows) if more else self._seconds
        weight = 0.5 if seconds * _FAST < expected else _WEIGHT
        if seconds > _OUTLIER * expected > 0:
            seconds = _OUTLIER * expected
        longer = seconds - self._seconds
        self._seconds += weight * longer
        if more or self._variance:
            self._rows += weight * more
            self._variance = (1 - weight) * (self._variance + weight * more * more)
            self._covariance = (1 - weight) * (self._covariance + weight * more * longer)

    def seconds(self, rows: int) -> float:
        """What a batch of so many rows takes; 0.0 before the first has run."""
        if rows == self._rows:
            return self._seconds
        per_row = self._seconds / self._rows
        if self._variance > 1e-6:
            slope = min(max(self._covariance / self._variance, 0.0), per_row)
        else:
            slope = per_row if rows < self._rows else 0.0
        return self._seconds + slope * (rows - self._rows)
