"""Tests of the adapter of TensorRT-LLM, with a fake tensorrt_llm package."""

from __future__ import annotations

import asyncio
import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from handlers import engines
from handlers.engines.engine import Engine, GenerationRequest, SamplingParams, StructuredOutput
from handlers.errors import HandlerLoadError, PredictionException
from tests.support.requirements import needs_no_package

# The part of TensorRT-LLM's API that the adapter uses, with an engine that counts upwards.
SOURCES = {
    "__init__": """
        class SamplingParams:
            def __init__(self, **fields):
                if fields.get("top_p") == 0:
                    raise ValueError("top_p must be above 0")
                self.fields = fields

        class Output:
            def __init__(self, start, params):
                self.start, self.params, self.aborted = start, params, False

            async def __aiter__(self):
                from types import SimpleNamespace

                for count in range(1, self.params["max_tokens"] + 1):
                    if self.start == 66:
                        raise RuntimeError("the executor is dead")
                    reason = "cancelled" if self.aborted else None
                    reason = "length" if count == self.params["max_tokens"] else reason
                    tokens = [self.start + 1 + i for i in range(count)]
                    yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, finish_reason=reason)])
                    if self.aborted:
                        return

            def abort(self):
                self.aborted = True

        class LLM:
            def __init__(self, **arguments):
                self.arguments, self.running = arguments, True

            def generate_async(self, inputs, sampling_params, streaming):
                assert streaming
                self.params = sampling_params.fields
                self.output = Output(inputs["prompt_token_ids"][-1], self.params)
                return self.output

            def shutdown(self):
                self.running = False
    """,
    "llmapi": """
        class KvCacheConfig:
            def __init__(self, **fields):
                self.fields = fields
    """,
    "_tensorrt_engine": """
        import tensorrt_llm

        class LLM(tensorrt_llm.LLM):
            compiled = True
    """,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a model's config.json and an ``engine``, beside the fake package."""
    package = tmp_path / "site" / "tensorrt_llm"
    package.mkdir(parents=True)
    for name, source in SOURCES.items():
        (package / f"{name}.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (tmp_path / "config.json").write_text('{"vocab_size": 100, "max_position_embeddings": 64}')
    (tmp_path / "engine").mkdir()
    config = {"build_config": {"max_seq_len": 32}, "pretrained_config": {"vocab_size": 90}}
    (tmp_path / "engine" / "config.json").write_text(json.dumps(config))
    return tmp_path


def start(folder: Path, **options: Any) -> Any:
    return asyncio.run(engines.start(folder, 0, {"name": "tensorrt_llm", **options}))


async def collect(engine: Engine, request: GenerationRequest) -> tuple[list[int], str | None]:
    chunks = [chunk async for chunk in engine.generate(request)]
    return [token for chunk in chunks for token in chunk.tokens], chunks[-1].finish_reason


def test_requests_are_converted_for_tensorrt_llm(folder: Path) -> None:
    cache = {"free_gpu_memory_fraction": 0.1}
    compiled = start(folder, engine_dir=str(folder / "engine"), kv_cache_config=cache)
    assert (compiled.capacity, compiled.vocab_size, compiled._llm.compiled) == (32, 90, True)
    assert compiled._llm.arguments["model"] == str(folder / "engine")
    assert compiled._llm.arguments["kv_cache_config"].fields == cache
    engine = start(folder, arguments={"max_batch_size": 4})
    assert (engine.capacity, engine.vocab_size, hasattr(engine._llm, "compiled")) == (64, 100, False)
    assert engine._llm.arguments["max_batch_size"] == 4

    sampling = SamplingParams(0.5, 4, 0.9, 7, presence_penalty=0.5)
    request = GenerationRequest("one", [5, 6], 3, sampling, stop_token_ids=(99, 98))
    assert asyncio.run(collect(engine, request)) == ([7, 8, 9], "length")
    params = engine._llm.params
    assert [params[key] for key in ("temperature", "top_k", "top_p", "seed")] == [0.5, 4, 0.9, 7]
    assert (params["end_id"], params["stop_token_ids"], params["presence_penalty"]) == (99, [98], 0.5)
    asyncio.run(collect(engine, GenerationRequest("greedy", [5], 2)))
    params = engine._llm.params
    assert (params["top_k"], "temperature" in params, params["end_id"]) == (1, False, -1)
    seeds = []
    for _ in range(2):
        asyncio.run(collect(engine, GenerationRequest("any", [5], 1, SamplingParams(1.0))))
        seeds.append(engine._llm.params["seed"])
    assert seeds[0] != seeds[1]
    asyncio.run(engine.shutdown())
    assert not engine._llm.running


def test_requests_are_aborted(folder: Path) -> None:
    engine = start(folder)

    async def run() -> None:
        chunks = engine.generate(GenerationRequest("one", [5], 9))
        await chunks.__anext__()
        await chunks.aclose()
        assert engine._llm.output.aborted, "a closed generator ends its request"
        chunks = engine.generate(GenerationRequest("two", [5], 9))
        await chunks.__anext__()
        await engine.abort("two")
        assert [chunk.finish_reason async for chunk in chunks][-1] == "abort"

    asyncio.run(run())


def test_errors_name_what_failed(folder: Path) -> None:
    engine = start(folder)
    for request, status, message in (
        (GenerationRequest("long", [5], 64), 400, "the limit is 64"),
        (GenerationRequest("zero", [5], 1, SamplingParams(1.0, 0, 0.0)), 400, "refuses the request: top_p"),
        (GenerationRequest("bias", [5], 1, SamplingParams(logit_bias=((1, 1.0),))), 400, "serve logit_bias"),
        (
            GenerationRequest(
                "json", [5], 1, SamplingParams(structured_output=StructuredOutput("regex", "a"))
            ),
            400,
            "structured output",
        ),
        (GenerationRequest("dead", [66], 1), 503, "engine has failed: the executor is dead"),
    ):
        with pytest.raises(PredictionException, match=message) as raised:
            asyncio.run(collect(engine, request))
        assert raised.value.error_code == status
    with pytest.raises(RuntimeError, match="the executor is dead"):
        asyncio.run(engine.check_health())
    with pytest.raises(HandlerLoadError, match=r"TensorRT-LLM makes processes of its own"):
        asyncio.run(engines.start(folder, 0, {"name": "tensorrt_llm"}, 2))
    with pytest.raises(HandlerLoadError, match=r"config\.json cannot be read"):
        start(folder, engine_dir=str(folder / "nowhere"))


@needs_no_package("tensorrt_llm")
def test_a_missing_package_names_its_command(tmp_path: Path) -> None:
    with pytest.raises(HandlerLoadError, match=r"not installed where .*pip install tensorrt_llm"):
        start(tmp_path)


def test_compiled_archives_of_torchserve_start_this_engine(folder: Path) -> None:
    from handlers.torchserve_compat import llm_config

    options = {"tokenizer_dir": "t", "engine_dir": "engine", "kv_cache_config": {"max_tokens": 9}}
    translated = llm_config.translate("trt_llm_handler", {"handler": options}, folder, has_vllm=False)
    assert translated.config["num_gpus"] == 1 and translated.model_path == "t"
    engine = {"name": "tensorrt_llm", "engine_dir": "engine", "kv_cache_config": {"max_tokens": 9}}
    assert translated.config["engine"] == engine and translated.warnings == ()
