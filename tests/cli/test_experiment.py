"""`torchrelay experiment`, over a server that answers its routes."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from serve_app.cli.app import app
from serve_app.control.assessment import Tally, assess
from serve_app.experiment import Metric

METRICS = [Metric("clicks", "reward"), Metric("seconds"), Metric("fail[ures]", "error_rate")]
WORDS = {
    "id": "e1",
    "name": "new [ranking]",
    "model": "m",
    "state": "running",
    "began": 1_700_000_000.0,
    "ended": None,
    "key": {"header": "x-user"},
}
BRIEF = {**WORDS, "arms": {"a": {"version": "1.0", "weight": 9000}, "b": {"version": "2.0", "weight": 1000}}}


def arm(name: str, version: str, clicks: float, units: int = 50_000) -> Tally:
    calls = 50
    return Tally(
        name,
        version,
        5000,
        units,
        calls * 1000,
        {
            "clicks": {group: (calls, calls * (clicks + (group % 7 - 3) / 100)) for group in range(1000)},
            "seconds": {group: (calls, calls * (0.01 + (group % 7) / 10_000)) for group in range(1000)},
            "fail[ures]": {},
        },
    )


class Told:
    """What the server was asked, and what it says of an experiment."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        self.url = ""
        self.states = ["running"]
        self.rival = arm("b", "2.0", 0.26)

    def says(self, method: str, path: str, document: Any) -> tuple[int, Any]:
        self.asked.append((method, path, document))
        if path == "/experiments/none":
            return 404, {"code": 404, "type": "ResourceNotFoundException", "message": "Experiment not found: none"}
        if path.endswith("/events"):
            return 200, {"counted": len(document), "repeated": 1}
        if method == "GET" and path.endswith("/experiments"):
            return 200, {"experiments": [BRIEF]}
        if path.endswith("?forget=true"):
            return 200, {"status": "gone"}
        if method == "DELETE":
            self.states = ["stopped"]
        state = self.states[0] if len(self.states) == 1 else self.states.pop(0)
        ended = 1_700_000_100.0 if state == "stopped" else None
        found = assess([arm("a", "1.0", 0.2), self.rival], METRICS, "a")
        return 200, {**WORDS, "state": state, "ended": ended, **found}


