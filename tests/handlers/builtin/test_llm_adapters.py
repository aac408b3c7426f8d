"""Tests of LoRA adapters of the handler ``llm``: their configuration, and the requests that name them."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import handlers
from handlers.context import Context
from handlers.errors import HandlerLoadError, PredictionException
from tests.support.hf_folders import save_byte_llama
from tests.support.lora_folders import generate, save_adapter

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ENGINE = {"num_blocks": 32, "page_size": 16, "max_batch_tokens": 64}
PROMPT, COUNT = "Roses are red", 12


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model's folder with an adapter in it."""
    folder = save_byte_llama(tmp_path_factory.mktemp("archive"))
    save_adapter(folder, folder / "adapters" / "french")
    return folder


class Served:
    """The handler of a folder; its model is called ``poet``."""

    def __init__(self, folder: Path, adapters: Any = None) -> None:
        self.folder = folder
        self.manifest = {"model": {"modelVersion": "1.0"}}
        engine = ENGINE if adapters is None else {**ENGINE, "adapters": adapters}
        self.config = {"engine": engine}
        self.entry = handlers.load("llm", folder, self.manifest)

    def context(self, **headers: str) -> Context:
        context = Context("poet", str(self.folder), self.manifest, model_yaml_config=self.config)
        context.begin(["id"], [headers], [{}], lambda *_: None)
        return context

    async def predict(self, body: dict[str, Any], **headers: str) -> Any:
        [answer] = await self.entry([{"body": body}], self.context(**headers))
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def generate(self, **fields: Any) -> str:
        answer = await self.predict({"prompt": PROMPT, "max_new_tokens": COUNT, **fields})
        text: str = answer["text"]
        return text

    async def complete(self, model: str, **headers: str) -> str:
        body = {"model": model, "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0}
        answer = await self.predict(body, url_path="v1/completions", **headers)
        assert answer["model"] == model
        text: str = answer["choices"][0]["text"]
        return text


def run_served(folder: Path, use: Callable[[Served], Awaitable[Any]], adapters: Any = None) -> Any:
    async def run() -> Any:
        served = Served(folder, adapters)
        await served.entry.initialize(served.context())
        try:
            return await asyncio.wait_for(use(served), 200)
        finally:
            await served.entry.instance.engine.shutdown()

    return asyncio.run(run())


def expect_text(served: Served, adapter: Path | None) -> str:
    tokenizer = served.entry.instance.tokenizer
    tokens = generate(served.folder, adapter, tokenizer.encode(PROMPT), COUNT)
    text: str = tokenizer.decode(tokens, skip_special_tokens=True)
    return text


def test_requests_name_an_adapter_of_the_archive(archive: Path) -> None:
    async def check(model: Served) -> None:
        base, french = expect_text(model, None), expect_text(model, archive / "adapters" / "french")
        assert base != french
        assert await model.generate() == base
        assert await model.generate(adapter="french") == french
        assert await model.generate(parameters={"adapter": "french"}) == french
        assert await model.complete("poet:french") == french
        assert await model.complete("poet:2.0:french") == french
        assert await model.complete("poet:prod", adapter="french") == french, "the server has parsed it"
        for name in ("poet", "poet:1.0", "gpt-4:french"):
            assert await model.complete(name) == base, name
        assert await model.complete("poet:french", adapter="") == base, "the server has found no adapter"
        models = (await model.predict({}, url_path="v1/models"))["data"]
        assert [(item["id"], item.get("parent")) for item in models] == [
            ("poet", None),
            ("poet:french", "poet"),
        ]
        description = model.entry.instance.describe_handle()
        assert description["adapters"] == ["french"]
        assert "adapter" in description["input"]
        with pytest.raises(PredictionException, match=r"no adapter 'dutch'. Its adapters: french") as unknown:
            await model.complete("poet:dutch")
        assert unknown.value.error_code == 404
        with pytest.raises(PredictionException, match="adapter is 3; it is the name of an adapter"):
            await model.generate(adapter=3)

    run_served(archive, check, {"french": "adapters/french"})


def test_requests_wait_for_an_adapter_that_is_being_loaded(archive: Path, tmp_path: Path) -> None:
    shutil.copytree(archive / "adapters" / "french", tmp_path / "french")

    async def check(model: Served) -> None:
        handler = model.entry.instance
        expected = expect_text(model, tmp_path / "french")
        folder: asyncio.Future[Path] = asyncio.get_running_loop().create_future()
        loading = asyncio.create_task(handler.load_adapter("later", folder))
        await asyncio.sleep(0)
        request = asyncio.create_task(model.generate(adapter="later"))
        assert await model.generate() == expect_text(model, None)
        assert not request.done()
        folder.set_result(tmp_path / "french")
        await loading
        assert await request == expected
        await handler.unload_adapter("later")
        with pytest.raises(PredictionException, match=r"no adapter 'later'. Its adapters: none"):
            await model.generate(adapter="later")

        folder = asyncio.get_running_loop().create_future()
        folder.set_result(tmp_path / "nowhere")
        with pytest.raises(HandlerLoadError, match=r"there is no adapter_config.json"):
            await handler.load_adapter("later", folder)
        with pytest.raises(
            PredictionException, match=r"later could not be loaded here.*no adapter_config"
        ) as failed:
            await model.generate(adapter="later")
        assert failed.value.error_code == 503

    run_served(archive, check)


@pytest.mark.parametrize(
    ("adapters", "error"),
    [
        (["french"], r"engine.adapters is \['french'\]; it is \{name: folder-in-archive\}"),
        ({"french": "elsewhere"}, "engine.adapters.french: there is no adapter_config.json"),
        ({"french": "../french"}, r"engine.adapters.french: ../french is outside of the archive"),
    ],
)
def test_invalid_adapters_of_the_archive_are_refused(archive: Path, adapters: Any, error: str) -> None:
    async def start() -> None:
        served = Served(archive, adapters)
        try:
            await served.entry.initialize(served.context())
        finally:
            await served.entry.instance.engine.shutdown()

    with pytest.raises(HandlerLoadError, match=error):
        asyncio.run(start())
