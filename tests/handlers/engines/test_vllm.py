"""Tests of the vLLM adapter, with a fake vllm package."""

from __future__ import annotations

import asyncio
import textwrap
from pathlib import Path
from typing import Any

import pytest

from handlers import engines
from handlers.engines.engine import Engine, GenerationRequest, Logprob, SamplingParams, StructuredOutput
from handlers.errors import HandlerLoadError, PredictionException
from tests.support.requirements import needs_no_package


@needs_no_package("vllm")
def test_a_missing_vllm_names_its_requirements(language_model: Path) -> None:
    with pytest.raises(
        HandlerLoadError, match=r"vllm is not installed.*requirements\.txt.*useVenv: true.*name: tran"
    ):
        asyncio.run(engines.start(language_model, None, {"name": "vllm"}))


# The part of vLLM's API that the adapter uses, with an engine that counts upwards.
VLLM_SOURCES = {
    "__init__": "from vllm.sampling_params import SamplingParams",
    "sampling_params": """
        import enum

        class RequestOutputKind(enum.Enum):
            CUMULATIVE = 0
            DELTA = 1

        class SamplingParams:
            def __init__(
                self, *, temperature, top_k, top_p, seed, logprobs, max_tokens, stop_token_ids, detokenize,
                output_kind, **others
            ):
                if top_p == 0:
                    raise ValueError("top_p must be in (0, 1]")
                assert output_kind is RequestOutputKind.DELTA and detokenize is False
                self.params = (temperature, top_k, top_p, seed, stop_token_ids)
                self.max_tokens, self.logprobs, self.others = max_tokens, logprobs, others
                self.prompt_logprobs = others.pop("prompt_logprobs")

        class StructuredOutputsParams:
            def __init__(self, **fields):
                self.fields = fields
    """,
    "engine/__init__": "",
    "engine/arg_utils": """
        class AsyncEngineArgs:
            def __init__(self, model, **others):
                self.model, self.others = model, others
    """,
    "lora/__init__": "",
    "lora/request": """
        from typing import NamedTuple

        class LoRARequest(NamedTuple):
            lora_name: str
            lora_int_id: int
            lora_path: str
    """,
    "v1/__init__": "",
    "v1/engine/__init__": "",
    "v1/engine/async_llm": """
        from types import SimpleNamespace

        class EngineDeadError(Exception):
            pass

        class AsyncLLM:
            errored = False

            @classmethod
            def from_engine_args(cls, args):
                engine = cls()
                engine.args, engine.aborted, engine.running = args, [], True
                engine.loras = {}
                engine.model_config = SimpleNamespace(max_model_len=64, get_vocab_size=lambda: 100)
                return engine

            async def add_lora(self, request):
                if "wide" in request.lora_path:
                    raise ValueError("the rank is too high")
                self.loras[request.lora_int_id] = request.lora_name
                return True

            async def remove_lora(self, lora_id):
                del self.loras[lora_id]
                return True

            async def generate(self, prompt, sampling_params, request_id, *, lora_request=None):
                self.lora = lora_request
                self.params, self.others = sampling_params.params, sampling_params.others
                self.cache_salt = prompt.get("cache_salt")
                for count in range(sampling_params.max_tokens):
                    if self.errored:
                        raise EngineDeadError("it is dead")
                    reason = "length" if count + 1 == sampling_params.max_tokens else None
                    token = prompt["prompt_token_ids"][-1] + 1 + count
                    completion = SimpleNamespace(token_ids=[token], finish_reason=reason, logprobs=None)
                    if sampling_params.logprobs is not None:
                        values = {token: SimpleNamespace(logprob=-2.0), 3: SimpleNamespace(logprob=-0.5)}
                        completion.logprobs = [values]
                    output = SimpleNamespace(outputs=[completion], num_cached_tokens=16, prompt_logprobs=None)
                    if sampling_params.prompt_logprobs is not None and not count:
                        tokens = prompt["prompt_token_ids"]
                        likely = SimpleNamespace(logprob=-0.5)
                        values = [{t: SimpleNamespace(logprob=-t), 3: likely} for t in tokens]
                        output.prompt_logprobs = [None, *values[1:]]
                    yield output

            async def abort(self, request_id):
                self.aborted.append(request_id)

            async def check_health(self):
                if self.errored:
                    raise EngineDeadError("it is dead")

            def shutdown(self):
                self.running = False
    """,
}


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, source in VLLM_SOURCES.items():
        file = tmp_path / "site" / "vllm" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


async def collect(engine: Engine, request: GenerationRequest) -> tuple[list[int], str | None]:
    """Return all tokens of a completion, and its finish reason."""
    chunks = [chunk async for chunk in engine.generate(request)]
    return [token for chunk in chunks for token in chunk.tokens], chunks[-1].finish_reason


