"""Tests of DeepSpeed-MII in ``causal_lm``.

Without a GPU, a model of transformers replaces MII's kernels; the rest of MII runs as it is.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from handlers.builtin.causal_lm import CausalLM
from handlers.context import Context
from handlers.distributed import mii
from handlers.errors import HandlerLoadError
from tests.support.rank_programs import run_ranks
from tests.support.requirements import needs_no_package

PROMPTS = [[5, 6, 7], [100, 3, 250, 77, 9], [42], list(range(1, 40))]
ROWS = [{"body": {"prompt": prompt, "max_new_tokens": 8 + index}} for index, prompt in enumerate(PROMPTS)]
ROWS += [{"body": {"prompt": prompt, "logits": True}} for prompt in PROMPTS]
SAMPLED = [
    {"body": {"prompt": [5, 6], "max_new_tokens": 9, "temperature": 0.8, "seed": 2}},
    {"body": {"prompt": [9], "max_new_tokens": 5, "top_k": 9, "seed": 4, "presence_penalty": 1}},
]
RANK = """
folder, rows, here = arguments
sys.path.insert(0, here)
import test_mii
torch.cuda.synchronize = lambda: None
model = test_mii.load_with_fake_kernels(test_mii.Path(folder))
result = [model.handle(rows, None), len(model.model._engine.forward_sizes)]
"""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random Llama without an end token, with the head size that the kernels need."""
    from tests.support.hf_folders import save_llama

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2}
    return save_llama(tmp_path_factory.mktemp("llama"), torch.bfloat16, **sizes)


