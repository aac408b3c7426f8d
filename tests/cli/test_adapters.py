"""`torchrelay adapters`, against a fake of the management API."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner, Result

from serve_app.cli.app import app

ADAPTER = {"name": "fr", "model": "poet", "version": "1.0", "url": "french", "digest": "d" * 64}


class FakeServer:
    """A management API with one adapter, which records its requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, Any]] = []
        self.url = ""
        self.status: dict[str, str] = {}

    def respond(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        self.requests.append((method, path, body))
        if method == "GET":
            return 200, {"adapters": [ADAPTER, {**ADAPTER, "name": "built-in", "url": "", "digest": ""}]}
        if method == "DELETE":
            return 200, {"status": 'Adapter "fr" of model "poet" unloaded'}
        return 200, {**ADAPTER, **self.status}

    def __call__(self, *arguments: str) -> Result:
        return CliRunner().invoke(
            app, ["adapters", "--management", self.url, *arguments], env={"COLUMNS": "200"}
        )


def test_adapters_are_listed(fake_server: FakeServer) -> None:
    result = fake_server("list", "poet")
    assert result.exit_code == 0, result.output
    assert fake_server.requests == [("GET", "/models/poet/adapters", None)]
    for text in ("poet:fr", "french", "poet:built-in", "the archive"):
        assert text in result.output


def test_an_adapter_is_added(fake_server: FakeServer) -> None:
    result = fake_server("add", "poet", "fr", "french")
    assert (result.exit_code, result.output) == (0, "requests for it name the model poet:fr\n")
    fake_server.status = {"status": "Stored, and not yet in force at 1 of the replicas that run."}
    result = fake_server("add", "poet", "fr", "s3://b/french.zip", "--version", "1.0", "--sha256", "ab")
    assert "not yet in force at 1" in result.output
    assert fake_server.requests == [
        ("POST", "/models/poet/adapters", {"name": "fr", "url": "french"}),
        ("POST", "/models/poet/1.0/adapters", {"name": "fr", "url": "s3://b/french.zip", "sha256": "ab"}),
    ]


def test_an_adapter_is_removed(fake_server: FakeServer) -> None:
    result = fake_server("remove", "poet", "fr", "--version", "1.0")
    assert (result.exit_code, result.output) == (0, 'Adapter "fr" of model "poet" unloaded\n')
    assert fake_server.requests == [("DELETE", "/models/poet/1.0/adapters/fr", None)]
