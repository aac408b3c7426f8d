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
class ShadowStats:
    """Counts by outcome and reason, means of measures, and the latency of both versions for the same
    requests.

    ``latency`` has a histogram for ``live`` and ``shadow``: see experiment_collector.bin_index.
    """

    keep: int  # of the worst disagreements
    counts: dict[Outcome, dict[str, int]] = field(default_factory=dict)
    latency: dict[str, dict[int, int]] = field(default_factory=dict)
    measures: dict[str, tuple[int, float]] = field(default_factory=dict)  # number of values, and their sum
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
            self._add_measure(name, 1, value)
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
        for name, (count, total) in other.measures.items():
            self._add_measure(name, count, total)
        for disagreement in other.worst_mismatches:
            self.worst_mismatches.add(disagreement)

    def _add_measure(self, name: str, count: int, total: float) -> None:
        before = self.measures.get(name, (0, 0.0))
        self.measures[name] = (before[0] + count, before[1] + total)

    @property
    def calls(self) -> dict[Outcome, int]:
        return {outcome: sum(self.counts.get(outcome, {}).values()) for outcome in OUTCOMES}

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics as JSON data, without the mismatches."""
        latency = {version: sorted(bins.items()) for version, bins in self.latency.items()}
        return {"counts": self.counts, "latency": latency, "measures": self.measures}

    @classmethod
    def from_dict(cls, max_mismatches: int, written: Mapping[str, Any]) -> ShadowStats:
        measures = {name: (count, total) for name, (count, total) in written["measures"].items()}
        latency = {version: dict(bins) for version, bins in written["latency"].items()}
        return cls(max_mismatches, written["counts"], latency, measures)
