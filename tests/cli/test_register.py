"""`torchrelay models register`: its progress display, against a fake of the management API."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from rich.console import Console

from serve_app.cli import progress
from serve_app.client import Client, ServerError

SPLIT_GPUS = {
    "wanted": 1.0,
    "free": 1.5,
    "placement": "STRICT_PACK",
    "machines": {"10.0.0.1": 0.75, "10.0.0.2": 0.75},
}
EVENTS = [
    ("accepted", {"url": "u"}),
    ("downloading", {"bytes": 50, "total": 200, "percent": 25.0}),
    ("installing", {"line": "Collecting tinypkg"}),
    ("starting", {"workers": 1, "waiting_for": {"GPU": {"wanted": 2.0, "free": 0.0}}}),
    ("starting", {"workers": 1, "waiting_for": {"GPU": SPLIT_GPUS}}),
    ("warming", {}),
    ("ready", {"workers": 1}),
]


class FakeServer:
    """A management API that sends ``EVENTS`` for a registration before its response."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.fails = False
        self.has_events = True
        self._events_sent = threading.Event()
        self._registration_id = ""
        self._registration_received = threading.Event()
        fake_server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                fake_server.requests.append(self.path)
                fake_server._registration_id = parse_qs(urlsplit(self.path).query)["registration"][0]
                fake_server._registration_received.set()
                if fake_server.fails:
                    return self._respond(400, {"message": "no", "detail": "because"})
                if fake_server.has_events:
                    fake_server._events_sent.wait(60)
                self._respond(200, {"status": "registered"})

            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                fake_server.requests.append(unquote(parts.path))
                if not fake_server.has_events:
                    return self._respond(404, {"message": "no such route"})
                fake_server._registration_received.wait(60)
                assert parse_qs(parts.query)["registration"] == [fake_server._registration_id]
                self.send_response(200)
                self.end_headers()
                for stage, details in EVENTS:
                    self.wfile.write(
                        f"id: 1\nevent: {stage}\ndata: {json.dumps(details)}\n\n: keep-alive\n\n".encode()
                    )
                fake_server._events_sent.set()

            def _respond(self, status: int, document: dict) -> None:
                body = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self.http_server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.client = Client(management=f"http://127.0.0.1:{self.http_server.server_port}")


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    fake_server = FakeServer()
    thread = threading.Thread(target=fake_server.http_server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield fake_server
    finally:
        fake_server.client.close()
        fake_server.http_server.shutdown()
        thread.join()
        fake_server.http_server.server_close()


def console() -> Console:
    return Console(file=io.StringIO(), width=100, force_terminal=False)


def test_events_are_shown_before_the_response(
    fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = []
    describe = progress._describe_stage
    monkeypatch.setattr(
        progress, "_describe_stage", lambda *stage: shown.append(describe(*stage)) or shown[-1]
    )
    assert (
        progress.register(fake_server.client, console(), "http://h/a b.tar.gz?x=1", initial_workers=1)
        == "registered"
    )
    assert "/models/a b/events" in fake_server.requests
    assert shown == [
        "Registering",
        "Downloading",
        "Installing: Collecting tinypkg",
        "Waiting for 2 GPU (0 free)",
        "Waiting for 1 GPU on one machine (free: 10.0.0.1 0.75, 10.0.0.2 0.75)",
        "Warming up",
        "Ready",
    ]


def test_given_name_takes_precedence_over_that_of_the_url(fake_server: FakeServer) -> None:
    assert (
        progress.register(fake_server.client, console(), "hf://owner/name/a.mar", model_name="m")
        == "registered"
    )
    assert "/models/m/events" in fake_server.requests


def test_server_without_events(fake_server: FakeServer) -> None:
    fake_server.has_events = False
    assert progress.register(fake_server.client, console(), "a.mar") == "registered"


def test_error_does_not_wait_for_events(fake_server: FakeServer) -> None:
    fake_server.fails = True
    with pytest.raises(ServerError) as error:
        progress.register(fake_server.client, console(), "a.mar")
    assert (error.value.status, error.value.detail) == (400, "because")


def test_refused_events_raise_the_servers_error(fake_server: FakeServer) -> None:
    fake_server.has_events = False
    with pytest.raises(ServerError, match="no such route"):
        list(fake_server.client.events("m"))
