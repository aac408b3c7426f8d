"""CORS: the same headers on every answer of the inference port, unless a handler set one itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream
from serve_app.protocols.http_app import metrics_app
from serve_app.settings import InferenceSettings, Settings

ALL = {
    "cors_allowed_origin": "https://a.example",
    "cors_allowed_methods": "GET, POST",
    "cors_allowed_headers": "X-Mine",
}
SENT = {
    b"access-control-allow-origin": b"https://a.example",
    b"access-control-allow-methods": b"GET, POST",
    b"access-control-allow-headers": b"X-Mine",
}
PREFLIGHT = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}


def cors(headers: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    found = [(name, value) for name, value in headers if name.startswith(b"access-control-")]
    assert len(dict(found)) == len(found), "none is sent twice"
    return dict(found)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/predictions/m", 200),
        ("OPTIONS", "/predictions/m", 200),
        ("OPTIONS", "/", 200),
        ("GET", "/ping", 200),
        ("GET", "/", 200),
        ("POST", "/", 405),
        ("GET", "/nothing", 404),
        ("OPTIONS", "/predictions/none", 404),
    ],
)
def test_cors_headers_of_the_inference_port(inference, method: str, path: str, status: int) -> None:
    response = inference(**ALL)(method, path, b"", PREFLIGHT)
    assert (response.status, cors(response.headers)) == (status, SENT)


def test_cors_headers_without_a_body(inference) -> None:
    response = inference(max_request_size=1, **ALL)("POST", "/predictions/m", b"xx")
    assert (response.status, response.body, cors(response.headers)) == (413, b"", SENT)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/models", 200),
        ("OPTIONS", "/", 200),
        ("OPTIONS", "/models", 405),
        ("GET", "/models/none", 404),
    ],
)
def test_management_port_has_no_cors_headers(management, method: str, path: str, status: int) -> None:
    response = management(**ALL)(method, path, b"", PREFLIGHT)
    assert (response.status, cors(response.headers)) == (status, {})


@pytest.mark.parametrize(("method", "path"), [("GET", "/models"), ("OPTIONS", "/models/m")])
def test_management_on_the_inference_port_has_no_cors_headers(inference, method: str, path: str) -> None:
    app = inference(serve_management=True, **ALL)
    response = app(method, path, b"", PREFLIGHT)
    assert cors(response.headers) == {}
    assert cors(app("OPTIONS", "/predictions/m", b"", PREFLIGHT).headers) == SENT


@pytest.mark.parametrize("path", ["/metrics", "/nothing"])
def test_metrics_port_has_no_cors_headers(path: str) -> None:
    async def render(names: object) -> bytes:
        return b""

    async def ask() -> httpx.Response:
        app = metrics_app(render, Settings(inference=InferenceSettings(**ALL)), lambda: None)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client:
            return await client.get(path)

    assert cors(asyncio.run(ask()).headers.raw) == {}


@pytest.mark.parametrize("settings", [{}, {"cors_allowed_methods": "GET"}])
def test_unset_headers_are_not_sent(inference, settings: dict[str, str]) -> None:
    response = inference(**settings)("GET", "/ping", b"", PREFLIGHT)
    assert cors(response.headers) == ({b"access-control-allow-methods": b"GET"} if settings else {})


@pytest.mark.parametrize("streamed", [False, True])
def test_a_handlers_own_header_wins(inference, streamed: bool) -> None:
    head = InferenceResponse(b"", headers=(("Access-Control-Allow-Origin", "mine"), ("X-Other", "1")))

    async def pieces() -> AsyncIterator[bytes]:
        yield b"a"

    async def reply(call: InferenceRequest) -> InferenceResponse | ResponseStream:
        return ResponseStream(head, pieces()) if streamed else head

    app = inference(reply, **ALL)
    assert cors(app("POST", "/predictions/m").headers) == {**SENT, b"access-control-allow-origin": b"mine"}
    assert app("POST", "/predictions/m")["pragma"] == "no-cache"
    assert cors(app("GET", "/ping").headers) == SENT
