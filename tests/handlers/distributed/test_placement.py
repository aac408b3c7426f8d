"""Tests of loading over devices and with DeepSpeed: the model generates the same as in one process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from handlers.builtin.causal_lm import CausalLM
from handlers.builtin.llm import LanguageModel
from handlers.context import Context
from handlers.errors import HandlerLoadError
from tests.support.rank_programs import run_ranks

pytestmark = pytest.mark.integration


PROMPTS = [[5, 6, 7], [100, 3, 250, 77, 9], [42]]  # of different lengths, so that their batch is padded
ROWS = [{"body": {"prompt": prompt, "max_new_tokens": 8}} for prompt in PROMPTS]
ROWS += [{"body": {"prompt": prompt, "logits": True}} for prompt in PROMPTS]
# Of a model with a tokenizer: the first two are sampled, and the last one without a seed.
SAMPLED: list[Any] = [
    {"prompt": "Once upon", "max_new_tokens": 16, "temperature": 0.9, "seed": 4, "stream": True},
    {"prompt": "a", "max_new_tokens": 12, "top_k": 20, "seed": 5, "frequency_penalty": 1.0},
    {"prompt": "Once", "max_new_tokens": 8},
    {"prompt": "Once", "max_new_tokens": 24, "temperature": 1.2},
]
RANK = """
from pathlib import Path
from handlers.builtin.causal_lm import CausalLM
from handlers.context import Context
from handlers.errors import HandlerLoadError

folders, rows, texts, sampled, here = arguments
config = {"tensor_parallel": 2, "engine": {"name": "deepspeed"}}
errors = []
for folder in folders:
    try:
        model = CausalLM()
        model.initialize(Context("m", folder, {}, model_yaml_config=config))
    except HandlerLoadError as error:
        errors.append(str(error))
parameters = sum(parameter.numel() for parameter in model.model.model.layers.parameters())
built = [str(file) for file in Path(os.environ["TORCH_EXTENSIONS_DIR"]).rglob("*")]
values = model.handle(rows, None)
model = CausalLM()
model.initialize(Context("m", texts, {}, model_yaml_config=config))
sys.path.insert(0, here)
from test_placement import handle_streams
result = [values, parameters, errors, built, handle_streams(model, sampled)]
"""


def handle_streams(model: CausalLM, bodies: list[Any]) -> list[Any]:
    """Return the values of a batch, with the chunks of its streams in them."""
    context, chunks = Context("m", "/m", {}), [""] * len(bodies)

    def emit(index: int, text: str) -> None:
        chunks[index] += text + "|"

    context.begin([f"{i}" for i in range(len(bodies))], [{}] * len(bodies), [{}] * len(bodies), emit)
    values = model.handle([{"body": body} for body in bodies], context)
    return [chunk + value if isinstance(value, str) else value for chunk, value in zip(chunks, values)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random Llama without an end token: 4 heads and 2 key-value heads."""
    from tests.support.hf_folders import save_llama

    return save_llama(tmp_path_factory.mktemp("llama"))


def load_model(folder: Path, **config: Any) -> CausalLM:
    model = CausalLM()
    model.initialize(Context("m", str(folder), {}, model_yaml_config=config))
    return model


def assert_equal(answers: list[Any], expected: list[Any]) -> None:
    """Check tokens to be equal, and logits to be within 1e-4."""
    assert [row.get("tokens") for row in answers] == [row.get("tokens") for row in expected]
    assert [len(row.get("tokens", ())) for row in expected] == [8, 8, 8, 0, 0, 0]
    for answer, reference in zip(answers[3:], expected[3:]):
        assert answer["logits"] == pytest.approx(reference["logits"], abs=1e-4)


@pytest.mark.parametrize(("memory", "devices"), [("300KB", {"cpu", "disk"}), (0, {"disk"})])
def test_layers_can_be_offloaded_to_the_disk(
    llama: Path, tmp_path: Path, memory: Any, devices: set[str]
) -> None:
    layout = {
        "device_map": "auto",
        "max_memory": {"cpu": memory},
        "offload_folder": str(tmp_path / "offload"),
    }
    model = load_model(llama, **layout)
    assert set(model.model.hf_device_map.values()) == devices, "the memory does not suffice for all layers"
    assert_equal(model.handle(ROWS, None), load_model(llama).handle(ROWS, None))