@pytest.fixture
def told() -> Iterator[Told]:
    told = Told()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            length = int(self.headers.get("content-length", 0))
            document = json.loads(self.rfile.read(length)) if length else None
            status, said = told.says(self.command, self.path, document)
            body = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_DELETE = answer

        def log_message(self, *_: object) -> None:
            """Tests read what was asked."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        told.url = f"http://127.0.0.1:{server.server_port}"
        yield told
        server.shutdown()
        thread.join()


Command = Callable[..., Result]


@pytest.fixture
def command(told: Told) -> Command:
    def run(*words: str, input: str | None = None) -> Result:
        environment = {"TORCHRELAY_MANAGEMENT": told.url, "COLUMNS": "200"}
        return CliRunner().invoke(app, ["experiment", *words], input=input, env=environment)

    return run


@pytest.mark.parametrize(
    "text", ['{"name": "n", "arms": {"a": {"version": "1.0"}}}', 'name: n\narms: {a: {version: "1.0"}}']
)
def test_begin_from_a_file(command: Command, told: Told, tmp_path: Path, text: str) -> None:
    (file := tmp_path / "experiment").write_text(text)
    done = command("begin", "m", str(file))
    assert done.exit_code == 0, done.output
    document = {"name": "n", "arms": {"a": {"version": "1.0"}}}
    assert told.asked == [("POST", "/models/m/experiments", document)]
    assert done.stdout == "e1 has begun. Look at it: torchrelay experiment show e1\n"
    assert command("begin", "m", "-", input=text).exit_code == 0
    assert told.asked[1] == told.asked[0]


def test_a_file_that_is_none(command: Command, told: Told, tmp_path: Path) -> None:
    (file := tmp_path / "experiment.json").write_text('{"name": ')
    done = command("begin", "m", str(file))
    assert done.exit_code == 1
    assert "experiment.json is neither JSON nor YAML" in done.stderr.replace("\n", " ")
    assert not told.asked


def test_list(command: Command, told: Told) -> None:
    done = command("list")
    assert [word in done.stdout for word in ("e1", "new [ranking]", "a 1.0 90 %, b 2.0 10 %", "running")] == [True] * 4
    command("list", "m")
    assert [path for _, path, _ in told.asked] == ["/experiments", "/models/m/experiments"]


def test_show(command: Command) -> None:
    done = command("show", "e1")
    assert done.exit_code == 0, done.output
    first, *lines = done.stdout.splitlines()
    assert first.startswith("new [ranking]: m, running, began 2023-11-1")
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    rows = {name: rest for name, *rest in cells}
    assert "fail[ures]" in lines[1]
    assert rows["a"][:4] == ["1.0", "50 %", "50,000", "50,000"]
    assert re.fullmatch(r"0\.2  \[0\.19\d\d, 0\.20\d\d\]", rows["a"][4])
    assert rows["b"][:4] == ["2.0", "50 %", "50,000", "50,000"]
    assert re.fullmatch(r"\+0\.06  \[\+0\.05\d+, \+0\.06\d+\]", rows[""][4])
    assert rows["b"][5].startswith("10.3 ms  [")
    assert rows["b"][6] == "-", "nothing was counted of fail[ures]"
    assert "b is better than a on clicks: 0.0600 more" in done.stdout
    assert "Not yet known: fail[ures] of b and a has 0 and 0 calls" in done.stdout
    assert lines[-1] == "b is better on clicks, no different on seconds, compared with a; fail[ures] not yet known."


def test_an_alarm_is_shown(command: Command, told: Told) -> None:
    told.rival = arm("b", "2.0", 0.26, units=30_000)
    done = command("show", "e1")
    assert "The arms' sizes do not fit their weights" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("Not to be trusted")


def test_show_as_json(command: Command) -> None:
    assert json.loads(command("show", "e1", "--json").stdout)["arms"]["b"]["calls"] == 50_000


def test_watch_ends_with_the_experiment(command: Command, told: Told) -> None:
    told.states = ["running", "running", "stopped"]
    done = command("watch", "e1", "--period", "0.1")
    assert done.exit_code == 0, done.output
    assert [method for method, _, _ in told.asked] == ["GET"] * 3
    assert "m, stopped 2023-11-1" in done.stdout


def test_stop(command: Command, told: Told) -> None:
    done = command("stop", "e1")
    assert told.asked[0][:2] == ("DELETE", "/experiments/e1")
    assert "m, stopped 2023-11-1" in done.stdout


def test_forget(command: Command, told: Told) -> None:
    assert command("forget", "e1").stdout == "gone\n"
    assert told.asked[0][:2] == ("DELETE", "/experiments/e1?forget=true")


def test_a_reward(command: Command, told: Told) -> None:
    done = command("reward", "e1", "0.5", "--request-id", "r1", "--metric", "clicks")
    assert done.stdout == "1 counted, 1 had been counted before\n"
    assert command("reward", "e1", "--key", "ann", "--event-id", "7", "--", "-1").exit_code == 0
    assert told.asked == [
        ("POST", "/experiments/e1/events", [{"value": 0.5, "request_id": "r1", "metric": "clicks"}]),
        ("POST", "/experiments/e1/events", [{"value": -1.0, "key": "ann", "id": "7"}]),
    ]


@pytest.mark.parametrize(
    "text",
    ['[{"key": "a", "value": 1}, {"key": "b", "value": 2}]', '{"key": "a", "value": 1}\n\n{"key": "b", "value": 2}\n'],
)
def test_rewards_from_a_file(command: Command, told: Told, text: str) -> None:
    assert command("reward", "e1", "--file", "-", input=text).stdout == "2 counted, 1 had been counted before\n"
    assert told.asked[0][2] == [{"key": "a", "value": 1}, {"key": "b", "value": 2}]


def test_many_rewards_go_in_several_requests(command: Command, told: Told) -> None:
    lines = "".join(f'{{"key": "{number}", "value": 1}}\n' for number in range(12_000))
    assert command("reward", "e1", "--file", "-", input=lines).stdout.startswith("12000 counted")
    assert [len(document) for _, _, document in told.asked] == [5000, 5000, 2000]


def test_what_is_wrong(command: Command, told: Told) -> None:
    refused = command("show", "none")
    assert (refused.exit_code, refused.stderr) == (1, "Experiment not found: none (404)\n")
    neither = command("reward", "e1", "--key", "ann")
    assert (neither.exit_code, neither.stderr) == (2, "Give either a VALUE or a --file of events.\n")
    unread = command("reward", "e1", "--file", "-", input="{")
    assert unread.exit_code == 1
    assert "a JSON list, or one on each line" in unread.stderr
