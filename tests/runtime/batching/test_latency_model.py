"""What the latest batches say about the next one."""

import random

import pytest

from serve_app.runtime.batching.admission_control import BatchLatencyModel


def after(*batches):
    pace = BatchLatencyModel()
    for rows, seconds in batches:
        pace.record(rows, seconds)
    return pace


def test_nothing_is_known_before_anything_ran():
    assert BatchLatencyModel().estimate(16) == 0.0
    assert not after(*[(1, 0.1)] * 4).is_ready
    assert after(*[(1, 0.1)] * 5).is_ready


def test_batches_of_one_size_are_taken_for_whichever_is_quicker():
    small, large = after((1, 0.1)), after((16, 1.6))
    assert small.estimate(16) == pytest.approx(0.1), "as if a batch cost the same for any size"
    assert large.estimate(1) == pytest.approx(0.1), "as if every row cost the same"


@pytest.mark.parametrize(("fixed", "per_row"), [(0.01, 0.0), (0.0, 0.003), (0.01, 0.002)])
def test_batches_of_several_sizes_say_what_a_row_costs(fixed, per_row):
    draw = random.Random(3)
    sizes = [draw.randint(1, 16) for _ in range(100)]
    pace = after(*((n, (fixed + per_row * n) * draw.uniform(0.95, 1.05)) for n in sizes))
    for n in (1, 8, 16):
        assert pace.estimate(n) == pytest.approx(fixed + per_row * n, rel=0.35, abs=1e-3)


def test_one_slow_batch_is_forgotten_soon():
    pace = after(*[(1, 0.01)] * 20, (1, 60.0))
    assert pace.estimate(1) < 0.03
    for _ in range(5):
        pace.record(1, 0.01)
    assert pace.estimate(1) < 0.015


def test_a_slow_first_batch_is_forgotten_too():
    assert after((1, 60.0), *[(1, 0.01)] * 15).estimate(1) < 0.03


def test_a_model_that_became_slow_is_believed_before_long():
    assert after(*[(1, 0.01)] * 20, *[(1, 1.0)] * 15).estimate(1) > 0.8
