"""The load of text generation, against a small server that streams tokens."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from serve_app.load_test import generation_load
from serve_app.load_test.generation_load import TokenLoadRequest, TokenLoadResult
from serve_app.load_test.profile import LoadProfile
from tests.support.http_server import running

pytestmark = pytest.mark.integration

TOKENS, FIRST_S, NEXT_S = 5, 0.03, 0.01


class TokenServer(ThreadingHTTPServer):
    """Streams TOKENS tokens; a prompt "no" is 400, "broken" an error in mid-stream, "silent" has no token."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), TokenHandler)
        self.paths: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.texts = itertools.count()
        self.read: set[str] | None = None  # the texts that a client has read, where the server waits for it
        self.read_more = threading.Condition()

    def record_read(self, text: str) -> None:
        assert self.read is not None
        with self.read_more:
            self.read.add(text)
            self.read_more.notify_all()

    def wait_until_read(self, text: str) -> None:
        if self.read is not None:
            with self.read_more:
                assert self.read_more.wait_for(lambda: self.read is not None and text in self.read, 60)

    def handle_error(self, *_: object) -> None:
        """Ignore clients that have left."""


class TokenHandler(BaseHTTPRequestHandler):
    server: TokenServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.paths.append(self.path)
        self.server.bodies.append(body)
        prompt = body.get("prompt", "")
        self.send_response(400 if prompt == "no" else 200)
        self.end_headers()
        if prompt == "no":
            return
        time.sleep(FIRST_S)
        text = ""
        for index in range(0 if prompt == "silent" else TOKENS):
            if index:
                self.server.wait_until_read(text)
                time.sleep(NEXT_S)
            text = f"a{next(self.server.texts)}"
            key = {"delta": {"content": text}} if "messages" in body else {"text": text}
            self.send({"choices": [key]})
            if prompt == "broken":
                return self.send({"error": {"message": "no"}})
        self.send({"choices": [], "usage": {"completion_tokens": 2 * TOKENS}})
        self.wfile.write(b"data: [DONE]\n\n")

    def send(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def token_server() -> Iterator[TokenServer]:
    server = TokenServer()
    with running(server):
        yield server


def send(server: TokenServer, *bodies: dict[str, Any], **options: Any) -> TokenLoadResult:
    request = TokenLoadRequest(f"http://127.0.0.1:{server.server_port}/v1", bodies)
    return generation_load.run(request, LoadProfile(**{"seconds": 1.0, "warmup": 0.0, **options}))


def test_tokens_and_their_times_are_measured(
    token_server: TokenServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_server.read, text_of = set(), generation_load._text

    def record_text(choice: Any) -> str:
        if text := text_of(choice):
            token_server.record_read(text)
        return text

    monkeypatch.setattr(generation_load, "_text", record_text)
    result = send(token_server, {"prompt": "a"}, {"messages": []}, connections=2, limit=60.0)
    assert result.failed == 0 and result.requests >= 2
    assert result.tokens == result.completed * 2 * TOKENS and result.within == result.completed
    assert FIRST_S <= result.ttft_p50 <= result.ttft_p99
    assert NEXT_S * (TOKENS - 1) / (2 * TOKENS - 1) <= result.itl_p50 <= result.itl_p99
    assert result.latency_mean >= FIRST_S + NEXT_S * (TOKENS - 1)
    assert set(token_server.paths) == {"/v1/completions", "/v1/chat/completions"}
    assert all(b["stream"] and b["stream_options"] == {"include_usage": True} for b in token_server.bodies)


def test_an_open_loop_keeps_its_rate(token_server: TokenServer) -> None:
    result = send(token_server, {"prompt": "a"}, connections=1, rate=40.0, limit=1e-6)
    assert 20 <= result.requests <= 60  # the arrivals of a seed; one client in turn would send 14
    assert result.within == 0


@pytest.mark.parametrize(
    ("prompt", "kind"), [("no", "status 400"), ("broken", "stream"), ("silent", "empty")]
)
def test_failures_are_counted_by_kind(token_server: TokenServer, prompt: str, kind: str) -> None:
    result = send(token_server, {"prompt": prompt}, connections=1, rate=20.0)
    assert set(result.errors) == {kind} and result.requests == result.completed == result.tokens == 0


def test_a_closed_port_is_a_failed_connection(token_server: TokenServer) -> None:
    request = TokenLoadRequest("http://127.0.0.1:1/v1", [{"prompt": "a"}])
    result = generation_load.run(request, LoadProfile(1, 20.0, 0.5, warmup=0.0))
    assert set(result.errors) == {"connect"}
