"""Drift statistics against SciPy and published numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from serve_app.domain import drift
from serve_app.domain.drift import to_weighted

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)
SAMPLES = st.lists(st.floats(-1e6, 1e6), min_size=4, max_size=60)  # SciPy's p-value divides by zero below


def index_of(reference, current) -> float:
    edges = drift.quantile_edges(to_weighted(reference))
    counts = (drift.count_bins(to_weighted(sample), edges) for sample in (reference, current))
    return drift.stability_index(*counts)


def test_the_index_of_known_shares() -> None:
    """Shares of 50, 30 and 20 % against 40, 35 and 25 %, each term computed by hand."""
    expected = -0.1 * math.log(0.8) + 0.05 * math.log(35 / 30) + 0.05 * math.log(1.25)
    assert drift.stability_index([5e6, 3e6, 2e6], [4e6, 3.5e6, 2.5e6]) == pytest.approx(expected, abs=1e-6)
    assert expected == pytest.approx(0.0412, abs=1e-4)


def test_an_empty_bin_is_smoothed() -> None:
    p, q = np.array([100.5, 0.5]) / 101, np.array([50.5, 50.5]) / 101
    assert drift.stability_index([100, 0], [50, 50]) == pytest.approx(((q - p) * np.log(q / p)).sum())


@settings(max_examples=50, deadline=None)
@given(SAMPLES, SAMPLES)
def test_the_statistic_is_that_of_scipy(first: list[float], second: list[float]) -> None:
    statistic = drift.ks_statistic(to_weighted(first), to_weighted(second))
    assert statistic == pytest.approx(stats.ks_2samp(first, second, method="asymp").statistic, abs=1e-12)


@settings(max_examples=50, deadline=None)
@given(NUMBERS, NUMBERS)
def test_the_index_is_symmetric_in_its_bins_and_zero_for_the_same_sample(
    first: list[float], second: list[float]
) -> None:
    edges = drift.quantile_edges(to_weighted(first))
    a, b = (drift.count_bins(to_weighted(sample), edges) for sample in (first, second))
    assert a.sum() == len(first) and b.sum() == len(second)
    assert drift.stability_index(a, a) == 0
    assert drift.stability_index(a, b) == pytest.approx(drift.stability_index(b, a))
    assert drift.stability_index(a, b) >= 0


def test_critical_values_of_the_tables() -> None:
    assert drift.ks_critical(100, 100) == pytest.approx(1.358 * math.sqrt(0.02), abs=1e-4)
    assert drift.ks_critical(50, 200, alpha=0.01) == pytest.approx(1.628 * math.sqrt(250 / 10_000), abs=1e-4)
    for bins in (2, 5, 10, 50):
        expected = stats.chi2.ppf(0.99, bins - 1) * (1 / 500 + 1 / 1000)
        assert drift.stability_index_critical(bins, 500, 1000) == pytest.approx(expected, rel=0.02)


def test_edges_are_quantiles_of_the_reference() -> None:
    edges = drift.quantile_edges(to_weighted(np.arange(1, 1001)))
    assert edges.tolist() == [100, 200, 300, 400, 500, 600, 700, 800, 900]
    assert drift.count_bins(to_weighted(np.arange(1, 1001)), edges).tolist() == [100] * 10


def test_a_constant_drifts_in_both_directions() -> None:
    constant = [5.0] * 100
    assert index_of(constant, constant) == 0
    assert index_of(constant, [4.9] * 100) > 1
    assert index_of(constant, [5.1] * 100) > 1


def test_equal_distributions_stay_below_the_thresholds_and_a_shift_exceeds_them() -> None:
    random = np.random.default_rng(0)
    reference = random.normal(0, 1, 1000)
    for _ in range(20):
        index = index_of(reference, random.normal(0, 1, 1000))
        assert drift.drift_level(index, drift.stability_index_critical(10, 1000, 1000)) == "none"
    assert drift.drift_level(index_of(reference, random.normal(0.4, 1, 1000)), 0.03) == "moderate"
    assert drift.drift_level(index_of(reference, random.normal(1, 1, 1000)), 0.03) == "major"


def test_an_index_of_few_values_that_chance_explains_is_no_drift() -> None:
    assert drift.drift_level(0.3, drift.stability_index_critical(10, 1000, 30)) == "none"
    assert drift.drift_level(0.09, 0.01) == "none"
    assert drift.drift_level(0.1, 0.01) == "moderate"
    assert drift.drift_level(0.25, 0.01) == "major"
