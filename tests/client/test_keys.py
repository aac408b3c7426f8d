"""Which key a client shows to whom."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from typer.testing import CliRunner

from serve_app.cli.app import app as command
from serve_app.cli.talk import key_file
from serve_app.client import Client, ServerError


class Doorkeeper(ThreadingHTTPServer):
    """A management port that lists no models, to whoever shows one of its keys."""

    daemon_threads = True

    def __init__(self, key_file: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.key_file = key_file
        self.good = {"good"}
        self.expired: set[str] = set()
        self.seen: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def write(self, **keys: str) -> None:
        self.key_file.write_text(json.dumps({kind: {"key": key} for kind, key in keys.items()}))


class Answers(BaseHTTPRequestHandler):
    server: Doorkeeper

    def do_GET(self) -> None:
        said = self.headers["authorization"]
        self.server.seen.append(said)
        key = (said or "").removeprefix("Bearer ")
        url = urlsplit(self.path)
        if url.path == "/token" and key == "api":
            [kind] = parse_qs(url.query)["type"]
            self.server.write(API="api", **{kind: "renewed"})
            self.server.good = {"renewed"}
            self.answer(200, b"\n")
        elif key in self.server.good:
            self.answer(200, b'{"models": []}')
        else:
            reason = "expired_token" if key in self.server.expired else "invalid_token"
            self.answer(400, b'{"code": 400, "message": "Token Authorization failed."}', reason)

    def answer(self, status: int, body: bytes, reason: str = "") -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        if reason:
            self.send_header("x-torchrelay-reason", reason)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Tests read what was seen."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Doorkeeper]:
    with Doorkeeper(tmp_path / "key_file.json") as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_token_is_shown(server: Doorkeeper) -> None:
    with Client(management=server.url, token="good") as client:
        assert client.models() == []
    assert server.seen == ["Bearer good"]


def test_without_one_the_servers_file_is_read_when_it_is_there(server: Doorkeeper) -> None:
    with Client(management=server.url, key_file=server.key_file) as client:
        with pytest.raises(ServerError):
            client.models()
        server.write(management="good", inference="other", API="api")
        assert client.models() == []
    assert server.seen == [None, "Bearer good"]


def test_a_token_wins_over_the_file(server: Doorkeeper) -> None:
    server.write(management="other", API="api")
    with Client(management=server.url, token="good", key_file=server.key_file) as client:
        assert client.models() == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"management": "good"}', '{"management": {}}'])
def test_a_file_of_another_form_is_passed_over(server: Doorkeeper, text: str) -> None:
    server.key_file.write_text(text)
    with Client(management=server.url, key_file=server.key_file) as client, pytest.raises(ServerError):
        client.models()
    assert server.seen == [None]


def test_a_key_that_expired_is_renewed_once(server: Doorkeeper) -> None:
    server.write(management="old", API="api")
    server.expired = {"old"}
    with Client(management=server.url, key_file=server.key_file) as client:
        assert client.models() == []
        assert client.models() == []
    assert server.seen == ["Bearer old", "Bearer api", "Bearer renewed", "Bearer renewed"]


def test_a_key_that_is_wrong_is_not_renewed(server: Doorkeeper) -> None:
    server.write(management="wrong", API="api")
    with Client(management=server.url, key_file=server.key_file) as client, pytest.raises(ServerError):
        client.models()
    assert server.seen == ["Bearer wrong"]


def test_the_command_line_shows_a_key(server: Doorkeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(server.key_file.parent)
    run = CliRunner()
    refused = run.invoke(command, ["models", "--management", server.url])
    assert refused.exit_code == 1
    assert run.invoke(command, ["models", "--management", server.url, "--token", "good"]).exit_code == 0
    assert run.invoke(command, ["models", "--management", server.url], env={"TORCHRELAY_TOKEN": "good"}).exit_code == 0
    server.write(management="good", API="api")
    assert run.invoke(command, ["models", "--management", server.url]).exit_code == 0
    assert server.seen == [None, *["Bearer good"] * 3]


def test_the_key_file_here_is_not_for_servers_elsewhere() -> None:
    assert key_file("http://127.0.0.1:8081") == Path("key_file.json")
    assert key_file("https://[::1]:8081") == Path("key_file.json")
    assert key_file("http://example.com:8081") is None
    assert key_file("http://192.0.2.1:8081") is None
