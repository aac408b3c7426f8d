"""`torchrelay rollout`, against a fake of the management API."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from serve_app.cli.app import app
from serve_app.control.rollouts.state_machine import (
    apply_action,
    create,
    enter_first_step,
    evaluate,
    to_document,
)
from serve_app.dataplane.experiment_collector import ArmStats, bin_index
from serve_app.domain.rollout import Rollout, RolloutPlan

pytestmark = pytest.mark.integration


FIGURES = [
    {
        "candidate": ArmStats(412, failed={"handler_failed": 42}, latency={bin_index(0.012): 370}),
        "baseline": ArmStats(7_806, latency={bin_index(0.010): 7_806}),
    }
]
STARTING = create(RolloutPlan("2.0", bake_s=0.0), "r1", "m", "1.0", False, 100.0)
RUNNING = enter_first_step(STARTING, 101.0)
PAUSED = apply_action(RUNNING, "pause", 102.0, [])
ROLLED_BACK = evaluate(RUNNING, FIGURES, 103.0)
PROMOTED = replace(RUNNING, state="promoted", step=4)


class FakeServer:
    """A management API with one rollout, whose state changes per request, and which records its requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, Any]] = []
        self.url = ""
        self.states = [RUNNING]

    def respond(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        self.requests.append((method, path, body))
        if "/none/" in path:
            return 404, {"code": 404, "type": "ResourceNotFoundException", "message": "Model not found: none"}
        rollout: Rollout = self.states[0] if len(self.states) == 1 else self.states.pop(0)
        return 200, to_document(rollout, FIGURES, 103.0)


Command = Callable[..., Result]


@pytest.fixture
def command(fake_server: FakeServer) -> Command:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(
            app,
            ["rollout", *arguments],
            env={"TORCHRELAY_MANAGEMENT": fake_server.url, "COLUMNS": "200", "TERM": "dumb"},
        )

    return run


def test_begin_sends_only_the_given_options(command: Command, fake_server: FakeServer) -> None:
    result = command("start", "m", "2.0")
    assert result.exit_code == 0, result.output
    assert fake_server.requests == [("POST", "/models/m/rollout", {"to": "2.0"})]
    assert "m: 2.0 in place of 1.0, running" in result.stdout


def test_begin_with_every_option(command: Command, fake_server: FakeServer) -> None:
    result = command(
        *(
            "start",
            "m",
            "2.0",
            "--steps",
            "10,50,100",
            "--bake",
            "5",
            "--min-calls",
            "20",
            "--keep-warm",
            "forever",
        ),
        *("--guardrail", "p99=off", "--guardrail", "error_rate=0.02", "--key", "header=x-user"),
    )
    assert result.exit_code == 0, result.output
    document = {
        "to": "2.0",
        "steps": [10, 50, 100],
        "bake_s": 5,
        "min_calls": 20,
        "keep_warm_s": None,
        "guardrails": {"p99": None, "error_rate": 0.02},
        "key": {"header": "x-user"},
    }
    assert fake_server.requests == [("POST", "/models/m/rollout", document)]
    assert command("start", "m", "2.0", "--keep-warm", "30").exit_code == 0
    assert fake_server.requests[1][2]["keep_warm_s"] == 30


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--steps=1,many,100", "'many' is not a number"),
        ("--keep-warm=long", "'long' is not a number"),
        ("--guardrail=p99", "'p99' is not of the form"),
        ("--guardrail=p99=high", "'high' is not a number"),
        ("--key=x-user", "'x-user' is not of the form"),
    ],
)
def test_invalid_options_send_no_request(
    command: Command, fake_server: FakeServer, option: str, message: str
) -> None:
    result = command("start", "m", "2.0", option)
    assert result.exit_code == 2
    assert message in result.stderr
    assert fake_server.requests == []


def test_show_renders_steps_figures_and_decisions(command: Command, fake_server: FakeServer) -> None:
    fake_server.states = [ROLLED_BACK]
    lines = command("show", "m").stdout.splitlines()
    assert lines[0] == "m: 2.0 in place of 1.0, rolled back"
    assert lines[1].split() == ["✗", "1", "%", "·", "5", "%", "·", "25", "%", "·", "50", "%", "·", "100", "%"]
    [candidate] = [line for line in lines if "candidate" in line]
    cells = [cell.strip() for cell in candidate.strip("│").split("│")]
    assert cells[:7] == ["candidate", "2.0", "412", "42", "10.2 %", "12.3 ms", "12.3 ms"]
    guardrail = "error_rate 10.2 % of 412 requests against 0 % of 7,806; at most 1 % more is allowed"
    assert any(line.startswith(guardrail) for line in lines)
    decisions = [line.split()[1:4] for line in lines if line[2:3] == ":"]
    assert decisions == [["started", "0", "%"], ["step", "1", "%"], ["rolled", "back", "0"]]


def test_show_before_the_first_step(command: Command, fake_server: FakeServer) -> None:
    fake_server.states = [STARTING]
    assert "starting; waiting for the workers of 2.0" in command("show", "m").stdout


def test_show_as_json(command: Command, fake_server: FakeServer) -> None:
    assert json.loads(command("show", "m", "--json").stdout)["state"] == "running"


@pytest.mark.parametrize(
    ("end", "code"), [(PROMOTED, 0), (ROLLED_BACK, 1), (replace(RUNNING, state="aborted"), 1)]
)
def test_watch_ends_with_the_rollout(
    command: Command, fake_server: FakeServer, end: Rollout, code: int
) -> None:
    fake_server.states = [STARTING, RUNNING, PAUSED, end]
    result = command("watch", "m", "--period", "0.1")
    assert result.exit_code == code, result.output
    assert len(fake_server.requests) == 4
    assert end.state.replace("_", " ") in result.stdout


def test_begin_and_watch(command: Command, fake_server: FakeServer) -> None:
    fake_server.states = [STARTING, PROMOTED]
    assert command("start", "m", "2.0", "--watch").exit_code == 0
    assert [method for method, _, _ in fake_server.requests] == ["POST", "GET"]


@pytest.mark.parametrize("action", ["pause", "resume", "abort"])
def test_pause_resume_and_abort(command: Command, fake_server: FakeServer, action: str) -> None:
    fake_server.states = [PAUSED]
    result = command(action, "a b")
    assert result.exit_code == 0, result.output
    assert fake_server.requests == [("POST", f"/models/a%20b/rollout/{action}", None)]
    assert "paused; waiting for somebody to resume it" in result.stdout


@pytest.mark.parametrize(
    "arguments", [("start", "none", "2.0"), ("show", "none"), ("watch", "none"), ("abort", "none")]
)
def test_server_errors_end_the_command(command: Command, arguments: tuple[str, ...]) -> None:
    result = command(*arguments)
    assert result.exit_code == 1
    assert "Model not found: none (404)" in result.stderr
