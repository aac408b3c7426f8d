"""A language model that lies on the disk, or in two processes by DeepSpeed, says what it says in one."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from handlers.causal_lm import CausalLM
from handlers.context import Context
from handlers.errors import HandlerLoadError
from handlers.llm import LanguageModel

pytest.importorskip("transformers")

PROMPTS = [[5, 6, 7], [100, 3, 250, 77, 9], [42]]  # of different lengths, so that a batch of them is padded
ROWS = [{"body": {"prompt": prompt, "max_new_tokens": 8}} for prompt in PROMPTS]
ROWS += [{"body": {"prompt": prompt, "logits": True}} for prompt in PROMPTS]
RANK = """
import json, os, sys, torch
from pathlib import Path
torch.set_num_threads(1)
from handlers.causal_lm import CausalLM
from handlers.context import Context
from handlers.errors import HandlerLoadError
from handlers.sharding import Place, Rendezvous

rank, port, folders, rows = (json.loads(word) for word in sys.argv[1:])
place = Place(rank, 2, rank, 2, "127.0.0.1")
meeting = Rendezvous(place) if rank == 0 else Rendezvous(place, port)
print(meeting.port, flush=True)
meeting.join()
config = {"tensor_parallel": 2, "engine": {"name": "deepspeed"}}
refused, models = [], []
for folder in folders:
    try:
        model = CausalLM()
        model.initialize(Context("m", folder, {}, model_yaml_config=config))
    except HandlerLoadError as error:
        refused.append(str(error))
held = sum(parameter.numel() for parameter in model.model.model.layers.parameters())
built = [str(file) for file in Path(os.environ["TORCH_EXTENSIONS_DIR"]).rglob("*")]
print(json.dumps([model.handle(rows, None), held, refused, built]), flush=True)
os._exit(0)  # without a farewell to the process group, whose other end may be gone
"""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights, 4 heads and 2 key-value heads, that never ends by itself."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)  # no two tokens that are as likely but for a rounding
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def loaded(folder: Path, **config: Any) -> CausalLM:
    model = CausalLM()
    model.initialize(Context("m", str(folder), {}, model_yaml_config=config))
    return model


def same(answers: list[Any], whole: list[Any]) -> bool:
    """Token for token, and logits within 1e-4."""
    assert [row.get("tokens") for row in answers] == [row.get("tokens") for row in whole]
    assert [len(row.get("tokens", ())) for row in whole] == [8, 8, 8, 0, 0, 0]
    for one, other in zip(whole[3:], answers[3:]):
        assert other["logits"] == pytest.approx(one["logits"], abs=1e-4)
    return True


@pytest.mark.parametrize(("memory", "places"), [("300KB", {"cpu", "disk"}), (0, {"disk"})])
def test_layers_on_the_disk(llama: Path, tmp_path: Path, memory: Any, places: set[str]) -> None:
    pytest.importorskip("accelerate")
    layout = {"device_map": "auto", "max_memory": {"cpu": memory}, "offload_folder": str(tmp_path / "offload")}
    model = loaded(llama, **layout)
    assert set(model.model.hf_device_map.values()) == places, "there is not room for all"
    assert same(model.handle(ROWS, None), loaded(llama).handle(ROWS, None))


def test_two_ranks_by_deepspeed(llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_embd=32, n_head=2, n_layer=1)).save_pretrained(tmp_path / "gpt2")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    env["TORCH_EXTENSIONS_DIR"] = str(tmp_path / "extensions")
    folders = [str(tmp_path / "gpt2"), str(llama)]

    def begin(rank: int, port: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", RANK, *map(json.dumps, (rank, port, folders, ROWS))]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    ranks = [begin(0, 0)]
    try:
        assert ranks[0].stdout is not None
        ranks.append(begin(1, json.loads(ranks[0].stdout.readline())))
        said = [json.loads(rank.communicate(timeout=300)[0].splitlines()[-1]) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    whole = loaded(llama)
    layers = sum(parameter.numel() for parameter in whole.model.model.layers.parameters())
    for answers, held, refused, built in said:
        assert same(answers, whole.handle(ROWS, None))
        assert held == pytest.approx(layers / 2, rel=0.01)
        assert len(refused) == 1 and "DeepSpeed cannot cut this model up" in refused[0]
        assert built == [], "nothing is compiled"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"engine": {"name": "deepsped"}}, "no engine 'deepsped'. Did you mean 'deepspeed'"),
        ({"engine": {"name": ["deepspeed"]}}, "no engine"),
        ({"engine": "deepspeed"}, "engine is 'deepspeed'; it is {name: transformers}"),
        ({"engine": {"name": "mii"}}, "mii .* kernels for NVIDIA GPUs alone.* Give num_gpus: 1 .* {name: deepspeed}"),
        ({"engine": {"name": "mii"}, "pipeline_parallel": 2}, "engine: mii .* no pipeline_parallel"),
        ({"engine": {"name": "mii"}, "device_map": "auto"}, "device_map needs engine: {name: transformers}"),
        ({"engine": {"num_blocks": 4}}, "no option 'num_blocks'"),
        ({"engine": {"name": "deepspeed"}}, "give tensor_parallel, from 2"),
        ({"engine": {"name": "deepspeed"}, "tensor_parallel": 2, "pipeline_parallel": 2}, "no pipeline_parallel"),
        ({"engine": {"name": "deepspeed"}, "tensor_parallel": 8}, "tensor_parallel: 8 does not divide"),
        ({"engine": {"name": "deepspeed"}, "device_map": "auto"}, "device_map needs engine: {name: transformers}"),
        ({"device_map": "auto", "tensor_parallel": 2}, "device_map .* tensor_parallel .* Take one of the two away"),
        ({"device_map": "auto", "pipeline_parallel": 2}, "pipeline_parallel cuts it up"),
        ({"max_memory": {"cpu": "1MB"}}, "max_memory belongs to a device_map; write device_map: auto"),
        ({"device_map": "auto", "max_memory": "1MB"}, "max_memory is '1MB'; it is {0: 20GB"),
        ({"device_map": "auto", "max_memory": {"cpu": "2 apples"}}, "max_memory: .*2 apples"),
        ({"device_map": "auto", "max_memory": {"gpu": "2GB"}}, "max_memory: .*gpu is not recognized"),
        ({"device_map": "everywhere"}, "device_map: .*everywhere|everywhere"),
    ],
)
def test_what_cannot_be_is_refused_with_the_cure(llama: Path, config: dict[str, Any], why: str) -> None:
    with pytest.raises(HandlerLoadError, match=why):
        loaded(llama, **config)


def test_llm_has_its_model_in_one_place(language_model: Path) -> None:
    context = Context("m", str(language_model), {}, model_yaml_config={"device_map": "auto"})
    with pytest.raises(HandlerLoadError, match="without device_map. Take tensor_parallel, or the handler causal_lm"):
        asyncio.run(LanguageModel().initialize(context))
