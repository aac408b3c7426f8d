"""`torchrelay models register`: what it shows of a registration, over a server that speaks the two routes."""

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

APART = {"wanted": 1.0, "free": 1.5, "placement": "STRICT_PACK", "machines": {"10.0.0.1": 0.75, "10.0.0.2": 0.75}}
EVENTS = [
    ("accepted", {"url": "u"}),
    ("downloading", {"bytes": 50, "total": 200, "percent": 25.0}),
    ("installing", {"line": "Collecting tinypkg"}),
    ("starting", {"workers": 1, "waiting_for": {"GPU": {"wanted": 2.0, "free": 0.0}}}),
    ("starting", {"workers": 1, "waiting_for": {"GPU": APART}}),
    ("warming", {}),
    ("ready", {"workers": 1}),
]


class Told:
    """A management API that tells ``EVENTS`` to whoever asks for the registration that begins, then answers it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.refuses = False
        self.speaks = True
        self._heard = threading.Event()
        self._id = ""
        self._begun = threading.Event()
        told = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                told.asked.append(self.path)
                told._id = parse_qs(urlsplit(self.path).query)["registration"][0]
                told._begun.set()
                if told.refuses:
                    return self._say(400, {"message": "no", "detail": "because"})
                if told.speaks:
                    told._heard.wait(60)
                self._say(200, {"status": "registered"})

            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                told.asked.append(unquote(parts.path))
                if not told.speaks:
                    return self._say(404, {"message": "no such route"})
                told._begun.wait(60)
                assert parse_qs(parts.query)["registration"] == [told._id]
                self.send_response(200)
                self.end_headers()
                for stage, said in EVENTS:
                    self.wfile.write(f"id: 1\nevent: {stage}\ndata: {json.dumps(said)}\n\n: still here\n\n".encode())
                told._heard.set()

            def _say(self, status: int, said: dict) -> None:
                body = json.dumps(said).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self.web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.client = Client(management=f"http://127.0.0.1:{self.web.server_port}")


@pytest.fixture
def told() -> Iterator[Told]:
    told = Told()
    thread = threading.Thread(target=told.web.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield told
    finally:
        told.client.close()
        told.web.shutdown()
        thread.join()
        told.web.server_close()


def console() -> Console:
    return Console(file=io.StringIO(), width=100, force_terminal=False)


def test_the_events_and_then_the_answer(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    step = progress._step
    monkeypatch.setattr(progress, "_step", lambda *said: shown.append(step(*said)) or shown[-1])
    assert progress.registered(told.client, console(), "http://h/a b.tar.gz?x=1", initial_workers=1) == "registered"
    assert "/models/a b/events" in told.asked
    assert shown == [
        "Registering",
        "Downloading",
        "Installing: Collecting tinypkg",
        "Waiting for 2 GPU (0 free)",
        "Waiting for 1 GPU on one machine (free: 10.0.0.1 0.75, 10.0.0.2 0.75)",
        "Warming up",
        "Ready",
    ]


def test_the_name_that_is_asked_for_goes_before_the_urls(told: Told) -> None:
    assert progress.registered(told.client, console(), "hf://owner/name/a.mar", model_name="m") == "registered"
    assert "/models/m/events" in told.asked


def test_a_server_that_tells_nothing(told: Told) -> None:
    told.speaks = False
    assert progress.registered(told.client, console(), "a.mar") == "registered"


def test_a_refusal_is_not_held_up_by_the_listener(told: Told) -> None:
    told.refuses = True
    with pytest.raises(ServerError) as error:
        progress.registered(told.client, console(), "a.mar")
    assert (error.value.status, error.value.detail) == (400, "because")


def test_events_of_a_client_are_refused_in_the_servers_words(told: Told) -> None:
    told.speaks = False
    with pytest.raises(ServerError, match="no such route"):
        list(told.client.events("m"))
