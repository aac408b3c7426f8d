"""The time to the first token of prompts with a shared prefix of 512 tokens, with prefix caching and without.

    python -m tests.benchmarks.prefix_caching

prints a table, or with --json every round, and ends with 1 where the two engines generate different tokens.
Both engines of one process get each prompt in turn; the prefix is in the cache before the first round.
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
from pathlib import Path
from typing import Any

from handlers import engines
from handlers.engines.engine import GenerationRequest
from tests.benchmarks.generation import save_model
from tests.benchmarks.report import CACHED_PREFIX, UNCACHED_PREFIX

PREFIX_TOKENS, QUESTION_TOKENS, NEW_TOKENS = 512, 32, 8
REQUESTS_PER_ROUND = 5
_SIZES = {"num_blocks": 128, "page_size": 32, "max_batch_tokens": 256}  # the defaults on a CPU

Answer = tuple[list[int], float]  # the tokens, and the seconds to the first


def make_prompts(count: int) -> list[list[int]]:
    """Return prompts with one prefix and different ends, always the same."""
    draw = random.Random(0)
    prefix = [draw.randrange(1, 1000) for _ in range(PREFIX_TOKENS)]
    return [prefix + [draw.randrange(1, 1000) for _ in range(QUESTION_TOKENS)] for _ in range(count)]


async def generate(engine: Any, name: str, prompt: list[int]) -> Answer:
    tokens: list[int] = []
    first, start = 0.0, time.perf_counter()
    async for chunk in engine.generate(GenerationRequest(name, prompt, NEW_TOKENS)):
        first = first or time.perf_counter() - start
        tokens += chunk.tokens
    return tokens, first


async def measure(folder: Path, rounds: int) -> dict[str, list[list[Answer]]]:
    """Return the answers of each round; the engines take turns at every prompt."""
    contenders = {
        name: await engines.start(folder, None, {**_SIZES, "prefix_caching": caches})
        for name, caches in ((UNCACHED_PREFIX, False), (CACHED_PREFIX, True))
    }
    first, *prompts = make_prompts(1 + rounds * REQUESTS_PER_ROUND)
    answers: dict[str, list[list[Answer]]] = {name: [[] for _ in range(rounds)] for name in contenders}
    try:
        for engine in contenders.values():
            await generate(engine, "first", first)
        for number, prompt in enumerate(prompts):
            for name, engine in contenders.items():
                answers[name][number // REQUESTS_PER_ROUND].append(
                    await generate(engine, str(number), prompt)
                )
    finally:
        for engine in contenders.values():
            await engine.shutdown()
    return answers


def format_table(answers: dict[str, list[list[Answer]]]) -> str:
    """Return the medians of all requests as Markdown."""
    lines = [
        f"| {PREFIX_TOKENS} shared tokens of {PREFIX_TOKENS + QUESTION_TOKENS} | first token, ms | ratio |",
        "|---|---|---|",
    ]
    medians = {
        name: statistics.median(seconds for done in rounds for _, seconds in done)
        for name, rounds in answers.items()
    }
    for name, seconds in medians.items():
        lines.append(f"| {name} | {seconds * 1000:.0f} | {seconds / medians[UNCACHED_PREFIX]:.2f} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> bool:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--width", type=int, default=512, help="the model's: 512 is 28 million weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="the seconds to each first token by round")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), options.width, context=1024)
        answers = asyncio.run(measure(Path(folder), options.rounds))
    times = {name: [[seconds for _, seconds in done] for done in all_] for name, all_ in answers.items()}
    print(json.dumps(times) if options.json else format_table(answers))
    tokens = [[tokens for done in rounds for tokens, _ in done] for rounds in answers.values()]
    if tokens[0] != tokens[1]:
        print("with prefix caching, other tokens were generated", file=sys.stderr)
    return tokens[0] == tokens[1]


if __name__ == "__main__":
    sys.exit(not main())
