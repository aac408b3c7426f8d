"""The search for the highest rate under a limit."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from serve_app.load_test.rate_search import LoadStep, RateOptions, best_step, find_rate
from tests.support.simulated_server import load_step

LIMIT = 0.02
OPTIONS = RateOptions(repeats=False)


@pytest.mark.parametrize("start", [5.0, 300.0, 949.0, 1500.0, 20_000.0])
def test_the_highest_rate_is_found_from_any_start(start: float) -> None:
    steps = find_rate(
        lambda rate: load_step(rate, 1000, 0.001, LIMIT), LIMIT, start, replace(OPTIONS, max_steps=30)
    )
    best = best_step(steps, LIMIT)
    assert best is not None and best.rate is not None
    assert 950 / 1.1 < best.rate <= 950  # 1 ms / (1 - rate / 1000) is 20 ms at 950


def test_a_candidate_that_misses_the_limit_at_the_floor_is_given_up() -> None:
    steps = find_rate(lambda rate: load_step(rate, 500, 0.001, LIMIT), LIMIT, 800.0, OPTIONS, floor=780.0)
    assert [step.rate for step in steps] == [800, 400]
    steps = find_rate(lambda rate: load_step(rate, 1000, 0.001, LIMIT), LIMIT, 800.0, OPTIONS, floor=780.0)
    assert len(steps) > 2


def test_a_limit_below_the_service_time_ends() -> None:
    steps = find_rate(
        lambda rate: load_step(rate, 1000, 0.03, LIMIT), LIMIT, 800.0, RateOptions(max_steps=99)
    )
    assert best_step(steps, LIMIT) is None
    assert 10 < steps[-1].rate < 40


def test_a_disturbed_step_is_repeated() -> None:
    calls: list[float] = []

    def send(rate: float) -> LoadStep:
        calls.append(rate)
        is_disturbed = len(calls) == 1
        return load_step(rate, 1 if is_disturbed else 1000, 0.001, LIMIT, lag=0.1 if is_disturbed else 0.0)

    find_rate(send, LIMIT, 500.0, replace(OPTIONS, max_steps=3))
    assert calls == [500, 500, 750]


def test_failures_count_as_late() -> None:
    step = LoadStep(100, 256, 10.0, 1000, 1000, 1000, 0, 0.001, 0.01)
    assert step.meets(0.02) and step.goodput == 100
    assert not replace(step, failed=11).meets(0.02)
    assert replace(step, failed=9).meets(0.02)
    assert not replace(step, requests=0, completed=0, within=0, p99=math.nan).meets(0.02)
    assert not replace(step, p99=0.021).meets(0.02)
