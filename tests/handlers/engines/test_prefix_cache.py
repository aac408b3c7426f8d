"""Tests of prefix caching: the same tokens as ``generate``, what is found, shared and evicted."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from handlers import engines
from handlers.engines.engine import Engine, GenerationRequest, SamplingParams, StructuredOutput
from handlers.engines.prefix_cache import iterate_hashes
from handlers.errors import HandlerLoadError

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

PAGE = 16
SIZES = {"num_blocks": 24, "page_size": PAGE, "max_batch_tokens": 64}
PREFIX = [(position * 29 + 3) % 256 for position in range(100)]  # six pages, and four tokens


class Client:
    """A client of one engine, which numbers its requests."""

    def __init__(self, engine: Engine) -> None:
        self.engine: Any = engine
        self.count = 0

    async def __call__(self, prompt: list[int], count: int = 12, **fields: Any) -> tuple[list[int], Any]:
        """Return the generated tokens, and the number of the prompt's tokens that were cached."""
        self.count += 1
        tokens, cached = [], set()
        async for chunk in self.engine.generate(
            GenerationRequest(f"{self.count}", prompt, count, stop_token_ids=(256,), **fields)
        ):
            tokens += chunk.tokens
            cached.add(chunk.cached_tokens)
        [found] = cached
        return tokens, found

    @property
    def unused_blocks(self) -> Any:
        [allocator] = self.engine._manager.batch_processor.cache.cache_allocators.values()
        return vars(allocator)["ledger"].cached_blocks


def with_client(folder: Path, use: Callable[[Client], Awaitable[Any]], **options: Any) -> Any:
    """Return the result of ``use`` with an engine on ``folder``, which is then shut down."""

    async def run() -> Any:
        engine = await engines.start(folder, None, {**SIZES, **options})
        try:
            return await asyncio.wait_for(use(Client(engine)), 200)
        finally:
            await engine.shutdown()

    return asyncio.run(run())


def generate(folder: Path, prompt: list[int], count: int) -> list[int]:
    """Return the greedy completion of transformers' ``generate``."""
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([prompt])
    model = AutoModelForCausalLM.from_pretrained(folder)
    done = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return done[0, len(prompt) :].tolist()


def test_a_cached_prefix_yields_the_tokens_of_generate(language_model: Path) -> None:
    prompts = [PREFIX + [tail] * length for tail, length in ((1, 20), (2, 20), (1, 20), (3, 1))]
    expected = [generate(language_model, prompt, 30) for prompt in prompts]

    async def use(client: Client) -> Any:
        return [await client(prompt, 30) for prompt in prompts]

    answers = with_client(language_model, use)
    assert [tokens for tokens, _ in answers] == expected
    assert [cached for _, cached in answers] == [0, 96, 112, 96], "of whole pages, never the last token"


def test_the_cache_holds_generated_tokens_and_the_pages_of_the_last_step(language_model: Path) -> None:
    async def use(client: Client) -> None:
        await client(PREFIX, 1)  # its last step is that of the prompt
        answer, cached = await client(PREFIX, 30)
        assert cached == 96
        follow_up = PREFIX + answer + [7, 7]
        tokens, cached = await client(follow_up, 10)
        assert cached == 128, "the 129 tokens before the last have their keys in the cache"
        assert tokens == generate(language_model, follow_up, 10)

    with_client(language_model, use)


@pytest.mark.nightly
def test_requests_that_share_running_pages_are_preempted_without_a_change(language_model: Path) -> None:
    prompts = [PREFIX + [tail] * 30 for tail in range(6)]  # with their answers 16 pages each, of 24
    expected = [generate(language_model, prompt, 120) for prompt in prompts]

    async def use(client: Client) -> Any:
        await client(PREFIX)
        return await asyncio.gather(*(client(prompt, 120) for prompt in prompts))

    answers = with_client(language_model, use)
    assert [tokens for tokens, _ in answers] == expected
    assert [cached for _, cached in answers] == [96] * 6


def test_sampling_logprobs_and_formats_do_not_depend_on_the_cache(language_model: Path) -> None:
    variants = [
        SamplingParams(1.0, seed=7),
        SamplingParams(repetition_penalty=1.5, frequency_penalty=1.0),
        SamplingParams(structured_output=StructuredOutput("regex", "[ab]{20}")),
    ]

    async def use(client: Client) -> Any:
        answers = [await client(PREFIX, sampling=sampling) for sampling in variants]
        measured = [
            chunk.logprobs
            async for chunk in client.engine.generate(
                GenerationRequest("measured", PREFIX, 12, SamplingParams(logprobs=2))
            )
        ]
        values = [logprob.logprob for logprobs in measured for logprob in logprobs]
        return [tokens for tokens, _ in answers], [cached for _, cached in answers], values

    async def use_twice(client: Client) -> Any:
        await client(PREFIX)
        return await use(client)

    tokens, cached, values = with_client(language_model, use, prefix_caching=False)
    assert cached == [None] * 3
    found_tokens, cached, found_values = with_client(language_model, use_twice)
    assert (found_tokens, cached) == (tokens, [96] * 3)
    assert found_values == pytest.approx(values, abs=1e-4)


