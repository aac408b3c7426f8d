"""The handler ``llm``: what a request may say, and what is answered, whole and in pieces."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import handlers
from handlers.context import Context
from handlers.errors import HandlerLoadError, PredictionException
from handlers.metrics import MetricCache, updates

CONFIG = {"engine": {"num_blocks": 32, "page_size": 16, "max_batch_tokens": 64}}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models are so small that more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Served:
    """The handler on a folder; ``ask`` is one call, whose pieces are kept under its request id."""

    def __init__(self, folder: Path, config: dict[str, Any], manifest: dict[str, Any]) -> None:
        self.entry = handlers.load("llm", folder, manifest)
        self.contexts: dict[str, Context] = {}
        self.pieces: dict[str, list[Any]] = {}
        self._made = (str(folder), manifest, config)

    def context(self, name: str = "", **headers: str) -> Context:
        folder, manifest, config = self._made
        context = Context("poet", folder, manifest, metrics=MetricCache("poet"), model_yaml_config=config)
        sent = self.pieces[name] = []
        context.begin([name], [headers], [{}], lambda idx, piece: sent.append(piece))
        context.metrics.request_ids = context.request_ids
        self.contexts[name] = context
        return context

    async def ask(self, row: dict[str, Any], name: str = "only") -> Any:
        [answer] = await self.entry([row], self.context(name))
        return answer

    async def json(self, **body: Any) -> Any:
        return await self.ask({"body": body})


def served(
    folder: Path,
    use: Callable[[Served], Awaitable[Any]],
    config: dict[str, Any] = CONFIG,
    serialized_file: str | None = None,
) -> Any:
    """What ``use`` gives of the handler on ``folder``."""
    model = {"serializedFile": serialized_file} if serialized_file else {}

    async def started() -> Any:
        made = Served(folder, config, {"model": model})
        assert made.entry.asynchronous
        await made.entry.initialize(made.context())
        try:
            return await asyncio.wait_for(use(made), 60)
        finally:
            await made.entry.instance.engine.shutdown()

    return asyncio.run(started())


def greedy(folder: Path, prompt: str, count: int) -> str:
    """What transformers generates by itself."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt")
    made = AutoModelForCausalLM.from_pretrained(folder).generate(**ids, max_new_tokens=count, do_sample=False)
    return tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def test_a_whole_answer(language_model: Path) -> None:
    async def ask(model: Served) -> None:
        expected = greedy(language_model, "Roses are red", 40)
        answer = await model.json(prompt="Roses are red", max_new_tokens=40)
        usage = {"prompt_tokens": 13, "completion_tokens": 40, "total_tokens": 53}
        assert answer == {"text": expected, "usage": usage, "finish_reason": "length"}
        tokens = model.entry.instance.tokenizer.encode("Roses are red")
        for same in (
            {"body": {"inputs": "Roses are red", "parameters": {"max_new_tokens": 40}}},
            {"body": {"prompt": tokens, "max_tokens": 40}},
            {"body": b'{"prompt": "Roses are red", "max_tokens": 40}'},
            {"data": {"prompt": "Roses are red", "max_tokens": 40.0, "stop": [], "stream": False, "seed": None}},
            {"prompt": bytearray(b"Roses are red"), "max_new_tokens": b"40", "stream": "false"},  # a form
        ):
            assert await model.ask(same) == answer, same

    served(language_model, ask)


def test_a_text_alone_is_a_prompt(language_model: Path) -> None:
    async def ask(model: Served) -> None:
        for body in ("Roses", b"Roses", {"prompt": "Roses"}, "Roses"):
            answer = await model.ask({"body": body})
            assert answer["usage"]["completion_tokens"] == 12, "as the configuration says"
            assert answer["text"] == greedy(language_model, "Roses", 12)

    served(language_model, ask, {"engine": {**CONFIG["engine"], "max_new_tokens": 12}})


def test_without_a_number_there_is_as_much_as_fits(language_model: Path) -> None:
    async def ask(model: Served) -> None:
        answer = await model.json(prompt="r" * 200)
        assert answer["usage"]["total_tokens"] == 256
        assert "room for 256" in (await model.json(prompt="r" * 256)).message

    served(language_model, ask)


