"""Statistics of comparisons between two versions; those of several processes and periods add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from serve_app.dataplane.experiment_collector import bin_index
from serve_app.dataplane.shadow.comparison import ResponseComparison
from serve_app.dataplane.shadow.mismatches import Mismatch, WorstMismatches

# agreed, disagreed: compared. error: the copy was not answered. skipped: not sent. dropped: given up in the
# queue.
Outcome = Literal["agreed", "disagreed", "error", "skipped", "dropped"]
OUTCOMES: tuple[Outcome, ...] = ("agreed", "disagreed", "error", "skipped", "dropped")


@dataclass
class RunningMean:
    count: int = 0
    total: float = 0.0

    def add(self, total: float, count: int = 1) -> None:
        self.count += count
        self.total += total

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass
class ShadowStats:
    """Counts by outcome and reason, means of measures, and the latency of both versions for the same
    requests.

    ``latency`` has a histogram for ``live`` and ``shadow``: see experiment_collector.bin_index.
    """

    keep: int  # of the worst disagreements
    counts: dict[Outcome, dict[str, int]] = field(default_factory=dict)
    latency: dict[str, dict[int, int]] = field(default_factory=dict)
    measures: dict[str, RunningMean] = field(default_factory=dict)
    worst_mismatches: WorstMismatches = field(init=False)

    def __post_init__(self) -> None:
        self.worst_mismatches = WorstMismatches(self.keep)

    def count(self, outcome: Outcome, reason: str = "", calls: int = 1) -> None:
        reasons = self.counts.setdefault(outcome, {})
        reasons[reason] = reasons.get(reason, 0) + calls

    def record_comparison(
        self, found: ResponseComparison, live: float, shadow: float, kept: Mismatch | None
    ) -> None:
        """Count a comparison of responses that took ``live`` and ``shadow`` seconds."""
        self.count("agreed" if found.agreed else "disagreed", found.why)
        for version, seconds in (("live", live), ("shadow", shadow)):
            bins, bin = self.latency.setdefault(version, {}), bin_index(seconds)
            bins[bin] = bins.get(bin, 0) + 1
        for name, value in found.measures.items():
            self.measures.setdefault(name, RunningMean()).add(value)
        if kept is not None:
            self.worst_mismatches.add(kept)

    def add(self, other: ShadowStats) -> None:
        for outcome, reasons in other.counts.items():
            for reason, calls in reasons.items():
                self.count(outcome, reason, calls)
        for version, theirs in other.latency.items():
            bins = self.latency.setdefault(version, {})
            for bin, calls in theirs.items():
                bins[bin] = bins.get(bin, 0) + calls
        for name, mean in other.measures.items():
            self.measures.setdefault(name, RunningMean()).add(mean.total, mean.count)
        for disagreement in other.worst_mismatches:
            self.worst_mismatches.add(disagreement)

    @property
    def calls(self) -> dict[Outcome, int]:
        return {outcome: sum(self.counts.get(outcome, {}).values()) for outcome in OUTCOMES}

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics as JSON data, without the mismatches."""
        means = {name: [mean.count, mean.total] for name, mean in self.measures.items()}
        latency = {version: sorted(bins.items()) for version, bins in self.latency.items()}
        return {"counts": self.counts, "latency": latency, "measures": means}

    @classmethod
    def from_dict(cls, max_mismatches: int, written: Mapping[str, Any]) -> ShadowStats:
        means = {name: RunningMean(count, total) for name, (count, total) in written["measures"].items()}
        latency = {version: dict(bins) for version, bins in written["latency"].items()}
        return cls(max_mismatches, written["counts"], latency, means)
