"""`torchrelay audit`, against a fake of the management API."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from serve_app.cli.app import app

RECORDS = [
    {
        "id": 2,
        "time": 1_795_000_000.0,
        "actor": "ops",
        "address": "192.0.2.1:5",
        "action": "scale",
        "subject": "m",
        "result": "ok",
        "before": {"versions/m/1.0": {"min_workers": 1}},
        "after": {"versions/m/1.0": {"min_workers": 3}},
    },
    {
        "id": 1,
        "time": 1_795_000_000.0,
        "actor": "anonymous",
        "address": "",
        "action": "POST",
        "subject": "/models/[bold]x",
        "result": "refused: missing_token",
        "before": None,
        "after": None,
    },
]


def test_records_are_a_table_of_changes(serve_json: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    requests = []

    def respond(method: str, path: str, document: Any) -> tuple[int, Any]:
        requests.append((method, path))
        return 200, {"records": RECORDS}

    address = serve_json(respond)
    arguments = ["audit", "--limit", "2", "--actor", "ops", "--management", address]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert requests == [("GET", "/audit?limit=2&actor=ops")]
    assert "min_workers: 1 → 3" in shown.output
    assert "/models/[bold]x" in shown.output
    assert "refused: missing_token" in shown.output
    as_json = CliRunner().invoke(app, [*arguments, "--json"])
    assert json.loads(as_json.output) == {"records": RECORDS}
