"""Tests of tensor parallelism: two ranks generate the same as one process, until a rank is lost."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from handlers import engines
from handlers.engines.engine import GenerationRequest, SamplingParams
from tests.support.load import Pulse

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


# One rank with an engine; rank 0 reads commands from its standard input and prints results as lines of JSON.
RANK = """
import asyncio, json, sys, torch, uuid
from pathlib import Path
torch.set_num_threads(1)
from handlers import engines
from handlers.distributed import process_group
from handlers.engines.engine import GenerationRequest, SamplingParams
from handlers.errors import PredictionException

rank, port, folder = (json.loads(argument) for argument in sys.argv[1:])

def report(value):
    print(json.dumps(value), flush=True)

rendezvous = process_group.Rendezvous(process_group.RankPlacement(rank, 2, rank, 2, "127.0.0.1"), port)
report(rendezvous.port)
rendezvous.join()

def make_request(command):
    sampling = SamplingParams(**command.get("sampling", {}))
    return GenerationRequest(f"{uuid.uuid4()}", command["prompt"], command["count"], sampling)

async def generate(engine, command, tokens=None):
    tokens = [] if tokens is None else tokens
    async for chunk in engine.generate(make_request(command)):
        tokens += chunk.tokens
    return tokens

async def main():
    options = {"num_blocks": 24, "page_size": 16, "max_batch_tokens": 64}
    engine = await engines.start(Path(folder), None, options, 2)
    report("ready")
    while (command := json.loads(await asyncio.to_thread(sys.stdin.readline))):
        if "batch" in command:
            runs = [generate(engine, item) for item in command["batch"]]
            values = await asyncio.gather(*runs, return_exceptions=True)
            report([value if isinstance(value, list) else str(value) for value in values])
        if "disconnect" in command:
            chunks = engine.generate(make_request(command["disconnect"]))
            first = await chunks.__anext__()
            before = engine.cache_usage
            await chunks.aclose()
            report([len(first.tokens), before, engine.cache_usage])
        if "until lost" in command:
            tokens = []
            task = asyncio.create_task(generate(engine, command["until lost"], tokens))
            while not tokens:
                await asyncio.sleep(0.001)
            report("generating")
            try:
                await task
            except PredictionException as error:
                report([error.error_code, error.message])
            try:
                await engine.check_health()
            except RuntimeError as error:
                report(str(error))
            try:
                await generate(engine, command["until lost"])
            except PredictionException as error:
                report(error.error_code)
    await engine.shutdown()

asyncio.run(main())
"""
PROMPTS = [[5, 6, 7], [100, 3, 250, 77, 9] * 20, [42], list(range(40, 60))]


class Ranks:
    """The processes of one engine; ``call`` sends a command to rank 0."""

    def __init__(self, folder: Path) -> None:
        self.processes = [self._start(folder, 0, 0)]
        port = self.receive()
        self.processes.append(self._start(folder, 1, port))
        assert self.receive(self.processes[1]) == port
        for process in self.processes:
            assert self.receive(process) == "ready"

    def _start(self, folder: Path, rank: int, port: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", RANK, *map(json.dumps, (rank, port, str(folder)))]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, env=env, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )

    def receive(self, process: subprocess.Popen[str] | None = None) -> Any:
        stdout = (process or self.processes[0]).stdout
        assert stdout is not None
        return json.loads(stdout.readline())

    def send(self, command: Any) -> None:
        stdin = self.processes[0].stdin
        assert stdin is not None
        print(json.dumps(command), file=stdin, flush=True)

    def call(self, **command: Any) -> Any:
        self.send(command)
        return self.receive()

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


async def generate_locally(folder: Path, commands: list[dict[str, Any]]) -> list[list[int]]:
    """Return the tokens of all commands, batched in an engine of this process."""
    engine = await engines.start(folder, None, {"num_blocks": 24, "page_size": 16, "max_batch_tokens": 64})

    async def generate(name: str, command: dict[str, Any]) -> list[int]:
        sampling = SamplingParams(**command.get("sampling", {}))
        chunks = engine.generate(GenerationRequest(name, command["prompt"], command["count"], sampling))
        return [token async for chunk in chunks for token in chunk.tokens]

    try:
        return list(await asyncio.gather(*(generate(f"{i}", command) for i, command in enumerate(commands))))
    finally:
        await engine.shutdown()


@pytest.fixture
def ranks(language_model: Path) -> Iterator[Callable[..., Ranks]]:
    started: list[Ranks] = []

    def start(folder: Path = language_model) -> Ranks:
        started.append(Ranks(folder))
        return started[-1]

    yield start
    for group in started:
        group.stop()


@pytest.mark.slow
def test_two_ranks_generate_the_same_as_one(ranks: Callable[[], Ranks], language_model: Path) -> None:
    group = ranks()
    sampling = {"temperature": 1.0, "seed": 3}
    batch = [{"prompt": prompt, "count": 30} for prompt in PROMPTS]
    batch += [{"prompt": prompt, "count": 20, "sampling": sampling} for prompt in PROMPTS[:2]]
    expected = asyncio.run(generate_locally(language_model, batch))
    assert [len(tokens) for tokens in expected] == [30] * 4 + [20] * 2
    assert group.call(batch=batch) == expected, "all ranks run the same steps"

    for _ in range(3):  # together they need more than the cache, so each frees its part
        count, used, remaining = group.call(disconnect={"prompt": [1, 2, 3], "count": 200})
        assert count < 200 and used > 0 and remaining == 0
    assert group.call(batch=batch) == expected, "the ranks stay in step after cancelled requests"

    unseeded = [{"prompt": [1], "count": 40, "sampling": {"temperature": 1.0}}] * 2
    first, second = group.call(batch=unseeded)
    assert first != second, "requests without a seed get different ones, the same on all ranks"


@pytest.mark.nightly
def test_scores_that_are_not_numbers_fail_their_own_row_on_all_ranks(
    ranks: Callable[..., Ranks], language_model: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(language_model)
    with torch.no_grad():
        model.get_input_embeddings().weight[77] = float("nan")
    shutil.copytree(language_model, tmp_path / "damaged")
    model.save_pretrained(tmp_path / "damaged")
    group = ranks(tmp_path / "damaged")
    sampled = [{"prompt": [5, 6], "count": 30, "sampling": {"temperature": 1.0, "seed": 3}} for _ in range(2)]
    failing = {**sampled[0], "prompt": [77]}
    first, failed, last = group.call(batch=[sampled[0], failing, sampled[1]])
    assert "not finite numbers" in failed
    assert [first, last] == group.call(batch=sampled), "the ranks stay in step"


@pytest.mark.nightly
def test_a_killed_rank_fails_running_requests(ranks: Callable[[], Ranks]) -> None:
    group = ranks()
    assert group.call(**{"until lost": {"prompt": [1, 2, 3], "count": 250}}) == "generating"
    with Pulse() as pulse:
        group.processes[1].kill()
        started = time.monotonic()
        status, message = group.receive()
        assert time.monotonic() - started - pulse.stalled_seconds(started) < 5
    assert (status, "do not generate together" in message) == (503, True), message
    assert "do not generate together" in group.receive(), "unhealthy: one rank cannot restart its loop alone"
    assert group.receive() == 503, "later requests fail as well"
