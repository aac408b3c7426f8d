"""The key that a client sends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from typer.testing import CliRunner

from serve_app.cli.api_client import key_file
from serve_app.cli.app import app as command
from serve_app.client import Client, ServerError
from tests.support.http_server import respond, running


class KeyServer(ThreadingHTTPServer):
    """A management port without models that accepts some keys."""

    daemon_threads = True

    def __init__(self, key_file: Path) -> None:
        super().__init__(("127.0.0.1", 0), KeyRequestHandler)
        self.key_file = key_file
        self.valid_keys = {"good"}
        self.expired_keys: set[str] = set()
        self.received_keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def write_keys(self, **keys: str) -> None:
        self.key_file.write_text(json.dumps({kind: {"key": key} for kind, key in keys.items()}))


class KeyRequestHandler(BaseHTTPRequestHandler):
    server: KeyServer

    def do_GET(self) -> None:
        authorization = self.headers["authorization"]
        self.server.received_keys.append(authorization)
        key = (authorization or "").removeprefix("Bearer ")
        url = urlsplit(self.path)
        if url.path == "/token" and key == "api":
            [kind] = parse_qs(url.query)["type"]
            self.server.write_keys(API="api", **{kind: "renewed"})
            self.server.valid_keys = {"renewed"}
            respond(self, 200, b"\n")
        elif key in self.server.valid_keys:
            respond(self, 200, {"models": []})
        else:
            reason = "expired_token" if key in self.server.expired_keys else "invalid_token"
            problem = {"code": 400, "message": "Token Authorization failed."}
            respond(self, 400, problem, x_torchrelay_reason=reason)

    def log_message(self, *_: object) -> None:
        """Log nothing: tests read ``received_keys``."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[KeyServer]:
    server = KeyServer(tmp_path / "key_file.json")
    with running(server):
        yield server


def test_token_is_sent(server: KeyServer) -> None:
    with Client(management=server.url, token="good") as client:
        assert client.models() == []
    assert server.received_keys == ["Bearer good"]


def test_key_file_is_read_once_it_exists(server: KeyServer) -> None:
    with Client(management=server.url, key_file=server.key_file) as client:
        with pytest.raises(ServerError):
            client.models()
        server.write_keys(management="good", inference="other", API="api")
        assert client.models() == []
    assert server.received_keys == [None, "Bearer good"]


def test_token_takes_precedence_over_key_file(server: KeyServer) -> None:
    server.write_keys(management="other", API="api")
    with Client(management=server.url, token="good", key_file=server.key_file) as client:
        assert client.models() == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"management": "good"}', '{"management": {}}'])
def test_invalid_key_files_are_ignored(server: KeyServer, text: str) -> None:
    server.key_file.write_text(text)
    with Client(management=server.url, key_file=server.key_file) as client, pytest.raises(ServerError):
        client.models()
    assert server.received_keys == [None]


def test_expired_key_is_renewed_once(server: KeyServer) -> None:
    server.write_keys(management="old", API="api")
    server.expired_keys = {"old"}
    with Client(management=server.url, key_file=server.key_file) as client:
        assert client.models() == []
        assert client.models() == []
    assert server.received_keys == ["Bearer old", "Bearer api", "Bearer renewed", "Bearer renewed"]


def test_invalid_key_is_not_renewed(server: KeyServer) -> None:
    server.write_keys(management="wrong", API="api")
    with Client(management=server.url, key_file=server.key_file) as client, pytest.raises(ServerError):
        client.models()
    assert server.received_keys == ["Bearer wrong"]


def test_command_line_sends_a_key(server: KeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(server.key_file.parent)
    runner = CliRunner()
    result = runner.invoke(command, ["models", "--management", server.url])
    assert result.exit_code == 1
    assert runner.invoke(command, ["models", "--management", server.url, "--token", "good"]).exit_code == 0
    assert (
        runner.invoke(
            command, ["models", "--management", server.url], env={"TORCHRELAY_TOKEN": "good"}
        ).exit_code
        == 0
    )
    server.write_keys(management="good", API="api")
    assert runner.invoke(command, ["models", "--management", server.url]).exit_code == 0
    assert server.received_keys == [None, *["Bearer good"] * 3]


def test_local_key_file_is_not_used_for_other_hosts() -> None:
    assert key_file("http://127.0.0.1:8081") == Path("key_file.json")
    assert key_file("https://[::1]:8081") == Path("key_file.json")
    assert key_file("http://example.com:8081") is None
    assert key_file("http://192.0.2.1:8081") is None
