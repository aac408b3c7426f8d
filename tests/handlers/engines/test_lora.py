"""Tests of LoRA adapters in continuous batching, with peft's own outputs as the reference."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from handlers.engines import adapter_files
from handlers.engines.adapter_files import AdapterOptions
from handlers.engines.engine import Engine, GenerationRequest
from handlers.engines.lora import find_modules
from handlers.errors import HandlerLoadError, PredictionException
from tests.support.engine_runs import run_with_engine
from tests.support.hf_folders import save_gpt2, save_llama
from tests.support.lora_folders import generate, save_adapter

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]

PROMPT = list(b"Once upon a time there was a king who lived in a castle")  # longer than three pages
COUNT = 24


@pytest.fixture(scope="module")
def adapters(language_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return adapters of different layers, ranks and scalings."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        "small": save_adapter(language_model, root / "small", 1),
        "large": save_adapter(
            language_model,
            root / "large",
            2,
            r=8,
            lora_alpha=12,
            use_rslora=True,
            target_modules="all-linear",
            rank_pattern={"q_proj": 3},
            alpha_pattern={"layers.1.mlp.up_proj": 5},
        ),
    }


async def collect(
    engine: Engine, id: str, adapter: str | None, prompt: list[int] = PROMPT, count: int = COUNT
) -> list[int]:
    request = GenerationRequest(id, prompt, count, stop_token_ids=(256,), adapter=adapter)
    return [token async for chunk in engine.generate(request) for token in chunk.tokens]


def test_a_mixed_batch_generates_what_peft_does(language_model: Path, adapters: dict[str, Path]) -> None:
    prompts = [PROMPT, PROMPT[:7], list(b"What?")]
    names = [None, "small", "large"]
    expected = [
        generate(language_model, adapters.get(name or ""), prompt, COUNT)
        for prompt in prompts
        for name in names
    ]

    async def generate_together(engine: Engine) -> Any:
        for name, folder in adapters.items():
            await engine.load_adapter(name, folder)
        assert engine.adapters == ("small", "large")
        # The second round finds the first one's prompts in the cache: three pages of the long ones.
        rounds = [
            await asyncio.gather(
                *(
                    collect(engine, f"{i} {name}", name, prompt)
                    for i, prompt in enumerate(prompts)
                    for name in names
                )
            )
            for _ in range(2)
        ]
        for name in names:
            request = GenerationRequest(f"again {name}", PROMPT, 1, adapter=name)
            assert [chunk.cached_tokens async for chunk in engine.generate(request)] == [48]
        return rounds

    assert run_with_engine(language_model, generate_together) == [expected, expected]
    assert len({tuple(tokens) for tokens in expected}) == len(expected)


def test_adapters_apply_to_the_convolutions_of_gpt2(tmp_path: Path) -> None:
    base = save_gpt2(tmp_path / "base")
    folder = save_adapter(base, tmp_path / "adapter", target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    prompt = [4, 5, 6, 7, 8]
    expected = [generate(base, item, prompt, 12, eos_token_id=-1) for item in (None, folder)]

    async def generate_both(engine: Engine) -> Any:
        await engine.load_adapter("a", folder)
        return await asyncio.gather(*(collect(engine, f"{name}", name, prompt, 12) for name in (None, "a")))

    assert run_with_engine(base, generate_both) == expected
    assert expected[0] != expected[1]


def test_an_adapter_is_loaded_and_unloaded_while_requests_run(
    language_model: Path, adapters: dict[str, Path]
) -> None:
    long = 150
    steps, replaced, answered = itertools.count(), threading.Event(), threading.Event()

    def hold(*args: Any) -> None:
        """Let the long requests, of 153 steps together, end neither before the load nor before the other."""
        step = next(steps)
        if step in (20, 100):
            (replaced if step == 20 else answered).wait(60)

    async def replace_adapters(engine: Any) -> Any:
        await engine.load_adapter("small", adapters["small"])
        started = asyncio.Event()
        engine.model.register_forward_pre_hook(hold)

        async def generate_long(name: str | None) -> list[int]:
            tokens: list[int] = []
            request = GenerationRequest(f"long {name}", PROMPT, long, adapter=name)
            async for chunk in engine.generate(request):
                tokens += chunk.tokens
                started.set()
            return tokens

        running = [asyncio.create_task(generate_long(name)) for name in (None, "small")]
        await started.wait()
        await engine.load_adapter("large", adapters["large"])
        await engine.unload_adapter("small")
        with pytest.raises(PredictionException, match=r"no adapter 'small'. Its adapters: large"):
            await collect(engine, "late", "small")
        replaced.set()
        other = await collect(engine, "other", "large")
        assert not any(task.done() for task in running)
        answered.set()
        return await asyncio.gather(*running), other

    (base, small), large = run_with_engine(language_model, replace_adapters)
    assert base == generate(language_model, None, PROMPT, long, eos_token_id=-1)
    assert small == generate(language_model, adapters["small"], PROMPT, long, eos_token_id=-1)
    assert large == generate(language_model, adapters["large"], PROMPT, COUNT)


def test_an_adapter_replaces_one_of_its_name(language_model: Path, adapters: dict[str, Path]) -> None:
    async def replace(engine: Engine) -> Any:
        await engine.load_adapter("a", adapters["small"])
        first = await collect(engine, "1", "a")
        await engine.load_adapter("a", adapters["large"])  # within max_adapters
        return first, await collect(engine, "2", "a")

    results = run_with_engine(language_model, replace, max_adapters=1)
    assert results == (
        generate(language_model, adapters["small"], PROMPT, COUNT),
        generate(language_model, adapters["large"], PROMPT, COUNT),
    )


@pytest.mark.nightly
def test_adapters_survive_a_loop_that_failed(language_model: Path, adapters: dict[str, Path]) -> None:
    async def fail_and_retry(engine: Any) -> list[int]:
        await engine.load_adapter("small", adapters["small"])
        failed = threading.Event()

        def fail(*args: Any) -> None:
            if not failed.is_set():
                failed.set()
                raise ValueError("a layer fails once")

        engine.model.register_forward_pre_hook(fail)
        with pytest.raises(PredictionException, match="a layer fails once"):
            await collect(engine, "1", "small")
        return await collect(engine, "2", "small")

    expected = generate(language_model, adapters["small"], PROMPT, COUNT)
    assert run_with_engine(language_model, fail_and_retry) == expected


def test_limits_of_number_and_rank(language_model: Path, adapters: dict[str, Path]) -> None:
    async def exceed(engine: Engine) -> None:
        with pytest.raises(HandlerLoadError, match=r"has the rank 8, and engine.max_adapter_rank is 4"):
            await engine.load_adapter("large", adapters["large"])
        await engine.load_adapter("small", adapters["small"])
        with pytest.raises(HandlerLoadError, match=r"has 1 adapters, and engine.max_adapters is 1"):
            await engine.load_adapter("another", adapters["small"])
        assert engine.adapters == ("small",)

    run_with_engine(language_model, exceed, max_adapters=1, max_adapter_rank=4)
    with pytest.raises(HandlerLoadError, match=r"engine.max_adapters is 0; it is a whole number from 1"):
        run_with_engine(language_model, exceed, max_adapters=0)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"use_dora": True}, "use_dora is True, which is not supported"),
        ({"bias": "all"}, "bias is 'all', which is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\], which is not supported"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, r"embed_tokens.* is not supported"),
        ({"target_modules": ["lm_head"]}, r"lm_head.* is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which is not supported"),
    ],
)
def test_unsupported_adapters_are_refused(
    language_model: Path, tmp_path: Path, config: dict[str, Any], error: str
) -> None:
    folder = save_adapter(language_model, tmp_path, **config)
    with pytest.raises(HandlerLoadError, match=error):
        read(language_model, folder)


def test_adapters_of_another_model_are_refused(language_model: Path, tmp_path: Path) -> None:
    other = save_llama(tmp_path / "other")
    wider = save_adapter(other, tmp_path / "wider")
    with pytest.raises(HandlerLoadError, match=r"q_proj are \(4, 64\) and \(64, 4\), and the base model's"):
        read(language_model, wider)
    deeper = save_llama(
        tmp_path / "deep", hidden_size=32, intermediate_size=64, num_hidden_layers=3, vocab_size=257
    )
    with pytest.raises(HandlerLoadError, match=r"no layer model\.layers\.2\.self_attn\.q_proj"):
        read(language_model, save_adapter(deeper, tmp_path / "deeper"))
    named = save_adapter(language_model, tmp_path / "named")
    change_config(named, base_model_name_or_path="meta/llama")
    read(language_model, named)  # nothing is known of the base model's name
    with pytest.raises(HandlerLoadError, match=r"is meta/llama, and this model is a/b. If .*base_model: me"):
        read(language_model, named, base_model="a/b")
    read(language_model, named, base_model="meta/llama")


def test_damaged_adapters_are_refused(language_model: Path, tmp_path: Path) -> None:
    folder = save_adapter(language_model, tmp_path / "adapter")
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    valid_config, valid_weights = config.read_text(), weights.read_bytes()
    for path, content, error in [
        (config, None, r"there is no adapter_config.json: an adapter is the folder"),
        (config, "{", r"adapter_config.json is no JSON"),
        (config, '{"peft_type": "IA3"}', "peft_type is 'IA3'; adapters of type LORA are served"),
        (config, json.dumps({**json.loads(valid_config), "r": 8}), r"rank 4 in .*safetensors and 8 in"),
        (config, json.dumps({**json.loads(valid_config), "r": "x"}), r"rank 4 in .*safetensors and x in"),
        (weights, None, r"there is no adapter_model.safetensors; pickled weights .* are not read"),
        (weights, "damaged", r"adapter_model.safetensors is damaged"),
    ]:
        path.unlink()
        if content is not None:
            path.write_text(content)
        with pytest.raises(HandlerLoadError, match=error):
            read(language_model, folder)
        config.write_text(valid_config)
        weights.write_bytes(valid_weights)
    read(language_model, folder)


def test_experts_and_output_embeddings_have_no_adapters() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = torch.nn.Linear(2, 3)
            self.experts = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
            self.head = torch.nn.Linear(2, 5)

        def get_output_embeddings(self) -> torch.nn.Module:
            return self.head

    assert find_modules(Model()) == {"attention": (2, 3)}


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def read(base: Path, folder: Path, **options: Any) -> Any:
    """Read an adapter for the model in ``base``."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    return adapter_files.read_adapter(folder, find_modules(model), AdapterOptions(**options))
