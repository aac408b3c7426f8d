"""`torchrelay shadow`, against a fake of the management API."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner, Result

from serve_app.cli.app import app
from serve_app.domain import validation
from serve_app.domain.traffic_policy import ComparisonRule, ShadowPolicy

PAIR = {
    "version": "1.0",
    "shadow": "2.0",
    "since": 1_795_000_000.0,
    "calls": {"agreed": 1180, "disagreed": 20, "error": 3, "skipped": 4, "dropped": 5},
    "reasons": {
        "disagreed": {"label": 15, "labels": 5},
        "error": {"handler_failed": 3},
        "skipped": {"stream": 4},
        "dropped": {"queue_full": 5},
    },
    "agreement_rate": 1180 / 1200,
    "error_rate": 3 / 1203,
    "label_flip_rate": 15 / 1200,
    "measures": {"label_flipped": 15 / 1200, "top_k_agreement": 0.97},
    "latency": {"live": {"p50_ms": 3.1, "p99_ms": 9.25}, "shadow": {"p50_ms": 5.5, "p99_ms": 21.0}},
    "disagreements": [
        {
            "request_id": "r1",
            "reason": "label",
            "distance": 1.5,
            "inputs": [
                {"name": "body", "json": {"text": "long " * 50}},
                {"name": "x", "base64": "AA==", "bytes": 1},
            ],
            "live": {"status": 200, "json": {"cat": 0.9}},
            "shadow": {"status": 200, "text": "no [bold]cat[/bold]"},
        },
        {
            "reason": "labels",
            "distance": 0.5,
            "inputs": [],
            "live": {"json": 1},
            "shadow": {"bytes": 9, "redacted": True},
        },
    ],
}
DOCUMENT = {
    "model": "m",
    "shadow": validation.write(ShadowPolicy("2.0", 10, ComparisonRule("top_k"))),
    "against": [PAIR],
}


class FakeServer:
    """A management API with one shadow, which records its requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str]] = []
        self.url = ""
        self.document: Any = DOCUMENT

    def respond(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        self.requests.append((method, path))
        if "/none/" in path:
            return 404, {"code": 404, "type": "ModelNotFoundException", "message": "Model not found: none"}
        return 200, self.document if method == "GET" else {"status": "It is forgotten"}

    def __call__(self, *arguments: str) -> Result:
        return CliRunner().invoke(
            app, ["shadow", *arguments, "--management", self.url], env={"COLUMNS": "200"}
        )


def test_rates_and_worst_mismatches_are_shown(fake_server: FakeServer) -> None:
    result = fake_server("team a/m")
    assert result.exit_code == 0, result.output
    assert fake_server.requests == [("GET", "/models/team%20a%2Fm/shadow")]
    for text in (
        "m: shadow 2.0, 10 % of the requests, compared as top_k",
        "98.33 %",
        "1.25 %",
        "handler_failed 3",
        "queue_full 5",
        "9.25 ms",
        "21 ms",
        "on average: top_k_agreement 0.97",
        "(1 bytes)",
        '{"cat": 0.9}',
        "no [bold]cat[/bold]",
        "(9 bytes)",
    ):
        assert text in result.output, text
    assert "labels" not in fake_server("m", "--worst", "1").output
    assert "worst" not in fake_server("m", "--worst", "0").output


def test_no_comparisons_yet(fake_server: FakeServer) -> None:
    fake_server.document = {**DOCUMENT, "against": []}
    assert "No comparisons yet" in fake_server("m").output
    no_figures = {"calls": dict.fromkeys(PAIR["calls"], 0), "reasons": {}, "measures": {}, "latency": {}}
    rates = dict.fromkeys(("agreement_rate", "error_rate", "label_flip_rate"))
    fake_server.document = {
        **DOCUMENT,
        "shadow": None,
        "against": [{**PAIR, **no_figures, **rates, "disagreements": []}],
    }
    result = fake_server("m")
    assert result.exit_code == 0, result.output
    assert "no active shadow" in result.output


def test_json_forget_and_errors(fake_server: FakeServer) -> None:
    assert json.loads(fake_server("m", "--json").output) == DOCUMENT
    assert fake_server("m", "--reset").output == "It is forgotten\n"
    assert fake_server.requests[-1] == ("DELETE", "/models/m/shadow")
    result = fake_server("none")
    assert result.exit_code == 1
    assert "Model not found: none (404)" in result.output
