"""`torchrelay models scale` and the table of versions, against a fake of the management API."""

from __future__ import annotations

import io
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from rich.console import Console
from typer.testing import CliRunner

from serve_app.cli import progress
from serve_app.cli.app import app
from serve_app.client import Client


class FakeServer:
    """A management API with the responses ``documents``, which records its requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.documents: dict[str, Any] = {}
        self.url = ""

    def respond(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        url = urlsplit(path)
        self.requests.append((f"{method} {url.path}", dict(parse_qsl(url.query))))
        return 200, self.documents[url.path]


@pytest.mark.parametrize(
    ("arguments", "parameters"),
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
        (
            ["1", "--max", "4", "--policy", "prometheus", "--query", "sum(jobs)", "--target-value", "10"],
            {
                "min_worker": "1",
                "max_worker": "4",
                "autoscaling_policy": "prometheus",
                "autoscaling_query": "sum(jobs)",
                "target_value": "10.0",
            },
        ),
    ],
)
def test_options_are_sent_as_parameters(
    fake_server: FakeServer, arguments: list[str], parameters: dict[str, str]
) -> None:
    fake_server.documents["/models/m/2.0"] = {"status": "Workers scaled."}
    command = ["models", "scale", "m", *arguments, "--version", "2.0"]
    result = CliRunner().invoke(app, command, env={"TORCHRELAY_MANAGEMENT": fake_server.url})
    assert (result.exit_code, result.output) == (0, "Workers scaled.\n")
    assert fake_server.requests == [("PUT /models/m/2.0", {**parameters, "synchronous": "true"})]


def test_table_shows_bounds_and_states(fake_server: FakeServer) -> None:
    def version(number: str, min_workers: int, max_workers: int, running: int) -> dict[str, Any]:
        workers = [{"status": "READY"}] * running
        return {
            "modelVersion": number,
            "modelUrl": "m.mar",
            "minWorkers": min_workers,
            "maxWorkers": max_workers,
            "workers": workers,
        }

    fake_server.documents["/models"] = {"models": [{"modelName": "m", "modelUrl": "m.mar"}]}
    fake_server.documents["/events"] = {"events": []}
    fake_server.documents["/models/m/all"] = [
        version("1", 2, 2, 2),
        version("2", 1, 4, 3),
        version("3", 0, 4, 0),
        version("4", 0, 0, 0),
    ]
    console = Console(width=100, file=io.StringIO())
    with Client(fake_server.url, fake_server.url) as client:
        console.print(progress.version_table(client))
    rows = [[cell.strip() for cell in line.split("│")[2:5]] for line in console.file.getvalue().splitlines()]
    assert [row for row in rows if len(row) == 3 and row[0].isdigit()] == [
        ["1", "2 of 2", "ready"],
        ["2", "3 of 1 to 4", "ready"],
        ["3", "0 of 0 to 4", "idle"],
        ["4", "0 of 0", "no workers"],
    ]
