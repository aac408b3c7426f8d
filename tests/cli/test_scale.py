"""`torchrelay models scale` and the table of versions, over a server that answers as the management API does."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from rich.console import Console
from typer.testing import CliRunner

from serve_app.cli import progress
from serve_app.cli.app import app
from serve_app.client import Client


class Answers:
    """It answers every question with what stands in ``said``, and keeps what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.said: dict[str, Any] = {}
        answers = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                url = urlsplit(self.path)
                answers.asked.append((f"{self.command} {url.path}", dict(parse_qsl(url.query))))
                body = json.dumps(answers.said[url.path]).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_PUT = do_GET

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def answers() -> Iterator[Answers]:
    answers = Answers()
    thread = threading.Thread(target=answers.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield answers
    finally:
        answers.server.shutdown()
        thread.join()
        answers.server.server_close()


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["2"], {"min_worker": "2", "max_worker": "2"}),
        (["0", "--max", "4"], {"min_worker": "0", "max_worker": "4"}),
        (
            ["1", "--max", "4", "--policy", "latency", "--target-p95-ms", "80", "--upscale-delay-s", "0.5"],
            {
                "min_worker": "1",
                "max_worker": "4",
                "autoscaling_policy": "latency",
                "target_p95_ms": "80.0",
                "upscale_delay_s": "0.5",
            },
        ),
    ],
)
def test_what_is_asked(answers: Answers, words: list[str], asked: dict[str, str]) -> None:
    answers.said["/models/m/2.0"] = {"status": "Workers scaled."}
    command = ["models", "scale", "m", *words, "--version", "2.0"]
    done = CliRunner().invoke(app, command, env={"TORCHRELAY_MANAGEMENT": answers.url})
    assert (done.exit_code, done.output) == (0, "Workers scaled.\n")
    assert answers.asked == [("PUT /models/m/2.0", {**asked, "synchronous": "true"})]


def test_the_table_shows_between_how_many_and_who_sleeps(answers: Answers) -> None:
    def version(number: str, low: int, high: int, running: int) -> dict[str, Any]:
        workers = [{"status": "READY"}] * running
        return {
            "modelVersion": number,
            "modelUrl": "m.mar",
            "minWorkers": low,
            "maxWorkers": high,
            "workers": workers,
        }

    answers.said["/models"] = {"models": [{"modelName": "m", "modelUrl": "m.mar"}]}
    answers.said["/models/m/all"] = [
        version("1", 2, 2, 2),
        version("2", 1, 4, 3),
        version("3", 0, 4, 0),
        version("4", 0, 0, 0),
    ]
    console = Console(width=100, file=io.StringIO())
    with Client(answers.url, answers.url) as client:
        console.print(progress.versions(client))
    rows = [[cell.strip() for cell in line.split("│")[2:5]] for line in console.file.getvalue().splitlines()]
    assert [row for row in rows if len(row) == 3 and row[0].isdigit()] == [
        ["1", "2 of 2", "ready"],
        ["2", "3 of 1 to 4", "ready"],
        ["3", "0 of 0 to 4", "idle"],
        ["4", "0 of 0", "no workers"],
    ]