@pytest.mark.nightly
def test_two_deepspeed_ranks_generate_the_same_as_one(llama: Path, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    from tests.support.hf_folders import save_byte_llama

    GPT2LMHeadModel(GPT2Config(n_embd=32, n_head=2, n_layer=1)).save_pretrained(tmp_path / "gpt2")
    folders = [str(tmp_path / "gpt2"), str(llama)]
    texts = save_byte_llama(tmp_path / "texts")
    outputs = run_ranks(
        *(RANK, folders, ROWS, str(texts), SAMPLED, str(Path(__file__).parent)),
        TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"),
    )
    reference = load_model(llama)
    layers = sum(parameter.numel() for parameter in reference.model.model.layers.parameters())
    expected = handle_streams(load_model(texts), SAMPLED)
    assert expected[0].count("|") > 1, "chunks of the stream"
    assert outputs[0][-1] == outputs[1][-1], "all ranks take the same tokens, also without a seed"
    assert outputs[0][-1][:3] == expected[:3]
    assert len(outputs[0][-1][3]["tokens"]) > 8
    for answers, rank_parameters, errors, built, _ in outputs:
        assert_equal(answers, reference.handle(ROWS, None))
        assert rank_parameters == pytest.approx(layers / 2, rel=0.01)
        assert len(errors) == 1 and "DeepSpeed cannot cut this model up" in errors[0]
        assert built == [], "no extension is compiled"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"engine": {"name": "deepsped"}}, "no engine 'deepsped'. Did you mean 'deepspeed'"),
        ({"engine": {"name": ["deepspeed"]}}, "no engine"),
        ({"engine": "deepspeed"}, "engine is 'deepspeed'; it is {name: transformers}"),
        (
            {"engine": {"name": "mii"}},
            "mii .* kernels for NVIDIA GPUs alone.* Give num_gpus: 1 .* {name: deepspeed}",
        ),
        ({"engine": {"name": "mii"}, "pipeline_parallel": 2}, "engine: mii .* no pipeline_parallel"),
        ({"engine": {"name": "mii"}, "device_map": "auto"}, "device_map needs engine: {name: transformers}"),
        ({"engine": {"num_blocks": 4}}, "no option 'num_blocks'"),
        ({"engine": {"name": "deepspeed"}}, "give tensor_parallel, from 2"),
        (
            {"engine": {"name": "deepspeed"}, "tensor_parallel": 2, "pipeline_parallel": 2},
            "no pipeline_parallel",
        ),
        ({"engine": {"name": "deepspeed"}, "tensor_parallel": 8}, "tensor_parallel: 8 does not divide"),
        (
            {"engine": {"name": "deepspeed"}, "device_map": "auto"},
            "device_map needs engine: {name: transformers}",
        ),
        (
            {"device_map": "auto", "tensor_parallel": 2},
            "device_map .* tensor_parallel .* Take one of the two away",
        ),
        ({"device_map": "auto", "pipeline_parallel": 2}, "pipeline_parallel cuts it up"),
        ({"max_memory": {"cpu": "1MB"}}, "max_memory belongs to a device_map; write device_map: auto"),
        ({"device_map": "auto", "max_memory": "1MB"}, "max_memory is '1MB'; it is {0: 20GB"),
        ({"device_map": "auto", "max_memory": {"cpu": "2 apples"}}, "max_memory: .*2 apples"),
        ({"device_map": "auto", "max_memory": {"gpu": "2GB"}}, "max_memory: .*gpu is not recognized"),
        ({"device_map": "everywhere"}, "device_map: .*everywhere|everywhere"),
    ],
)
def test_impossible_options_are_rejected_with_the_cure(
    llama: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(HandlerLoadError, match=message):
        load_model(llama, **config)


def test_llm_rejects_a_device_map(language_model: Path) -> None:
    context = Context("m", str(language_model), {}, model_yaml_config={"device_map": "auto"})
    with pytest.raises(
        HandlerLoadError, match=r"without device_map\. Take tensor_parallel, or the handler causal_lm"
    ):
        asyncio.run(LanguageModel().initialize(context))
