"""Rows that wait, by priority: who came first goes first, and who is more urgent overtakes for a while."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain, islice
from math import inf
from typing import Generic, Protocol, TypeVar

from serve_app.types import Call, Priority

# Seconds by which a row lets later ones of more urgent priorities overtake it: no row waits for ever.
PATIENCE: dict[Priority, float] = {"high": 0.0, "normal": 0.5, "low": 3.0}


class Waiting(Protocol):
    """What can stand in a queue."""

    call: Call
    arrived: float  # on one clock for all of a queue


R = TypeVar("R", bound=Waiting)


class Queue(Generic[R]):
    """First in, first out for each priority; the head with the smallest arrival + patience is the next of all.

    ``live`` counts the rows of callers. ``shadows`` stand apart: they are in nobody's way, and only ``take_shadows``
    takes them. Nothing here is bounded.
    """

    __slots__ = ("_by_priority", "_normal", "live", "shadows")

    def __init__(self) -> None:
        self.live = 0
        self.shadows: deque[R] = deque()
        self._by_priority: dict[Priority, deque[R]] = {priority: deque() for priority in PATIENCE}
        self._normal = self._by_priority["normal"]

    def __iter__(self) -> Iterator[R]:
        """Live rows, the most urgent priority first."""
        return chain(*self._by_priority.values())

    def put(self, row: R) -> None:
        priority = row.call.priority
        if priority == "shadow":
            self.shadows.append(row)
        else:
            self._by_priority[priority].append(row)
            self.live += 1

    def put_back(self, row: R) -> None:
        """A row that was taken stands at the head again."""
        if row.call.priority == "shadow":
            self.shadows.appendleft(row)
        else:
            self._by_priority[row.call.priority].appendleft(row)
            self.live += 1

    def first(self) -> R:
        """The row that is next. One must be there."""
        return self._next()[0]

    def pop(self) -> R:
        """Take the row that is next. One must be there."""
        row = self._next().popleft()
        self.live -= 1
        return row

    def take(self, most: int) -> list[R]:
        """The next live rows, at most so many, and all of one kind of call."""
        rows: list[R] = []
        queue = self._normal
        while self.live and len(rows) < most:
            if len(queue) != self.live:
                queue = self._next()
            if rows and queue[0].call.kind != rows[0].call.kind:
                break
            rows.append(queue.popleft())
            self.live -= 1
        return rows

    def window(self, most: int) -> list[R]:
        """The row that is next, then the others of its kind among the ``most`` most urgent. One must be there."""
        first = self.first()
        kind = first.call.kind
        return [first, *(row for row in islice(self, most) if row is not first and row.call.kind == kind)]

    def take_shadows(self, most: int) -> list[R]:
        """As ``take``, of those that nobody waits for."""
        rows: list[R] = []
        shadows = self.shadows
        while shadows and len(rows) < most and (not rows or shadows[0].call.kind == rows[0].call.kind):
            rows.append(shadows.popleft())
        return rows

    def remove(self, row: R) -> bool:
        """Whether the row stood here; it does no more."""
        priority = row.call.priority
        try:
            (self.shadows if priority == "shadow" else self._by_priority[priority]).remove(row)
        except ValueError:
            return False
        self.live -= priority != "shadow"
        return True

    def newest_below(self, priority: Priority) -> R | None:
        """The last of the least urgent rows, where they are less urgent than ``priority``."""
        for other in reversed(PATIENCE):
            if other == priority:
                break
            if queue := self._by_priority[other]:
                return queue[-1]
        return None

    def before(self, priority: Priority) -> int:
        """How many rows are at least as urgent. Some that have lost their patience may go first as well."""
        if len(self._normal) == self.live and priority != "high":
            return self.live
        count = 0
        for other, queue in self._by_priority.items():
            count += len(queue)
            if other == priority:
                break
        return count

    def mixed(self) -> bool:
        """Whether rows of more kinds than one wait, as far as heads and tails tell."""
        normal = self._normal
        if len(normal) == self.live:
            return normal[0].call.kind != normal[-1].call.kind
        kind = self.first().call.kind
        return any(q and (q[0].call.kind != kind or q[-1].call.kind != kind) for q in self._by_priority.values())

    def since(self) -> float:
        """When the row that waits longest arrived. One must be there."""
        return min(queue[0].arrived for queue in self._by_priority.values() if queue)

    def clear(self) -> list[R]:
        """Everything that stood here, shadows too."""
        rows = [*self, *self.shadows]
        for queue in (*self._by_priority.values(), self.shadows):
            queue.clear()
        self.live = 0
        return rows

    def _next(self) -> deque[R]:
        """The queue whose head is next."""
        best = self._normal
        if len(best) != self.live:
            least = inf
            for priority, queue in self._by_priority.items():
                if queue and (rank := queue[0].arrived + PATIENCE[priority]) < least:
                    best, least = queue, rank
        return best