def test_namespaces_share_nothing(language_model: Path) -> None:
    async def use(client: Client) -> None:
        assert [(await client(PREFIX, cache_salt=salt))[1] for salt in ("", "poet", "", "poet", "other")] == [
            *(0, 0, 96, 96, 0)
        ]

    with_client(language_model, use)


def test_the_least_recently_used_pages_are_evicted_first(language_model: Path) -> None:
    first, second, third = ([word] * 97 for word in (1, 2, 3))  # six pages, and one of the answer

    async def use(client: Client) -> None:
        for prompt in (first, second, third, first):
            await client(prompt, 1)
        assert len(client.unused_blocks) == 18
        await client([4] * 150, 2)  # ten of 24 pages: four are evicted
        assert len(client.unused_blocks) == 14 + 9
        # The lookups themselves evict nothing: their pages and one more are free.
        assert [(await client(prompt, 1))[1] for prompt in (first, third)] == [96, 96]
        assert (await client(second, 1))[1] == 32, "the end of a prefix goes before its beginning"

    with_client(language_model, use)


def test_a_full_cache_serves_long_requests(language_model: Path) -> None:
    prompt = [9] * 200
    expected = generate(language_model, prompt, 50)

    async def use(client: Client) -> None:
        for word in range(6):
            await client([word] * 90, 20)
        assert len(client.unused_blocks) > 18, "nothing is dropped before it is needed"
        assert (await client(prompt, 50))[0] == expected

    with_client(language_model, use)


def test_a_replaced_loop_starts_with_an_empty_cache(language_model: Path) -> None:
    async def use(client: Client) -> None:
        before, _ = await client(PREFIX)
        client.engine._manager.add_request([9999], request_id="not validated", max_new_tokens=3)
        while client.engine._manager.is_running():
            await asyncio.sleep(0.01)
        assert [await client(PREFIX), await client(PREFIX)] == [(before, 0), (before, 96)]

    with_client(language_model, use)


def test_prefix_caching_can_be_switched_off(language_model: Path) -> None:
    async def use(client: Client) -> None:
        assert [(await client(PREFIX))[1] for _ in range(2)] == [None, None]
        assert client.unused_blocks == {}

    with_client(language_model, use, prefix_caching=False)
    with pytest.raises(HandlerLoadError, match=r"engine\.prefix_caching is 'no'; it is true or false"):
        asyncio.run(engines.start(language_model, None, {"prefix_caching": "no"}))


def test_hashes_depend_on_all_tokens_before_and_on_the_namespace() -> None:
    tokens = list(range(40))
    first, second = iterate_hashes(b"", tokens, PAGE)
    assert list(iterate_hashes(first, tokens[PAGE:], PAGE)) == [second]
    assert list(iterate_hashes(b"x", tokens, PAGE))[1] != second
    assert list(iterate_hashes(b"", [1, *tokens[1:]], PAGE))[1] != second


# Rank 0 generates for the prompts on its command line, and prints what it generated and found; the other
# rank runs the same steps until its stdin is closed.
RANK = """
import asyncio, json, sys
from pathlib import Path
import torch
from handlers import engines
from handlers.distributed.process_group import RankPlacement, Rendezvous
from handlers.engines.engine import GenerationRequest

rank, port, folder, options, prompts = int(sys.argv[1]), int(sys.argv[2]), *map(json.loads, sys.argv[3:])
torch.set_num_threads(1)
rendezvous = Rendezvous(RankPlacement(rank, 2, rank, 2, "127.0.0.1"), port)
if not rank:
    print(rendezvous.port, flush=True)
rendezvous.join()

async def main():
    engine = await engines.start(Path(folder), None, options, 2)
    for number, prompt in enumerate([] if rank else prompts):
        chunks = [chunk async for chunk in engine.generate(GenerationRequest(str(number), prompt, 20))]
        tokens = [token for chunk in chunks for token in chunk.tokens]
        print(json.dumps([tokens, chunks[0].cached_tokens]), flush=True)
    await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


@pytest.mark.nightly
def test_two_ranks_find_the_same_prefixes(language_model: Path) -> None:
    prompts = [PREFIX + [tail] * 20 for tail in (1, 2, 1)]
    prompts += [[tail] * 180 for tail in (3, 4)]  # evict the prefix
    prompts += prompts[:1]
    words = [json.dumps(value) for value in (str(language_model), SIZES, prompts)]

    def start(rank: int, port: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", RANK, str(rank), port, *words]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    ranks = [start(0, "0")]
    try:
        assert ranks[0].stdout is not None
        ranks.append(start(1, ranks[0].stdout.readline().strip()))
        answers = [json.loads(ranks[0].stdout.readline()) for _ in prompts]
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert [cached for _, cached in answers] == [0, 96, 112, 0, 0, 0]
    assert [tokens for tokens, _ in answers] == [generate(language_model, prompt, 20) for prompt in prompts]
