"""Text generation: sixteen requests of mixed lengths one after another, as one batch, and by continuous
batching.

    python -m tests.benchmarks.generation

prints a table, or with --json every round, and ends with 1 where the engine's answers are not ``generate``'s:
all is greedy and in float32.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from handlers import engines
from handlers.engines.engine import GenerationRequest
from tests.benchmarks.report import ALONE_EACH as ALONE
from tests.benchmarks.report import CONTINUOUS
from tests.benchmarks.report import TOGETHER as STATIC

_VOCABULARY = 1000

Requests = list[tuple[list[int], int]]
Run = tuple[list[list[int]], list[float], float]  # the answers' tokens, the seconds of each, and of all


def requests(count: int = 16) -> Requests:
    """Prompts of 8 to 96 tokens with 4 to 48 new ones wanted, always the same."""
    draw = random.Random(0)
    return [
        ([draw.randrange(1, _VOCABULARY) for _ in range(draw.randint(8, 96))], draw.randint(4, 48))
        for _ in range(count)
    ]


def save_model(folder: Path, width: int, context: int = 512) -> None:
    """Save a Llama with random weights that never ends an answer by itself."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=8,
        num_attention_heads=8,
        max_position_embeddings=context,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


def alone(model: Any, requested: Requests) -> Run:
    """Each waits for those before it."""
    import torch

    answers, seconds, began = [], [], time.perf_counter()
    for prompt, count in requested:
        ids = torch.tensor([prompt])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
        answers.append(made[0, len(prompt) :].tolist())
        seconds.append(time.perf_counter() - began)
    return answers, seconds, seconds[-1]


def static(model: Any, requested: Requests) -> Run:
    """All wait for the longest."""
    import torch

    longest, most = max(len(prompt) for prompt, _ in requested), max(count for _, count in requested)
    began = time.perf_counter()
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in requested])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in requested])
    made = model.generate(ids, attention_mask=mask, max_new_tokens=most, do_sample=False)
    seconds = time.perf_counter() - began
    answers = [row[longest : longest + count].tolist() for row, (_, count) in zip(made, requested)]
    return answers, [seconds] * len(requested), seconds


async def continuous(engine: Any, requested: Requests) -> Run:
    """Each leaves when it is done."""
    began = time.perf_counter()

    async def one(place: int, prompt: list[int], count: int) -> tuple[list[int], float]:
        tokens: list[int] = []
        async for chunk in engine.generate(GenerationRequest(f"{place}", prompt, count)):
            tokens += chunk.tokens
        return tokens, time.perf_counter() - began

    done = await asyncio.gather(*(one(place, *request) for place, request in enumerate(requested)))
    return (
        [tokens for tokens, _ in done],
        [seconds for _, seconds in done],
        max(seconds for _, seconds in done),
    )


async def measure(folder: Path, rounds: int) -> tuple[dict[str, list[Run]], Requests]:
    """Each way ``rounds`` times, in turn, after one round that does not count."""
    from transformers import AutoModelForCausalLM

    requested = requests()
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    engine = await engines.start(folder, None, {"num_blocks": 128, "page_size": 32, "max_batch_tokens": 256})
    runs: dict[str, list[Run]] = {ALONE: [], STATIC: [], CONTINUOUS: []}
    ways: dict[str, Callable[[], Any]] = {
        ALONE: lambda: alone(model, requested),
        STATIC: lambda: static(model, requested),
    }
    try:
        for counts in range(rounds + 1):
            for way, run in runs.items():
                made = ways[way]() if way in ways else await continuous(engine, requested)
                if counts:
                    run.append(made)
    finally:
        await engine.shutdown()
    return runs, requested


def table(runs: dict[str, list[Run]], requested: Requests) -> str:
    """Return the medians of the rounds as Markdown."""
    old, new = sum(len(prompt) for prompt, _ in requested), sum(count for _, count in requested)
    lines = [
        f"| {len(requested)} requests, {old:,} tokens in, {new:,} out | s | tokens/s | x | mean latency, s |",
        "|---|---|---|---|---|",
    ]
    first = statistics.median(whole for *_, whole in runs[ALONE])
    for way, measured in runs.items():
        whole = statistics.median(seconds for *_, seconds in measured)
        latency = statistics.median(statistics.mean(each) for _, each, _ in measured)
        lines.append(f"| {way} | {whole:.2f} | {new / whole:,.0f} | {first / whole:.2f} | {latency:.2f} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> bool:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--width", type=int, default=512, help="the model's: 512 makes one of 28 million weights"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--json", action="store_true", help="each way's rounds as [tokens, seconds, [latency, ...]]"
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), options.width)
        runs, requested = asyncio.run(measure(Path(folder), options.rounds))
    tokens = sum(count for _, count in requested)
    every = {way: [[tokens, whole, each] for _, each, whole in rounds] for way, rounds in runs.items()}
    print(json.dumps(every) if options.json else table(runs, requested))
    expected = runs[ALONE][0][0]
    wrong = sum(answers != expected for answers, *_ in runs[CONTINUOUS])
    if wrong:
        print(
            f"{wrong} of {options.rounds} rounds of {CONTINUOUS} answered otherwise than generate",
            file=sys.stderr,
        )
    return not wrong


if __name__ == "__main__":
    sys.exit(not main())
