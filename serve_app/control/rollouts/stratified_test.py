"""Whether hits are more frequent among a candidate's calls than a baseline's, stratum by stratum: pure arithmetic.

A stratum holds calls of one time, dealt out in one ratio. What differs from one to the next, such as an hour that was
bad for both sides, is no difference between the sides; putting all calls into one heap would make it one.

The test is universal inference (Wasserman, Ramdas and Balakrishnan, "Universal inference", PNAS 117, 2020,
arXiv:1912.11436) with Robbins' mixtures as the alternative: the probability of all hits and misses with one rate for
each side, each mixed over Jeffreys' prior, over the greatest that the null hypothesis allows, with rates of its own in
every stratum. Under the null this is ever above 1 / alpha with probability alpha at most (Ville's inequality), however
often one looks; a later stratum may begin whenever one likes. Calls are taken as independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_ROUNDS = 40  # of a search by halves: far finer than any rate can be known


@dataclass(frozen=True)
class Stratum:
    """Calls of one time, and how many of them were hits."""

    calls: int
    hits: int
    baseline_calls: int
    baseline_hits: int


def exceeds(strata: Sequence[Stratum], margin: float, alpha: float) -> bool:
    """Whether in some stratum, for sure, the candidate's rate is above the baseline's by more than ``margin``."""
    return _evidence(strata, margin) >= -math.log(alpha)


def surely_above(strata: Sequence[Stratum], alpha: float) -> float:
    """The greatest margin that is exceeded for sure; 0.0 where none is."""
    inside, outside = 0.0, 1.0
    if not exceeds(strata, inside, alpha):
        return 0.0
    for _ in range(_ROUNDS // 2):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if exceeds(strata, middle, alpha) else (inside, middle)
    return inside


def rates(strata: Sequence[Stratum]) -> tuple[float | None, float | None]:
    """The candidate's rate, and the baseline's in strata weighed by the candidate's calls, so that both compare."""
    calls = sum(s.calls for s in strata)
    both = [s for s in strata if s.baseline_calls]
    weight = sum(s.calls for s in both)
    mine = sum(s.hits for s in strata) / calls if calls else None
    return mine, sum(s.calls * s.baseline_hits / s.baseline_calls for s in both) / weight if weight else None


def _evidence(strata: Sequence[Stratum], margin: float) -> float:
    """The logarithm of how much likelier everything is under the alternative."""
    mine = _mixture(sum(s.calls for s in strata), sum(s.hits for s in strata))
    theirs = _mixture(sum(s.baseline_calls for s in strata), sum(s.baseline_hits for s in strata))
    return mine + theirs - sum(_greatest(stratum, margin) for stratum in strata)


def _mixture(calls: int, hits: int) -> float:
    return math.lgamma(hits + 0.5) + math.lgamma(calls - hits + 0.5) - math.lgamma(calls + 1.0) - math.log(math.pi)


def _greatest(s: Stratum, margin: float) -> float:
    """The greatest likelihood of a stratum in which the candidate's rate is the baseline's and ``margin`` at most."""
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
