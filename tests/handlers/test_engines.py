"""Engines: what they generate, refuse, cancel and survive; and the text of tokens as they come."""

from __future__ import annotations

import asyncio
import codecs
import importlib.util
import textwrap
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from handlers import engines
from handlers.engines.detokenizer import Detokenizer
from handlers.engines.engine import Chunk, Engine, GenerationRequest, Logprob, Sampling
from handlers.errors import HandlerLoadError, PredictionException

SIZES = {"num_blocks": 24, "page_size": 16, "max_batch_tokens": 64}  # 384 tokens: less than eight requests want
LENGTHS = [(3, 40), (17, 5), (64, 60), (1, 80), (130, 20), (30, 30), (8, 1), (90, 50)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models are so small that more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def with_engine(folder: Path, use: Callable[[Any], Awaitable[Any]], **options: Any) -> Any:
    """What ``use`` gives of an engine on ``folder``, which is shut down after it."""

    async def started() -> Any:
        engine = await engines.start(folder, None, {**SIZES, **options})
        try:
            return await asyncio.wait_for(use(engine), 60)
        finally:
            await engine.shutdown()

    return asyncio.run(started())


async def said(engine: Engine, request: GenerationRequest) -> tuple[list[int], str | None]:
    """All tokens of an answer, and why it ended."""
    tokens: list[int] = []
    reason = None
    async for chunk in engine.generate(request):
        assert reason is None, "nothing comes after the last chunk"
        tokens += chunk.tokens
        reason = chunk.finish_reason
    return tokens, reason


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def prompts() -> list[list[int]]:
    return [[(seven * 7 + place * 13) % 256 for place in range(length)] for seven, (length, _) in enumerate(LENGTHS)]


def test_eight_at_once_say_what_each_says_alone(language_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(language_model)
    alone = []
    for prompt, (_, count) in zip(prompts(), LENGTHS, strict=True):
        ids = torch.tensor([prompt])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
        alone.append(made[0, len(prompt) :].tolist())

    async def all_at_once(engine: Engine) -> Any:
        requests = [
            GenerationRequest(f"request {i}", prompt, count, end=(256,))
            for i, (prompt, (_, count)) in enumerate(zip(prompts(), LENGTHS, strict=True))
        ]
        return await asyncio.gather(*(said(engine, request) for request in requests))

    together = with_engine(language_model, all_at_once)
    assert [tokens for tokens, _ in together] == alone
    assert len({tuple(tokens) for tokens in alone}) == 8
    assert [reason for _, reason in together] == [
        "stop" if tokens[-1] == 256 else "length" for tokens in alone
    ]


def test_each_request_is_drawn_as_it_asks(language_model: Path) -> None:
    prompt = list(b"Once upon a time")

    def asked(name: str, **sampling: Any) -> GenerationRequest:
        return GenerationRequest(name, prompt, 20, Sampling(**sampling))

    async def draw(engine: Engine) -> Any:
        requests = [
            asked("greedy"),
            asked("seven", temperature=1.0, seed=7),
            asked("eight", temperature=1.0, seed=8),
            asked("the likeliest only", temperature=1.0, top_k=1, seed=1),
            asked("almost nothing", temperature=1.0, top_p=0.0, seed=1),
            asked("hardly any", temperature=1e-4, seed=2),
            asked("whatever", temperature=5.0),
        ]
        together = [tokens for tokens, _ in await asyncio.gather(*(said(engine, request) for request in requests))]
        again = [(await said(engine, asked("again", temperature=1.0, seed=7)))[0]]
        again += [(await said(engine, asked("whatever else", temperature=5.0)))[0]]
        return together, again

    (greedy, seven, eight, *likeliest, whatever), (seven_again, whatever_again) = with_engine(language_model, draw)
    assert likeliest == [greedy] * 3
    assert seven == seven_again, "a seed means the same alone as in company"
    assert len({tuple(tokens) for tokens in (greedy, seven, eight, whatever, whatever_again)}) == 5


@pytest.mark.parametrize("sampling", [Sampling(logprobs=3), Sampling(1.0, 5, 0.9, 7, 0)], ids=["greedy", "drawn"])
def test_how_likely_each_token_was(language_model: Path, sampling: Sampling) -> None:
    from transformers import AutoModelForCausalLM

    prompt = prompts()[1]

    async def ask(engine: Any) -> list[Chunk]:
        beside = asyncio.create_task(said(engine, GenerationRequest("beside", prompts()[2], 20)))
        made = [chunk async for chunk in engine.generate(GenerationRequest("asks", prompt, 20, sampling))]
        await beside
        assert engine._sampler._followed == {}, "it is forgotten"
        return made

    chunks = with_engine(language_model, ask)
    tokens = [token for chunk in chunks for token in chunk.tokens]
    told = [logprob for chunk in chunks for logprob in chunk.logprobs]
    assert [one.token for one in told] == tokens
    ids = torch.tensor([prompt + tokens])
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(language_model)(ids).logits[0, len(prompt) - 1 : -1]
    chances = logits.log_softmax(-1)
    for one, token, row in zip(told, tokens, chances, strict=True):
        assert one.logprob == pytest.approx(float(row[token]), abs=1e-4)
        values, likeliest = row.topk(sampling.logprobs)
        assert [token for token, _ in one.likeliest] == likeliest.tolist()
        assert [value for _, value in one.likeliest] == pytest.approx(values.tolist(), abs=1e-4)


def test_what_ends_an_answer(language_model: Path) -> None:
    async def end(engine: Engine) -> Any:
        whole, reason = await said(engine, GenerationRequest("whole", [1, 2, 3], 30))
        assert reason == "length"
        place = next(i for i in range(5, 30) if whole[i] not in whole[:i])
        cut = await said(engine, GenerationRequest("cut", [1, 2, 3], 30, end=(whole[place],)))
        assert cut == (whole[: place + 1], "stop")

    with_engine(language_model, end)


@pytest.mark.parametrize(
    ("prompt", "count", "complaint"),
    [
        ([], 5, "The prompt is empty"),
        ([1, 257], 5, "257 is no token of this model: its ids are 0 to 256"),
        ([-1], 5, "-1 is no token"),
        ([True], 5, "True is no token"),
        ([1], 0, "max_new_tokens is 0; it is 1 or more"),
        ([1] * 200, 57, r"200 tokens, and max_new_tokens is 57: together 257, and there is room for 256. Either ask "
                        r"for at most 56 new tokens, or .*num_blocks"),
        ([1] * 256, 1, "shorten the prompt to less than 256"),
    ],
)  # fmt: skip
def test_what_would_end_the_loop_is_refused(
    language_model: Path, prompt: list[int], count: int, complaint: str
) -> None:
    async def refuse(engine: Engine) -> None:
        other = asyncio.ensure_future(said(engine, GenerationRequest("other", [5, 6], 20)))
        with pytest.raises(PredictionException, match=complaint) as refused:
            await said(engine, GenerationRequest("bad", prompt, count))
        assert refused.value.error_code == 400
        assert len((await other)[0]) == 20

    with_engine(language_model, refuse)


def test_room_is_what_the_cache_has(language_model: Path) -> None:
    async def fill(engine: Engine) -> None:
        assert engine.capacity == 48
        tokens, reason = await said(engine, GenerationRequest("all of it", [1] * 8, 40))
        assert (len(tokens), reason) == (40, "length")
        with pytest.raises(PredictionException, match="room for 48"):
            await said(engine, GenerationRequest("one more", [1] * 8, 41))

    with_engine(language_model, fill, num_blocks=3)


def test_an_id_is_one_requests_alone(language_model: Path) -> None:
    async def twice(engine: Any) -> None:
        request = GenerationRequest("same", [1], 250)
        first = asyncio.ensure_future(said(engine, request))
        await until(lambda: engine.use > 0)
        with pytest.raises(ValueError, match="'same' is under way already"):
            await said(engine, request)
        assert len((await first)[0]) == 250

    with_engine(language_model, twice)


def test_abort_ends_the_stream_and_frees_its_place(language_model: Path) -> None:
    async def stop(engine: Any) -> None:
        chunks = []
        async for chunk in engine.generate(GenerationRequest("long", [1, 2], 250)):
            chunks.append(chunk)
            await engine.abort("long")
        assert chunks[-1].finish_reason == "abort"
        assert sum(len(chunk.tokens) for chunk in chunks) < 250
        assert engine.use == 0
        scheduler = engine._manager.batch_processor.scheduler
        await until(lambda: not scheduler.active_requests)
        await engine.abort("long")  # it is over

        # A caller that leaves: its task is cancelled.
        left = asyncio.ensure_future(said(engine, GenerationRequest("left", [1, 2], 250)))
        await until(lambda: "left" in scheduler.active_requests)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        assert engine.use == 0
        await until(lambda: not scheduler.active_requests)
        assert len((await said(engine, GenerationRequest("left", [1, 2], 250)))[0]) == 250, "the room is whole again"

    with_engine(language_model, stop)


def test_a_loop_that_fails_is_made_anew(language_model: Path) -> None:
    async def fail(engine: Any) -> None:
        expected = await said(engine, GenerationRequest("before", [1, 2, 3], 30))
        waiting = [
            asyncio.ensure_future(said(engine, GenerationRequest(f"{i}", [1, 2, 3], 250))) for i in range(3)
        ]
        await until(lambda: len(engine._answers) == 3)
        engine._manager.add_request([9999], request_id="past admission", max_new_tokens=3)
        for answer in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(answer, PredictionException)
            assert answer.error_code == 503
            assert "The generation loop failed (index out of range" in answer.message
            assert "send the request again" in answer.message
        assert engine.use == 0
        after = await asyncio.gather(*(said(engine, GenerationRequest(f"{i}", [1, 2, 3], 30)) for i in range(3)))
        assert after == [expected] * 3
        await engine.check_health()

    with_engine(language_model, fail)


def test_shutdown_ends_what_is_under_way(language_model: Path) -> None:
    async def end(engine: Any) -> None:
        waiting = asyncio.ensure_future(said(engine, GenerationRequest("long", [1], 250)))
        await until(lambda: engine.use > 0)
        await engine.shutdown()
        assert (await waiting)[1] == "abort"
        with pytest.raises(PredictionException, match="being unloaded"):
            await said(engine, GenerationRequest("late", [1], 5))
        with pytest.raises(RuntimeError, match="shut down"):
            await engine.check_health()

    with_engine(language_model, end)


def test_sizes_are_always_set(language_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    from handlers.engines.continuous_batching import sizes

    model = AutoModelForCausalLM.from_pretrained(language_model)
    assert sizes(model, {}) == {"num_blocks": 64, "page_size": 32, "max_batch_tokens": 256}, "eight whole contexts"
    assert sizes(model, {"page_size": 16}) == {"num_blocks": 128, "page_size": 16, "max_batch_tokens": 256}
    for key, value, least in (("num_blocks", 0, 1), ("page_size", 3, 4), ("max_batch_tokens", "many", 1)):
        with pytest.raises(HandlerLoadError, match=rf"engine\.{key} is {value!r}; it is a whole number from {least}"):
            sizes(model, {key: value})


def test_options_that_are_not_known(language_model: Path) -> None:
    for options, complaint in (
        ({"name": "transformer"}, "no engine 'transformer'. Did you mean 'transformers'?"),
        ({"num_block": 5}, "transformers has no option 'num_block'. Did you mean 'num_blocks'?"),
    ):
        with pytest.raises(HandlerLoadError) as refused:
            asyncio.run(engines.start(language_model, None, options))
        assert complaint in str(refused.value)


def test_a_folder_without_a_language_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(HandlerLoadError, match="no language model that generates text"):
        asyncio.run(engines.start(tmp_path, None, {}))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed")
def test_vllm_says_what_it_needs(language_model: Path) -> None:
    with pytest.raises(HandlerLoadError, match=r"vllm is not installed.*requirements\.txt.*useVenv: true.*name: tran"):
        asyncio.run(engines.start(language_model, None, {"name": "vllm"}))


# What vLLM says of itself: its names and arguments, in front of an engine that counts.
VLLM = {
    "__init__": "from vllm.sampling_params import SamplingParams",
    "sampling_params": """
        import enum

        class RequestOutputKind(enum.Enum):
            CUMULATIVE = 0
            DELTA = 1

        class SamplingParams:
            def __init__(
                self, *, temperature, top_k, top_p, seed, logprobs, max_tokens, stop_token_ids, detokenize, output_kind
            ):
                if top_p == 0:
                    raise ValueError("top_p must be in (0, 1]")
                assert output_kind is RequestOutputKind.DELTA and detokenize is False
                self.asked = (temperature, top_k, top_p, seed, stop_token_ids)
                self.max_tokens, self.logprobs = max_tokens, logprobs
    """,
    "engine/__init__": "",
    "engine/arg_utils": """
        class AsyncEngineArgs:
            def __init__(self, model, **others):
                self.model, self.others = model, others
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
                made = cls()
                made.args, made.aborted, made.running = args, [], True
                made.model_config = SimpleNamespace(max_model_len=64, get_vocab_size=lambda: 100)
                return made

            async def generate(self, prompt, sampling_params, request_id):
                self.asked = sampling_params.asked
                for count in range(sampling_params.max_tokens):
                    if self.errored:
                        raise EngineDeadError("it is dead")
                    reason = "length" if count + 1 == sampling_params.max_tokens else None
                    token = prompt["prompt_token_ids"][-1] + 1 + count
                    said = SimpleNamespace(token_ids=[token], finish_reason=reason, logprobs=None)
                    if sampling_params.logprobs is not None:
                        said.logprobs = [{token: SimpleNamespace(logprob=-2.0), 3: SimpleNamespace(logprob=-0.5)}]
                    yield SimpleNamespace(outputs=[said])

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
    for name, source in VLLM.items():
        file = tmp_path / "site" / "vllm" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


@pytest.mark.usefixtures("vllm")
def test_vllm_is_asked_in_its_own_words(tmp_path: Path) -> None:
    async def ask() -> None:
        engine: Any = await engines.start(tmp_path, 0, {"name": "vllm", "arguments": {"max_model_len": 64}})
        own = engine._engine
        assert (own.args.model, own.args.others) == (str(tmp_path), {"max_model_len": 64})
        assert (engine.capacity, engine.use) == (64, None)
        request = GenerationRequest("one", [5, 6], 3, Sampling(0.5, 4, 0.9, 7), end=(99,))
        assert await said(engine, request) == ([7, 8, 9], "length")
        assert own.asked == (0.5, 4, 0.9, 7, [99])
        wished = GenerationRequest("likely", [5], 1, Sampling(logprobs=1))
        [chunk] = [chunk async for chunk in engine.generate(wished)]
        assert list(chunk.logprobs) == [Logprob(6, -2.0, ((3, -0.5),))]
        await engine.abort("one")
        assert own.aborted == ["one"]
        await engine.check_health()

        for bad, complaint in (
            (GenerationRequest("long", [5], 64), "room for 64"),
            (GenerationRequest("odd", [100], 1), "100 is no token"),
            (GenerationRequest("zero", [5], 3, Sampling(1.0, 0, 0.0)), "vLLM refuses the request: top_p must be"),
        ):
            with pytest.raises(PredictionException, match=complaint) as refused:
                await said(engine, bad)
            assert refused.value.error_code == 400

        own.errored = True
        with pytest.raises(PredictionException, match="vLLM's engine has failed: it is dead") as failed:
            await said(engine, request)
        assert failed.value.error_code == 503
        with pytest.raises(RuntimeError, match="it is dead"):
            await engine.check_health()
        await engine.shutdown()
        assert not own.running

    asyncio.run(ask())


# The text of tokens; here each token is a byte, or a word.


def bytewise(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def pieces(text: bytes, *stops: str) -> tuple[list[str], Detokenizer]:
    made = Detokenizer(bytewise, stops)
    return [piece for byte in text if (piece := made.push([byte]))] + [made.finish()], made


def test_words_leave_whole() -> None:
    got, made = pieces("Größe zählt, sagt 猫と犬 😀!".encode())
    assert got == ["Größe ", "zählt,", " ", "sagt ", "猫", "と", "犬", " ", "😀", "!", ""]
    assert made.text == "Größe zählt, sagt 猫と犬 😀!"


def test_a_word_without_end_leaves_as_well() -> None:
    got, made = pieces(b"a" * 100)
    assert len(got) > 2
    assert made.text == "a" * 100


def test_bytes_that_are_no_text() -> None:
    broken = b"ok \xff\xfe and \xe7\x8c"
    got, made = pieces(broken)
    assert "".join(got) == made.text == broken.decode(errors="replace")
    assert got[0] == "ok "


def test_what_a_decoder_makes_of_a_token_depends_on_its_neighbours() -> None:
    words = ["▁Once", "▁upon", "▁a", "▁ti", "me"]

    def decode(tokens: list[int]) -> str:  # as SentencePiece does: no space in front
        return "".join(words[token] for token in tokens).replace("▁", " ").removeprefix(" ")

    made = Detokenizer(decode)
    assert [made.push([token]) for token in range(5)] == ["", "Once ", "upon ", "a ", ""]
    assert made.finish() == "time"
    assert made.text == "Once upon a time"


def test_a_text_ends_before_its_stop_string() -> None:
    got, made = pieces(b"one two STOP three", "STOP")
    assert (made.text, made.stopped) == ("one two ", True)
    assert "".join(got) == "one two "

    got, made = pieces(b"one. Two. \n\nThree", " \n\n", "Three")
    assert made.text == "one. Two."
    assert "".join(got) == made.text, "nothing of a stop string has left before it was whole"

    got, made = pieces(b"a \n b", "\n\n")
    assert (made.text, made.stopped) == ("a \n b", False)

    _, made = pieces(b"ends with the", "the")
    assert (made.text, made.stopped) == ("ends with ", True)


def test_many_tokens_at_once() -> None:
    made = Detokenizer(bytewise, ["."])
    assert made.push(list(b"One two. Three")) == "One two"
    assert made.stopped
    assert made.push(list(b"four")) == made.finish() == ""
    assert codecs.encode(made.text) == b"One two"
