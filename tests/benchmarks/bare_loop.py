"""What a model does with nothing around it: full batches, one after another.

``python -m tests.benchmarks.bare_loop MODEL THREADS SECONDS`` prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import time

import torch

from tests.benchmarks.archives import MODELS


def loop(name: str, threads: int, seconds: float) -> dict[str, float]:
    """Rows and seconds of a loop of full batches, after a warm-up of three."""
    torch.set_num_threads(threads)
    model = MODELS[name]
    module = model.build()
    batch = model.batch()
    batches = 0
    with torch.inference_mode():
        for _ in range(3):
            module(batch)
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            module(batch)
            batches += 1
    return {"rows": batches * model.batch_size, "seconds": time.perf_counter() - began}


if __name__ == "__main__":
    print(json.dumps(loop(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))))
