"""Serve a page that chats with a model, at http://127.0.0.1:8090; it forwards /v1 to the server."""

import argparse
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route

HERE = Path(__file__).resolve().parent
INFERENCE = os.environ.get("TORCHRELAY_INFERENCE", "http://127.0.0.1:8080")
KEY = os.environ.get("TORCHRELAY_TOKEN", "")


@asynccontextmanager
async def connect(app: Starlette) -> AsyncIterator[None]:
    headers = {"authorization": f"Bearer {KEY}"} if KEY else {}  # the key stays out of the browser
    async with httpx.AsyncClient(base_url=INFERENCE, headers=headers, timeout=120) as app.state.client:
        yield


async def show_page(request: Request) -> Response:
    return FileResponse(HERE / "chat.html")


async def forward(request: Request) -> Response:
    """Forward a request of OpenAI's API; a stream is sent chunk by chunk, and ends with the browser's."""
    client: httpx.AsyncClient = request.app.state.client
    sent = client.build_request(
        request.method,
        request.url.path,
        content=await request.body(),
        headers={"content-type": "application/json"},
    )
    response = await client.send(sent, stream=True)
    return StreamingResponse(
        response.aiter_raw(),
        response.status_code,
        {"content-type": response.headers.get("content-type", "application/json")},
        background=BackgroundTask(response.aclose),
    )


app = Starlette(
    routes=[
        Route("/", show_page),
        Route("/v1/models", forward),
        Route("/v1/chat/completions", forward, methods=["POST"]),
    ],
    lifespan=connect,
)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8090)
    port = parser.parse_args().port
    print(f"Chat with the models of {INFERENCE}: http://127.0.0.1:{port}", flush=True)
    uvicorn.run(app, port=port, log_level="warning")
