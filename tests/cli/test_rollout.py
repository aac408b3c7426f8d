"""`torchrelay rollout`, over a server that answers its routes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from serve_app.cli.app import app
from serve_app.control.progression import begun, document, looked_at, started, steered
from serve_app.rollout import Plan, Rollout
from serve_app.telemetry.observations import ArmFigures, bin_of

FIGURES = [
    {
        "candidate": ArmFigures(412, failed={"handler_failed": 42}, latency={bin_of(0.012): 370}),
        "baseline": ArmFigures(7_806, latency={bin_of(0.010): 7_806}),
    }
]
STARTING = begun(Plan("2.0", bake_s=0.0), "r1", "m", "1.0", False, 100.0)
RUNNING = started(STARTING, 101.0)
PAUSED = steered(RUNNING, "pause", 102.0, [])
BACK = looked_at(RUNNING, FIGURES, 103.0)
PROMOTED = replace(RUNNING, state="promoted", step=4)


class Told:
    """What the server was asked, and the rollout as it is at each question."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        self.url = ""
        self.states = [RUNNING]

    def says(self, method: str, path: str, said: Any) -> tuple[int, Any]:
        self.asked.append((method, path, said))
        if "/none/" in path:
            return 404, {"code": 404, "type": "ResourceNotFoundException", "message": "Model not found: none"}
        rollout: Rollout = self.states[0] if len(self.states) == 1 else self.states.pop(0)
        return 200, document(rollout, FIGURES, 103.0)


@pytest.fixture
def told() -> Iterator[Told]:
    told = Told()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            length = int(self.headers.get("content-length", 0))
            status, said = told.says(self.command, self.path, json.loads(self.rfile.read(length)) if length else None)
            body = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = answer

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
    def run(*words: str) -> Result:
        return CliRunner().invoke(
            app, ["rollout", *words], env={"TORCHRELAY_MANAGEMENT": told.url, "COLUMNS": "200", "TERM": "dumb"}
        )

    return run


def test_begin_says_no_more_than_it_is_told(command: Command, told: Told) -> None:
    done = command("begin", "m", "2.0")
    assert done.exit_code == 0, done.output
    assert told.asked == [("POST", "/models/m/rollout", {"to": "2.0"})]
    assert "m: 2.0 in place of 1.0, running" in done.stdout


def test_begin_with_everything(command: Command, told: Told) -> None:
    done = command(
        *("begin", "m", "2.0", "--steps", "10,50,100", "--bake", "5", "--min-calls", "20", "--keep-warm", "forever"),
        *("--guardrail", "p99=off", "--guardrail", "error_rate=0.02", "--key", "header=x-user"),
    )
    assert done.exit_code == 0, done.output
    document = {
        "to": "2.0",
        "steps": [10, 50, 100],
        "bake_s": 5,
        "min_calls": 20,
        "keep_warm_s": None,
        "guardrails": {"p99": None, "error_rate": 0.02},
        "key": {"header": "x-user"},
    }
    assert told.asked == [("POST", "/models/m/rollout", document)]
    assert command("begin", "m", "2.0", "--keep-warm", "30").exit_code == 0
    assert told.asked[1][2]["keep_warm_s"] == 30


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--steps=1,many,100", "'many' is no number"),
        ("--keep-warm=long", "'long' is no number"),
        ("--guardrail=p99", "'p99' has not the form"),
        ("--guardrail=p99=high", "'high' is no number"),
        ("--key=x-user", "'x-user' has not the form"),
    ],
)
def test_a_wrong_option_asks_nobody(command: Command, told: Told, option: str, said: str) -> None:
    done = command("begin", "m", "2.0", option)
    assert done.exit_code == 2
    assert said in done.stderr
    assert told.asked == []


def test_show(command: Command, told: Told) -> None:
    told.states = [BACK]
    lines = command("show", "m").stdout.splitlines()
    assert lines[0] == "m: 2.0 in place of 1.0, rolled back"
    assert lines[1].split() == ["✗", "1", "%", "·", "5", "%", "·", "25", "%", "·", "50", "%", "·", "100", "%"]
    [candidate] = [line for line in lines if "candidate" in line]
    cells = [cell.strip() for cell in candidate.strip("│").split("│")]
    assert cells[:7] == ["candidate", "2.0", "412", "42", "10.2 %", "12.3 ms", "12.3 ms"]
    guardrail = "error_rate 10.2 % of 412 calls against 0 % of 7,806; at most 1 % more is allowed"
    assert any(line.startswith(guardrail) for line in lines)
    decided = [line.split()[1:4] for line in lines if line[2:3] == ":"]
    assert decided == [["began", "0", "%"], ["step", "1", "%"], ["rolled", "back", "0"]]


def test_show_before_there_is_anything(command: Command, told: Told) -> None:
    told.states = [STARTING]
    assert "starting; it waits for the workers of 2.0" in command("show", "m").stdout


def test_show_as_json(command: Command, told: Told) -> None:
    assert json.loads(command("show", "m", "--json").stdout)["state"] == "running"


@pytest.mark.parametrize(("end", "code"), [(PROMOTED, 0), (BACK, 1), (replace(RUNNING, state="aborted"), 1)])
def test_watch_ends_with_it(command: Command, told: Told, end: Rollout, code: int) -> None:
    told.states = [STARTING, RUNNING, PAUSED, end]
    done = command("watch", "m", "--period", "0.1")
    assert done.exit_code == code, done.output
    assert len(told.asked) == 4
    assert end.state.replace("_", " ") in done.stdout


def test_begin_and_watch(command: Command, told: Told) -> None:
    told.states = [STARTING, PROMOTED]
    assert command("begin", "m", "2.0", "--watch").exit_code == 0
    assert [method for method, _, _ in told.asked] == ["POST", "GET"]


@pytest.mark.parametrize("verb", ["pause", "resume", "abort"])
def test_steering(command: Command, told: Told, verb: str) -> None:
    told.states = [PAUSED]
    done = command(verb, "a b")
    assert done.exit_code == 0, done.output
    assert told.asked == [("POST", f"/models/a%20b/rollout/{verb}", None)]
    assert "paused; it waits for somebody to resume it" in done.stdout


@pytest.mark.parametrize("words", [("begin", "none", "2.0"), ("show", "none"), ("watch", "none"), ("abort", "none")])
def test_the_servers_no_is_the_commands_end(command: Command, words: tuple[str, ...]) -> None:
    done = command(*words)
    assert done.exit_code == 1
    assert "Model not found: none (404)" in done.stderr
