"""Tests of pipeline parallelism: two processes generate the same as one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

pytestmark = pytest.mark.slow


PROMPTS = [[5, 6, 7], [100, 3, 250, 77, 9], [42]]  # of different lengths, so that their batch is padded
RANK = """
import json, sys, torch
torch.set_num_threads(1)
from handlers.builtin.causal_lm import CausalLM
from handlers.context import Context
from handlers.distributed.process_group import RankPlacement, Rendezvous

rank, port, folder, rows, config = (json.loads(argument) for argument in sys.argv[1:])
if config:
    placement = RankPlacement(rank, 2, rank, 2, "127.0.0.1")
    rendezvous = Rendezvous(placement) if rank == 0 else Rendezvous(placement, port)
    print(rendezvous.port, flush=True)
    rendezvous.join()
model = CausalLM()
model.initialize(Context("m", folder, {}, model_yaml_config=config))
torch.manual_seed(rank)
print(json.dumps(model.handle(rows, None)), flush=True)
"""


def start_rank(rank: int, port: int, folder: Path, config: dict[str, Any]) -> subprocess.Popen[str]:
    rows = [{"body": {"prompt": prompt, "max_new_tokens": 8}} for prompt in PROMPTS]
    rows += [{"body": {"prompt": prompt, "logits": True}} for prompt in PROMPTS]
    rows += [{"body": {"prompt": [7, 8], "max_new_tokens": 8, "temperature": 1.0, "seed": 3}}]
    rows += [{"body": {"prompt": [7, 8, 9], "max_new_tokens": 8, "temperature": 1.0}}]
    command = [sys.executable, "-c", RANK, *map(json.dumps, (rank, port, str(folder), rows, config))]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


@pytest.mark.nightly
def test_two_ranks_generate_the_same_as_one(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=None,
    )
    torch.manual_seed(0)  # no two tokens are equally likely up to rounding
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    ranks = [start_rank(0, 0, tmp_path, {}), start_rank(0, 0, tmp_path, {"pipeline_parallel": 2})]
    try:
        _, first = ranks
        assert first.stdout is not None
        port = int(first.stdout.readline())
        ranks.append(start_rank(1, port, tmp_path, {"pipeline_parallel": 2}))
        expected, actual, other = (
            json.loads(rank.communicate(timeout=300)[0].splitlines()[-1]) for rank in ranks
        )
        assert [rank.returncode for rank in ranks] == [0, 0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [row.get("tokens") for row in actual[:7]] == [row.get("tokens") for row in expected[:7]]
    assert actual[7] == other[7], "all ranks take the same tokens without a seed"
    assert all(len(row["tokens"]) == 8 for row in expected[:3])
    for row, reference in zip(actual[3:6], expected[3:6]):
        assert row["logits"] == pytest.approx(reference["logits"], abs=1e-4)
