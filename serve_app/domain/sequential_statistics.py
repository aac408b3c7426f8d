"""Confidence sequences for means and shares that may be checked at any time: pure arithmetic, no
state.

An ordinary 95 % interval holds for one check at one time that was fixed before. Repeated checks, with a stop
at a welcome result, are wrong far more often. The results of this file hold at all times together: the
probability that a true value is *ever* outside of its interval is at most ``alpha``.

Values of an experiment's metrics come in **groups**: for each group the number of values and their sum. All
requests of one key are in the same group, so groups are independent of each other, and requests are not.
``Estimate``, ``interval`` and ``difference`` rest on that and on the central limit theorem.

Every function of numbers accepts numpy arrays too, and works on all their elements at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Groups = Mapping[int, tuple[float, float]]  # group -> how many values, and their sum
Number = Any  # a float, or an array of them

MIN_COUNT = 100  # values of each arm before a verdict: the central limit theorem needs a start
MIN_GROUPS = 30  # and as many groups of equal size
TUNED_COUNT = 1_000  # values of each arm at which intervals are as narrow as they can be
_ROUNDING = 1e-9  # of a sum: what may be left of equal values by adding them up
_PRIOR = 4  # deviations that are taken as seen before the first value, each in a group of its own
_CONCENTRATION = 300  # of the mixture over sample ratios: deviations of some percent are found soonest


@dataclass(frozen=True)
class Estimate:
    """A mean, and its uncertainty as estimated from its groups.

    ``groups``: the number of groups of equal size with the same weight (Kish's effective sample size).
    ``variance``: the square of the mean's standard error. ``degrees_of_freedom``: the certainty of that
    variance. ``third_moment``: the mean's third central moment, whose sign is the side of the larger error.
    """

    count: Number
    groups: Number
    mean: Number  # nan without values
    variance: Number
    degrees_of_freedom: Number
    third_moment: Number

    @classmethod
    def from_groups(cls, groups: Groups, rate: bool = False) -> Estimate:
        """Return the estimate of one arm's metric. ``rate``: each value is 0 or 1."""
        table = np.array(list(groups.values()), dtype=float).reshape(-1, 2)
        seen = estimate(table[:, 0], table[:, 1], rate)
        return cls(*(value[()] for value in map(np.asarray, vars(seen).values())))


def estimate(counts: np.ndarray, sums: np.ndarray, rate: bool = False) -> Estimate:
    """Return the mean of values in groups, which are the last axis; groups without values are ignored.

    The variance is that of a ratio of sums over independent groups (the delta method, robust against whatever
    happens inside of a group): ``V = G / (G - 1) * sum((sum_g - mean * count_g)**2) / count**2``.

    It stands on few large deviations where values are skewed or few keys call most, and is then uncertain
    itself.
    ``freedom`` is set: Satterthwaite's degrees of freedom from the second and fourth moments of the
    deviations, and never more than the groups less one.

    No error in n calls does not mean a rate of zero for certain. So of a ``rate`` four more deviations of 1
    are taken as seen, each in a group of its own, in the variance and not in the mean: nothing beside real
    errors, and an upper bound of about 9 / n where there are none (an exact one is 8 / n at a thousand
    calls).
    """
    with np.errstate(all="ignore"):
        count = counts.sum(axis=-1)
        occur = (counts > 0).sum(axis=-1)
        mean = sums.sum(axis=-1) / count
        deviations = sums - mean[..., None] * counts
        deviations[np.abs(deviations) <= _ROUNDING * np.abs(sums)] = 0.0
        squares = deviations * deviations
        second = squares.sum(axis=-1)
        third = np.einsum("...g,...g->...", squares, deviations) / count**3
        fourth = np.einsum("...g,...g->...", squares, squares)
        groups = count**2 / np.einsum("...g,...g->...", counts, counts)
        variance = occur / (occur - 1.0) * second / count**2
        freedom = np.fmin(2 * second**2 / np.maximum(fourth - second**2 / occur, 0.0), groups - 1)
        if rate:
            variance, freedom = _add_variances((variance, freedom), (_PRIOR / count**2, 2.0 * _PRIOR))
        variance = np.where(occur > 1, variance, np.inf)
    return Estimate(count, np.nan_to_num(groups), mean, variance, np.nan_to_num(freedom), third)


def interval(estimate: Estimate, alpha: float) -> tuple[Number, Number]:
    """Where the true mean is, at all times at once with probability 1 - ``alpha``; infinite while that is not
    known.

    An asymptotic confidence sequence: Robbins' normal mixture around an estimated variance, as in
    Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas, "Time-uniform central limit theory and asymptotic
    confidence sequences", Annals of Statistics 52 (2024), arXiv:2103.06476, Theorem 2.2:

        mean ± sqrt(V * (1 + 1 / x) * log((1 + x) / alpha**2)),    x = t * rho**2

    where V estimates the variance of the mean (theirs is the sample variance / t), t is the number of values,
    and rho is chosen as they advise to make it narrowest at t = ``TUNED_FOR``. Three things are ours, and
    each widens it where there is too little for the central limit theorem: no verdict is given before
    ``MINIMUM_COUNT`` values in
    ``MINIMUM_GROUPS`` groups; the normal law's boundary z is replaced by t where ``freedom * log(1 + t**2 /
    freedom)`` is z**2 (Wallace 1959), since V is estimated; and ``skewness * (2 * z**2 + 1) / 6`` is added to
    it, by which the ratio of a skewed mean to its estimated error goes beyond z on the side that is worse
    (Johnson 1978).
    """
    known = _has_enough_data(estimate) & (estimate.variance > 0)
    radius = _radius(
        estimate.variance, estimate.degrees_of_freedom, estimate.third_moment, estimate.count, alpha
    )
    with np.errstate(all="ignore"):
        low, high = estimate.mean - radius, estimate.mean + radius
    return np.where(known, low, -np.inf)[()], np.where(known, high, np.inf)[()]


@dataclass(frozen=True)
class MeanDifference:
    """The difference of two means, its interval, and the same as a share of the baseline's mean.

    The shares are nan while the baseline's mean is not distinguishable from zero.
    """

    difference: Number
    low: Number
    high: Number
    share: Number
    share_low: Number
    share_high: Number


def difference(arm: Estimate, baseline: Estimate, alpha: float) -> MeanDifference:
    """How far ``arm``'s mean is from ``baseline``'s, at all times at once with probability 1 - ``alpha``.

    ``interval`` for a difference: the variances add up, and t is the harmonic mean of the two counts, which
    goes as one over the variance. It is taken twice, and the wider is the answer: with the two arms' own
    variances, and with that which both would have if they were equal. The latter matters where one arm is
    small and its values rare: none among a hundred calls would have no variance at all. Where all values of
    both arms are the same, there is no verdict.

    The bounds of the share are Fieller's, with the same boundary: all r for which ``arm - (1 + r) *
    baseline`` may be zero.
    """
    with np.errstate(all="ignore"):
        gap = arm.mean - baseline.mean
        gap = np.where(np.abs(gap) <= _ROUNDING * np.abs(baseline.mean), 0.0, gap)[()]
        total, ratio = arm.count + baseline.count, arm.count / baseline.count
        count = 2.0 * baseline.count * ratio / (1.0 + ratio)
        own, freedom = _add_variances(
            (arm.variance, arm.degrees_of_freedom), (baseline.variance, baseline.degrees_of_freedom)
        )
        equal = _add_variances(
            _add_variances(
                (arm.variance * ratio, arm.degrees_of_freedom),
                (baseline.variance / ratio, baseline.degrees_of_freedom),
            ),
            (gap**2 / total, np.fmin(arm.groups, baseline.groups) - 1),
        )
        third = (arm.third_moment * arm.count**3 + baseline.third_moment * baseline.count**3) / total
        third *= 1 / arm.count**2 - 1 / baseline.count**2
        radius = np.fmax(
            _radius(own, freedom, arm.third_moment - baseline.third_moment, count, alpha),
            _radius(*equal, third, count, alpha),
        )
        begun = _has_enough_data(arm) & _has_enough_data(baseline) & (equal[0] > 0)
        low, high = np.where(begun, gap - radius, -np.inf), np.where(begun, gap + radius, np.inf)
        # Fieller: (arm - r * baseline)**2 <= boundary * (V_arm + r**2 * V_baseline), a parabola in r
        squared = radius**2 / own
        leading = baseline.mean**2 - squared * baseline.variance
        last = arm.mean**2 - squared * arm.variance
        middle = arm.mean * baseline.mean
        root = np.sqrt(np.maximum(middle**2 - leading * last, 0.0))
        bounded = begun & (own > 0) & (leading > 0)
        ends = (middle - root) / leading - 1, (middle + root) / leading - 1
        # A share of a negative mean grows to the other side.
        below, above = np.where(baseline.mean < 0, (-ends[1], -ends[0]), ends)
        shares = (
            np.where(bounded, value, np.nan)[()] for value in (gap / np.abs(baseline.mean), below, above)
        )
    return MeanDifference(gap, low[()], high[()], *shares)


def required_growth(arm: Estimate, baseline: Estimate, effect: float, alpha: float) -> float:
    """Return the factor by which the count must grow to show a difference of ``effect`` in four experiments
    of five.

    The factor is approximate: the variance is assumed to fall as one over the count, as it does while new
    keys arrive.
    """
    variance = float(arm.variance + baseline.variance)
    count = 2.0 / (1.0 / arm.count + 1.0 / baseline.count)
    times = 1.0
    for _ in range(20):  # the boundary grows with the logarithm of the count: this settles in a few rounds
        times = (math.sqrt(float(boundary(count * times, alpha))) + 0.84) ** 2 * variance / effect**2
    return times


def boundary(count: Number, alpha: float) -> Number:
    """Return the square of the number of standard errors by which a mean of ``count`` values may be off,
    at any time.
    """
    log = -2.0 * math.log(alpha)
    x = count * (log + math.log1p(log)) / TUNED_COUNT
    return (1 + 1 / x) * (np.log1p(x) + log)


def _radius(variance: Number, freedom: Number, third: Number, count: Number, alpha: float) -> Number:
    with np.errstate(all="ignore"):
        squared = boundary(count, alpha)
        errors = np.sqrt(freedom * np.expm1(squared / freedom))
        errors += np.abs(third) / variance**1.5 * (2 * squared + 1) / 6
        return np.sqrt(variance) * errors


def _has_enough_data(estimate: Estimate) -> Number:
    enough = (estimate.count >= MIN_COUNT) & (estimate.groups >= MIN_GROUPS)
    return enough & np.isfinite(estimate.mean)


def _add_variances(one: tuple[Number, Number], other: tuple[Number, Number]) -> tuple[Number, Number]:
    """Return the sum of two variances, and its degrees of freedom (Welch and Satterthwaite)."""
    total = one[0] + other[0]
    parts = sum(np.where(variance > 0, variance**2 / freedom, 0.0) for variance, freedom in (one, other))
    return total, total**2 / parts


def sample_ratio_p_value(units: Sequence[float], weights: Sequence[float]) -> float:
    """Return the p-value of the arms' sizes against their weights; it may be checked at any time, with alarm
    at 0.01.

    ``units``: the number of independent units of each arm: distinct keys, or requests where each request is
    assigned by itself. Requests of a keyed experiment are not independent: a busy client would raise an
    alarm. ``weights``: the intended split, in any unit.

    Lindon and Malek, "Anytime-valid inference for multinomial count data", NeurIPS 2022, arXiv:2011.03567:
    one over the Bayes factor of a Dirichlet mixture around the weights against the weights themselves. Under
    a fair split it ever falls to p with probability p at most; the smallest value so far may be kept as the
    result.
    """
    shares = [weight / sum(weights) for weight in weights]
    if any(seen and not share for seen, share in zip(units, shares)):
        return 0.0
    total = sum(units)
    factor = math.lgamma(_CONCENTRATION) - math.lgamma(_CONCENTRATION + total)
    for seen, share in zip(units, shares):
        if share:
            prior = _CONCENTRATION * share
            factor += math.lgamma(prior + seen) - math.lgamma(prior) - seen * math.log(share)
    return math.exp(min(0.0, -factor))
