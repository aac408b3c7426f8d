"""Tests of TorchServe's handlers of language models: configuration, requests and responses on ``llm``."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import handlers
from handlers.context import Context
from handlers.errors import HandlerLoadError, PredictionException
from handlers.torchserve_compat import names
from tests.support.requirements import needs_no_package

pytestmark = [pytest.mark.integration, needs_no_package("vllm"), pytest.mark.slow]

PROMPT = "Once upon"
ENGINE = {"max_model_len": 100, "max_num_seqs": 4, "dtype": "half", "served_model_name": ["a", "b"]}
Ask = Callable[..., Awaitable[Any]]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.hf_folders import save_byte_llama

    return save_byte_llama(tmp_path_factory.mktemp("byte_llama"))


def serve(
    directory: Path, handler: str, config: dict[str, Any], use: Callable[[Any, Ask], Awaitable[None]]
) -> None:
    """Load the archive in ``directory``, and call ``use`` with its handler and a function that sends bodies.

    The function returns a body's value and the chunks of its stream.
    """
    manifest = {"model": {"handler": handler, "modelName": "m"}}

    async def run() -> None:
        entry = handlers.load(handler, directory, manifest)
        context = Context("m", str(directory), manifest, model_yaml_config=config)
        initialized = entry.initialize(context)
        assert entry.is_async and initialized is not None
        await initialized

        async def ask(body: Any, path: str = "") -> tuple[Any, list[Any]]:
            chunks: list[Any] = []
            headers = {"url_path": path} if path else {}
            context.begin(["1"], [headers], [{}], lambda index, chunk: chunks.append(chunk))
            [value] = await entry([{"body": body}], context)
            if isinstance(value, Exception):
                raise value
            return value, chunks

        try:
            await use(entry.instance, ask)
        finally:
            await entry.instance.engine.shutdown()

    asyncio.run(run())


@pytest.fixture
def archive_dir(tmp_path: Path, model_folder: Path) -> Path:
    shutil.copytree(model_folder, tmp_path / "model" / "snapshot")
    return tmp_path


def test_vllm_archives_answer_in_the_formats_of_torchserve(archive_dir: Path, caplog: Any) -> None:
    config = {
        "minWorkers": 1,
        "deviceType": "gpu",
        "asyncCommunication": True,
        "handler": {
            "model_path": "model/snapshot",
            "vllm_engine_config": {**ENGINE, "swap_space": 4},
            "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
        },
    }

    async def use(handler: Any, ask: Ask) -> None:
        assert handler.engine.capacity == 100, "max_model_len"
        assert str(handler.engine.model.dtype) == "torch.float16"
        body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "model": "a"}
        completion, _ = await ask(body, "v1/completions")
        text = completion["choices"][0]["text"]
        assert (completion["model"], completion["usage"]["completion_tokens"]) == ("a", 12)

        value, chunks = await ask(body | {"stream": True}, "v1/completions")
        assert value == b"data: [DONE]\n\n"
        events = [json.loads(part[6:]) for part in b"".join(chunks).split(b"\n\n") if part]
        assert "".join(event["choices"][0]["text"] for event in events) == text

        chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12, "temperature": 0}
        answer, _ = await ask(chat, "v1/chat/completions")
        assert answer["choices"][0]["message"]["content"] == text
        models, _ = await ask(None, "v1/models")
        assert [model["id"] for model in models["data"]] == ["a", "b"]

        # TorchServe 0.11: no path, a stream of texts with their last token
        old = {"prompt": PROMPT, "max_new_tokens": 12, "temperature": 0, "logprobs": 1}
        value, chunks = await ask(json.dumps(old).encode())
        pieces = [json.loads(chunk) for chunk in [*chunks, value]]
        assert "".join(piece["text"] for piece in pieces) == text
        assert all(type(piece["tokens"]) is int for piece in pieces if piece["text"])
        value, chunks = await ask({"prompt": PROMPT})
        assert len("".join(json.loads(chunk)["text"] for chunk in [*chunks, value])) <= 16, "vLLM's default"

        for body, path, status, message in (
            ({"prompt": PROMPT}, "v1/nothing", 404, "Unknown API endpoint: v1/nothing"),
            ({"prompt": PROMPT, "max_tokens": 100}, "", 400, "the limit is 100"),
            ({"prompt": PROMPT, "use_beam_search": True}, "", 400, "'use_beam_search' is not known"),
            (b"{", "v1/completions", 400, "no JSON"),
        ):
            with pytest.raises(PredictionException, match=message) as raised:
                await ask(body, path)
            assert raised.value.error_code == status

    serve(archive_dir, "vllm_handler", config, use)
    assert "vLLM is not installed: the engine transformers of the handler llm serves" in caplog.text
    assert "vllm_engine_config: swap_space has no effect: remove it" in caplog.text


def test_a_class_of_an_archive_extends_the_vllm_handler(archive: Any, archive_dir: Path) -> None:
    names.install()
    directory = archive(
        handler="""
        from ts.torch_handler.vllm_handler import VLLMHandler

        class Shouting(VLLMHandler):
            def initialize(self, ctx):
                self.prefix = "Once "
                return super().initialize(ctx)

            async def preprocess(self, requests, context):
                bodies = await super().preprocess(requests, context)
                return [{**body, "prompt": self.prefix + body["prompt"]} for body in bodies]

            async def postprocess(self, inference_outputs):
                outputs = await super().postprocess(inference_outputs)
                return [{"answer": output} for output in outputs]
        """
    )
    assert directory == archive_dir
    config = {"handler": {"vllm_engine_config": {"model": "model/snapshot"}}}

    async def use(handler: Any, ask: Ask) -> None:
        body = {"prompt": "upon", "max_tokens": 4, "temperature": 0}
        value, _ = await ask(body, "v1/completions")
        assert value["answer"]["usage"]["prompt_tokens"] == len(PROMPT)

    serve(directory, "handler.py", config, use)


def test_trt_llm_archives_answer_in_the_formats_of_torchserve(archive_dir: Path, caplog: Any) -> None:
    config = {
        "handler": {
            "tokenizer_dir": "model/snapshot/",
            "engine_dir": "llama-engine",
            "kv_cache_config": {"free_gpu_memory_fraction": 0.1},
        }
    }

    async def use(handler: Any, ask: Ask) -> None:
        body = {"prompt": PROMPT, "max_new_tokens": 12, "end_id": 256}
        text, chunks = await ask(body)
        assert isinstance(text, str) and text and chunks == []
        value, chunks = await ask(body | {"streaming": True})
        assert value == "" and "".join(json.loads(chunk)["text"] for chunk in chunks) == text
        sampled = [await ask(body | {"temperature": 1.0, "random_seed": 3}) for _ in range(2)]
        assert sampled[0] == sampled[1] and sampled[0][0] != text
        with pytest.raises(PredictionException, match="'beam_width' is not known"):
            await ask(body | {"beam_width": 4})

    serve(archive_dir, "trt_llm_handler", config, use)
    assert "engine transformers of the handler llm serves the model in model/snapshot/" in caplog.text
    assert "kv_cache_config has no effect: num_gpus below 1" in caplog.text


def test_a_name_of_the_hub_is_read_from_its_cache(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "cache" / "models--tiny--llama" / "snapshots" / "abc"
    shutil.copytree(model_folder, snapshot)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    options = {"download_dir": str(tmp_path / "cache")}

    async def use(handler: Any, ask: Ask) -> None:
        assert (await ask({"prompt": PROMPT, "max_tokens": 2}, "v1/completions"))[0]["choices"]

    config = {"handler": {"model_path": "tiny/llama", "vllm_engine_config": options}}
    (tmp_path / "archive").mkdir()
    serve(tmp_path / "archive", "vllm_handler", config, use)
    config = {"handler": {"model_path": "tiny/other", "vllm_engine_config": options}}
    with pytest.raises(HandlerLoadError, match="tiny/other is neither a folder of the archive nor available"):
        serve(tmp_path / "archive", "vllm_handler", config, use)
    config = {"handler": {"model_path": "nowhere"}}
    with pytest.raises(HandlerLoadError, match="nowhere: there is no such folder"):
        serve(tmp_path / "archive", "vllm_handler", config, use)


def test_files_without_a_manifest_name_no_other_folder(tmp_path: Path, model_folder: Path) -> None:
    config = {"handler": {"model_path": str(model_folder)}}
    entry = handlers.load("vllm_handler", tmp_path, {}, runs_code=False)
    context = Context("m", str(tmp_path), {}, model_yaml_config=config)
    with pytest.raises(HandlerLoadError, match="is not inside of the model, which has no manifest"):
        asyncio.run(entry.instance.initialize(context))


def test_vllm_archives_have_their_adapters(archive_dir: Path, model_folder: Path) -> None:
    from tests.support.lora_folders import save_adapter

    save_adapter(model_folder, archive_dir / "adapters" / "one", strength=1.0)
    engine = {"enable_lora": True, "max_loras": 4, "max_model_len": 100, "served_model_name": "base"}
    settings = {"model_path": "model/snapshot", "vllm_engine_config": engine}
    config = {"handler": {**settings, "adapters": {"one": "adapters/one"}}}

    async def use(handler: Any, ask: Ask) -> None:
        body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        [plain] = (await ask({**body, "model": "base"}, "v1/completions"))[0]["choices"]
        [adapted] = (await ask({**body, "model": "one"}, "v1/completions"))[0]["choices"]
        assert plain["text"] != adapted["text"]
        last, chunks = await ask({**body, "lora_adapter": "one"})
        assert "".join(json.loads(chunk)["text"] for chunk in [*chunks, last]) == adapted["text"]
        models = (await ask(None, "v1/models"))[0]["data"]
        assert [model["id"] for model in models] == ["base", "one"]

    serve(archive_dir, "vllm_handler", config, use)
