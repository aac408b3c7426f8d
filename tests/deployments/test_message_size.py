"""Ray Serve's own HTTP server takes WebSocket messages as large as our setting says, by the callback that
it offers.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn
from ray.serve._private import http_util
from ray.serve.config import HTTPOptions
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from serve_app.cli.server_process import read_env
from serve_app.protocols.http.server import ray_bypass, websocket_protocol
from tests.support.ports import free_port
from tests.support.server import ROOT

LIMIT = 17 << 20
CALLBACK = read_env(ROOT / "configs/serve.env")["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"]


async def counts(scope: Any, receive: Any, send: Any) -> None:
    """Tells the size of each message."""
    await receive()
    await send({"type": "websocket.accept", "headers": []})
    while (message := await receive())["type"] != "websocket.disconnect":
        await send({"type": "websocket.send", "text": str(len(message["bytes"]))})


async def nobody(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("what Ray Serve would have answered")


def test_the_setting_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(uvicorn.config.WS_PROTOCOLS, "auto", uvicorn.config.WS_PROTOCOLS["auto"])
    monkeypatch.setattr(websocket_protocol, "_max_message_size", None)
    monkeypatch.setattr(ray_bypass, "_app", None)
    monkeypatch.setattr(http_util, "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", CALLBACK)

    async def run() -> None:
        options = HTTPOptions(host="127.0.0.1", port=free_port())
        loop = asyncio.get_running_loop()
        with_ours = http_util.configure_http_middlewares(options)
        ended, server = await http_util.start_asgi_http_server(nobody, with_ours, event_loop=loop)
        ray_bypass.set_app(counts, LIMIT)
        while not server.started:
            await asyncio.sleep(0.005)
        address = f"ws://127.0.0.1:{options.port}/predictions/m"
        async with connect(address, compression=None, open_timeout=60) as line:
            await line.send(bytes(LIMIT))
            assert await line.recv() == str(LIMIT)
        with pytest.raises(ConnectionClosed) as closed:
            async with connect(address, compression=None, open_timeout=60) as line:
                await line.send(bytes(LIMIT + 1))
                await line.recv()
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, f"max_request_size ({LIMIT} bytes)" in closed.value.rcvd.reason) == (
            1009,
            True,
        )
        server.should_exit = True
        await ended

    asyncio.run(run())
