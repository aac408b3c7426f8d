"""A stratified test of whether a candidate's rate of hits exceeds a baseline's: pure arithmetic.

A stratum holds calls of one time, dealt out in one ratio. What differs from one to the next, such as an hour
that was bad for both sides, is no difference between the sides; putting all calls into one heap would make it
one.

The test is universal inference (Wasserman, Ramdas and Balakrishnan, "Universal inference", PNAS 117, 2020,
arXiv:1912.11436) with Robbins' mixtures as the alternative: the probability of all hits and misses with one
rate for each side, each mixed over Jeffreys' prior, over the greatest that the null hypothesis allows, with
rates of its own in every stratum. Under the null this is ever above 1 / alpha with probability alpha at most
(Ville's inequality), however often one looks; a later stratum may begin whenever one likes. Calls are taken
as independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_ROUNDS = 40  # of a search by halves: far finer than any rate can be known


@dataclass(frozen=True)
class Stratum:
    """The calls of one period, and how many of them were hits."""

    calls: int
    hits: int
    baseline_calls: int
    baseline_hits: int


def exceeds(periods: Sequence[Stratum], margin: float, alpha: float) -> bool:
    """Return whether the candidate's rate is surely above the baseline's by more than ``margin``."""
    return _evidence(periods, margin) >= -math.log(alpha)


def surely_above(periods: Sequence[Stratum], alpha: float) -> float:
    """Return the greatest margin that is surely exceeded; 0.0 without one."""
    inside, outside = 0.0, 1.0
    if not exceeds(periods, inside, alpha):
        return 0.0
    for _ in range(_ROUNDS // 2):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if exceeds(periods, middle, alpha) else (inside, middle)
    return inside


def lower_bound(calls: int, hits: int, alpha: float) -> float:
    """Return the rate below which the true one never is: at all times at once with probability 1 - ``alpha``.

    The bound is exact for independent calls. It is that of Robbins' mixture of likelihood ratios
    ("Statistical methods related to the law of the iterated logarithm", Annals of Mathematical Statistics 41,
    1970).
    """
    if not hits:
        return 0.0
    excluded = _mixture(calls, hits) + math.log(alpha)
    inside, outside = hits / calls, 0.0
    for _ in range(_ROUNDS):
        middle = (inside + outside) / 2
        if _likelihood(calls, hits, middle) <= excluded:
            outside = middle
        else:
            inside = middle
    return outside


def rates(periods: Sequence[Stratum]) -> tuple[float | None, float | None]:
    """Return the candidate's rate and the baseline's.

    The baseline's periods are weighed by the candidate's calls, so that both rates are comparable.
    """
    calls = sum(s.calls for s in periods)
    both = [s for s in periods if s.baseline_calls]
    weight = sum(s.calls for s in both)
    mine = sum(s.hits for s in periods) / calls if calls else None
    return mine, sum(s.calls * s.baseline_hits / s.baseline_calls for s in both) / weight if weight else None


def _evidence(periods: Sequence[Stratum], margin: float) -> float:
    """Return the logarithm of the likelihood ratio of the alternative over the null hypothesis."""
    mine = _mixture(sum(s.calls for s in periods), sum(s.hits for s in periods))
    theirs = _mixture(sum(s.baseline_calls for s in periods), sum(s.baseline_hits for s in periods))
    return mine + theirs - sum(_greatest(stratum, margin) for stratum in periods)


def _mixture(calls: int, hits: int) -> float:
    return (
        math.lgamma(hits + 0.5)
        + math.lgamma(calls - hits + 0.5)
        - math.lgamma(calls + 1.0)
        - math.log(math.pi)
    )


def _greatest(s: Stratum, margin: float) -> float:
    """Return the greatest likelihood of a stratum under the null hypothesis.

    Under it the candidate's rate is at most the baseline's plus ``margin``.
    """
    mine, theirs = _rate(s.calls, s.hits), _rate(s.baseline_calls, s.baseline_hits)
    if not s.calls or not s.baseline_calls or mine <= theirs + margin:
        return _likelihood(s.calls, s.hits, mine) + _likelihood(s.baseline_calls, s.baseline_hits, theirs)
    # On the edge of the null, where the slope is zero: it falls from one rate to the other.
    low, high = theirs, mine - margin
    for _ in range(_ROUNDS):
        rate = (low + high) / 2
        rises = _slope(s.calls, s.hits, rate + margin) + _slope(s.baseline_calls, s.baseline_hits, rate) > 0
        low, high = (rate, high) if rises else (low, rate)
    return _likelihood(s.calls, s.hits, low + margin) + _likelihood(s.baseline_calls, s.baseline_hits, low)


def _rate(calls: int, hits: int) -> float:
    return hits / calls if calls else 0.0


def _likelihood(calls: int, hits: int, rate: float) -> float:
    of_hits = hits * math.log(rate) if hits else 0.0
    return of_hits + ((calls - hits) * math.log1p(-rate) if calls > hits else 0.0)


def _slope(calls: int, hits: int, rate: float) -> float:
    return (hits / rate if hits else 0.0) - ((calls - hits) / (1 - rate) if calls > hits else 0.0)
