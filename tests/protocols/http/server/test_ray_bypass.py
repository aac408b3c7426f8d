"""The responses of Ray's own proxy, as a client behind uvicorn receives them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest
import uvicorn

from serve_app.protocols.http.server.ray_bypass import BypassMiddleware

App = Callable[[Any, Any, Any], Coroutine[Any, Any, None]]


def request_through_proxy(ray_app: App) -> httpx.Response:
    """Return the response to one request to a server of ``ray_app`` behind the middleware."""

    async def main() -> httpx.Response:
        config = uvicorn.Config(BypassMiddleware(ray_app), port=0, log_level="critical", lifespan="off")
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            async with httpx.AsyncClient(timeout=60) as client:
                return await client.get(f"http://127.0.0.1:{port}/predictions/m")
        finally:
            server.should_exit = True
            await task

    return asyncio.run(main())


async def raise_before_the_response(scope: Any, receive: Any, send: Any) -> None:
    raise RuntimeError("the actor died")


async def cancel_the_request(scope: Any, receive: Any, send: Any) -> None:
    raise asyncio.CancelledError


async def send_nothing(scope: Any, receive: Any, send: Any) -> None:
    """Return as Ray's proxy does where it has given up."""


async def send_plain_500(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"x-request-id", b"ours"), (b"x-request-id", b"ray's")]
    await send({"type": "http.response.start", "status": 500, "headers": headers})
    await send({"type": "http.response.body", "body": b"Internal Server Error"})


@pytest.mark.parametrize(
    "ray_app", [raise_before_the_response, cancel_the_request, send_nothing, send_plain_500]
)
def test_errors_of_the_proxy_have_a_reason(ray_app: App) -> None:
    response = request_through_proxy(ray_app)
    assert response.status_code == 500
    assert response.headers["x-torchrelay-reason"] == "replica_died"
    assert response.json()["code"] == 500


def test_an_error_after_the_start_closes_the_connection() -> None:
    async def raise_in_the_response(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
        await send({"type": "http.response.body", "body": b"part", "more_body": True})
        raise RuntimeError("the actor died")

    with pytest.raises(httpx.RemoteProtocolError):
        request_through_proxy(raise_in_the_response)
