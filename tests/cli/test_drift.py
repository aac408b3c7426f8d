"""`torchrelay drift`, against a fake of the management API."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner, Result

from serve_app.cli.app import app

FEATURE = {"name": "input.[bold]age", "kind": "numeric", "psi": 1.25, "psi_critical": 0.04, "ks": 0.5}
FEATURE |= {"ks_critical": 0.06, "level": "major", "reference_count": 1000, "current_count": 990}
WINDOW = {"source": "requests", "requests": 1000, "complete": True, "since": 1.0, "until": 2.0}
VERSION: dict[str, Any] = {
    "version": "1.0",
    "level": "major",
    "capture": {"captured": 2000, "dropped": {"queue_full": 7}, "last_error": "disk full"},
    "reference": WINDOW,
    "current": {**WINDOW, "requests": 990, "complete": False},
    "omitted_features": 3,
    "features": [FEATURE, {**FEATURE, "name": "output.label", "kind": "categorical", "ks": None}],
}
DOCUMENT = {"model": "m", "versions": [VERSION]}


class FakeServer:
    """A management API with the drift of one model, which records its requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str]] = []
        self.url = ""
        self.document: Any = DOCUMENT

    def respond(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        self.requests.append((method, path))
        return 200, self.document

    def __call__(self, *arguments: str) -> Result:
        return CliRunner().invoke(
            app, ["drift", *arguments, "--management", self.url], env={"COLUMNS": "200"}
        )


def test_the_features_of_each_version(fake_server: FakeServer) -> None:
    result = fake_server("m")
    assert result.exit_code == 0, result.output
    assert fake_server.requests == [("GET", "/models/m/drift")]
    for text in (
        "m 1.0: major drift; reference: 1,000 requests, current: 990 requests (incomplete)",
        "2,000 captured, 7 lost. disk full",
        "3 features beyond max_features",
        "input.[bold]age",
        "1.250",
        "0.500",
        "categorical",
    ):
        assert text in result.output, text


def test_no_comparison_yet(fake_server: FakeServer) -> None:
    fake_server.document = {**DOCUMENT, "versions": [{**VERSION, "current": None, "features": []}]}
    assert "No comparison yet" in fake_server("m", "1.0").output
    assert fake_server.requests == [("GET", "/models/m/1.0/drift")]


def test_json_and_reset(fake_server: FakeServer) -> None:
    assert json.loads(fake_server("m", "--json").output) == DOCUMENT
    assert "is the reference now" in fake_server("m", "1.0", "--reset").output
    assert fake_server.requests[-1] == ("POST", "/models/m/1.0/drift/reset")
    assert fake_server("m", "--reset").exit_code == 2
