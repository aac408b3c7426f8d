"""The sample ratio alarm."""

from __future__ import annotations

import math

import numpy as np
import pytest

from serve_app.domain import sequential_statistics
from serve_app.domain.sequential_statistics import (
    sample_ratio_p_value,
)

EVERY = 100  # calls between two looks


def ratios(truth: list[float], weights: list[float], units: int, simulations: int) -> np.ndarray:
    """Return the p-values of each simulation after every hundred units."""
    random = np.random.default_rng(10)
    dealt = random.multinomial(EVERY, truth, (simulations, units // EVERY)).cumsum(axis=1)
    return np.array(
        [[sample_ratio_p_value(look, weights) for look in simulation] for simulation in dealt.tolist()]
    )


@pytest.mark.parametrize("weights", [[0.5, 0.5], [0.9, 0.1], [0.98, 0.01, 0.01]])
def test_a_fair_split_is_no_alarm(weights: list[float]) -> None:
    p_values = ratios(weights, weights, 5_000, 1_000)
    assert (p_values.min(axis=1) <= 0.01).mean() < 0.01
    assert (p_values.min(axis=1) <= 0.05).mean() < 0.05


@pytest.mark.parametrize(
    ("truth", "weights", "units"),
    [([0.47, 0.53], [1, 1], 10_000), ([0.6, 0.4], [5_000, 5_000], 1_000), ([0.92, 0.08], [9, 1], 7_000)],
)
def test_an_unfair_split_is_an_alarm(truth: list[float], weights: list[float], units: int) -> None:
    assert (ratios(truth, weights, units, 200).min(axis=1) <= 0.01).mean() > 0.97


def test_a_sample_ratio() -> None:
    assert sample_ratio_p_value([0, 0], [1, 1]) == 1.0
    assert sample_ratio_p_value([50, 50], [1, 1]) == 1.0
    assert sample_ratio_p_value([0, 100], [1, 1]) < 1e-5
    assert (
        sample_ratio_p_value([470, 530], [1, 1]) > 0.1 > 0.01 > sample_ratio_p_value([4_700, 5_300], [1, 1])
    )
    assert sample_ratio_p_value([100, 100, 0], [1, 1, 0]) == 1.0
    assert sample_ratio_p_value([100, 100, 1], [1, 1, 0]) == 0.0
    concentration = sequential_statistics._CONCENTRATION
    one = sample_ratio_p_value([40, 10], [3, 1])  # the paper's Bayes factor, by products
    factor = math.prod((0.75 * concentration + i) / 0.75 for i in range(40))
    factor *= math.prod((0.25 * concentration + i) / 0.25 for i in range(10))
    assert one == pytest.approx(min(1.0, math.prod(concentration + i for i in range(50)) / factor))
