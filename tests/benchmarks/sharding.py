"""One language model in one process and over two: what the exchange between them costs.

``python -m tests.benchmarks.sharding RANK PORT FOLDER TENSOR PIPELINE THREADS`` is one process of a model.
Rank 0 prints the port at which the others find it; then each answers the line ``logits`` or ``tokens`` on its
stdin with what it did and the seconds that it took, as JSON. All processes of a model receive the
same.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from serve_app.load_test.profile import LoadProfile, LoadResult
from tests.benchmarks.targets import Contender, Measurer, measurer

LOGITS, TOKENS = "logits", "tokens"
# What a table calls it -> tensor_parallel, pipeline_parallel and the threads of each process.
WAYS = {
    "one process, one thread": (1, 1, 1),
    "one process, two threads": (1, 1, 2),
    "tensor parallel, two processes of one thread": (2, 1, 1),
    "pipeline parallel, two processes of one thread": (1, 2, 1),
}
_PROMPTS, _LONG, _NEW = 4, 64, 16  # tokens


def rows(what: str) -> list[dict[str, Any]]:
    """Return a batch that requests the scores after four prompts, or sixteen new tokens after each of
    them.
    """
    draw = random.Random(0)
    prompts = [[draw.randrange(1, 256) for _ in range(_LONG)] for _ in range(_PROMPTS)]
    more = {"logits": True} if what == LOGITS else {"max_new_tokens": _NEW}
    return [{"body": {"prompt": prompt, **more}} for prompt in prompts]


class Sharded:
    """The processes of one model, rank 0 first."""

    def __init__(self, ranks: list[Measurer]) -> None:
        self._ranks = ranks

    def measure(self, what: str) -> dict[str, Any]:
        """Return rank 0's report of one batch: how many it ``made``, the ``seconds``, and the ``answers``."""
        for rank in self._ranks:
            rank.tell(what)
        answers = [rank.hear() for rank in self._ranks]  # every rank must answer before the next order
        return answers[0]

    def contender(self, way: str, what: str) -> Contender:
        """Return a row of a table; its latency is that of the median batch."""

        def measure(load: LoadProfile) -> LoadResult:
            batches = [self.measure(what)]
            while sum(batch["seconds"] for batch in batches) < (load.seconds or 0):
                batches.append(self.measure(what))
            seconds, made = ([batch[name] for batch in batches] for name in ("seconds", "made"))
            median, nan = statistics.median(seconds), math.nan
            return LoadResult(
                "loop", 0, sum(seconds), _PROMPTS * len(batches), sum(made), median, nan, nan, max(seconds)
            )

        return Contender(way, measure)


@contextlib.contextmanager
def started(folder: Path, tensor: int, pipeline: int, threads: int) -> Iterator[Sharded]:
    """Yield the model of the Hugging Face folder ``folder``, loaded. Raises PeerFailed."""
    with contextlib.ExitStack() as stack:
        ranks, port = [], 0
        for rank in range(tensor * pipeline):
            words = map(str, (rank, port, folder, tensor, pipeline, threads))
            ranks.append(stack.enter_context(measurer("sharding", *words, threads=threads)))
            port = ranks[0].hear() if not rank else port
        for rank in ranks:
            rank.hear()
        yield Sharded(ranks)


def answer(rank: int, port: int, folder: Path, tensor: int, pipeline: int, threads: int) -> None:
    """One process of the model; see above."""
    import torch

    from handlers.builtin.causal_lm import CausalLM
    from handlers.context import Context
    from handlers.distributed.process_group import RankPlacement, Rendezvous

    torch.set_num_threads(threads)
    world = tensor * pipeline
    if world > 1:
        meeting = Rendezvous(RankPlacement(rank, world, rank, world, "127.0.0.1"), port)
        port = meeting.port
    if not rank:
        print(port, flush=True)
    if world > 1:
        meeting.join()
    model = CausalLM()
    degrees = {"tensor_parallel": tensor, "pipeline_parallel": pipeline}
    model.initialize(Context("sharded", str(folder), {}, model_yaml_config=degrees))
    for what in (LOGITS, TOKENS):  # once, not counted
        model.handle(rows(what), None)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        requested, began = rows(line.strip()), time.perf_counter()
        answers = model.handle(requested, None)
        seconds = time.perf_counter() - began
        made = sum(len(row["tokens"]) for row in answers) if line.strip() == TOKENS else len(answers)
        print(json.dumps({"made": made, "seconds": seconds, "answers": answers}), flush=True)


if __name__ == "__main__":
    answer(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *map(int, sys.argv[4:]))
