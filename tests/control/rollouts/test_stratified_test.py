"""Rates compared within periods: what is found, what is not held against the candidate, and how often it
errs.
"""

from __future__ import annotations

import math
import random

import pytest

from serve_app.control.rollouts.stratified_test import Stratum, exceeds, lower_bound, rates, surely_above

ALPHA = 0.001


@pytest.mark.parametrize(
    ("periods", "found"),
    [
        ([], False),
        ([Stratum(0, 0, 100, 50)], False),
        ([Stratum(50, 50, 0, 0)], False),  # nothing to compare with
        ([Stratum(1, 1, 10_000, 0)], False),
        ([Stratum(4, 4, 400, 0)], True),
        ([Stratum(20, 20, 20, 0)], True),
        ([Stratum(100, 10, 1_900, 0)], True),
        ([Stratum(60, 6, 1_140, 0)], False),
        ([Stratum(60, 6, 1_140, 0), Stratum(60, 6, 240, 0)], True),  # what neither shows alone
        ([Stratum(100, 0, 9_900, 0), Stratum(5_000, 500, 5_000, 500)], False),  # a bad hour of both
        ([Stratum(5_000, 100, 5_000, 100)], False),
        ([Stratum(5_000, 75, 5_000, 50)], False),  # half a point worse, of one that is allowed
        ([Stratum(5_000, 0, 5_000, 500)], False),  # better
    ],
)
def test_one_point_more_for_sure(periods: list[Stratum], found: bool) -> None:
    assert exceeds(periods, 0.01, ALPHA) is found
    assert (surely_above(periods, ALPHA) > 0.01) is found


def test_what_is_exceeded_for_sure_is_below_what_is_seen_and_nears_it() -> None:
    bounds = [
        surely_above([Stratum(n, n // 10, 10 * n, 0)], ALPHA) for n in (10, 100, 1_000, 10_000, 100_000)
    ]
    assert bounds == sorted(bounds)
    assert bounds[0] == 0.0
    assert 0.09 < bounds[-1] < 0.1
    periods = [Stratum(1_000, 100, 10_000, 0)]
    assert exceeds(periods, bounds[2] - 1e-4, ALPHA)
    assert not exceeds(periods, bounds[2] + 1e-4, ALPHA)


def test_a_higher_risk_finds_more() -> None:
    periods = [Stratum(80, 8, 1_520, 0)]
    assert exceeds(periods, 0.01, 0.01)
    assert not exceeds(periods, 0.01, 0.001)


def test_rates_are_weighted_over_the_same_periods() -> None:
    assert rates([Stratum(100, 0, 9_900, 0), Stratum(5_000, 500, 5_000, 500)]) == (500 / 5_100, 500 / 5_100)
    assert rates([Stratum(10, 1, 0, 0)]) == (0.1, None)
    assert rates([Stratum(0, 0, 10, 1)]) == (None, None)


@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_it_errs_as_seldom_as_it_says_while_looked_at_all_the_time(alpha: float) -> None:
    """At the edge of what is allowed, with a base rate and a split that change from stratum to stratum."""
    draw = random.Random(1)
    runs, wrong = 200, 0
    for _ in range(runs):
        periods: list[Stratum] = []
        found = False
        for base, share in ((0.02, 0.05), (0.3, 0.25), (0.0, 0.5)):
            periods.append(Stratum(0, 0, 0, 0))
            for _ in range(15):
                mine = sum(draw.random() < share for _ in range(40))
                hits = sum(draw.random() < base + 0.01 for _ in range(mine))
                theirs = sum(draw.random() < base for _ in range(40 - mine))
                s = periods[-1]
                counts = (
                    s.calls + mine,
                    s.hits + hits,
                    s.baseline_calls + 40 - mine,
                    s.baseline_hits + theirs,
                )
                periods[-1] = Stratum(*counts)
                found = found or exceeds(periods, 0.01, alpha)
        wrong += found
    assert wrong <= alpha * runs


@pytest.mark.parametrize("rate", [0.005, 0.02, 0.1, 0.5, 0.8])
def test_the_lower_bound_of_a_rate_holds_at_all_times(rate: float) -> None:
    """The exact probability that the bound is ever above the rate within 120 calls."""
    alive = {0: 1.0}  # hits so far -> probability
    for calls in range(1, 121):
        after: dict[int, float] = {}
        for hits, probability in alive.items():
            after[hits + 1] = after.get(hits + 1, 0.0) + probability * rate
            after[hits] = after.get(hits, 0.0) + probability * (1 - rate)
        alive = {hits: p for hits, p in after.items() if lower_bound(calls, hits, 0.05) <= rate}
    assert 0.95 < sum(alive.values()) < 1.0


def test_the_lower_bound_of_a_rate() -> None:
    assert lower_bound(0, 0, 0.05) == lower_bound(1_000, 0, 0.05) == 0.0
    assert lower_bound(1_000, 1_000, 0.05) == pytest.approx(1 - 0.0070, abs=1e-4)
    low = lower_bound(200, 20, 0.05)
    log = math.lgamma
    mixture = log(20.5) + log(180.5) - log(201) - math.log(math.pi)
    assert 20 * math.log(low) + 180 * math.log1p(-low) == pytest.approx(mixture + math.log(0.05))
    assert 0.01 < lower_bound(500, 25, 0.01) < 0.05
