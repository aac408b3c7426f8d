"""Text from a language model that lies in two processes: what one process says, in step, until one of them is lost."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parts import Pulse

from handlers import engines
from handlers.engines.engine import GenerationRequest, Sampling

# One rank with an engine; rank 0 reads orders from its standard input and answers each with a line of JSON.
RANK = """
import asyncio, json, sys, torch, uuid
from pathlib import Path
torch.set_num_threads(1)
from handlers import engines, sharding
from handlers.engines.engine import GenerationRequest, Sampling
from handlers.errors import PredictionException

rank, port, folder = (json.loads(word) for word in sys.argv[1:])

def tell(value):
    print(json.dumps(value), flush=True)

meeting = sharding.Rendezvous(sharding.Place(rank, 2, rank, 2, "127.0.0.1"), port)
tell(meeting.port)
meeting.join()

def request(order):
    sampling = Sampling(**order.get("sampling", {}))
    return GenerationRequest(f"{uuid.uuid4()}", order["prompt"], order["count"], sampling)

async def said(engine, order, tokens=None):
    tokens = [] if tokens is None else tokens
    async for chunk in engine.generate(request(order)):
        tokens += chunk.tokens
    return tokens

async def main():
    options = {"num_blocks": 24, "page_size": 16, "max_batch_tokens": 64}
    engine = await engines.start(Path(folder), None, options, 2)
    tell("ready")
    while (order := json.loads(await asyncio.to_thread(sys.stdin.readline))):
        if "together" in order:
            tell(await asyncio.gather(*(said(engine, one) for one in order["together"])))
        if "leave" in order:
            chunks = engine.generate(request(order["leave"]))
            first = await chunks.__anext__()
            before = engine.use
            await chunks.aclose()
            tell([len(first.tokens), before, engine.use])
        if "until lost" in order:
            tokens = []
            task = asyncio.create_task(said(engine, order["until lost"], tokens))
            while not tokens:
                await asyncio.sleep(0.001)
            tell("under way")
            try:
                await task
            except PredictionException as error:
                tell([error.error_code, error.message])
            try:
                await engine.check_health()
            except RuntimeError as error:
                tell(str(error))
            try:
                await said(engine, order["until lost"])
            except PredictionException as error:
                tell(error.error_code)
    await engine.shutdown()

asyncio.run(main())
"""
PROMPTS = [[5, 6, 7], [100, 3, 250, 77, 9] * 20, [42], list(range(40, 60))]


class Ranks:
    """The processes of one engine; ``ask`` is an order to the first of them."""

    def __init__(self, folder: Path) -> None:
        self.processes = [self._begin(folder, 0, 0)]
        port = self.hear()
        self.processes.append(self._begin(folder, 1, port))
        assert self.hear(self.processes[1]) == port
        for process in self.processes:
            assert self.hear(process) == "ready"

    def _begin(self, folder: Path, rank: int, port: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", RANK, *map(json.dumps, (rank, port, str(folder)))]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)

    def hear(self, process: subprocess.Popen[str] | None = None) -> Any:
        stdout = (process or self.processes[0]).stdout
        assert stdout is not None
        return json.loads(stdout.readline())

    def tell(self, order: Any) -> None:
        stdin = self.processes[0].stdin
        assert stdin is not None
        print(json.dumps(order), file=stdin, flush=True)

    def ask(self, **order: Any) -> Any:
        self.tell(order)
        return self.hear()

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The model is so small that more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


async def alone(folder: Path, asked: list[dict[str, Any]]) -> list[list[int]]:
    """What an engine in this process says, asked for all at once."""
    engine = await engines.start(folder, None, {"num_blocks": 24, "page_size": 16, "max_batch_tokens": 64})

    async def said(name: str, one: dict[str, Any]) -> list[int]:
        sampling = Sampling(**one.get("sampling", {}))
        chunks = engine.generate(GenerationRequest(name, one["prompt"], one["count"], sampling))
        return [token async for chunk in chunks for token in chunk.tokens]

    try:
        return list(await asyncio.gather(*(said(f"{i}", one) for i, one in enumerate(asked))))
    finally:
        await engine.shutdown()


@pytest.fixture
def ranks(language_model: Path) -> Iterator[Callable[[], Ranks]]:
    made: list[Ranks] = []

    def begin() -> Ranks:
        made.append(Ranks(language_model))
        return made[-1]

    yield begin
    for one in made:
        one.end()


def test_two_ranks_say_what_one_says(ranks: Callable[[], Ranks], language_model: Path) -> None:
    two = ranks()
    drawn = {"temperature": 1.0, "seed": 3}
    together = [{"prompt": prompt, "count": 30} for prompt in PROMPTS]
    together += [{"prompt": prompt, "count": 20, "sampling": drawn} for prompt in PROMPTS[:2]]
    expected = asyncio.run(alone(language_model, together))
    assert [len(tokens) for tokens in expected] == [30] * 4 + [20] * 2
    assert two.ask(together=together) == expected, "many at once, each rank with the same in its steps"

    for _ in range(3):  # more than there is room for, were it not given back
        count, held, left = two.ask(leave={"prompt": [1, 2, 3], "count": 200})
        assert count < 200 and held > 0 and left == 0
    assert two.ask(together=together) == expected, "and in step after those who left"

    apart = [{"prompt": [1], "count": 40, "sampling": {"temperature": 1.0}}] * 2
    first, second = two.ask(together=apart)
    assert first != second, "without a seed there is one for all ranks, and another each time"


def test_a_rank_that_is_killed_ends_what_is_under_way(ranks: Callable[[], Ranks]) -> None:
    two = ranks()
    assert two.ask(**{"until lost": {"prompt": [1, 2, 3], "count": 250}}) == "under way"
    with Pulse() as pulse:
        two.processes[1].kill()
        began = time.monotonic()
        status, why = two.hear()
        assert time.monotonic() - began - pulse.stood(began) < 5
    assert (status, "do not generate together" in why) == (503, True), why
    assert "do not generate together" in two.hear(), "it is not well: a loop alone cannot be made anew"
    assert two.hear() == 503, "who comes now is told as well"
