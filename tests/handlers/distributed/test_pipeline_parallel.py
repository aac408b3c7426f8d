"""Tests of pipeline parallelism: two processes generate the same as one."""

from __future__ import annotations

from pathlib import Path

import pytest

from handlers.builtin.causal_lm import CausalLM
from handlers.context import Context
from tests.support.hf_folders import save_llama
from tests.support.rank_programs import run_ranks

pytestmark = pytest.mark.slow


PROMPTS = [[5, 6, 7], [100, 3, 250, 77, 9], [42]]  # of different lengths, so that their batch is padded
ROWS = [{"body": {"prompt": prompt, "max_new_tokens": 8}} for prompt in PROMPTS]
ROWS += [{"body": {"prompt": prompt, "logits": True}} for prompt in PROMPTS]
ROWS += [{"body": {"prompt": [7, 8], "max_new_tokens": 8, "temperature": 1.0, "seed": 3}}]
ROWS += [{"body": {"prompt": [7, 8, 9], "max_new_tokens": 8, "temperature": 1.0}}]
RANK = """
from handlers.builtin.causal_lm import CausalLM
from handlers.context import Context

folder, rows = arguments
model = CausalLM()
model.initialize(Context("m", folder, {}, model_yaml_config={"pipeline_parallel": 2}))
torch.manual_seed(rank)
result = model.handle(rows, None)
"""


@pytest.mark.nightly
def test_two_ranks_generate_the_same_as_one(tmp_path: Path) -> None:
    save_llama(tmp_path)
    actual, other = run_ranks(RANK, str(tmp_path), ROWS)
    model = CausalLM()
    model.initialize(Context("m", str(tmp_path), {}))
    expected = model.handle(ROWS, None)
    assert [row.get("tokens") for row in actual[:7]] == [row.get("tokens") for row in expected[:7]]
    assert actual[7] == other[7], "all ranks take the same tokens without a seed"
    assert all(len(row["tokens"]) == 8 for row in expected[:3])
    for row, reference in zip(actual[3:6], expected[3:6]):
        assert row["logits"] == pytest.approx(reference["logits"], abs=1e-4)
