"""Tests of the handler ``llm``: its requests, and its responses, whole and streamed."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import handlers
from handlers.context import Context
from handlers.errors import HandlerLoadError, PredictionException
from handlers.metrics import MetricCache, updates

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


CONFIG = {"engine": {"num_blocks": 32, "page_size": 16, "max_batch_tokens": 64}}


class Served:
    """The handler on a folder; ``predict`` sends one request, whose chunks are stored under its id."""

    def __init__(self, folder: Path, config: dict[str, Any], manifest: dict[str, Any]) -> None:
        self.entry = handlers.load("llm", folder, manifest)
        self.contexts: dict[str, Context] = {}
        self.chunks: dict[str, list[Any]] = {}
        self._arguments = (str(folder), manifest, config)

    def context(self, name: str = "", **headers: str) -> Context:
        folder, manifest, config = self._arguments
        context = Context("poet", folder, manifest, metrics=MetricCache("poet"), model_yaml_config=config)
        chunks = self.chunks[name] = []
        context.begin([name], [headers], [{}], lambda idx, chunk: chunks.append(chunk))
        context.metrics.request_ids = context.request_ids
        self.contexts[name] = context
        return context

    async def predict(self, row: dict[str, Any], name: str = "only") -> Any:
        [answer] = await self.entry([row], self.context(name))
        return answer

    async def json(self, **body: Any) -> Any:
        return await self.predict({"body": body})


def run_served(
    folder: Path,
    use: Callable[[Served], Awaitable[Any]],
    config: dict[str, Any] = CONFIG,
    serialized_file: str | None = None,
) -> Any:
    """Return the result of ``use`` with the handler on ``folder``."""
    model = {"serializedFile": serialized_file} if serialized_file else {}

    async def run() -> Any:
        handler = Served(folder, config, {"model": model})
        assert handler.entry.is_async
        await handler.entry.initialize(handler.context())
        try:
            return await asyncio.wait_for(use(handler), 200)
        finally:
            await handler.entry.instance.engine.shutdown()

    return asyncio.run(run())


def generate_greedily(folder: Path, prompt: str, count: int) -> str:
    """Return the text that transformers itself generates."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt")
    generated = AutoModelForCausalLM.from_pretrained(folder).generate(
        **ids, max_new_tokens=count, do_sample=False
    )
    return tokenizer.decode(generated[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def test_a_response_has_text_and_usage(language_model: Path) -> None:
    async def check(model: Served) -> None:
        expected = generate_greedily(language_model, "Roses are red", 40)
        answer = await model.json(prompt="Roses are red", max_new_tokens=40)
        usage = {"prompt_tokens": 13, "completion_tokens": 40, "total_tokens": 53}
        usage["prompt_tokens_details"] = {"cached_tokens": 0}
        assert answer == {"text": expected, "usage": usage, "finish_reason": "length"}
        tokens = model.entry.instance.tokenizer.encode("Roses are red")
        for row in (
            {"body": {"inputs": "Roses are red", "parameters": {"max_new_tokens": 40}}},
            {"body": {"prompt": tokens, "max_tokens": 40}},
            {"body": b'{"prompt": "Roses are red", "max_tokens": 40}'},
            {
                "data": {
                    "prompt": "Roses are red",
                    "max_tokens": 40.0,
                    "stop": [],
                    "stream": False,
                    "seed": None,
                }
            },
            {"prompt": bytearray(b"Roses are red"), "max_new_tokens": b"40", "stream": "false"},  # a form
        ):
            assert await model.predict(row) == answer, row

    run_served(language_model, check)


def test_a_plain_text_is_a_prompt(language_model: Path) -> None:
    async def check(model: Served) -> None:
        for body in ("Roses", b"Roses", {"prompt": "Roses"}, "Roses"):
            answer = await model.predict({"body": body})
            assert answer["usage"]["completion_tokens"] == 12, "the configured number"
            assert answer["text"] == generate_greedily(language_model, "Roses", 12)

    run_served(language_model, check, {"engine": {**CONFIG["engine"], "max_new_tokens": 12}})


def test_the_default_length_is_limited_by_the_capacity(language_model: Path) -> None:
    async def check(model: Served) -> None:
        answer = await model.json(prompt="r" * 200)
        assert answer["usage"]["total_tokens"] == 256
        assert "the limit is 256" in (await model.json(prompt="r" * 256)).message

    run_served(language_model, check)


def test_streamed_chunks_join_to_the_whole_text(language_model: Path) -> None:
    async def check(model: Served) -> None:
        names = [f"line {i}" for i in range(8)]
        whole = [
            (await model.json(prompt=name, max_new_tokens=20 + 9 * i))["text"] for i, name in enumerate(names)
        ]
        rest = await asyncio.gather(
            *(
                model.predict({"body": {"prompt": name, "max_new_tokens": 20 + 9 * i, "stream": True}}, name)
                for i, name in enumerate(names)
            )
        )
        assert ["".join([*model.chunks[name], last]) for name, last in zip(names, rest, strict=True)] == whole
        assert any(model.chunks.values()), "chunks were streamed before the end"
        for name in names:
            assert model.contexts[name].get_response_content_type(0) == "text/plain; charset=utf-8"

    run_served(language_model, check)


def test_stop_strings_end_the_text(language_model: Path) -> None:
    async def check(model: Served) -> None:
        request = {"prompt": "Roses are red", "max_new_tokens": 40}
        whole = (await model.json(**request))["text"]
        stop = whole[20:23]
        text = whole[: whole.index(stop)]
        answer = await model.json(**request, stop=[stop, "never generated"])
        assert (answer["text"], answer["finish_reason"]) == (text, "stop")
        assert answer["usage"]["completion_tokens"] < 40, "generation stopped, and the text was not only cut"
        rest = await model.predict({"body": {**request, "stop": stop, "stream": True}}, "s")
        assert "".join([*model.chunks["s"], rest]) == text
        assert model.entry.instance.engine.cache_usage == 0

    run_served(language_model, check)


def test_sampling_parameters_of_requests(language_model: Path) -> None:
    async def check(model: Served) -> None:
        async def text(**more: Any) -> str:
            return (await model.json(prompt="Roses", max_new_tokens=20, **more))["text"]

        most_probable = await text()
        assert (
            most_probable
            == await text(temperature=0)
            == await text(temperature=0, seed=4)
            == await text(top_k=1)
        )
        sampled = await text(temperature=1.0, seed=4)
        assert sampled == await text(seed=4) == await text(seed=4, top_p=1.0, top_k=0) != most_probable

    run_served(language_model, check)


def test_sampling_parameters_of_the_folder(language_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    shutil.copytree(language_model, folder / "weights")
    settings = folder / "weights" / "generation_config.json"
    config = {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.9, "eos_token_id": [256, 3]}
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **config}))

    async def check(model: Served) -> None:
        handler = model.entry.instance
        assert (
            handler.default_sampling.temperature,
            handler.default_sampling.top_k,
            handler.default_sampling.top_p,
        ) == (0.9, 20, 0.9)
        assert handler.end_tokens == (256, 3)
        request = {"prompt": "Roses", "max_new_tokens": 20}
        configured = await model.json(**request, seed=4)
        assert configured == await model.json(**request, seed=4, temperature=0.9, top_k=20, top_p=0.9)
        assert configured != await model.json(**request, temperature=0)

    run_served(folder, check, serialized_file="weights/model.safetensors")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "There is no prompt: send a text"),
        ([1, 2], "A request is a text, or JSON"),
        ("", "The prompt is empty"),
        ({"prompt": ["a", "b"]}, "prompt is a text, or a list of token ids"),
        ({"prompt": [300]}, "300 is no token of this model"),
        ({"prompt": "a", "inputs": "b"}, "prompt is given twice (also as inputs)"),
        ({"prompt": "a", "parameters": 5}, "parameters is an object"),
        (
            {"prompt": "a", "temprature": 1},
            "'temprature' is not known: there are prompt, max_new_tokens, temp",
        ),
        ({"prompt": "a", "temperature": -1}, "temperature is -1; it is a number from 0 to 100"),
        ({"prompt": "a", "temperature": "warm"}, "temperature is 'warm'"),
        ({"prompt": "a", "temperature": True}, "temperature is True"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature is nan"),
        ({"prompt": "a", "max_new_tokens": 2.5}, "max_new_tokens is 2.5; it is a whole number from 1"),
        ({"prompt": "a", "max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"prompt": "a", "max_new_tokens": 999}, "together 1000, and the limit is 256"),
        ({"prompt": "a", "top_p": 1.5}, "top_p is 1.5; it is a number from 0 to 1"),
        ({"prompt": "a", "top_k": [1]}, "top_k is [1]; it is a whole number from 0"),
        ({"prompt": "a", "stop": ["x", ""]}, "stop is a text, or a list of up to 16 texts"),
        ({"prompt": "a", "stop": 5}, "stop is a text"),
        ({"prompt": "a", "stream": "maybe"}, "stream is 'maybe'; it is true or false"),
        (b"\xff", "the request is no UTF-8 text"),
        (b"{1", "The request is no JSON"),
        (b'{"a":' * 300 + b"1" + b"}" * 300, "more than 250 levels"),
        ({"prompt": "\ud800"}, "The text is no Unicode"),
    ],
)
def test_invalid_requests_are_rejected(body: Any, message: str, request_error: Callable[[Any], Any]) -> None:
    error = request_error(body)
    assert isinstance(error, PredictionException)
    assert error.error_code == 400
    assert message in error.message


@pytest.fixture(scope="module")
def request_error(language_model: Path) -> Any:
    """Return a function from a body to its error; all use one handler."""
    loop = asyncio.new_event_loop()
    model = Served(language_model, CONFIG, {"model": {}})
    loop.run_until_complete(model.entry.initialize(model.context()))
    yield lambda body: loop.run_until_complete(model.predict({"body": body}))
    valid = loop.run_until_complete(model.json(prompt="Roses", max_new_tokens=3))
    assert valid["usage"]["completion_tokens"] == 3, "the handler still works"
    loop.run_until_complete(model.entry.instance.engine.shutdown())
    loop.close()


def test_invalid_rows_fail_alone(language_model: Path) -> None:
    async def check(model: Served) -> None:
        context = model.context("batch")
        context.begin(["a", "b"], [{}, {}], [{}, {}])
        valid, error = await model.entry(
            [{"body": {"prompt": "Roses", "max_new_tokens": 5}}, {"body": {}}], context
        )
        assert valid["usage"]["completion_tokens"] == 5
        assert isinstance(error, PredictionException)

    run_served(language_model, check)


def test_cancelled_requests_free_their_cache(language_model: Path) -> None:
    async def run_cancelled(model: Served) -> None:
        engine = model.entry.instance.engine
        call = asyncio.ensure_future(model.json(prompt="Roses", max_new_tokens=240, stream=True))
        while engine.cache_usage == 0:
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert engine.cache_usage == 0

    run_served(language_model, run_cancelled)


def test_metrics_are_recorded(language_model: Path) -> None:
    async def check(model: Served) -> dict[str, float]:
        updates.clear()
        await model.predict({"body": {"prompt": "Roses are red", "max_new_tokens": 30}}, "measured")
        assert {request_id for *_, request_id in updates} == {"measured"}
        return {metric.metric_name: value for metric, value, *_ in updates}

    values = run_served(language_model, check)
    assert set(values) == {
        "TimeToFirstToken",
        "CacheUse",
        "PromptTokens",
        "GeneratedTokens",
        "TokensPerSecond",
        "PrefixCacheQueries",
        "PrefixCacheHits",
    }
    assert (values["PromptTokens"], values["GeneratedTokens"]) == (13, 30)
    assert 0 < values["TimeToFirstToken"] < 60_000
    assert values["TokensPerSecond"] > 0
    assert (values["PrefixCacheQueries"], values["PrefixCacheHits"]) == (13, 0)
    assert values["CacheUse"] in (0.0, 3.12, 6.25, 9.38), "of 32 pages, at the first tokens"


def test_the_handler_describes_itself(language_model: Path) -> None:
    async def check(model: Served) -> Any:
        return await model.entry([{}], model.context("d", describe="True"))

    [description] = run_served(language_model, check)
    assert description["cache_tokens"] == 256
    assert description["input"][:2] == ["prompt", "max_new_tokens"]


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("transformers", "engine is 'transformers'; it is {name: transformers}"),
        ({"max_new_tokens": 0}, "engine.max_new_tokens is 0; it is 1 or more"),
        ({"blocks": 3}, "no option 'blocks'"),
    ],
)
def test_invalid_configurations_are_rejected(language_model: Path, engine: Any, message: str) -> None:
    async def fail(model: Served) -> None:
        raise AssertionError("the handler has started")

    with pytest.raises(HandlerLoadError) as raised:
        run_served(language_model, fail, {"engine": engine})
    assert message in str(raised.value)