def test_pieces_join_to_the_whole(language_model: Path) -> None:
    async def ask(model: Served) -> None:
        names = [f"line {i}" for i in range(8)]
        whole = [(await model.json(prompt=name, max_new_tokens=20 + 9 * i))["text"] for i, name in enumerate(names)]
        rest = await asyncio.gather(
            *(
                model.ask({"body": {"prompt": name, "max_new_tokens": 20 + 9 * i, "stream": True}}, name)
                for i, name in enumerate(names)
            )
        )
        assert ["".join([*model.pieces[name], last]) for name, last in zip(names, rest, strict=True)] == whole
        assert any(model.pieces.values()), "they came while the rest was being made"
        for name in names:
            assert model.contexts[name].get_response_content_type(0) == "text/plain; charset=utf-8"

    served(language_model, ask)


def test_stop_strings(language_model: Path) -> None:
    async def ask(model: Served) -> None:
        asked = {"prompt": "Roses are red", "max_new_tokens": 40}
        whole = (await model.json(**asked))["text"]
        stop = whole[20:23]
        text = whole[: whole.index(stop)]
        answer = await model.json(**asked, stop=[stop, "never said"])
        assert (answer["text"], answer["finish_reason"]) == (text, "stop")
        assert answer["usage"]["completion_tokens"] < 40, "it stopped there, and did not only cut"
        rest = await model.ask({"body": {**asked, "stop": stop, "stream": True}}, "s")
        assert "".join([*model.pieces["s"], rest]) == text
        assert model.entry.instance.engine.use == 0

    served(language_model, ask)


def test_draws_as_it_is_asked(language_model: Path) -> None:
    async def ask(model: Served) -> None:
        async def text(**more: Any) -> str:
            return (await model.json(prompt="Roses", max_new_tokens=20, **more))["text"]

        likeliest = await text()
        assert likeliest == await text(temperature=0) == await text(temperature=0, seed=4) == await text(top_k=1)
        drawn = await text(temperature=1.0, seed=4)
        assert drawn == await text(seed=4) == await text(seed=4, top_p=1.0, top_k=0) != likeliest

    served(language_model, ask)


