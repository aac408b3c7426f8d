"""The analysis of an experiment: estimates, verdicts and sentences, computed from counts without state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from serve_app.domain.experiment import ExperimentMetric
from serve_app.domain.sequential_statistics import (
    MIN_COUNT,
    MIN_GROUPS,
    Estimate,
    Groups,
    MeanDifference,
    difference,
    interval,
    required_growth,
    sample_ratio_p_value,
)

Verdict = Literal["better", "worse", "no_difference_seen", "not_yet_known"]

ALARM = 0.01  # a sample ratio's p-value at which nothing is to be trusted
_DISTRUST = "Not to be trusted: the arms' sizes do not fit their weights."


class _MetricKind(NamedTuple):
    unit: str  # of a mean, as it is answered
    of_difference: str
    scale: float  # from what was counted
    values: str
    bounds: tuple[float, float]  # no mean is outside, as it was counted
    share: float  # of the baseline's mean: the difference that is looked for
    effect: float  # or that difference itself, where a baseline of zero is likely
    sought: str


_NUMBER = _MetricKind("", "", 1.0, "values", (-math.inf, math.inf), 0.1, 0.0, "10 %")
_KINDS = {
    "latency": _NUMBER._replace(
        unit="ms", of_difference=" ms", scale=1000.0, values="requests", bounds=(0.0, math.inf)
    ),
    "error_rate": _MetricKind(
        "percent", " percentage points", 100.0, "requests", (0.0, 1.0), 0.0, 0.005, "half a percentage point"
    ),
    "output": _NUMBER,
    "reward": _NUMBER,
}


@dataclass(frozen=True)
class ArmTotals:
    """The totals of one arm."""

    name: str
    version: str
    weight: int  # basis points
    units: int  # distinct keys, or calls where each call is dealt by itself
    calls: int
    groups: Mapping[str, Groups]  # of each metric; latencies in seconds


def assess(
    arms: Sequence[ArmTotals],
    metrics: Sequence[ExperimentMetric],
    baseline: str,
    alpha: float = 0.05,
    p_value: float = 1.0,
) -> dict[str, Any]:
    """Compare the arms with the baseline; return the results as JSON.

    All statements hold at all times at once with probability 1 - ``alpha``, which is divided evenly among the
    comparisons of each metric and each arm. Latencies are in milliseconds, error rates in percent; unknown
    values are null. ``p_value`` is the lowest one returned for the sample ratio before, so that an alarm
    persists.

    Raises ValueError when the baseline is none of the arms.
    """
    if baseline not in (names := [arm.name for arm in arms]):
        raise ValueError(f"baseline {baseline!r} is none of the arms {', '.join(names)}")
    rivals = [name for name in names if name != baseline]
    comparisons = len(rivals) * len(metrics)
    each = alpha / max(1, comparisons)
    ratio = _sample_ratio(arms, p_value)
    of_metrics: dict[str, Any] = {}
    for metric in metrics:
        seen = {
            arm.name: Estimate.from_groups(arm.groups.get(metric.name, {}), metric.kind == "error_rate")
            for arm in arms
        }
        compared = {
            rival: _ArmComparison(
                metric, rival, baseline, seen[rival], seen[baseline], each, f"({100 * (1 - alpha):g} %)"
            )
            for rival in rivals
        }
        of_metrics[metric.name] = {
            "kind": metric.kind,
            "goal": metric.direction,
            "unit": _KINDS[metric.kind].unit,
            "arms": {name: _mean(_KINDS[metric.kind], estimate, each) for name, estimate in seen.items()},
            "differences": {
                rival: comparison.document(not ratio["alarm"]) for rival, comparison in compared.items()
            },
        }
    return {
        "sentence": _summary(of_metrics, rivals, baseline, not ratio["alarm"]),
        "baseline": baseline,
        "alpha": alpha,
        "comparisons": comparisons,
        "alpha_per_comparison": each,
        "arms": {
            arm.name: {"version": arm.version, "weight": arm.weight, "units": arm.units, "calls": arm.calls}
            for arm in arms
        },
        "metrics": of_metrics,
        "sample_ratio": ratio,
    }


def _mean(kind: _MetricKind, seen: Estimate, alpha: float) -> dict[str, Any]:
    low, high = interval(seen, alpha)
    least, most = kind.bounds
    return {
        "count": int(seen.count),
        "mean": _known(seen.mean * kind.scale),
        "low": _known(max(low, least) * kind.scale) if math.isfinite(low) else None,
        "high": _known(min(high, most) * kind.scale) if math.isfinite(high) else None,
    }


@dataclass(frozen=True)
class _ArmComparison:
    """A comparison of one arm with the baseline, on one metric."""

    metric: ExperimentMetric
    arm: str
    baseline: str
    seen: Estimate
    base: Estimate
    alpha: float
    sure: str

    @property
    def kind(self) -> _MetricKind:
        return _KINDS[self.metric.kind]

    @cached_property
    def gap(self) -> MeanDifference:
        return difference(self.seen, self.base, self.alpha)

    @property
    def sought(self) -> float:
        """The difference that is looked for."""
        return self.kind.effect or self.kind.share * abs(float(self.base.mean))

    @property
    def verdict(self) -> Verdict:
        if self.gap.low > 0 or self.gap.high < 0:
            return "better" if (self.gap.low > 0) == (self.metric.direction == "increase") else "worse"
        excluded = -self.sought < self.gap.low and self.gap.high < self.sought
        return "no_difference_seen" if excluded else "not_yet_known"

    @property
    def more(self) -> int | None:
        """Return how many more calls of both arms would show such a difference, to two digits.

        The result is None where it cannot be computed.
        """
        if self.verdict != "not_yet_known" or not math.isfinite(self.gap.low) or not self.sought:
            return None
        times = required_growth(self.seen, self.base, self.sought, self.alpha)
        more = (times - 1) * float(self.seen.count + self.base.count)
        if not 0 < more < 1e9:
            return None
        digit: int = 10 ** max(0, math.floor(math.log10(more)) - 1)
        return math.ceil(more / digit) * digit

    @property
    def sentence(self) -> str:
        metric, gap, kind = self.metric.name, self.gap, self.kind
        if not math.isfinite(gap.low):
            return f"Not yet known: {self.why_not}."
        radius = (gap.high - gap.low) / 2 * kind.scale
        places = max(0, 1 - math.floor(math.log10(radius)))  # two digits of what is uncertain
        amount, spread = f"{gap.difference * kind.scale:,.{places}f}", f"{radius:,.{places}f}"
        over = f"over {int(self.seen.count):,} and {int(self.base.count):,} {kind.values}"
        if (verdict := self.verdict) in ("better", "worse"):
            amount = f"{amount.lstrip('-')}{kind.of_difference} {'more' if gap.difference > 0 else 'less'}"
            found = f"{self.arm} is {verdict} than {self.baseline} on {metric}"
            return f"{found}: {amount}, ± {spread} {self.sure}, {over}."
        found = (
            f"{self.arm}'s {metric} differs from {self.baseline}'s by {amount} ± {spread}{kind.of_difference}"
        )
        found = f"{found} {self.sure}, {over}"
        if verdict == "no_difference_seen":
            return f"No difference seen: {found}, so by less than {kind.sought}."
        hint = f"; about {self.more:,} more would show a difference of {kind.sought}" if self.more else ""
        return f"Not yet known: {found}{hint}."

    @property
    def why_not(self) -> str:
        """Return why the difference is unknown."""
        counted = {self.arm: self.seen, self.baseline: self.base}
        metric = f"{self.metric.name} of {self.arm} and {self.baseline}"
        if broken := [arm for arm, each in counted.items() if each.count and not math.isfinite(each.mean)]:
            return f"{self.metric.name} of {broken[0]} has values that are no finite numbers"
        if min(each.count for each in counted.values()) < MIN_COUNT:
            have = " and ".join(f"{int(each.count):,}" for each in counted.values())
            return f"{metric} have {have} {self.kind.values}; each arm needs at least {MIN_COUNT}"
        fewest = min(counted, key=lambda arm: counted[arm].groups)
        if counted[fewest].groups < MIN_GROUPS:
            return (
                f"few keys send most of {fewest}'s requests, and {MIN_GROUPS} that send as many are "
                f"needed at least"
            )
        if not self.seen.variance and not self.base.variance:
            return f"{metric} was the same in all requests"
        return f"{metric} has too few values that differ"

    def document(self, trusted: bool) -> dict[str, Any]:
        gap, scale = self.gap, self.kind.scale
        shares = {"difference": gap.share, "low": gap.share_low, "high": gap.share_high}
        return {
            "verdict": self.verdict,
            "trusted": trusted,
            "sentence": self.sentence if trusted else f"{self.sentence} {_DISTRUST}",
            "difference": _known(gap.difference * scale),
            "low": _known(gap.low * scale),
            "high": _known(gap.high * scale),
            "relative_percent": {name: float(share * 100) for name, share in shares.items()}
            if all(map(math.isfinite, shares.values()))
            else None,
            "more_calls": self.more,
        }


def _sample_ratio(arms: Sequence[ArmTotals], before: float) -> dict[str, Any]:
    units, weights = [arm.units for arm in arms], [arm.weight for arm in arms]
    total = sum(units)
    expected = {arm.name: total * arm.weight / sum(weights) for arm in arms}
    p_value = min(before, sample_ratio_p_value(units, weights))
    alarm = p_value <= ALARM
    counted = ", ".join(f"{arm.name} {arm.units:,} of {expected[arm.name]:,.0f}" for arm in arms)
    if alarm:
        sentence = (
            f"The arms' sizes do not fit their weights (p = {p_value:.2g}): {counted} expected. "
            "Something loses or redirects one arm's clients; look for it before believing any verdict."
        )
    elif total:
        sentence = f"The arms' sizes fit their weights (p = {p_value:.2g}): {counted} expected."
    else:
        sentence = "No requests yet."
    return {
        "p_value": p_value,
        "alarm": alarm,
        "expected": expected,
        "observed": {arm.name: arm.units for arm in arms},
        "sentence": sentence,
    }


def _summary(of_metrics: Mapping[str, Any], rivals: Sequence[str], baseline: str, trusted: bool) -> str:
    """Return one sentence for each arm over all metrics."""
    words = {"better": "better on {}", "worse": "worse on {}", "no_difference_seen": "no different on {}"}
    sentences = [] if trusted else [_DISTRUST]
    for rival in rivals:
        found: dict[Verdict, list[str]] = {}
        for name, of_metric in of_metrics.items():
            found.setdefault(of_metric["differences"][rival]["verdict"], []).append(name)
        known = [form.format(_join(found[verdict])) for verdict, form in words.items() if verdict in found]
        rest = _join(found.get("not_yet_known", ()))
        if known:
            open_ = f"; {rest} not yet known" if rest else ""
            sentences.append(f"{rival} is {', '.join(known)}, compared with {baseline}{open_}.")
        else:
            sentences.append(f"{rival} compared with {baseline}: {rest} not yet known.")
    return " ".join(sentences)


def _join(names: Sequence[str]) -> str:
    """Return ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _known(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
