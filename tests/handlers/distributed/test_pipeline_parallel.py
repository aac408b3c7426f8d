"""A language model whose layers lie in two processes says what it says in one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

PROMPTS = [[5, 6, 7], [100, 3, 250, 77, 9], [42]]  # of different lengths, so that a batch of them is padded
RANK = """
import json, sys, torch
torch.set_num_threads(1)
from handlers.causal_lm import CausalLM
from handlers.context import Context
from handlers.sharding import Place, Rendezvous

rank, port, folder, rows, config = (json.loads(word) for word in sys.argv[1:])
if config:
    place = Place(rank, 2, rank, 2, "127.0.0.1")
    meeting = Rendezvous(place) if rank == 0 else Rendezvous(place, port)
    print(meeting.port, flush=True)
    meeting.join()
model = CausalLM()
model.initialize(Context("m", folder, {}, model_yaml_config=config))
print(json.dumps(model.handle(rows, None)), flush=True)
"""


def begin(rank: int, port: int, folder: Path, config: dict[str, Any]) -> subprocess.Popen[str]:
    rows = [{"body": {"prompt": prompt, "max_new_tokens": 8}} for prompt in PROMPTS]
    rows += [{"body": {"prompt": prompt, "logits": True}} for prompt in PROMPTS]
    command = [sys.executable, "-c", RANK, *map(json.dumps, (rank, port, str(folder), rows, config))]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def test_rows_of_different_lengths_in_one_batch(tmp_path: Path) -> None:
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
    torch.manual_seed(0)  # no two tokens that are as likely but for a rounding
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    ranks = [begin(0, 0, tmp_path, {}), begin(0, 0, tmp_path, {"pipeline_parallel": 2})]
    try:
        alone, first = ranks
        assert first.stdout is not None
        port = int(first.stdout.readline())
        ranks.append(begin(1, port, tmp_path, {"pipeline_parallel": 2}))
        whole, split, _ = (json.loads(rank.communicate(timeout=300)[0].splitlines()[-1]) for rank in ranks)
        assert [rank.returncode for rank in ranks] == [0, 0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [row.get("tokens") for row in split] == [row.get("tokens") for row in whole]
    assert all(len(row["tokens"]) == 8 for row in whole[:3])
    for one, other in zip(whole[3:], split[3:]):
        assert other["logits"] == pytest.approx(one["logits"], abs=1e-4)
