"""The guardrails of a rollout: the candidate's calls compared with the baseline's. Pure arithmetic.

**Comparison.** The candidate's calls are compared with the baseline's of the same time. The calls of all
steps count, so that rare failures are found in the end. Each step is a stratum of its own (see
stratified_test.py), because its calls were split in its own ratio: an hour that was bad for both arms must
not count more for the arm with more calls in it. At 100 % there is no concurrent baseline: the candidate's
calls of that step are compared with the baseline's of the steps before.

**Confidence.** The comparisons are always valid, so they may be repeated each second. The risk of rolling
back a version within all its limits is ``ALPHA`` over the whole rollout. It is divided equally among the
guardrails, and between the steps with a baseline and the one at 100 %. Calls of one key are taken as
independent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from serve_app.control.rollouts.stratified_test import Stratum, exceeds, lower_bound, rates, surely_above
from serve_app.dataplane.experiment_collector import ArmStats, count_slower, quantile
from serve_app.domain.rollout import BASELINE, CANDIDATE, Guardrails, Rollout

Figures = Sequence[Mapping[str, ArmStats]]  # of each step up to the present one, by arm

ALPHA = 0.01
_EACH = ALPHA / len(fields(Guardrails)) / 2
# Answers of each: fewer have no 99th percentile, and the first ones of a new worker are slow.
_LEAST_FOR_P99 = 100
_SLOW = 0.01  # the share of calls that may take longer than the p99


@dataclass(frozen=True)
class GuardrailReading:
    """A guardrail's reading: the candidate's ``value`` beside the baseline's, and the limit of their
    difference.

    The baseline's rate is that of the steps, weighed by the candidate's calls in them. ``surely`` is the
    lower bound of the candidate's excess; for p99, of the share of its answers that took too long.
    """

    name: str
    limit: float
    value: float | None = None
    baseline: float | None = None
    surely: float = 0.0
    calls: int = 0
    baseline_calls: int = 0
    concurrent: bool = True  # the baseline's are of the same time
    broken: bool = False
    words: str = ""


@dataclass(frozen=True)
class _PeriodCounts:
    """Both arms' calls of one period."""

    candidate: ArmStats
    baseline: ArmStats


def evaluate_guardrails(rollout: Rollout, figures: Figures) -> list[GuardrailReading]:
    """Return the readings of the plan's guardrails at its present step."""
    concurrent = rollout.plan.steps[rollout.step] < 100
    pairs = _pairs(rollout.step, figures, concurrent)
    limits = rollout.plan.guardrails
    made = [
        _rate(name, limit, pairs, concurrent, hits, of)
        for name, hits, of in _RATES
        if (limit := getattr(limits, name)) is not None
    ]
    if limits.p99 is not None:
        made.append(_p99(limits.p99, pairs, concurrent))
    if limits.out_of_memory is not None:
        made.append(_out_of_memory(limits.out_of_memory, pairs, concurrent))
    return made


def arm_of(figures: Figures, step: int, arm: str) -> ArmStats:
    """Return the statistics of an arm's calls in one step."""
    return figures[step].get(arm, _NOTHING) if step < len(figures) else _NOTHING


_NOTHING = ArmStats()
_Count = Callable[[ArmStats], int]


def _calls(figures: ArmStats) -> int:
    return figures.calls


def _answers(figures: ArmStats) -> int:
    return figures.calls - figures.failures


_RATES: tuple[tuple[str, _Count, _Count], ...] = (
    ("error_rate", lambda figures: figures.failures, _calls),
    ("non_finite", lambda figures: figures.non_finite, _answers),
    ("empty", lambda figures: figures.empty, _answers),
)


def _pairs(step: int, figures: Figures, concurrent: bool) -> list[_PeriodCounts]:
    """Return the periods to compare: each step, or at 100 % this step against all before it."""
    if concurrent:
        return [
            _PeriodCounts(arm_of(figures, n, CANDIDATE), arm_of(figures, n, BASELINE))
            for n in range(step + 1)
        ]
    before = ArmStats()
    for n in range(step):
        before.add(arm_of(figures, n, BASELINE))
    return [_PeriodCounts(arm_of(figures, step, CANDIDATE), before)]


def _periods(pairs: Sequence[_PeriodCounts], hits: _Count, of: _Count) -> list[Stratum]:
    return [Stratum(of(p.candidate), hits(p.candidate), of(p.baseline), hits(p.baseline)) for p in pairs]


