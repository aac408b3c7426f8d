"""BERT without a model server: full batches in a loop, or an unbatched FastAPI.

``python -m tests.gpu.bare DEVICE PORT`` answers ``/predictions/float32`` and ``/predictions/bfloat16``, one
request at a time.
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

SERVED = ("float32", "bfloat16")


def run_loop(scale: Scale, dtype: str) -> float:
    """Return rows per second of full batches, with the copies from and to the host."""
    device = select_device(0 if scale.device == "cuda" else None)
    model = build_bert(scale, dtype=dtype).to(device)

    def run() -> None:
        with torch.inference_mode():
            model(torch.tensor([scale.ids] * scale.batch_size).to(device)).tolist()

    for _ in range(3):
        run()
    batches, began = 0, time.perf_counter()
    while (seconds := time.perf_counter() - began) < scale.seconds:
        run()
        batches += 1
    return batches * scale.batch_size / seconds


def serve(scale: Scale, port: int) -> None:
    device = select_device(0 if scale.device == "cuda" else None)
    models = {dtype: build_bert(scale, dtype=dtype).to(device) for dtype in SERVED}
    app = FastAPI(openapi_url=None)

    def answer(dtype: str, body: bytes) -> bytes:
        with torch.inference_mode():
            return orjson.dumps(models[dtype](torch.tensor([orjson.loads(body)]).to(device))[0].tolist())

    @app.post("/predictions/{dtype}")
    async def predict(dtype: str, request: Request) -> Response:
        body = await run_in_threadpool(answer, dtype, await request.body())
        return Response(body, media_type="application/json")

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    serve(SCALES[sys.argv[1]], int(sys.argv[2]))
