"""`torchrelay models register`: its progress display, against a fake of the management API."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from rich.console import Console
from typer.testing import CliRunner

from serve_app.cli import progress
from serve_app.cli.app import app
from serve_app.client import Client, ServerError
from tests.support.http_server import respond, serving

SPLIT_GPUS = {
    "wanted": 1.0,
    "free": 1.5,
    "placement": "STRICT_PACK",
    "machines": {"10.0.0.1": 0.75, "10.0.0.2": 0.75},
}
EVENTS = [
    ("accepted", {"url": "u"}),
    ("downloading", {"bytes": 50, "total": 200, "percent": 25.0}),
    ("checking", {"warnings": ["m/model-config.yaml: 'minWorker' is left to the handler"]}),
    ("installing", {"line": "Collecting tinypkg"}),
    ("starting", {"workers": 1, "waiting_for": {"GPU": {"wanted": 2.0, "free": 0.0}}}),
    ("starting", {"workers": 1, "waiting_for": {"GPU": SPLIT_GPUS}}),
    ("warming", {}),
    ("ready", {"workers": 1}),
]


class FakeServer:
    """A management API that sends ``EVENTS`` for a registration before its response."""

    client: Client
    url: str

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.fails = False
        self.has_events = True
        self._events_sent = threading.Event()
        self._registration_id = ""
        self._registration_received = threading.Event()

    def answer(self, handler: Any) -> None:
        url = urlsplit(handler.path)
        if handler.command == "POST":
            self.requests.append(handler.path)
            [self._registration_id] = parse_qs(url.query)["registration"]
            self._registration_received.set()
            if self.fails:
                return respond(handler, 400, {"message": "no", "detail": "because"})
            if self.has_events:
                self._events_sent.wait(60)
            return respond(handler, 200, {"status": "registered"})
        self.requests.append(unquote(url.path))
        if not self.has_events:
            return respond(handler, 404, {"message": "no such route"})
        self._registration_received.wait(60)
        assert parse_qs(url.query)["registration"] == [self._registration_id]
        handler.send_response(200)
        handler.end_headers()
        for stage, details in EVENTS:
            event = f"id: 1\nevent: {stage}\ndata: {json.dumps(details)}\n\n: keep-alive\n\n"
            handler.wfile.write(event.encode())
        self._events_sent.set()


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    fake_server = FakeServer()
    with serving(fake_server.answer) as fake_server.url, Client(management=fake_server.url) as client:
        fake_server.client = client
        yield fake_server


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the last events on a machine that stalls."""
    monkeypatch.setattr(progress, "_LAST_EVENTS_TIMEOUT_S", 60.0)


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
        "Checking",
        "Installing: Collecting tinypkg",
        "Waiting for 2 GPU (0 free)",
        "Waiting for 1 GPU on one machine (free: 10.0.0.1 0.75, 10.0.0.2 0.75)",
        "Warming up",
        "Ready",
    ]


def test_warnings_of_a_registration_stay_on_the_terminal(fake_server: FakeServer) -> None:
    terminal = console()
    progress.register(fake_server.client, terminal, "a.mar")
    assert isinstance(terminal.file, io.StringIO)
    shown = terminal.file.getvalue()
    assert "Warning: m/model-config.yaml: 'minWorker' is left to the handler\n" in shown


def test_given_name_takes_precedence_over_that_of_the_url(fake_server: FakeServer) -> None:
    assert (
        progress.register(fake_server.client, console(), "hf://owner/name/a.mar", model_name="m")
        == "registered"
    )
    assert "/models/m/events" in fake_server.requests


@pytest.mark.parametrize("refused", [True, False])
def test_the_copy_of_a_refused_archive_is_removed(
    fake_server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    fake_server.fails, fake_server.has_events = refused, False
    monkeypatch.chdir(tmp_path)
    (store := tmp_path / "model_store").mkdir()
    (store / "other.mar").write_bytes(b"other")
    for name in ("m.mar", "m.mar.sig"):
        (tmp_path / name).write_bytes(b"archive")
    command = ["models", "--management", fake_server.url, "register", "./m.mar"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == int(refused), result.output
    kept = {path.name for path in store.iterdir()}
    assert kept == ({"other.mar"} if refused else {"other.mar", "m.mar", "m.mar.sig"})


def test_a_path_that_does_not_exist(fake_server: FakeServer, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["models", "register", "./no-such.mar"])
    assert (result.exit_code, fake_server.requests) == (1, [])
    assert "./no-such.mar does not exist in " in result.stderr


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