@pytest.mark.usefixtures("vllm")
def test_requests_are_converted_for_vllm(tmp_path: Path) -> None:
    async def generate() -> None:
        engine: Any = await engines.start(tmp_path, 0, {"name": "vllm", "arguments": {"max_model_len": 64}})
        own = engine._engine
        assert (own.args.model, own.args.others) == (str(tmp_path), {"max_model_len": 64})
        assert (engine.capacity, engine.cache_usage) == (64, None)
        request = GenerationRequest("one", [5, 6], 3, SamplingParams(0.5, 4, 0.9, 7), stop_token_ids=(99,))
        assert await collect(engine, request) == ([7, 8, 9], "length")
        assert own.params == (0.5, 4, 0.9, 7, [99])
        assert own.others == {
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "logit_bias": None,
            "structured_outputs": None,
        }
        with_logprobs = GenerationRequest("likely", [5], 1, SamplingParams(logprobs=1))
        [chunk] = [chunk async for chunk in engine.generate(with_logprobs)]
        assert list(chunk.logprobs) == [Logprob(6, -2.0, ((3, -0.5),))]
        assert (chunk.cached_tokens, own.cache_salt) == (16, None)
        prompt = [Logprob(5, None), Logprob(9, -9, ((3, -0.5),))]
        for count in (0, 2):
            rated = GenerationRequest("rated", [5, 9], count, prompt_logprobs=1)
            chunks = [chunk async for chunk in engine.generate(rated)]
            assert list(chunks[0].prompt_logprobs) == prompt
            assert [chunk.tokens for chunk in chunks] == ([[10], [11]] if count else [[]])
            assert chunks[-1].finish_reason == "length"
        await collect(engine, GenerationRequest("adapter", [5], 1, cache_salt="poet"))
        assert own.cache_salt == "poet"
        await engine.abort("one")
        assert own.aborted == ["one"]
        await engine.check_health()

        for invalid, message in (
            (GenerationRequest("long", [5], 64), "the limit is 64"),
            (GenerationRequest("odd", [100], 1), "100 is no token"),
            (
                GenerationRequest("zero", [5], 3, SamplingParams(1.0, 0, 0.0)),
                "vLLM refuses the request: top_p must be",
            ),
        ):
            with pytest.raises(PredictionException, match=message) as raised:
                await collect(engine, invalid)
            assert raised.value.error_code == 400

        own.errored = True
        with pytest.raises(PredictionException, match="vLLM's engine has failed: it is dead") as failed:
            await collect(engine, request)
        assert failed.value.error_code == 503
        with pytest.raises(RuntimeError, match="it is dead"):
            await engine.check_health()
        await engine.shutdown()
        assert not own.running

    asyncio.run(generate())


@pytest.mark.usefixtures("vllm")
def test_penalties_and_formats_are_converted_for_vllm(tmp_path: Path) -> None:
    async def generate() -> None:
        engine: Any = await engines.start(tmp_path, 0, {"name": "vllm"})
        for output, fields in (
            (StructuredOutput("json", '{"type": "object"}'), {"json": '{"type": "object"}'}),
            (StructuredOutput("json_object"), {"json_object": True}),
            (StructuredOutput("regex", "a+"), {"regex": "a+"}),
            (StructuredOutput("choice", '["a", "b"]'), {"choice": ["a", "b"]}),
        ):
            sampling = SamplingParams(1.0, 0, 1.0, None, None, 0.5, -0.5, 1.1, ((5, -2.0),), output)
            await collect(engine, GenerationRequest("one", [5], 1, sampling))
            others = engine._engine.others
            assert others.pop("structured_outputs").fields == fields
            assert others == {
                "presence_penalty": 0.5,
                "frequency_penalty": -0.5,
                "repetition_penalty": 1.1,
                "logit_bias": {5: -2.0},
            }

    asyncio.run(generate())


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("value", [True, False])
def test_prefix_caching_is_passed_to_vllm(tmp_path: Path, value: bool) -> None:
    options = {"name": "vllm", "prefix_caching": value}
    engine: Any = asyncio.run(engines.start(tmp_path, 0, options))
    assert engine._engine.args.others == {"enable_prefix_caching": value}


@pytest.mark.usefixtures("vllm")
def test_adapters_become_lora_requests(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("poet", "cook", "wide")}
    for folder in folders.values():
        folder.mkdir()
        (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')

    async def generate() -> None:
        options = {"name": "vllm", "max_adapters": 2, "max_adapter_rank": 32}
        engine: Any = await engines.start(tmp_path, 0, options)
        own = engine._engine
        assert own.args.others == {"enable_lora": True, "max_loras": 2, "max_lora_rank": 32}
        await engine.load_adapter("poet", folders["poet"])
        await collect(engine, GenerationRequest("1", [1], 1, adapter="poet"))
        assert own.lora == ("poet-1", 1, str(folders["poet"]))
        await collect(engine, GenerationRequest("2", [1], 1))
        assert own.lora is None
        with pytest.raises(HandlerLoadError, match="vLLM does not load it: the rank is too high"):
            await engine.load_adapter("wide", folders["wide"])
        await engine.load_adapter("poet", folders["cook"])
        assert own.loras == {3: "poet-3"}, "the adapter of the same name is replaced"
        await engine.load_adapter("cook", folders["cook"])
        with pytest.raises(HandlerLoadError, match="has 2 adapters"):
            await engine.load_adapter("third", folders["cook"])
        await engine.unload_adapter("poet")
        assert own.loras == {4: "cook-4"}
        assert engine.adapters == ("cook",)
        with pytest.raises(PredictionException, match=r"no adapter 'poet'. Its adapters: cook"):
            await collect(engine, GenerationRequest("3", [1], 1, adapter="poet"))

    async def refuse() -> None:
        engine = await engines.start(tmp_path, 0, {"name": "vllm"})
        with pytest.raises(HandlerLoadError, match="max_adapters: 8"):
            await engine.load_adapter("poet", folders["poet"])

    asyncio.run(generate())
    asyncio.run(refuse())
