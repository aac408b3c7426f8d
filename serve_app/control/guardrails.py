"""What the guardrails of a rollout show: the candidate's calls beside the baseline's. Pure arithmetic.

**What is compared.** The candidate's calls against the baseline's of the same time. The calls of the steps before
count as well, so that what is rare is found in the end; but an hour that was bad for both must not weigh more on the
side that had more calls in it. So the baseline's calls of the steps before are weighed down to the ratio of this
step's split: as many for each of the candidate's as now. At 100 % nobody is left to compare with: there the
candidate's calls of that step alone stand against the baseline's of the steps before.

**How sure.** The comparisons are always-valid (see statistics.py), so they may be looked at each second. The risk that
a version goes back which is within all its limits is ``ALPHA`` over the whole rollout, in equal parts for each
guardrail in each step. The weights are known before a step begins, and a call that counts for less than one is
weaker evidence on either side, so they break none of that. Calls of one key are taken as independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from serve_app.control.statistics import Comparison, exceeds, exceeds_share
from serve_app.rollout import BASELINE, CANDIDATE, Guardrails, Rollout
from serve_app.telemetry.observations import ArmFigures, quantile, slower

Figures = Sequence[Mapping[str, ArmFigures]]  # of each step up to the present one, by arm

ALPHA = 0.01
_LEAST_FOR_P99 = 100  # answers of the baseline: fewer have no 99th percentile


@dataclass(frozen=True)
class Reading:
    """What a guardrail shows: the candidate's ``value`` beside the baseline's, and how far apart they may be.

    ``surely``: what the candidate's is above for certain, less the baseline's where two rates are compared; None
    while nothing can be said. Calls of the baseline are as they are weighed.
    """

    name: str
    limit: float
    value: float | None = None
    baseline: float | None = None
    surely: float | None = None
    calls: int = 0
    baseline_calls: int = 0
    concurrent: bool = True  # the baseline's are of the same time
    broken: bool = False
    words: str = ""


@dataclass
class _Side:
    """Calls that are compared; those of a step may count for less than one."""

    calls: float = 0.0
    failed: float = 0.0
    out_of_memory: float = 0.0
    empty: float = 0.0
    non_finite: float = 0.0
    latency: dict[int, Any] = field(default_factory=dict)

    def add(self, figures: ArmFigures, weight: float = 1.0) -> None:
        self.calls += weight * figures.calls
        self.failed += weight * figures.failures
        self.out_of_memory += weight * figures.failed.get("out_of_memory", 0)
        self.empty += weight * figures.empty
        self.non_finite += weight * figures.non_finite
        for bin, count in figures.latency.items():
            self.latency[bin] = self.latency.get(bin, 0) + weight * count

    @property
    def answers(self) -> float:
        return self.calls - self.failed


def readings(rollout: Rollout, figures: Figures) -> list[Reading]:
    """What each guardrail of the plan shows at its present step."""
    candidate, baseline, concurrent = _compared(rollout, figures)
    alpha = ALPHA / (len(rollout.plan.steps) * len(fields(Guardrails)))
    limits = rollout.plan.guardrails
    made = []
    for name, hits, of in _RATES:
        if (limit := getattr(limits, name)) is not None:
            made.append(_rate(name, limit, hits, of, candidate, baseline, concurrent, alpha))
    if limits.p99 is not None:
        made.append(_p99(limits.p99, candidate, baseline, concurrent, alpha))
    if limits.out_of_memory is not None:
        made.append(_out_of_memory(limits.out_of_memory, candidate, baseline, concurrent, alpha))
    return made


_Count = Callable[[_Side], float]
_RATES: tuple[tuple[str, _Count, _Count], ...] = (
    ("error_rate", lambda side: side.failed, lambda side: side.calls),
    ("non_finite", lambda side: side.non_finite, lambda side: side.answers),
    ("empty", lambda side: side.empty, lambda side: side.answers),
)


def _compared(rollout: Rollout, figures: Figures) -> tuple[_Side, _Side, bool]:
    """The candidate's calls, the baseline's that they are compared with, and whether those are of the same time."""
    steps, step = rollout.plan.steps, rollout.step
    candidate, baseline = _Side(), _Side()
    last = step if steps[step] < 100 else step - 1  # in which the baseline had calls
    for before in range(last + 1):
        baseline.add(arm_of(figures, before, BASELINE), _ratio(steps[last]) / _ratio(steps[before]))
    for before in range(step + 1) if last == step else (step,):
        candidate.add(arm_of(figures, before, CANDIDATE))
    return candidate, baseline, last == step


def _ratio(percent: float) -> float:
    """Calls of the baseline for each of the candidate's."""
    return (100 - percent) / percent