class FakeKernels:
    """A model of transformers with the interface of DeepSpeed's inference engine.

    Its limits are so low that requests queue. ``forward_sizes`` are the tokens of each forward; the pages of
    a sequence hold 16 tokens.
    """

    page = 16

    def __init__(self, folder: Path, pages: int = 8) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        limits = SimpleNamespace(max_ragged_sequence_count=3, max_ragged_batch_size=24)
        self._config = SimpleNamespace(state_manager=limits)
        model_config = SimpleNamespace(max_seq_length=self.model.config.max_position_embeddings)
        self._policy = SimpleNamespace(_checkpoint_engine=SimpleNamespace(model_config=model_config))
        self.sequences: dict[int, list[int]] = {}
        self.forward_sizes: list[int] = []
        self.pages = pages

    def _page_count(self, tokens: int) -> int:
        return -(-tokens // self.page)

    @property
    def free_blocks(self) -> list[int]:
        return [self.pages - sum(self._page_count(len(tokens)) for tokens in self.sequences.values())]

    def query(self, uid: int, tokens: int, pages: int) -> tuple[int, int]:
        length = len(self.sequences.get(uid, ()))
        used = self._page_count(length)
        needed = self._page_count(length + tokens) - used
        return (tokens, needed) if needed <= pages else ((pages + used) * self.page - length, pages)

    def get_remaining_block_capacity(self, uid: int) -> int:
        return len(self.sequences.get(uid, ())) % self.page

    def put(self, uids: list[int], tokens: list[torch.Tensor], do_checks: bool = True) -> torch.Tensor:
        self.forward_sizes.append(sum(map(len, tokens)))
        assert not do_checks or self.forward_sizes[-1] <= 256
        for uid, new in zip(uids, tokens):
            self.sequences.setdefault(uid, []).extend(new.tolist())
        assert self.free_blocks[0] >= 0
        with torch.inference_mode():
            return torch.cat([self.model(torch.tensor([self.sequences[uid]])).logits[:, -1] for uid in uids])

    def flush(self, uid: int) -> None:
        self.sequences.pop(uid, None)


def load_model(folder: Path, gpu_id: int | None = None, **config: Any) -> CausalLM:
    model = CausalLM()
    context = Context("m", str(folder), {}, model_yaml_config=config)
    context.system_properties["gpu_id"] = gpu_id
    model.initialize(context)
    return model


def load_with_fake_kernels(folder: Path, **generation: Any) -> CausalLM:
    """Return ``causal_lm`` with MII on fake kernels."""
    from mii.config import ModelConfig

    kernels = FakeKernels(folder)
    request_port, group_port = mii._free_ports()
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    settings = ModelConfig(
        model_name_or_path=str(folder),
        tensor_parallel=world,
        zmq_port_number=request_port,
        torch_dist_port=group_port,
    )
    model = CausalLM()
    for name, value in generation.items():
        setattr(kernels.model.generation_config, name, value)
    model.model = mii.RaggedEngine(
        kernels, kernels.model.config, kernels.model.generation_config, settings
    ).eval()
    model._end_tokens = generation.get("eos_token_id") or []
    return model


def load_reference(folder: Path) -> CausalLM:
    model = load_model(folder)
    model.model.float()
    return model


def assert_equal(answers: list[Any], expected: list[Any]) -> None:
    assert [row.get("tokens") for row in answers] == [row.get("tokens") for row in expected]
    for answer, reference in zip(answers[4:], expected[4:]):
        assert answer["logits"] == pytest.approx(reference["logits"], abs=1e-4)


def test_mii_generates_the_same_as_transformers(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mii")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    model = load_with_fake_kernels(llama)
    expected = load_reference(llama).handle(ROWS, None)
    assert [len(row.get("tokens", ())) for row in expected] == [8, 9, 10, 11, 0, 0, 0, 0]
    assert_equal(model.handle(ROWS, None), expected)
    assert_equal(model.handle(ROWS[:1], None), expected[:1])
    assert model.handle(SAMPLED, None) == load_reference(llama).handle(SAMPLED, None)
    kernels = model.model._engine
    model.model._pipeline.destroy()
    # Prompts to continue are split into chunks; prompts to score run in one forward.
    assert sorted(kernels.forward_sizes)[-2:] == [24, 39]
    assert kernels.sequences == {}, "all sequences are flushed"


def test_the_end_token_ends_a_completion(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mii")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    tokens = load_reference(llama).handle(ROWS[:2], None)
    end = [tokens[0]["tokens"][3]]
    model = load_with_fake_kernels(llama, eos_token_id=end)
    answers = model.handle(ROWS[:1], None)
    model.model._pipeline.destroy()
    assert answers == [{"tokens": tokens[0]["tokens"][: tokens[0]["tokens"].index(end[0])]}]


def test_two_ranks_run_the_same_forwards(llama: Path) -> None:
    pytest.importorskip("mii")
    (answers, forwards), (_, other_forwards) = run_ranks(RANK, str(llama), ROWS, str(Path(__file__).parent))
    assert_equal(answers, load_reference(llama).handle(ROWS, None))
    assert other_forwards == forwards


@pytest.mark.parametrize(
    ("changed_file", "environment", "message"),
    [
        ("", {"LOCAL_WORLD_SIZE": "2"}, "ranks of engine: mii talk within one machine.* STRICT_PACK"),
        ("ds_model_config.pkl", {}, "engine: mii would run what is pickled in it. Save .* as safetensors"),
        ("model.safetensors", {}, "engine: mii would run what is pickled in it. Save .* as safetensors"),
    ],
)
def test_unsupported_models_are_rejected_on_a_gpu(
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changed_file: str,
    environment: dict[str, str],
    message: str,
) -> None:
    pytest.importorskip("mii")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    if changed_file.endswith(".pkl"):
        (tmp_path / changed_file).touch()
    elif changed_file:
        (tmp_path / changed_file).unlink()
    with pytest.raises(HandlerLoadError, match=message):
        load_model(tmp_path, 0, engine={"name": "mii"}, tensor_parallel=1)


@needs_no_package("mii")
def test_missing_mii_names_the_package_to_install(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(
        HandlerLoadError,
        match=r"which is not installed where the model runs: pip install 'torchrelay\[mii\]'",
    ):
        load_model(llama, 0, engine={"name": "mii"})


@pytest.mark.gpu
def test_mii_on_a_gpu(llama: Path) -> None:
    """Check each token to be transformers' most likely one, within the precision of bfloat16."""
    pytest.importorskip("mii")
    answers = load_model(llama, 0, engine={"name": "mii"}).handle(ROWS, None)
    reference = load_reference(llama)
    for row, answer, expected in zip(ROWS, answers, reference.handle(ROWS, None)):
        if "logits" in answer:
            assert answer["logits"] == pytest.approx(expected["logits"], abs=0.1)
            continue
        assert len(answer["tokens"]) == row["body"]["max_new_tokens"]
        tokens = [*row["body"]["prompt"], *answer["tokens"]]
        with torch.inference_mode():
            logits = reference.model(torch.tensor([tokens], device=reference.model.device)).logits[0].float()
        for position in range(len(row["body"]["prompt"]), len(tokens)):
            assert logits[position - 1, tokens[position]] >= logits[position - 1].max() - 0.1