def test_archives_without_a_model_are_rejected(language_model: Path, tmp_path: Path) -> None:
    async def fail(model: Served) -> None:
        raise AssertionError("the handler has started")

    with pytest.raises(HandlerLoadError, match=r"there is no config\.json"):
        run_served(tmp_path, fail)
    shutil.copy(language_model / "config.json", tmp_path)
    with pytest.raises(HandlerLoadError, match="there is no tokenizer in it"):
        run_served(tmp_path, fail)


def test_a_folders_own_file_does_not_allow_its_code(tmp_path: Path) -> None:
    """``arguments`` reach vLLM, which imports the folder's code where they say so."""
    (tmp_path / "config.json").write_text("{}")
    engine = {"engine": {"name": "vllm", "arguments": {"trust_remote_code": True}}}
    entry = handlers.load("llm", tmp_path, {}, runs_code=False)
    with pytest.raises(HandlerLoadError, match=r"trust_remote_code: a model's own file.*trusted=true"):
        asyncio.run(entry.initialize(Context("m", str(tmp_path), {}, model_yaml_config=engine)))


@pytest.mark.parametrize("path", ["", "v1/completions", "v1/chat/completions"])
def test_a_long_prompt_is_tokenized_while_others_generate(
    language_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """The tokens of the long prompt wait until another request has its response."""
    folder = tmp_path / "model"
    shutil.copytree(language_model, folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    other_has_ended = threading.Event()

    async def send(handler: Served) -> None:
        tokenizer = handler.entry.instance.tokenizer
        encode = tokenizer.encode

        def wait(text: str, **options: Any) -> list[int]:
            assert len(text) < 9000 or other_has_ended.wait(200)
            return encode(text, **options)

        monkeypatch.setattr(tokenizer, "encode", wait)
        text = "a" * 9000
        content = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
        headers = {"url_path": path} if path else {}
        long = asyncio.ensure_future(handler.entry([{"body": content}], handler.context("long", **headers)))
        other = await handler.json(prompt="b", max_new_tokens=3)
        other_has_ended.set()
        assert other["usage"]["completion_tokens"] == 3
        [refused] = await long
        assert refused.error_code == 400 and "9000 tokens" in refused.message

    run_served(folder, send)


def test_a_cache_salt_separates_cached_prefixes(language_model: Path) -> None:
    async def send(handler: Served) -> list[int]:
        found = []
        for salt in ("", "a", "a", "b", ""):
            headers = {"cache_salt": salt} if salt else {}
            row = {"body": {"prompt": "c" * 64, "max_new_tokens": 1}}
            [answer] = await handler.entry([row], handler.context("only", **headers))
            found.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        return found

    first, *others = run_served(language_model, send)
    assert first == 0 and [count > 0 for count in others] == [False, True, False, True]