def test_how_the_models_authors_want_it_drawn(language_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    shutil.copytree(language_model, folder / "weights")
    settings = folder / "weights" / "generation_config.json"
    wanted = {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.9, "eos_token_id": [256, 3]}
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **wanted}))

    async def ask(model: Served) -> None:
        handler = model.entry.instance
        assert (handler.default.temperature, handler.default.top_k, handler.default.top_p) == (0.9, 20, 0.9)
        assert handler.end == (256, 3)
        asked = {"prompt": "Roses", "max_new_tokens": 20}
        as_they_say = await model.json(**asked, seed=4)
        assert as_they_say == await model.json(**asked, seed=4, temperature=0.9, top_k=20, top_p=0.9)
        assert as_they_say != await model.json(**asked, temperature=0)

    served(folder, ask, serialized_file="weights/model.safetensors")


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ({}, "There is no prompt: send a text"),
        ([1, 2], "A request is a text, or JSON"),
        ("", "The prompt is empty"),
        ({"prompt": ["a", "b"]}, "prompt is a text, or a list of token ids"),
        ({"prompt": [300]}, "300 is no token of this model"),
        ({"prompt": "a", "inputs": "b"}, "prompt is given twice (also as inputs)"),
        ({"prompt": "a", "parameters": 5}, "parameters is an object"),
        ({"prompt": "a", "temprature": 1}, "'temprature' is not known: there are prompt, max_new_tokens, temp"),
        ({"prompt": "a", "temperature": -1}, "temperature is -1; it is a number from 0 to 100"),
        ({"prompt": "a", "temperature": "warm"}, "temperature is 'warm'"),
        ({"prompt": "a", "temperature": True}, "temperature is True"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature is nan"),
        ({"prompt": "a", "max_new_tokens": 2.5}, "max_new_tokens is 2.5; it is a whole number from 1"),
        ({"prompt": "a", "max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"prompt": "a", "max_new_tokens": 999}, "together 1000, and there is room for 256"),
        ({"prompt": "a", "top_p": 1.5}, "top_p is 1.5; it is a number from 0 to 1"),
        ({"prompt": "a", "top_k": [1]}, "top_k is [1]; it is a whole number from 0"),
        ({"prompt": "a", "stop": ["x", ""]}, "stop is a text, or a list of up to 16 texts"),
        ({"prompt": "a", "stop": 5}, "stop is a text"),
        ({"prompt": "a", "stream": "maybe"}, "stream is 'maybe'; it is true or false"),
        (b"\xff", "the request is no UTF-8 text"),
        (b"{1", "The request is no JSON"),
    ],
)
def test_what_cannot_be_read(body: Any, complaint: str, refuse: Callable[[Any], Any]) -> None:
    error = refuse(body)
    assert isinstance(error, PredictionException)
    assert error.error_code == 400
    assert complaint in error.message


@pytest.fixture(scope="module")
def refuse(language_model: Path) -> Any:
    """``refuse(body)``: the answer of one handler that all the bad requests get to see."""
    loop = asyncio.new_event_loop()
    model = Served(language_model, CONFIG, {"model": {}})
    loop.run_until_complete(model.entry.initialize(model.context()))
    yield lambda body: loop.run_until_complete(model.ask({"body": body}))
    good = loop.run_until_complete(model.json(prompt="Roses", max_new_tokens=3))
    assert good["usage"]["completion_tokens"] == 3, "none of them has hurt it"
    loop.run_until_complete(model.entry.instance.engine.shutdown())
    loop.close()


def test_rows_of_a_batch_fail_alone(language_model: Path) -> None:
    async def ask(model: Served) -> None:
        context = model.context("batch")
        context.begin(["a", "b"], [{}, {}], [{}, {}])
        good, bad = await model.entry([{"body": {"prompt": "Roses", "max_new_tokens": 5}}, {"body": {}}], context)
        assert good["usage"]["completion_tokens"] == 5
        assert isinstance(bad, PredictionException)

    served(language_model, ask)


def test_a_caller_that_leaves_frees_its_place(language_model: Path) -> None:
    async def leave(model: Served) -> None:
        engine = model.entry.instance.engine
        call = asyncio.ensure_future(model.json(prompt="Roses", max_new_tokens=240, stream=True))
        while engine.use == 0:
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert engine.use == 0

    served(language_model, leave)


def test_metrics(language_model: Path) -> None:
    async def ask(model: Served) -> dict[str, float]:
        updates.clear()
        await model.ask({"body": {"prompt": "Roses are red", "max_new_tokens": 30}}, "measured")
        assert {request_id for *_, request_id in updates} == {"measured"}
        return {metric.metric_name: value for metric, value, *_ in updates}

    values = served(language_model, ask)
    assert set(values) == {"TimeToFirstToken", "CacheUse", "PromptTokens", "GeneratedTokens", "TokensPerSecond"}
    assert (values["PromptTokens"], values["GeneratedTokens"]) == (13, 30)
    assert 0 < values["TimeToFirstToken"] < 60_000
    assert values["TokensPerSecond"] > 0
    assert values["CacheUse"] in (0.0, 3.12, 6.25, 9.38), "of 32 pages, when the first tokens were seen"


def test_describes_itself(language_model: Path) -> None:
    async def ask(model: Served) -> Any:
        return await model.entry([{}], model.context("d", describe="True"))

    [described] = served(language_model, ask)
    assert described["room"] == 256
    assert described["input"][:2] == ["prompt", "max_new_tokens"]


@pytest.mark.parametrize(
    ("engine", "complaint"),
    [
        ("transformers", "engine is 'transformers'; it is {name: transformers}"),
        ({"max_new_tokens": 0}, "engine.max_new_tokens is 0; it is 1 or more"),
        ({"blocks": 3}, "no option 'blocks'"),
    ],
)
def test_a_configuration_that_is_wrong(language_model: Path, engine: Any, complaint: str) -> None:
    async def nothing(model: Served) -> None:
        raise AssertionError("it has started")

    with pytest.raises(HandlerLoadError) as refused:
        served(language_model, nothing, {"engine": engine})
    assert complaint in str(refused.value)


def test_an_archive_that_is_no_model(language_model: Path, tmp_path: Path) -> None:
    async def nothing(model: Served) -> None:
        raise AssertionError("it has started")

    with pytest.raises(HandlerLoadError, match=r"there is no config\.json"):
        served(tmp_path, nothing)
    shutil.copy(language_model / "config.json", tmp_path)
    with pytest.raises(HandlerLoadError, match="there is no tokenizer in it"):
        served(tmp_path, nothing)
