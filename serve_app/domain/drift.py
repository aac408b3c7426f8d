"""Drift of a distribution from a reference: the population stability index and the Kolmogorov-Smirnov test.

Pure functions. Numbers are given as sorted values with their weights, so that samples and sketches are
treated alike.

Sources: N. Siddiqi, "Credit Risk Scorecards" (2006), for the index with its thresholds 0.1 and 0.25;
B. Yurdakul and J. Naranjo, "Statistical properties of the population stability index", Journal of Risk Model
Validation 14 (2020), for its distribution without drift; N. Smirnov, "Table for estimating the goodness of
fit of empirical distributions", Annals of Mathematical Statistics 19 (1948), for the critical value of the
test; E. Wilson and M. Hilferty, "The distribution of chi-square", PNAS 17 (1931), for its quantiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

DriftLevel = Literal["none", "moderate", "major"]
LEVELS: tuple[DriftLevel, ...] = ("none", "moderate", "major")

MODERATE = 0.1  # population stability index
MAJOR = 0.25
BINS = 10  # of the reference, each with the same share of its values
_SMOOTHING = 0.5  # is added to the count of each bin, so that an empty bin has no infinite logarithm
_ALPHA = 0.05  # of the Kolmogorov-Smirnov test
_Z_99 = 2.3263478740408408  # the normal distribution's quantile 0.99

Weighted = tuple[np.ndarray, np.ndarray]  # sorted values, and the weight of each


def to_weighted(values: Sequence[float] | np.ndarray) -> Weighted:
    """Return a sample as sorted values of weight one."""
    ordered = np.sort(np.asarray(values, np.float64))
    return ordered, np.ones(len(ordered))


def quantile_edges(reference: Weighted, bins: int = BINS) -> np.ndarray:
    """Return the inner edges of bins that each have the same share of the reference.

    A bin has the values above its lower edge, up to and with its upper edge. A value that fills several
    bins alone has one of its own, so that a constant can drift in both directions.
    """
    values, weights = reference
    ranks = np.cumsum(weights) / weights.sum()
    places = np.searchsorted(ranks, np.arange(1, bins) / bins - 1e-12)
    edges, repeats = np.unique(values[places], return_counts=True)
    ties = edges[repeats > 1]
    return np.union1d(edges, np.nextafter(ties, -np.inf))


def count_bins(sample: Weighted, edges: np.ndarray) -> np.ndarray:
    """Return the weight of a sample in each bin; there is one bin more than edges."""
    values, weights = sample
    bins = np.searchsorted(edges, values, side="left")
    return np.bincount(bins, weights, minlength=len(edges) + 1)


def stability_index(reference: Sequence[float] | np.ndarray, current: Sequence[float] | np.ndarray) -> float:
    """Return the population stability index of the counts of two samples in the same bins.

    It is the sum of ``(q - p) * ln(q / p)``, where ``p`` and ``q`` are the shares of a bin after 0.5 was
    added to each count (additive smoothing by Jeffreys' prior).
    """
    p = np.asarray(reference, np.float64) + _SMOOTHING
    q = np.asarray(current, np.float64) + _SMOOTHING
    p, q = p / p.sum(), q / q.sum()
    return float(((q - p) * np.log(q / p)).sum())


def stability_index_critical(bins: int, reference: float, current: float) -> float:
    """Return the index that samples of these sizes exceed by chance in one of a hundred cases.

    Without drift the index has, times the harmonic sum of the sizes, a chi-square distribution.
    """
    freedom = max(1, bins - 1)
    part = 2 / (9 * freedom)
    chi_square = freedom * (1 - part + _Z_99 * math.sqrt(part)) ** 3
    return float(chi_square * (1 / reference + 1 / current))


def ks_statistic(reference: Weighted, current: Weighted) -> float:
    """Return the two-sample Kolmogorov-Smirnov statistic: the largest gap of the distribution functions."""
    places = np.union1d(reference[0], current[0])
    return float(np.abs(_distribution(reference, places) - _distribution(current, places)).max())


def _distribution(sample: Weighted, places: np.ndarray) -> np.ndarray:
    values, weights = sample
    totals = np.concatenate([[0.0], np.cumsum(weights)])
    shares: np.ndarray = totals[np.searchsorted(values, places, side="right")] / totals[-1]
    return shares


def ks_critical(reference: float, current: float, alpha: float = _ALPHA) -> float:
    """Return the statistic above which two samples of these sizes differ at the level ``alpha``.

    It is Smirnov's approximation for large samples.
    """
    return math.sqrt(-math.log(alpha / 2) / 2 * (reference + current) / (reference * current))


def drift_level(index: float, critical: float) -> DriftLevel:
    """Return the level of a population stability index; one within its ``critical`` value is no drift."""
    if index < MODERATE or index <= critical:
        return "none"
    return "major" if index >= MAJOR else "moderate"
