"""DeepSpeed-MII behind ``causal_lm``.

Where there is no GPU a model of transformers stands in for its kernels, so what runs is all of MII but these.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from handlers import mii
from handlers.causal_lm import CausalLM
from handlers.context import Context
from handlers.errors import HandlerLoadError

pytest.importorskip("transformers")

PROMPTS = [[5, 6, 7], [100, 3, 250, 77, 9], [42], list(range(1, 40))]
ROWS = [{"body": {"prompt": prompt, "max_new_tokens": 8 + index}} for index, prompt in enumerate(PROMPTS)]
ROWS += [{"body": {"prompt": prompt, "logits": True}} for prompt in PROMPTS]
RANK = """
import json, os, sys, torch
torch.set_num_threads(1)
from handlers.sharding import Place, Rendezvous
rank, port, folder, rows = (json.loads(word) for word in sys.argv[1:])
place = Place(rank, 2, rank, 2, "127.0.0.1")
meeting = Rendezvous(place) if rank == 0 else Rendezvous(place, port)
print(meeting.port, flush=True)
meeting.join()
sys.path.insert(0, {here!r})
import test_mii
torch.cuda.synchronize = lambda: None
model = test_mii.served(test_mii.Path(folder))
print(json.dumps([model.handle(rows, None), len(model.model._engine.heard)]), flush=True)
os._exit(0)  # without a farewell to the process group, whose other end may be gone
"""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights that never ends by itself, its heads as wide as the kernels want them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


class Kernels:
    """What DeepSpeed's inference engine is to MII, by a model of transformers and in so few tokens that it has to wait.

    ``heard`` are the forwards that it ran, and the pages of a sequence hold 16 tokens.
    """

    page = 16

    def __init__(self, folder: Path, pages: int = 8) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        limits = SimpleNamespace(max_ragged_sequence_count=3, max_ragged_batch_size=24)
        self._config = SimpleNamespace(state_manager=limits)
        longest = SimpleNamespace(max_seq_length=self.model.config.max_position_embeddings)
        self._policy = SimpleNamespace(_checkpoint_engine=SimpleNamespace(model_config=longest))
        self.seen: dict[int, list[int]] = {}
        self.heard: list[int] = []
        self.pages = pages

    def _held(self, tokens: int) -> int:
        return -(-tokens // self.page)

    @property
    def free_blocks(self) -> list[int]:
        return [self.pages - sum(self._held(len(tokens)) for tokens in self.seen.values())]

    def query(self, uid: int, tokens: int, pages: int) -> tuple[int, int]:
        seen = len(self.seen.get(uid, ()))
        wanted = self._held(seen + tokens) - self._held(seen)
        return (tokens, wanted) if wanted <= pages else ((pages + self._held(seen)) * self.page - seen, pages)

    def get_remaining_block_capacity(self, uid: int) -> int:
        return len(self.seen.get(uid, ())) % self.page

    def put(self, uids: list[int], tokens: list[torch.Tensor], do_checks: bool = True) -> torch.Tensor:
        self.heard.append(sum(map(len, tokens)))
        assert not do_checks or self.heard[-1] <= 256
        for uid, new in zip(uids, tokens):
            self.seen.setdefault(uid, []).extend(new.tolist())
        assert self.free_blocks[0] >= 0
        with torch.inference_mode():
            return torch.cat([self.model(torch.tensor([self.seen[uid]])).logits[:, -1] for uid in uids])

    def flush(self, uid: int) -> None:
        self.seen.pop(uid, None)


def loaded(folder: Path, gpu_id: int | None = None, **config: Any) -> CausalLM:
    model = CausalLM()
    context = Context("m", str(folder), {}, model_yaml_config=config)
    context.system_properties["gpu_id"] = gpu_id
    model.initialize(context)
    return model


def served(folder: Path, **generation: Any) -> CausalLM:
    """``causal_lm`` with MII, whose kernels are stood in for."""
    from mii.config import ModelConfig

    kernels = Kernels(folder)
    requests, group = mii._ports()
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    settings = ModelConfig(
        model_name_or_path=str(folder), tensor_parallel=world, zmq_port_number=requests, torch_dist_port=group
    )
    model = CausalLM()
    for name, value in generation.items():
        setattr(kernels.model.generation_config, name, value)
    model.model = mii.Ragged(kernels, kernels.model.config, kernels.model.generation_config, settings).eval()
    model._end = generation.get("eos_token_id") or []
    return model


def whole(folder: Path) -> CausalLM:
    model = loaded(folder)
    model.model.float()
    return model


def same(answers: list[Any], expected: list[Any]) -> bool:
    assert [row.get("tokens") for row in answers] == [row.get("tokens") for row in expected]
    for one, other in zip(expected[4:], answers[4:]):
        assert other["logits"] == pytest.approx(one["logits"], abs=1e-4)
    return True


def test_mii_schedules_what_transformers_would_say(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mii")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    model = served(llama)
    expected = whole(llama).handle(ROWS, None)
    assert [len(row.get("tokens", ())) for row in expected] == [8, 9, 10, 11, 0, 0, 0, 0]
    assert same(model.handle(ROWS, None), expected)
    assert same(model.handle(ROWS[:1], None), expected[:1]), "and again"
    heard, kernels = model.model._engine.heard, model.model._engine
    model.model._pipeline.destroy()
    assert sorted(heard)[-2:] == [24, 39], "prompts to go on from in pieces, those to score whole"
    assert kernels.seen == {}, "and nothing stays"


def test_an_answer_ends_where_the_model_ends_it(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mii")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    tokens = whole(llama).handle(ROWS[:2], None)
    end = [tokens[0]["tokens"][3]]
    model = served(llama, eos_token_id=end)
    answers = model.handle(ROWS[:1], None)
    model.model._pipeline.destroy()
    assert answers == [{"tokens": tokens[0]["tokens"][: tokens[0]["tokens"].index(end[0])]}]


def test_two_ranks_hear_of_the_same_requests(llama: Path) -> None:
    pytest.importorskip("mii")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    program = RANK.replace("{here!r}", repr(str(Path(__file__).parent)))

    def begin(rank: int, port: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program, *map(json.dumps, (rank, port, str(llama), ROWS))]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)

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
    (answers, forwards), (_, also) = said
    assert same(answers, whole(llama).handle(ROWS, None))
    assert also == forwards, "a forward on one is a forward on all"


@pytest.mark.parametrize(
    ("spoil", "environment", "why"),
    [
        ("", {"LOCAL_WORLD_SIZE": "2"}, "ranks of engine: mii talk within one machine.* STRICT_PACK"),
        ("ds_model_config.pkl", {}, "engine: mii would run what is pickled in it. Save .* as safetensors"),
        ("model.safetensors", {}, "engine: mii would run what is pickled in it. Save .* as safetensors"),
    ],
)
def test_what_mii_cannot_is_refused_where_there_is_a_gpu(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: str, environment: dict[str, str], why: str
) -> None:
    pytest.importorskip("mii")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    if spoil.endswith(".pkl"):
        (tmp_path / spoil).touch()
    elif spoil:
        (tmp_path / spoil).unlink()
    with pytest.raises(HandlerLoadError, match=why):
        loaded(tmp_path, 0, engine={"name": "mii"}, tensor_parallel=1)


@pytest.mark.skipif(importlib.util.find_spec("mii") is not None, reason="DeepSpeed-MII is installed")
def test_a_gpu_without_mii_is_told_what_to_install(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(HandlerLoadError, match=r"mii is not installed: pip install 'torchrelay\[mii\]' where"):
        loaded(llama, 0, engine={"name": "mii"})


@pytest.mark.gpu
def test_mii_on_a_gpu(llama: Path) -> None:
    """Each token is what transformers finds likeliest there, or as likely as bfloat16 can tell."""
    pytest.importorskip("mii")
    answers = loaded(llama, 0, engine={"name": "mii"}).handle(ROWS, None)
    plain = whole(llama)
    for row, answer, other in zip(ROWS, answers, plain.handle(ROWS, None)):
        if "logits" in answer:
            assert answer["logits"] == pytest.approx(other["logits"], abs=0.1)
            continue
        assert len(answer["tokens"]) == row["body"]["max_new_tokens"]
        said = [*row["body"]["prompt"], *answer["tokens"]]
        with torch.inference_mode():
            logits = plain.model(torch.tensor([said], device=plain.model.device)).logits[0].float()
        for place in range(len(row["body"]["prompt"]), len(said)):
            assert logits[place - 1, said[place]] >= logits[place - 1].max() - 0.1
