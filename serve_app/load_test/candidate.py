"""A configuration of a model, and the values that a search may give it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

AXES = ("variant", "workers", "batch_size", "threads", "max_batch_delay")  # in the order of the search
PLAIN = "plain"
# Keys that a candidate replaces or lacks: others would change its workers or answer during a measurement.
_REPLACED = (
    "minWorkers",
    "maxWorkers",
    "batchSize",
    "maxBatchDelay",
    "threads",
    "autoscaling",
    "recycling",
    "response_cache",
)
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_DELAYS_MS = (1, 2, 5, 10, 20, 50)


@dataclass(frozen=True)
class Candidate:
    """A configuration of a model.

    ``threads`` and ``max_batch_delay`` (milliseconds) are None for the server's default.
    """

    variant: str = PLAIN
    workers: int = 1
    threads: int | str | None = None
    batch_size: int = 1
    max_batch_delay: int | None = None

    @property
    def label(self) -> str:
        parts = [
            self.variant,
            f"{self.workers} × {self.threads or 'default'} threads",
            f"batch {self.batch_size}",
        ]
        return ", ".join([*parts, f"{self.max_batch_delay} ms"] if self.max_batch_delay else parts)

    @property
    def thread_count(self) -> int:
        """Return the threads of a worker; a server's default is one."""
        return self.threads if isinstance(self.threads, int) else 1

    def document(self) -> dict[str, Any]:
        return asdict(self)

    def configure(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a model-config.yaml with this candidate's values in place of those of ``config``."""
        kept = {key: value for key, value in config.items() if key not in _REPLACED}
        values: dict[str, Any] = {"minWorkers": self.workers, "maxWorkers": self.workers}
        values |= {"batchSize": self.batch_size, "maxBatchDelay": self.max_batch_delay}
        values["threads"] = self.threads
        return {key: value for key, value in values.items() if value is not None} | kept


@dataclass(frozen=True)
class SearchSpace:
    """The values of each axis; a candidate uses at most ``cores`` threads in all its workers together."""

    cores: int
    variants: tuple[str, ...] = (PLAIN,)
    max_workers: int = 1
    max_batch_size: int = 64
    limit: float = math.inf  # seconds; a longer batch delay cannot meet it
    axes: tuple[str, ...] = AXES

    def ladder(self, axis: str, candidate: Candidate) -> list[Candidate]:
        """Return the candidates along an axis, in ascending order, with ``candidate`` itself."""
        values: list[Any]
        if axis == "variant":
            values = [*self.variants]
        elif axis == "workers":
            values = [*range(1, self.max_workers + 1)] if self.max_workers <= 4 else _powers(self.max_workers)
        elif axis == "threads":
            values = [n for n in _powers(self.cores) if n != candidate.thread_count]
        elif axis == "batch_size":
            values = [n for n in _BATCH_SIZES if n <= self.max_batch_size]
        else:
            longest = self.limit * 1000 / 2
            values = [None, *(ms for ms in _DELAYS_MS if ms <= longest)] if candidate.batch_size > 1 else []
        current = getattr(candidate, axis)
        values = [*dict.fromkeys([*values, current])]
        if axis == "threads":
            values.sort(key=lambda value: candidate.thread_count if value == current else value)
        elif axis != "variant":
            values.sort(key=lambda value: value or 0)

        def change(value: Any) -> Candidate:
            changed = replace(candidate, **{axis: value})
            return self._fit(changed) if axis == "workers" else changed

        found = [candidate if value == current else change(value) for value in values]
        return [c for c in found if c == candidate or self._fits(c)]

    def _fit(self, candidate: Candidate) -> Candidate:
        """Reduce the threads to the cores that the workers leave for each of them."""
        most = max(1, self.cores // candidate.workers)
        return replace(candidate, threads=most) if candidate.thread_count > most else candidate

    def _fits(self, candidate: Candidate) -> bool:
        return candidate.workers * candidate.thread_count <= max(self.cores, self.max_workers)


def _powers(most: int) -> list[int]:
    """Return 1, 2, 4 … up to ``most``, and ``most`` itself."""
    return sorted({*(2**n for n in range(most.bit_length()) if 2**n <= most), most})
