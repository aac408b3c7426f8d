"""``/ui`` on the management port, in front of a small application on a Unix socket."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync import client

from serve_app.control.api import ControlPlane
from serve_app.errors import Unavailable
from serve_app.protocols.http_app import management_app
from serve_app.settings import Settings
from tests.support.protocol_fakes import FakeControlAPI

pytestmark = pytest.mark.integration

connect = partial(client.connect, open_timeout=60)


async def show(request: Request) -> Response:
    headers = {"cache-control": "max-age=5", "set-cookie": "a=b; HttpOnly"}
    return JSONResponse({"url": str(request.url), "headers": dict(request.headers)}, headers=headers)


async def echo(websocket: WebSocket) -> None:
    await websocket.accept()
    await websocket.send_text(json.dumps(dict(websocket.headers)))
    while (message := await websocket.receive())["type"] == "websocket.receive":
        if message.get("text") == "close":
            return await websocket.close(4001)
        await websocket.send(
            {"type": "websocket.send", "text": message.get("text"), "bytes": message.get("bytes")}
        )


class Backend:
    """A running application, or one that cannot start."""

    def __init__(self, socket: str, failure: str = "") -> None:
        self.socket, self.failure = socket, failure

    async def start(self) -> str:
        if self.failure:
            raise Unavailable(self.failure)
        return self.socket


@pytest.fixture(scope="module")
def socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = str(tmp_path_factory.mktemp("console") / "console.sock")
    app = Starlette(routes=[WebSocketRoute("/{path:path}", echo), Route("/{path:path}", show)])
    server = uvicorn.Server(uvicorn.Config(app, uds=path, log_config=None, lifespan="off"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    while not server.started:
        assert thread.is_alive()
        thread.join(0.005)
    yield path
    server.should_exit = True
    thread.join()


@pytest.fixture
def serve(over_http: Callable[..., str], socket: str) -> Callable[..., str]:
    def build(failure: str = "", disabled: bool = False) -> str:
        control = ControlPlane(FakeControlAPI(), Settings(), lambda: None)
        console = None if disabled else Backend(socket, failure)
        return over_http(management_app(control, Settings(), console=console))

    return build


def test_requests_reach_the_console_with_its_prefix_and_without_api_keys(serve: Callable[..., str]) -> None:
    url = serve()
    headers = {"cookie": "c=d", "authorization": "Bearer key", "x-forwarded-prefix": "/relay"}
    response = httpx.get(f"{url}/ui/models/a%2Fb?x=1", headers=headers, timeout=60)
    seen = response.json()
    assert seen["url"].endswith("/models/a/b?x=1")
    assert seen["headers"]["x-forwarded-prefix"] == "/relay/ui"
    assert seen["headers"]["host"] == url.partition("//")[2]
    assert seen["headers"]["cookie"] == "c=d"
    assert "authorization" not in seen["headers"]
    assert response.headers.get_list("cache-control") == ["max-age=5"]
    assert response.headers["set-cookie"] == "a=b; HttpOnly"
    assert httpx.get(f"{url}/ui", timeout=60).json()["url"].endswith("/")
    unsafe = httpx.get(f"{url}/ui", headers={"x-forwarded-prefix": '"><script>'}, timeout=60).json()
    assert unsafe["headers"]["x-forwarded-prefix"] == "/ui"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_other_methods_are_refused(serve: Callable[..., str], method: str) -> None:
    assert httpx.request(method, f"{serve()}/ui", timeout=60).status_code == 405


def test_head_has_no_body(serve: Callable[..., str]) -> None:
    response = httpx.head(f"{serve()}/ui", timeout=60)
    assert (response.status_code, response.content) == (200, b"")


def test_a_disabled_console_is_not_found_and_a_failed_one_is_unavailable(serve: Callable[..., str]) -> None:
    assert httpx.get(f"{serve(disabled=True)}/ui", timeout=60).status_code == 404
    response = httpx.get(f"{serve('it ended with code 3')}/ui", timeout=60)
    assert response.status_code == 503
    assert "it ended with code 3" in response.text


def test_websocket_messages_pass_in_both_directions(serve: Callable[..., str]) -> None:
    url = serve()
    address = url.replace("http", "ws") + "/ui/socket?x=1"
    with connect(address, additional_headers={"Origin": url, "Authorization": "Bearer key"}) as connection:
        headers: dict[str, Any] = json.loads(connection.recv())
        assert headers["origin"] == url
        assert headers["x-forwarded-prefix"] == "/ui"
        assert "authorization" not in headers
        for message in ("text", b"bytes", "x" * (1 << 20)):
            connection.send(message)
            assert connection.recv() == message
        connection.send("close")
        with pytest.raises(ConnectionClosed) as closed:
            connection.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 4001


@pytest.mark.parametrize(
    ("path", "headers"), [("/ui/socket", {"Origin": "http://attacker.example"}), ("/models", {})]
)
def test_websockets_of_other_sites_and_paths_are_refused(
    serve: Callable[..., str], path: str, headers: dict[str, str]
) -> None:
    with pytest.raises(InvalidStatus):
        connect(serve().replace("http", "ws") + path, additional_headers=headers)
