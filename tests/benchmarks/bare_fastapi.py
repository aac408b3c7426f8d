"""The bare server that the benchmark compares with: one FastAPI process and no model server at all.

``python -m tests.benchmarks.bare_fastapi PORT`` answers ``/predictions/echo`` and ``/predictions/mlp`` as the
archives do, one request at a time: what somebody writes who needs no versions, batches or replicas.
"""

from __future__ import annotations

import sys

import orjson
import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool

from tests.benchmarks.archives import MODELS

app = FastAPI(openapi_url=None)
mlp = MODELS["mlp"].build()


def _json(answer: object) -> Response:
    return Response(orjson.dumps(answer), media_type="application/json")


@app.get("/ping")
async def ping() -> Response:
    return _json({"status": "Healthy"})


@app.post("/predictions/echo")
async def echo(request: Request) -> Response:
    return _json(orjson.loads(await request.body()))


def _predict(body: bytes) -> dict:
    with torch.inference_mode():
        logits = mlp(torch.tensor([orjson.loads(body)]))[0]
    return {"class": int(logits.argmax()), "logits": logits.tolist()}


@app.post("/predictions/mlp")
async def predict(request: Request) -> Response:
    return _json(await run_in_threadpool(_predict, await request.body()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    uvicorn.run(
        app, host="127.0.0.1", port=int(sys.argv[1]), loop="uvloop", http="httptools", log_level="warning"
    )
