"""BERT without a model server: full batches in a loop, or an unbatched FastAPI.

``python -m tests.gpu.bare DEVICE DTYPE loop`` prints rows per second, and ``… serve PORT`` answers
``/predictions/bert``, one request at a time.
"""

from __future__ import annotations

import sys
import time

import orjson
import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool

from handlers.loading.device import select_device
from tests.gpu.models import SCALES, Scale, build_bert


def loop(scale: Scale, model: torch.nn.Module, device: torch.device) -> float:
    """Return rows per second of full batches, with the copies from and to the host."""

    def run() -> None:
        model(torch.tensor([scale.ids] * scale.batch_size).to(device)).tolist()

    for _ in range(3):
        run()
    batches, began = 0, time.perf_counter()
    while (seconds := time.perf_counter() - began) < scale.seconds:
        run()
        batches += 1
    return batches * scale.batch_size / seconds


def serve(model: torch.nn.Module, device: torch.device, port: int) -> None:
    app = FastAPI(openapi_url=None)

    def answer(body: bytes) -> bytes:
        with torch.inference_mode():
            return orjson.dumps(model(torch.tensor([orjson.loads(body)]).to(device))[0].tolist())

    @app.post("/predictions/bert")
    async def predict(request: Request) -> Response:
        return Response(await run_in_threadpool(answer, await request.body()), media_type="application/json")

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


def main(device_name: str, dtype: str, mode: str, port: str = "") -> None:
    scale = SCALES[device_name]
    device = select_device(0 if device_name == "cuda" else None)
    model = build_bert(scale, dtype=dtype).to(device)
    if mode == "serve":
        serve(model, device, int(port))
    else:
        with torch.inference_mode():
            print(loop(scale, model, device))


if __name__ == "__main__":
    main(*sys.argv[1:])
