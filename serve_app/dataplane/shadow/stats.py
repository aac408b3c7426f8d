"""What comparing one version's answers with another's came to: figures of several processes and times add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from serve_app.shadow.comparison import Comparison
from serve_app.shadow.disagreements import Disagreement, Worst
from serve_app.telemetry.observations import bin_of

# agreed, disagreed: compared. error: the copy was not answered. skipped: not sent. dropped: given up in the queue.
Outcome = Literal["agreed", "disagreed", "error", "skipped", "dropped"]
OUTCOMES: tuple[Outcome, ...] = ("agreed", "disagreed", "error", "skipped", "dropped")


@dataclass
class Mean:
    count: int = 0
    total: float = 0.0

    def add(self, total: float, count: int = 1) -> None:
        self.count += count
        self.total += total

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass
class Figures:
    """Counts by outcome and reason, means of measures, and how long both versions took for the same calls.

    ``latency`` holds for ``live`` and ``shadow`` a histogram: see observations.bin_of.
    """

    keep: int  # of the worst disagreements
    counts: dict[Outcome, dict[str, int]] = field(default_factory=dict)
    latency: dict[str, dict[int, int]] = field(default_factory=dict)
    measures: dict[str, Mean] = field(default_factory=dict)
    worst: Worst = field(init=False)

    def __post_init__(self) -> None:
        self.worst = Worst(self.keep)

    def count(self, outcome: Outcome, reason: str = "", calls: int = 1) -> None:
        reasons = self.counts.setdefault(outcome, {})
        reasons[reason] = reasons.get(reason, 0) + calls

    def compared(self, found: Comparison, live: float, shadow: float, kept: Disagreement | None) -> None:
        """Two answers were compared that took ``live`` and ``shadow`` seconds."""
        self.count("agreed" if found.agreed else "disagreed", found.why)
        for version, seconds in (("live", live), ("shadow", shadow)):
            bins, bin = self.latency.setdefault(version, {}), bin_of(seconds)
            bins[bin] = bins.get(bin, 0) + 1
        for name, value in found.measures.items():
            self.measures.setdefault(name, Mean()).add(value)
        if kept is not None:
            self.worst.put(kept)

    def add(self, other: Figures) -> None:
        for outcome, reasons in other.counts.items():
            for reason, calls in reasons.items():
                self.count(outcome, reason, calls)
        for version, theirs in other.latency.items():
            bins = self.latency.setdefault(version, {})
            for bin, calls in theirs.items():
                bins[bin] = bins.get(bin, 0) + calls
        for name, mean in other.measures.items():
            self.measures.setdefault(name, Mean()).add(mean.total, mean.count)
        for disagreement in other.worst:
            self.worst.put(disagreement)

    @property
    def calls(self) -> dict[Outcome, int]:
        return {outcome: sum(self.counts.get(outcome, {}).values()) for outcome in OUTCOMES}

    def write(self) -> dict[str, Any]:
        """As JSON; the disagreements stand apart."""
        means = {name: [mean.count, mean.total] for name, mean in self.measures.items()}
        latency = {version: sorted(bins.items()) for version, bins in self.latency.items()}
        return {"counts": self.counts, "latency": latency, "measures": means}

    @classmethod
    def read(cls, keep: int, written: Mapping[str, Any]) -> Figures:
        means = {name: Mean(count, total) for name, (count, total) in written["measures"].items()}
        latency = {version: dict(bins) for version, bins in written["latency"].items()}
        return cls(keep, written["counts"], latency, means)