def _rate(
    name: str, limit: float, hits: _Count, of: _Count, candidate: _Side, baseline: _Side, concurrent: bool, alpha: float
) -> Reading:
    count, others = of(candidate), of(baseline)
    if concurrent or others:
        compared = exceeds(count, hits(candidate), others, hits(baseline), limit, alpha)
        allowed = f"at most {_percent(limit)} more is allowed"
    else:  # all calls were the candidate's from the first on
        compared = exceeds_share(count, hits(candidate), limit, alpha)
        compared = replace(compared, low=compared.low + limit, against=0.0, margin=limit)
        allowed = f"at most {_percent(limit)} is allowed"
    reading = _reading(name, limit, compared, count, others, concurrent, bool(compared.worse))
    said = _against(reading, "calls" if name == "error_rate" else "answers")
    sure = f" (surely above: {_percent(reading.surely)})" if reading.surely is not None else ""
    return replace(reading, words=f"{said}; {allowed}{sure}")


def _p99(multiple: float, candidate: _Side, baseline: _Side, concurrent: bool, alpha: float) -> Reading:
    """Too slow is a candidate of which surely more than 1 % take longer than the multiple of the baseline's p99.

    Surely more, too, than of the baseline's own calls, whose p99 is uncertain while they are few.
    """
    count, others = candidate.answers, baseline.answers
    mine, theirs = quantile(candidate.latency, 0.99), quantile(baseline.latency, 0.99)
    reading = Reading(
        "p99",
        multiple,
        mine if count else None,
        theirs if others else None,
        calls=round(count),
        baseline_calls=round(others),
        concurrent=concurrent,
    )
    if not count or others < _LEAST_FOR_P99:
        return replace(reading, words=f"p99: not known before {_LEAST_FOR_P99} answers of the baseline")
    bar = multiple * theirs
    slow = slower(candidate.latency, bar)
    among_all = exceeds_share(count, slow, 0.01, alpha)
    among_theirs = exceeds(count, slow, others, slower(baseline.latency, bar), 0.0, alpha)
    surely = float(among_all.low) + 0.01
    words = (
        f"p99 {_seconds(mine)} of {round(count):,} answers against {_seconds(theirs)} of {round(others):,}"
        f"{'' if concurrent else ' in the steps before'}; {_percent(slow / count)} took longer than {multiple:g} times "
        f"that, 1 % may (surely above: {_percent(surely)})"
    )
    return replace(reading, surely=surely, broken=bool(among_all.worse and among_theirs.worse), words=words)


def _out_of_memory(limit: int, candidate: _Side, baseline: _Side, concurrent: bool, alpha: float) -> Reading:
    """More than ``limit`` calls; and where the baseline runs out of memory as well, surely more often than it."""
    times = candidate.out_of_memory
    compared = exceeds(candidate.calls, times, baseline.calls, baseline.out_of_memory, 0.0, alpha)
    broken = times > limit and (not baseline.out_of_memory or bool(compared.worse))
    reading = _reading("out_of_memory", limit, compared, candidate.calls, baseline.calls, concurrent, broken)
    return replace(reading, words=f"{_against(reading, 'calls')}; {round(times):,} in all, at most {limit:,} may be")


def _reading(
    name: str, limit: float, compared: Comparison, count: float, others: float, concurrent: bool, broken: bool
) -> Reading:
    seen = count > 0
    return Reading(
        name,
        limit,
        float(compared.rate) if seen else None,
        float(compared.against) if math.isfinite(compared.against) else None,
        max(0.0, float(compared.low)) if seen else None,
        round(count),
        round(others),
        concurrent,
        broken,
    )


def arm_of(figures: Figures, step: int, arm: str) -> ArmFigures:
    """What an arm's calls of one step came to."""
    return figures[step].get(arm, _NOTHING) if step < len(figures) else _NOTHING


_NOTHING = ArmFigures()


def _against(reading: Reading, what: str) -> str:
    if reading.value is None:
        return f"{reading.name}: no {what} yet"
    ours = f"{reading.name} {_percent(reading.value)} of {reading.calls:,} {what}"
    if reading.baseline is None or not reading.baseline_calls:
        return f"{ours}, with nothing to compare with"
    theirs = f"{ours} against {_percent(reading.baseline)} of {reading.baseline_calls:,}"
    return theirs if reading.concurrent else f"{theirs} in the steps before"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
