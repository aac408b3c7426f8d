"""Selection of rows of similar length, for batches that are padded to their longest row."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import TypeVar

R = TypeVar("R")

# Of what a batch computes, the part that may be padding. With more, two batches are quicker than one
# (docs/guides/handlers.md).
MAX_PADDING = 0.2


def select_similar(first: tuple[int, R], others: Iterable[tuple[int, R]], size: int) -> list[R]:
    """Return ``first`` and its nearest in length of ``others``, at most ``size`` rows; ties keep their order.

    Each item is a length and a row. Rows are added while the batch's share of padding stays within
    MAX_PADDING: each time the next shorter or the next longer one, whichever leaves less padding.
    """
    longest = max(1, first[0])
    known = [(max(1, length), row) for length, row in others]
    shorter = sorted((each for each in known if each[0] < longest), key=_length, reverse=True)
    longer = sorted((each for each in known if each[0] >= longest), key=_length)
    rows, filled = [first[1]], longest
    down = up = 0  # how many of each were taken
    while len(rows) < size:
        count = len(rows) + 1
        below = 1 - (filled + shorter[down][0]) / (count * longest) if down < len(shorter) else inf
        above = 1 - (filled + longer[up][0]) / (count * longer[up][0]) if up < len(longer) else inf
        if min(below, above) > MAX_PADDING:
            break
        if below < above:
            length, row = shorter[down]
            down += 1
        else:
            length, row = longer[up]
            longest = length
            up += 1
        filled += length
        rows.append(row)
    return rows


def _length(each: tuple[int, R]) -> int:
    return each[0]
