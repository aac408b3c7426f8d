"""The benchmark of sharded models, with one small enough for a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from handlers.builtin.causal_lm import CausalLM
from handlers.context import Context
from serve_app.load_test import LoadProfile
from tests.benchmarks import generation, sharding

pytestmark = pytest.mark.nightly


def test_a_process_of_the_benchmark_answers_as_the_handler_does(tmp_path: Path) -> None:
    generation.save_model(tmp_path, 64)
    whole = CausalLM()
    whole.initialize(Context("whole", str(tmp_path), {}))
    with sharding.started(tmp_path, 1, 1, 1) as model:
        found = model.measure(sharding.TOKENS)
        result = model.contender("one", sharding.LOGITS).measure(LoadProfile(seconds=0.01))
    expected = whole.handle(sharding.rows(sharding.TOKENS), None)
    assert found["answers"] == expected and found["made"] == sum(len(row["tokens"]) for row in expected) == 64
    assert result.completed == result.requests > 0 and result.completed % len(expected) == 0
    assert 0 < result.p50 <= result.max <= result.seconds
