"""The models as BentoML serves them: ``bentoml serve`` of ``Models``."""

from __future__ import annotations

import bentoml
import numpy as np
import torch

from tests.benchmarks.archives import MODELS
from tests.benchmarks.frameworks import BATCH


# BentoML learns the time for which a batch waits. ``max_latency_ms`` bounds a request's whole time.
@bentoml.service(traffic={"timeout": 30})
class Models:
    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = MODELS["mlp"].build()

    @bentoml.api(route="/predictions/echo", batchable=True, max_batch_size=BATCH, max_latency_ms=10_000)
    def echo(self, texts: list[str]) -> list[str]:
        return texts

    @bentoml.api(route="/predictions/mlp", batchable=True, max_batch_size=BATCH, max_latency_ms=10_000)
    def mlp(self, rows: np.ndarray) -> list[dict]:
        with torch.inference_mode():
            logits = self.model(torch.from_numpy(rows).float())
        return [{"class": c, "logits": row} for c, row in zip(logits.argmax(1).tolist(), logits.tolist())]
