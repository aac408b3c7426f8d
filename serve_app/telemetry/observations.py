"""What the calls of this process said of trials and shadows: counted here, fetched by its link.

A call costs a few additions; nothing is computed that is not asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ArmFigures:
    """What the calls of one arm came to. Figures of several processes and times add up.

    ``latency`` is a histogram: the index of a bin and the calls in it; see ``bin_of``. ``sums`` has for each metric
    and each group of buckets how many values there were, and their sum.
    """

    calls: int = 0
    units: int = 0  # different keys, where the trial has one; else calls
    failed: dict[str, int] = field(default_factory=dict)  # by reason; callers that left are not among them
    empty: int = 0
    non_finite: int = 0
    latency: dict[int, int] = field(default_factory=dict)
    sums: dict[str, dict[int, tuple[float, float]]] = field(default_factory=dict)