def _rate(
    name: str, limit: float, pairs: Sequence[_PeriodCounts], concurrent: bool, hits: _Count, of: _Count
) -> GuardrailReading:
    periods = _periods(pairs, hits, of)
    reading = _seen(name, limit, periods, concurrent)
    if concurrent or reading.baseline_calls:
        surely, broken = surely_above(periods, _EACH), exceeds(periods, limit, _EACH)
        allowed = f"at most {_percent(limit)} more is allowed"
    else:  # all calls were the candidate's from the first on
        surely = lower_bound(periods[0].calls, periods[0].hits, _EACH)
        broken = surely > limit
        allowed = f"at most {_percent(limit)} is allowed"
    comparison = _against(reading, "requests" if of is _calls else "answers")
    return replace(
        reading,
        surely=surely,
        broken=broken,
        words=f"{comparison}; {allowed} (surely above: {_percent(surely)})",
    )


def _p99(multiple: float, pairs: Sequence[_PeriodCounts], concurrent: bool) -> GuardrailReading:
    """Compare the latencies: the share of candidate calls slower than a multiple of the baseline's p99.

    The guardrail is broken where this share is surely above 1 %, and surely above the baseline's own share,
    whose p99 is uncertain while its calls are few. Each step has a threshold of its own.
    """
    known = [pair for pair in pairs if _answers(pair.baseline) >= _LEAST_FOR_P99]
    candidate, baseline, periods = ArmStats(), ArmStats(), []
    for pair in known:
        bar = multiple * quantile(pair.baseline.latency, 0.99)
        late, others = count_slower(pair.candidate.latency, bar), count_slower(pair.baseline.latency, bar)
        periods.append(Stratum(_answers(pair.candidate), late, _answers(pair.baseline), others))
        candidate.add(pair.candidate)
        baseline.add(pair.baseline)
    reading = GuardrailReading("p99", multiple, concurrent=concurrent)
    late, calls = sum(s.hits for s in periods), sum(s.calls for s in periods)
    if calls < _LEAST_FOR_P99:
        return replace(reading, words=f"p99: not known before {_LEAST_FOR_P99} answers of each")
    surely = lower_bound(calls, late, _EACH)
    reading = replace(
        reading,
        value=quantile(candidate.latency, 0.99),
        baseline=quantile(baseline.latency, 0.99),
        surely=surely,
        calls=calls,
        baseline_calls=sum(s.baseline_calls for s in periods),
        broken=surely > _SLOW and exceeds(periods, 0.0, _EACH),
    )
    words = (
        f"{_against(reading, 'answers', _seconds)}; {_percent(late / calls)} took longer than {multiple:g} "
        f"times that, {_percent(_SLOW)} may (surely above: {_percent(surely)})"
    )
    return replace(reading, words=words)


def _out_of_memory(limit: int, pairs: Sequence[_PeriodCounts], concurrent: bool) -> GuardrailReading:
    """Compare the calls that ran out of memory: more than ``limit`` break the guardrail.

    Where the baseline runs out of memory as well, the candidate must surely do so more often.
    """
    periods = _periods(pairs, lambda figures: figures.failed.get("out_of_memory", 0), _calls)
    times = sum(s.hits for s in periods)
    alone = not any(s.baseline_hits for s in periods)
    reading = _seen("out_of_memory", limit, periods, concurrent)
    return replace(
        reading,
        surely=surely_above(periods, _EACH),
        broken=times > limit and (alone or exceeds(periods, 0.0, _EACH)),
        words=f"{_against(reading, 'requests')}; {times:,} in all, at most {limit:,} may be",
    )


def _seen(name: str, limit: float, periods: Sequence[Stratum], concurrent: bool) -> GuardrailReading:
    value, baseline = rates(periods)
    calls, others = sum(s.calls for s in periods), sum(s.baseline_calls for s in periods)
    return GuardrailReading(name, limit, value, baseline, 0.0, calls, others, concurrent)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _against(reading: GuardrailReading, what: str, word: Callable[[float], str] = _percent) -> str:
    """Return both arms' values in words."""
    if reading.value is None:
        return f"{reading.name}: no {what} yet"
    ours = f"{reading.name} {word(reading.value)} of {reading.calls:,} {what}"
    if reading.baseline is None:
        return f"{ours}, with nothing to compare with"
    theirs = f"{ours} against {word(reading.baseline)} of {reading.baseline_calls:,}"
    return theirs if reading.concurrent else f"{theirs} in the steps before"
