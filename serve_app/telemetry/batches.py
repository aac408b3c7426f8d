"""Batches by their size, and when the last one ran: what statistics tell of a version beside its metrics."""

from __future__ import annotations

import time


class Batches:
    """Those of one version. ``sizes``: for each number of rows how many batches, and the seconds in the handler."""

    __slots__ = ("last", "sizes")

    def __init__(self) -> None:
        self.last = 0.0  # in seconds since the epoch; 0: none has run
        self.sizes: dict[int, tuple[int, float]] = {}

    def note(self, rows: int, seconds: float) -> None:
        """One ran just now."""
        count, so_far = self.sizes.get(rows, (0, 0.0))
        self.sizes[rows] = count + 1, so_far + seconds
        self.last = time.time()

    def add(self, other: Batches) -> None:
        """Those of another process."""
        self.last = max(self.last, other.last)
        for rows, (count, seconds) in other.sizes.items():
            mine, so_far = self.sizes.get(rows, (0, 0.0))
            self.sizes[rows] = mine + count, so_far + seconds
