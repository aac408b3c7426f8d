"""What the guardrails of a rollout show: the candidate's calls beside the baseline's. Pure arithmetic.

**What is compared.** The candidate's calls against the baseline's of the same time. The calls of all steps count, so
that what is rare is found in the end; but each step is a stratum of its own (see strata.py), because its calls were
dealt out in its own ratio: an hour that was bad for both must not weigh more on the side that had more calls in it.
At 100 % nobody is left to compare with: there the candidate's calls of that step stand against the baseline's of the
steps before.

**How sure.** The comparisons are always-valid, so they may be looked at each second. The risk that a version goes back
which is within all its limits is ``ALPHA`` over the whole rollout, in equal parts for each guardrail, and for the steps
beside a baseline and the one at 100 %. Calls of one key are taken as independent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from serve_app.control.statistics import exceeds_share
from serve_app.control.strata import Stratum, exceeds, rates, surely_above
from serve_app.rollout import BASELINE, CANDIDATE, Guardrails, Rollout
from serve_app.telemetry.observations import ArmFigures, quantile, slower

Figures = Sequence[Mapping[str, ArmFigures]]  # of each step up to the present one, by arm

ALPHA = 0.01
_EACH = ALPHA / len(fields(Guardrails)) / 2
_LEAST_FOR_P99 = 100  # answers of each: fewer have no 99th percentile, and the first ones of a new worker are slow
_SLOW = 0.01  # the share of calls that may take longer than the p99


@dataclass(frozen=True)
class Reading:
    """What a guardrail shows: the candidate's ``value`` beside the baseline's, and how far apart they may be.

    The baseline's rate is that of the steps, weighed by the candidate's calls in them. ``surely``: how much the
    candidate's is above it for certain; of p99, how many of its answers took too long for certain.
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
class _Pair:
    """Both sides' calls of one time."""

    candidate: ArmFigures
    baseline: ArmFigures


def readings(rollout: Rollout, figures: Figures) -> list[Reading]:
    """What each guardrail of the plan shows at its present step."""
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


def arm_of(figures: Figures, step: int, arm: str) -> ArmFigures:
    """What an arm's calls of one step came to."""
    return figures[step].get(arm, _NOTHING) if step < len(figures) else _NOTHING


_NOTHING = ArmFigures()
_Count = Callable[[ArmFigures], int]


def _calls(figures: ArmFigures) -> int:
    return figures.calls


def _answers(figures: ArmFigures) -> int:
    return figures.calls - figures.failures


_RATES: tuple[tuple[str, _Count, _Count], ...] = (
    ("error_rate", lambda figures: figures.failures, _calls),
    ("non_finite", lambda figures: figures.non_finite, _answers),
    ("empty", lambda figures: figures.empty, _answers),
)


def _pairs(step: int, figures: Figures, concurrent: bool) -> list[_Pair]:
    """What is compared at a step: step by step, or at 100 % the step against all before it."""
    if concurrent:
        return [_Pair(arm_of(figures, n, CANDIDATE), arm_of(figures, n, BASELINE)) for n in range(step + 1)]
    before = ArmFigures()
    for n in range(step):
        before.add(arm_of(figures, n, BASELINE))
    return [_Pair(arm_of(figures, step, CANDIDATE), before)]


def _strata(pairs: Sequence[_Pair], hits: _Count, of: _Count) -> list[Stratum]:
    return [Stratum(of(p.candidate), hits(p.candidate), of(p.baseline), hits(p.baseline)) for p in pairs]


