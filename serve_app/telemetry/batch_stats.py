"""Batches by size, and the time of the last one: statistics of a version besides its metrics."""

from __future__ import annotations

import time


class BatchStats:
    """The batches of one version.

    ``sizes`` maps a number of rows to the number of batches and their seconds in the handler. A request of
    tensors has as many rows as the first axis of its inputs.
    """

    __slots__ = ("last", "sizes")

    def __init__(self) -> None:
        self.last = 0.0  # in seconds since the epoch; 0: none has run
        self.sizes: dict[int, tuple[int, float]] = {}

    def record(self, rows: int, seconds: float) -> None:
        """Record a batch that has just run."""
        count, total = self.sizes.get(rows, (0, 0.0))
        self.sizes[rows] = count + 1, total + seconds
        self.last = time.time()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BatchStats) and (self.last, self.sizes) == (other.last, other.sizes)

    def copy(self) -> BatchStats:
        copy = BatchStats()
        copy.add(self)
        return copy

    def add(self, other: BatchStats) -> None:
        """Add the batches of another process."""
        self.last = max(self.last, other.last)
        for rows, (count, seconds) in other.sizes.items():
            own_count, total = self.sizes.get(rows, (0, 0.0))
            self.sizes[rows] = own_count + count, total + seconds
