"""The models as Ray Serve serves them without Torchrelay: ``ray_serve_app.py PORT FOLDER``."""

from __future__ import annotations

import sys
import time
from typing import Any

import ray
import torch
from ray import serve
from starlette.requests import Request

from tests.benchmarks.archives import MODELS
from tests.benchmarks.frameworks import BATCH, BATCH_DELAY_S

_OPTIONS: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0}, "max_ongoing_requests": 100}


@serve.deployment(**_OPTIONS)
class Echo:
    @serve.batch(max_batch_size=BATCH, batch_wait_timeout_s=BATCH_DELAY_S)
    async def predict(self, rows: list[Any]) -> list[Any]:
        return rows

    async def __call__(self, request: Request) -> Any:
        return await self.predict(await request.json())


@serve.deployment(**_OPTIONS)
class Perceptron:
    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = MODELS["mlp"].build()

    @serve.batch(max_batch_size=BATCH, batch_wait_timeout_s=BATCH_DELAY_S)
    async def predict(self, rows: list[Any]) -> list[Any]:
        with torch.inference_mode():
            logits = self.model(torch.tensor(rows, dtype=torch.float32))
        return [{"class": c, "logits": row} for c, row in zip(logits.argmax(1).tolist(), logits.tolist())]

    async def __call__(self, request: Request) -> Any:
        return await self.predict(await request.json())


@serve.deployment(**_OPTIONS)
class Ping:
    async def __call__(self, request: Request) -> str:
        return "Healthy"


if __name__ == "__main__":
    port, folder = int(sys.argv[1]), sys.argv[2]
    ray.init(address="local", include_dashboard=False, _temp_dir=folder, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"enable_access_log": False})
    routes = {"/predictions/echo": Echo, "/predictions/mlp": Perceptron, "/ping": Ping}
    for route, deployment in routes.items():  # one after another: /ping answers when all others do
        serve.run(deployment.bind(), name=deployment.name, route_prefix=route)
    while True:
        time.sleep(60)
