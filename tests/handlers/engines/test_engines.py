"""Tests of the continuous batching engine: generation, validation, cancellation and recovery."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from handlers import engines
from handlers.engines.engine import Engine, GenerationChunk, GenerationRequest, SamplingParams
from handlers.errors import HandlerLoadError, PredictionException
from tests.support import engine_runs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


# 384 tokens: fewer than eight requests need.
run_with_engine = partial(engine_runs.run_with_engine, num_blocks=24, max_batch_tokens=64)
LENGTHS = [(3, 40), (17, 5), (64, 60), (1, 80), (130, 20), (30, 30), (8, 1), (90, 50)]


async def collect(engine: Engine, request: GenerationRequest) -> tuple[list[int], str | None]:
    """Return all tokens of a completion, and its finish reason."""
    tokens: list[int] = []
    reason = None
    async for chunk in engine.generate(request):
        assert reason is None, "no chunk follows the last one"
        tokens += chunk.tokens
        reason = chunk.finish_reason
    return tokens, reason


async def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def make_prompts() -> list[list[int]]:
    return [
        [(row * 7 + position * 13) % 256 for position in range(length)]
        for row, (length, _) in enumerate(LENGTHS)
    ]


def test_batched_requests_generate_the_same_as_alone(language_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(language_model)
    alone = []
    for prompt, (_, count) in zip(make_prompts(), LENGTHS, strict=True):
        ids = torch.tensor([prompt])
        generated = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
        )
        alone.append(generated[0, len(prompt) :].tolist())

    async def generate_together(engine: Engine) -> Any:
        requests = [
            GenerationRequest(f"request {i}", prompt, count, stop_token_ids=(256,))
            for i, (prompt, (_, count)) in enumerate(zip(make_prompts(), LENGTHS, strict=True))
        ]
        return await asyncio.gather(*(collect(engine, request) for request in requests))

    together = run_with_engine(language_model, generate_together)
    assert [tokens for tokens, _ in together] == alone
    assert len({tuple(tokens) for tokens in alone}) == 8
    assert [reason for _, reason in together] == [
        "stop" if tokens[-1] == 256 else "length" for tokens in alone
    ]


def test_each_request_has_its_own_sampling_params(language_model: Path) -> None:
    prompt = list(b"Once upon a time")

    def make_request(name: str, **sampling: Any) -> GenerationRequest:
        return GenerationRequest(name, prompt, 20, SamplingParams(**sampling))

    async def draw(engine: Engine) -> Any:
        requests = [
            make_request("greedy"),
            make_request("seven", temperature=1.0, seed=7),
            make_request("eight", temperature=1.0, seed=8),
            make_request("the likeliest only", temperature=1.0, top_k=1, seed=1),
            make_request("almost nothing", temperature=1.0, top_p=0.0, seed=1),
            make_request("hardly any", temperature=1e-4, seed=2),
            make_request("whatever", temperature=5.0),
        ]
        together = [
            tokens for tokens, _ in await asyncio.gather(*(collect(engine, request) for request in requests))
        ]
        again = [(await collect(engine, make_request("again", temperature=1.0, seed=7)))[0]]
        again += [(await collect(engine, make_request("whatever else", temperature=5.0)))[0]]
        return together, again

    (greedy, seven, eight, *likeliest, whatever), (seven_again, whatever_again) = run_with_engine(
        language_model, draw
    )
    assert likeliest == [greedy] * 3
    assert seven == seven_again, "a seed yields the same tokens alone as in a batch"
    assert len({tuple(tokens) for tokens in (greedy, seven, eight, whatever, whatever_again)}) == 5


@pytest.mark.parametrize(
    "sampling", [SamplingParams(logprobs=3), SamplingParams(1.0, 5, 0.9, 7, 0)], ids=["greedy", "sampled"]
)
def test_logprobs_match_the_model(language_model: Path, sampling: SamplingParams) -> None:
    from transformers import AutoModelForCausalLM

    prompt = make_prompts()[1]

    async def generate(engine: Any) -> list[GenerationChunk]:
        concurrent = asyncio.create_task(
            collect(engine, GenerationRequest("concurrent", make_prompts()[2], 20))
        )
        generated = [
            chunk async for chunk in engine.generate(GenerationRequest("measured", prompt, 20, sampling))
        ]
        await concurrent
        assert engine._sampler._recorded == {}, "the finished request is forgotten"
        return generated

    chunks = run_with_engine(language_model, generate)
    tokens = [token for chunk in chunks for token in chunk.tokens]
    logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
    assert [logprob.token for logprob in logprobs] == tokens
    ids = torch.tensor([prompt + tokens])
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(language_model)(ids).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    for logprob, token, row in zip(logprobs, tokens, expected, strict=True):
        assert logprob.logprob == pytest.approx(float(row[token]), abs=1e-4)
        values, top_tokens = row.topk(sampling.logprobs)
        assert [token for token, _ in logprob.top_tokens] == top_tokens.tolist()
        assert [value for _, value in logprob.top_tokens] == pytest.approx(values.tolist(), abs=1e-4)


def test_stop_tokens_end_a_completion(language_model: Path) -> None:
    async def stop(engine: Engine) -> Any:
        complete, reason = await collect(engine, GenerationRequest("complete", [1, 2, 3], 30))
        assert reason == "length"
        position = next(i for i in range(5, 30) if complete[i] not in complete[:i])
        cut = await collect(
            engine, GenerationRequest("cut", [1, 2, 3], 30, stop_token_ids=(complete[position],))
        )
        assert cut == (complete[: position + 1], "stop")

    run_with_engine(language_model, stop)


@pytest.mark.parametrize(
    ("prompt", "count", "message"),
    [
        ([], 5, "The prompt is empty"),
        ([1, 257], 5, "257 is no token of this model: its ids are 0 to 256"),
        ([-1], 5, "-1 is no token"),
        ([True], 5, "True is no token"),
        ([1], 0, "max_new_tokens is 0; it is 1 or more"),
        (
            [1] * 200,
            57,
            r"200 tokens, and max_new_tokens is 57: together 257, and the limit is 256. "
            r"Either request at most 56 new tokens, or .*num_blocks",
        ),
        ([1] * 256, 1, "shorten the prompt to less than 256"),
    ],
)
def test_invalid_requests_are_rejected_without_failing_the_loop(
    language_model: Path, prompt: list[int], count: int, message: str
) -> None:
    async def reject(engine: Engine) -> None:
        other = asyncio.ensure_future(collect(engine, GenerationRequest("other", [5, 6], 20)))
        with pytest.raises(PredictionException, match=message) as raised:
            await collect(engine, GenerationRequest("bad", prompt, count))
        assert raised.value.error_code == 400
        assert len((await other)[0]) == 20

    run_with_engine(language_model, reject)


def test_capacity_is_the_size_of_the_cache(language_model: Path) -> None:
    async def fill(engine: Engine) -> None:
        assert engine.capacity == 48
        tokens, reason = await collect(engine, GenerationRequest("all of it", [1] * 8, 40))
        assert (len(tokens), reason) == (40, "length")
        with pytest.raises(PredictionException, match="the limit is 48"):
            await collect(engine, GenerationRequest("one more", [1] * 8, 41))

    run_with_engine(language_model, fill, num_blocks=3)


def test_duplicate_request_ids_are_rejected(language_model: Path) -> None:
    async def submit_twice(engine: Any) -> None:
        request = GenerationRequest("same", [1], 250)
        first = asyncio.ensure_future(collect(engine, request))
        await wait_until(lambda: engine.cache_usage > 0)
        with pytest.raises(ValueError, match="'same' is under way already"):
            await collect(engine, request)
        assert len((await first)[0]) == 250

    run_with_engine(language_model, submit_twice)


def test_abort_ends_the_stream_and_frees_its_cache(language_model: Path) -> None:
    async def abort(engine: Any) -> None:
        chunks = []
        async for chunk in engine.generate(GenerationRequest("long", [1, 2], 250)):
            chunks.append(chunk)
            await engine.abort("long")
        assert chunks[-1].finish_reason == "abort"
        assert sum(len(chunk.tokens) for chunk in chunks) < 250
        assert engine.cache_usage == 0
        scheduler = engine._manager.batch_processor.scheduler
        await wait_until(lambda: not scheduler.active_requests)
        await engine.abort("long")  # the request has finished

        # When a client disconnects, its task is cancelled.
        task = asyncio.ensure_future(collect(engine, GenerationRequest("cancelled", [1, 2], 250)))
        await wait_until(lambda: "cancelled" in scheduler.active_requests)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.cache_usage == 0
        await wait_until(lambda: not scheduler.active_requests)
        assert len((await collect(engine, GenerationRequest("cancelled", [1, 2], 250)))[0]) == 250, (
            "the cache is free again"
        )

    run_with_engine(language_model, abort)


def test_a_failed_loop_is_replaced(language_model: Path) -> None:
    async def fail(engine: Any) -> None:
        expected = await collect(engine, GenerationRequest("before", [1, 2, 3], 30))
        waiting = [
            asyncio.ensure_future(collect(engine, GenerationRequest(f"{i}", [1, 2, 3], 250)))
            for i in range(3)
        ]
        await wait_until(lambda: len(engine._token_queues) == 3)
        engine._manager.add_request([9999], request_id="not validated", max_new_tokens=3)
        for error in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(error, PredictionException)
            assert error.error_code == 503
            assert "The generation loop failed (index out of range" in error.message
            assert "send the request again" in error.message
        assert engine.cache_usage == 0
        after = await asyncio.gather(
            *(collect(engine, GenerationRequest(f"{i}", [1, 2, 3], 30)) for i in range(3))
        )
        assert after == [expected] * 3
        await engine.check_health()

    run_with_engine(language_model, fail)


def test_shutdown_aborts_running_requests(language_model: Path) -> None:
    async def shut_down(engine: Any) -> None:
        waiting = asyncio.ensure_future(collect(engine, GenerationRequest("long", [1], 250)))
        await wait_until(lambda: engine.cache_usage > 0)
        await engine.shutdown()
        assert (await waiting)[1] == "abort"
        with pytest.raises(PredictionException, match="being unloaded"):
            await collect(engine, GenerationRequest("late", [1], 5))
        with pytest.raises(RuntimeError, match="shut down"):
            await engine.check_health()

    run_with_engine(language_model, shut_down)


def test_cache_sizes_have_defaults(language_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    from handlers.engines.continuous_batching import cache_sizes

    model = AutoModelForCausalLM.from_pretrained(language_model)
    assert cache_sizes(model, {}) == {"num_blocks": 64, "page_size": 32, "max_batch_tokens": 256}, (
        "eight full contexts"
    )
    assert cache_sizes(model, {"page_size": 16}) == {
        "num_blocks": 128,
        "page_size": 16,
        "max_batch_tokens": 256,
    }
    for key, value, minimum in (("num_blocks", 0, 1), ("page_size", 3, 4), ("max_batch_tokens", "many", 1)):
        with pytest.raises(
            HandlerLoadError, match=rf"engine\.{key} is {value!r}; it is a whole number from {minimum}"
        ):
            cache_sizes(model, {key: value})


def test_unknown_options_are_rejected(language_model: Path) -> None:
    for options, message in (
        ({"name": "transformer"}, "no engine 'transformer'. Did you mean 'transformers'?"),
        ({"num_block": 5}, "transformers has no option 'num_block'. Did you mean 'num_blocks'?"),
    ):
        with pytest.raises(HandlerLoadError) as raised:
            asyncio.run(engines.start(language_model, None, options))
        assert message in str(raised.value)


def test_a_folder_without_a_language_model_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(HandlerLoadError, match="no language model that generates text"):
        asyncio.run(engines.start(tmp_path, None, {}))
