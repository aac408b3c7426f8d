"""Detection of versions that leak memory in a process that they share.

The memory of a process is measured once a second. Its growth between two measurements is attributed to the
versions that ran meanwhile, in proportion to their time in the handler.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from serve_app.domain.model import ModelRef
from serve_app.runtime.pool.memory import MemoryUse

_MIB = 1 << 20
# The process may exceed its budget by this share, or these bytes: allocators keep what batches have freed.
_TOLERATED_SHARE, _TOLERATED_BYTES = 0.25, 128 * _MIB
_MIN_GROWTH = 64 * _MIB  # bytes that are attributed to a version before it is named


@dataclass(frozen=True)
class Leak:
    """A version to which most of a growth is attributed, in bytes."""

    ref: ModelRef
    growth: int
    process: int
    budget: int

    def __str__(self) -> str:
        return (
            f"its handler leaks memory: the process grew by {self.growth / _MIB:.0f} MiB while it ran, to "
            f"{self.process / _MIB:.0f} MiB, and the budget is {self.budget / _MIB:.0f} MiB"
        )


class LeakDetector:
    """A detector for one process; ``base`` is its use without versions."""

    def __init__(self, budget: MemoryUse, base: MemoryUse) -> None:
        self._budget = budget
        self._base = base
        self._last = base
        self._busy: dict[ModelRef, float] = {}
        self._growth: dict[ModelRef, float] = {}

    def restart(self, use: MemoryUse, loaded: Collection[ModelRef]) -> None:
        """Measure from here on: a load or an eviction has changed the memory.

        A version that is not among ``loaded`` starts anew when it is loaded again.
        """
        self._last = use
        self._busy = {ref: seconds for ref, seconds in self._busy.items() if ref in loaded}
        self._growth = {ref: growth for ref, growth in self._growth.items() if ref in loaded}

    def sample(
        self, use: MemoryUse, loaded: MemoryUse, busy_seconds: Mapping[ModelRef, float]
    ) -> Leak | None:
        """Return the version that leaks, where the process is beyond its budget.

        ``loaded`` is the memory of the loaded versions after their loads; ``busy_seconds`` has their time in
        the handler since then.
        """
        ran = {ref: seconds - self._busy.get(ref, 0.0) for ref, seconds in busy_seconds.items()}
        self._busy = dict(busy_seconds)
        self._growth = {ref: growth for ref, growth in self._growth.items() if ref in busy_seconds}
        growth, self._last = use.host - self._last.host, use
        if (total := sum(ran.values())) > 0:
            for ref, seconds in ran.items():
                self._growth[ref] = max(0.0, self._growth.get(ref, 0.0) + growth * seconds / total)
        process = use.host - self._base.host
        limit = max(self._budget.host, loaded.host)
        if process <= limit + max(_TOLERATED_SHARE * limit, _TOLERATED_BYTES) or not self._growth:
            return None
        ref, grown = max(self._growth.items(), key=lambda item: item[1])
        if grown < _MIN_GROWTH:
            return None
        del self._growth[ref]
        return Leak(ref, int(grown), process, self._budget.host)
