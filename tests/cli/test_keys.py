"""`torchrelay keys`, against a fake of the management API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from serve_app.cli.app import app

KEY = {
    "name": "team",
    "source": "api",
    "rights": ["infer"],
    "models": ["team-*"],
    "limits": {"requests_per_second": 50.0},
    "created": 1.0,
    "expires": None,
    "rotated": None,
    "previous_expires": None,
}


@pytest.fixture
def run(serve_json: Callable[..., str]) -> Any:
    requests: list[tuple[str, str, Any]] = []

    def respond(method: str, path: str, document: Any) -> tuple[int, Any]:
        requests.append((method, path, document))
        if method == "DELETE":
            return 200, {"status": 'Key "team" revoked'}
        if method == "GET":
            return 200, {"keys": [KEY]}
        return 202, {**KEY, "key": "trk_secret", "status": "Stored, and not yet in force."}

    url = serve_json(respond)

    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["keys", "--management", url, *arguments])

    invoke.requests = requests  # type: ignore[attr-defined]
    return invoke


def test_a_new_key_alone_is_printed_to_standard_output(run: Any) -> None:
    options = ("--model", "team-*", "--limit", "requests_per_second=50", "--expires-in", "90d")
    result = run("create", "team", *options)
    assert result.exit_code == 0 and result.stdout == "trk_secret\n" and "not yet" in result.stderr
    document = {
        "name": "team",
        "role": "infer",
        "models": ["team-*"],
        "limits": {"requests_per_second": 50.0},
        "expires_in": 7_776_000.0,
    }
    assert run.requests == [("POST", "/keys", document)]


def test_rotate_list_and_revoke(run: Any) -> None:
    assert run("rotate", "team", "--grace", "24h").stdout == "trk_secret\n"
    assert run("rotate", "team").exit_code == 0
    assert "requests_per_second=50" in run("list").stdout.replace("\n", "").replace(" ", "")
    assert "revoked" in run("revoke", "team").stdout
    assert run.requests == [
        ("POST", "/keys/team/rotate", {"grace": 86_400.0}),
        ("POST", "/keys/team/rotate", {"grace": 3600.0}),
        ("GET", "/keys", None),
        ("DELETE", "/keys/team", None),
    ]


@pytest.mark.parametrize(
    "arguments",
    [("create", "a", "--expires-in", "soon"), ("create", "a", "--limit", "requests_per_second=x")],
)
def test_options_that_are_wrong(run: Any, arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2 and run.requests == []
