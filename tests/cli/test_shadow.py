"""`torchrelay shadow`, over a server that answers its routes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from serve_app import documents
from serve_app.cli.app import app
from serve_app.policy import Compare, Shadow

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
            "why": "label",
            "distance": 1.5,
            "inputs": [{"name": "body", "json": {"text": "long " * 50}}, {"name": "x", "base64": "AA==", "bytes": 1}],
            "live": {"status": 200, "json": {"cat": 0.9}},
            "shadow": {"status": 200, "text": "no [bold]cat[/bold]"},
        },
        {"why": "labels", "distance": 0.5, "inputs": [], "live": {"json": 1}, "shadow": {"bytes": 9, "redacted": True}},
    ],
}
SAID = {
    "model": "m",
    "shadow": documents.write(Shadow("2.0", 10, Compare("top_k"))),
    "against": [PAIR],
}


class Told:
    """What the server was asked, and what it says."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.url = ""
        self.said: Any = SAID

    def __call__(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, ["shadow", *arguments, "--management", self.url], env={"COLUMNS": "200"})


@pytest.fixture
def told() -> Iterator[Told]:
    told = Told()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            told.asked.append((self.command, self.path))
            missing = {"code": 404, "type": "ModelNotFoundException", "message": "Model not found: none"}
            known = "/none/" not in self.path
            said = missing if not known else told.said if self.command == "GET" else {"status": "It is forgotten"}
            body = json.dumps(said).encode()
            self.send_response(200 if known else 404)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_DELETE = answer

        def log_message(self, *_: object) -> None:
            """Tests read what was asked."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        told.url = f"http://127.0.0.1:{server.server_port}"
        yield told
        server.shutdown()
        thread.join()


def test_rates_and_the_worst_as_tables(told: Told) -> None:
    done = told("team a/m")
    assert done.exit_code == 0, done.output
    assert told.asked == [("GET", "/models/team%20a%2Fm/shadow")]
    for words in (
        "m: shadow 2.0, 10 % of the calls, compared as top_k",
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
        assert words in done.output, words
    assert "labels" not in told("m", "--worst", "1").output
    assert "worst" not in told("m", "--worst", "0").output


def test_before_there_is_anything(told: Told) -> None:
    told.said = {**SAID, "against": []}
    assert "Nothing was compared yet" in told("m").output
    nothing = {"calls": dict.fromkeys(PAIR["calls"], 0), "reasons": {}, "measures": {}, "latency": {}}
    rates = dict.fromkeys(("agreement_rate", "error_rate", "label_flip_rate"))
    told.said = {**SAID, "shadow": None, "against": [{**PAIR, **nothing, **rates, "disagreements": []}]}
    done = told("m")
    assert done.exit_code == 0, done.output
    assert "no shadow now" in done.output


def test_json_forgetting_and_refusals(told: Told) -> None:
    assert json.loads(told("m", "--json").output) == SAID
    assert told("m", "--forget").output == "It is forgotten\n"
    assert told.asked[-1] == ("DELETE", "/models/m/shadow")
    refused = told("none")
    assert refused.exit_code == 1
    assert "Model not found: none (404)" in refused.output