def _rate(
    name: str, limit: float, pairs: Sequence[_Pair], concurrent: bool, hits: _Count, of: _Count
) -> Reading:
    strata = _strata(pairs, hits, of)
    reading = _seen(name, limit, strata, concurrent)
    if concurrent or reading.baseline_calls:
        surely, broken = surely_above(strata, _EACH), exceeds(strata, limit, _EACH)
        allowed = f"at most {_percent(limit)} more is allowed"
    else:  # all calls were the candidate's from the first on
        compared = exceeds_share(strata[0].calls, strata[0].hits, limit, _EACH)
        surely, broken = max(0.0, float(compared.low) + limit), bool(compared.low > 0)
        allowed = f"at most {_percent(limit)} is allowed"
    said = _against(reading, "calls" if of is _calls else "answers")
    return replace(
        reading, surely=surely, broken=broken, words=f"{said}; {allowed} (surely above: {_percent(surely)})"
    )


def _p99(multiple: float, pairs: Sequence[_Pair], concurrent: bool) -> Reading:
    """Too slow is a candidate of which surely more than 1 % take longer than the multiple of the baseline's p99.

    Surely more, too, than of the baseline's own, whose p99 is uncertain while they are few. Each step has its bar.
    """
    known = [pair for pair in pairs if _answers(pair.baseline) >= _LEAST_FOR_P99]
    candidate, baseline, strata = ArmFigures(), ArmFigures(), []
    for pair in known:
        bar = multiple * quantile(pair.baseline.latency, 0.99)
        late, others = slower(pair.candidate.latency, bar), slower(pair.baseline.latency, bar)
        strata.append(Stratum(_answers(pair.candidate), late, _answers(pair.baseline), others))
        candidate.add(pair.candidate)
        baseline.add(pair.baseline)
    reading = Reading("p99", multiple, concurrent=concurrent)
    late, calls = sum(s.hits for s in strata), sum(s.calls for s in strata)
    if calls < _LEAST_FOR_P99:
        return replace(reading, words=f"p99: not known before {_LEAST_FOR_P99} answers of each")
    among_all = exceeds_share(calls, late, _SLOW, _EACH)
    surely = max(0.0, float(among_all.low) + _SLOW)
    reading = replace(
        reading,
        value=quantile(candidate.latency, 0.99),
        baseline=quantile(baseline.latency, 0.99),
        surely=surely,
        calls=calls,
        baseline_calls=sum(s.baseline_calls for s in strata),
        broken=bool(among_all.low > 0) and exceeds(strata, 0.0, _EACH),
    )
    words = (
        f"{_against(reading, 'answers', _seconds)}; {_percent(late / calls)} took longer than {multiple:g} times that, "
        f"{_percent(_SLOW)} may (surely above: {_percent(surely)})"
    )
    return replace(reading, words=words)


def _out_of_memory(limit: int, pairs: Sequence[_Pair], concurrent: bool) -> Reading:
    """More than ``limit`` calls; and where the baseline runs out of memory as well, surely more often than it."""
    strata = _strata(pairs, lambda figures: figures.failed.get("out_of_memory", 0), _calls)
    times = sum(s.hits for s in strata)
    alone = not any(s.baseline_hits for s in strata)
    reading = _seen("out_of_memory", limit, strata, concurrent)
    return replace(
        reading,
        surely=surely_above(strata, _EACH),
        broken=times > limit and (alone or exceeds(strata, 0.0, _EACH)),
        words=f"{_against(reading, 'calls')}; {times:,} in all, at most {limit:,} may be",
    )


def _seen(name: str, limit: float, strata: Sequence[Stratum], concurrent: bool) -> Reading:
    value, baseline = rates(strata)
    calls, others = sum(s.calls for s in strata), sum(s.baseline_calls for s in strata)
    return Reading(name, limit, value, baseline, 0.0, calls, others, concurrent)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _against(reading: Reading, what: str, word: Callable[[float], str] = _percent) -> str:
    """What the two sides show."""
    if reading.value is None:
        return f"{reading.name}: no {what} yet"
    ours = f"{reading.name} {word(reading.value)} of {reading.calls:,} {what}"
    if reading.baseline is None:
        return f"{ours}, with nothing to compare with"
    theirs = f"{ours} against {word(reading.baseline)} of {reading.baseline_calls:,}"
    return theirs if reading.concurrent else f"{theirs} in the steps before"
