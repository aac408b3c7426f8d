"""Webhooks of async predictions: retries, signatures, allowed URLs."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import Callable
from typing import Any

import pytest

from serve_app.control.async_predictions.webhooks import WebhookSender
from serve_app.errors import ConfigurationError
from serve_app.settings import load
from tests.support.async_server import ASYNC, Server
from tests.support.http_server import dripping
from tests.support.listeners import close_listener


class WebhookReceiver:
    """A server that receives webhooks, and refuses the first ``refusals`` of them."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.received: list[tuple[dict[str, str], bytes]] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        headers = dict(
            line.lower().split(": ", 1) if i else (":", line) for i, line in enumerate(head) if line
        )
        raw = {line.split(": ", 1)[0].lower(): line.split(": ", 1)[1] for line in head[1:] if line}
        body = await reader.readexactly(int(headers["content-length"]))
        self.received.append((raw, body))
        status = b"500 no" if len(self.received) <= self.refusals else b"200 OK"
        writer.write(b"HTTP/1.1 %s\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % status)
        await writer.drain()
        writer.close()


def test_webhook_is_retried_and_signed(start: Callable[..., Server]) -> None:
    loop_server: list[Any] = []
    hook = WebhookReceiver(refusals=2)
    environ = {"HOOK_SECRET": "s3cret"}
    allowed = {"webhook_secret": "env:HOOK_SECRET"}
    probe = start()

    async def listen() -> int:
        server = await asyncio.start_server(hook, "127.0.0.1", 0)
        loop_server.append(server)
        return server.sockets[0].getsockname()[1]

    port = probe.loop.run_until_complete(listen())
    url = f"http://127.0.0.1:{port}/ended"
    refused = probe("POST", "/predictions/m", b"x", {**ASYNC, "x-torchrelay-webhook": url})
    assert refused.status == 400 and "async_predictions.webhook_urls names none" in refused.json["message"]
    document = {**allowed, "webhook_urls": [f"http://127.0.0.1:{port}/*"], "webhook_backoff": 0.01}
    server = start(environ=environ, async_predictions=document)
    other = server(
        "POST", "/predictions/m", b"x", {**ASYNC, "x-torchrelay-webhook": "http://127.0.0.2/ended"}
    )
    assert other.status == 400
    location = server.submit(x_torchrelay_webhook=url)

    async def wait_for_delivery() -> None:
        while server.service._all[location.rpartition("/")[2]].webhook_state != "delivered":
            await asyncio.sleep(0.005)

    server.loop.run_until_complete(asyncio.wait_for(wait_for_delivery(), 60))
    assert len(hook.received) == 3
    headers, body = hook.received[-1]
    assert json.loads(body)["state"] == "done" and json.loads(body)["result"] == f"{location}/result"
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    digest = hmac.digest(b"s3cret", signed, hashlib.sha256)
    assert headers["webhook-signature"] == f"v1,{base64.b64encode(digest).decode()}"
    assert server("GET", location).json["webhook"] == {"url": url, "state": "delivered"}

    async def close() -> None:
        await close_listener(loop_server[0])
        await loop_server[0].wait_closed()

    server.loop.run_until_complete(close())


def test_slow_headers_end_at_the_timeout(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def send(url: str) -> bool:
        options = {"webhook_urls": [url], "webhook_secret": "env:S", "webhook_attempts": 1}
        settings = load({"async_predictions": {**options, "webhook_timeout": 0.5}})
        sender = WebhookSender(settings.async_predictions, {"S": "s"})
        delivered = await sender.send(url, "id", {})
        await sender.close()
        return delivered

    with dripping() as address:
        assert not asyncio.run(send(f"{address}/ended"))
    assert "it took longer than webhook_timeout (0.5 s)" in caplog.text


def test_a_host_that_a_star_matches_must_be_public() -> None:
    """The pattern's own host may be private; a client cannot select another private one by a star."""

    async def send(pattern: str) -> tuple[bool, int]:
        received = 0

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal received
            received += 1
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1") as server:
            port = server.sockets[0].getsockname()[1]
            settings = {
                "webhook_urls": [pattern.format(port)],
                "webhook_secret": "env:S",
                "webhook_attempts": 1,
            }
            sender = WebhookSender(load({"async_predictions": settings}).async_predictions, {"S": "s"})
            url = f"http://127.0.0.1:{port}/ended"
            sender.check(url)
            delivered = await sender.send(url, "id", {})
            await sender.close()
            return delivered, received

    assert asyncio.run(send("http://*:{}/*")) == (False, 0)
    assert asyncio.run(send("http://127.0.0.1:{}/*")) == (True, 1)


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://a.example.com/hooks/1", True),
        ("https://a.example.com:443/hooks/1", True),
        ("https://example.com/hooks/1", False),
        ("http://a.example.com/hooks/1", False),
        ("https://a.example.com:8443/hooks/1", False),
        ("https://evil.test/.example.com/hooks/1", False),
        ("https://evil.test#.example.com/hooks/1", False),
        ("https://user@a.example.com/hooks/1", False),
        ("https://a.example.com/other", False),
        ("https://[", False),
        ("", False),
    ],
)
def test_wildcard_of_a_host_does_not_match_beyond_it(url: str, allowed: bool) -> None:
    settings = load(
        {"async_predictions": {"webhook_urls": ["https://*.example.com/hooks/*"], "webhook_secret": "env:S"}}
    )
    hooks = WebhookSender(settings.async_predictions, {"S": "s"})
    if allowed:
        hooks.check(url)
    else:
        with pytest.raises(Exception, match=r"async_predictions\.webhook_urls"):
            hooks.check(url)


@pytest.mark.parametrize(
    "url", ["127.0.0.1", "ftp://a/*", "http://a:*/", "http://[", "http://u@a/*", "http://a/?x=1"]
)
def test_invalid_url_pattern_stops_the_start(url: str) -> None:
    settings = load({"async_predictions": {"webhook_urls": [url], "webhook_secret": "env:S"}})
    with pytest.raises(ConfigurationError, match=r"async_predictions\.webhook_urls.*is no pattern"):
        WebhookSender(settings.async_predictions, {"S": "s"})


def test_webhooks_without_a_secret_stop_the_start() -> None:
    document = load({"async_predictions": {"webhook_urls": ["https://a.example.com/*"]}})
    with pytest.raises(Exception, match=r"async_predictions\.webhook_secret.*env:"):
        WebhookSender(document.async_predictions, {})
