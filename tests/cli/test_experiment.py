"""`torchrelay experiment`, against a fake of the management API."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from serve_app.cli.app import app
from serve_app.control.experiments.analysis import ArmTotals, assess
from serve_app.domain.experiment import ExperimentMetric

METRICS = [
    ExperimentMetric("clicks", "reward"),
    ExperimentMetric("seconds"),
    ExperimentMetric("fail[ures]", "error_rate"),
]
FIELDS = {
    "id": "e1",
    "name": "new [ranking]",
    "model": "m",
    "state": "running",
    "started_at": 1_700_000_000.0,
    "ended": None,
    "key": {"header": "x-user"},
}
SUMMARY = {
    **FIELDS,
    "arms": {"a": {"version": "1.0", "weight": 9000}, "b": {"version": "2.0", "weight": 1000}},
}


def arm(name: str, version: str, clicks: float, units: int = 50_000) -> ArmTotals:
    calls = 50
    return ArmTotals(
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


class FakeServer:
    """A management API with one experiment, which records its requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, Any]] = []
        self.url = ""
        self.states = ["running"]
        self.candidate = arm("b", "2.0", 0.26)

    def respond(self, method: str, path: str, document: Any) -> tuple[int, Any]:
        self.requests.append((method, path, document))
        if path == "/experiments/none":
            return 404, {
                "code": 404,
                "type": "ResourceNotFoundException",
                "message": "Experiment not found: none",
            }
        if path.endswith("/events"):
            return 200, {"counted": len(document), "repeated": 1}
        if method == "GET" and path.endswith("/experiments"):
            return 200, {"experiments": [SUMMARY]}
        if path.endswith("?purge=true"):
            return 200, {"status": "gone"}
        if method == "DELETE":
            self.states = ["stopped"]
        state = self.states[0] if len(self.states) == 1 else self.states.pop(0)
        ended = 1_700_000_100.0 if state == "stopped" else None
        results = assess([arm("a", "1.0", 0.2), self.candidate], METRICS, "a")
        return 200, {**FIELDS, "state": state, "ended": ended, **results}


Command = Callable[..., Result]


@pytest.fixture
def command(fake_server: FakeServer) -> Command:
    def run(*arguments: str, input: str | None = None) -> Result:
        environment = {"TORCHRELAY_MANAGEMENT": fake_server.url, "COLUMNS": "200"}
        return CliRunner().invoke(app, ["experiment", *arguments], input=input, env=environment)

    return run


@pytest.mark.parametrize(
    "text", ['{"name": "n", "arms": {"a": {"version": "1.0"}}}', 'name: n\narms: {a: {version: "1.0"}}']
)
def test_begin_reads_json_and_yaml(
    command: Command, fake_server: FakeServer, tmp_path: Path, text: str
) -> None:
    (file := tmp_path / "experiment").write_text(text)
    result = command("start", "m", str(file))
    assert result.exit_code == 0, result.output
    document = {"name": "n", "arms": {"a": {"version": "1.0"}}}
    assert fake_server.requests == [("POST", "/models/m/experiments", document)]
    assert result.stdout == "e1 has started. Show it: torchrelay experiment show e1\n"
    assert command("start", "m", "-", input=text).exit_code == 0
    assert command("start", "m", json.dumps(document)).exit_code == 0
    assert fake_server.requests == [fake_server.requests[0]] * 3


def test_invalid_file_is_refused(command: Command, fake_server: FakeServer, tmp_path: Path) -> None:
    (file := tmp_path / "experiment.json").write_text('{"name": ')
    result = command("start", "m", str(file))
    assert result.exit_code == 2
    assert "experiment.json is neither JSON nor YAML" in " ".join(result.stderr.replace("│", "").split())
    assert not fake_server.requests


def test_list_shows_experiments(command: Command, fake_server: FakeServer) -> None:
    result = command("list")
    assert [
        word in result.stdout for word in ("e1", "new [ranking]", "a 1.0 90 %, b 2.0 10 %", "running")
    ] == [True] * 4
    command("list", "m")
    assert [path for _, path, _ in fake_server.requests] == ["/experiments", "/models/m/experiments"]


def test_show_renders_arms_and_metrics(command: Command) -> None:
    result = command("show", "e1")
    assert result.exit_code == 0, result.output
    first, *lines = result.stdout.splitlines()
    assert first.startswith("new [ranking]: m, running, started 2023-11-1")
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    rows = {name: rest for name, *rest in cells}
    assert "fail[ures]" in lines[1]
    assert rows["a"][:4] == ["1.0", "50 %", "50,000", "50,000"]
    assert re.fullmatch(r"0\.2  \[0\.19\d\d, 0\.20\d\d\]", rows["a"][4])
    assert rows["b"][:4] == ["2.0", "50 %", "50,000", "50,000"]
    assert re.fullmatch(r"\+0\.06  \[\+0\.05\d+, \+0\.06\d+\]", rows[""][4])
    assert rows["b"][5].startswith("10.3 ms  [")
    assert rows["b"][6] == "-", "nothing was counted of fail[ures]"
    assert "b is better than a on clicks: 0.0600 more" in result.stdout
    assert "Not yet known: fail[ures] of b and a have 0 and 0 requests" in result.stdout
    assert (
        lines[-1]
        == "b is better on clicks, no different on seconds, compared with a; fail[ures] not yet known."
    )


def test_sample_ratio_alarm_is_shown(command: Command, fake_server: FakeServer) -> None:
    fake_server.candidate = arm("b", "2.0", 0.26, units=30_000)
    result = command("show", "e1")
    assert "The arms' sizes do not fit their weights" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("Not to be trusted")


def test_show_as_json(command: Command) -> None:
    assert json.loads(command("show", "e1", "--json").stdout)["arms"]["b"]["calls"] == 50_000


def test_watch_ends_when_the_experiment_stops(command: Command, fake_server: FakeServer) -> None:
    fake_server.states = ["running", "running", "stopped"]
    result = command("watch", "e1", "--period", "0.1")
    assert result.exit_code == 0, result.output
    assert [method for method, _, _ in fake_server.requests] == ["GET"] * 3
    assert "m, stopped 2023-11-1" in result.stdout


def test_stop_shows_the_result(command: Command, fake_server: FakeServer) -> None:
    result = command("stop", "e1")
    assert fake_server.requests[0][:2] == ("DELETE", "/experiments/e1")
    assert "m, stopped 2023-11-1" in result.stdout


def test_forget_deletes_the_experiment(command: Command, fake_server: FakeServer) -> None:
    assert command("delete", "e1").stdout == "gone\n"
    assert fake_server.requests[0][:2] == ("DELETE", "/experiments/e1?purge=true")


def test_reward_is_sent(command: Command, fake_server: FakeServer) -> None:
    result = command("reward", "e1", "0.5", "--request-id", "r1", "--metric", "clicks")
    assert result.stdout == "1 counted, 1 had been counted before\n"
    assert command("reward", "e1", "--key", "ann", "--event-id", "7", "--", "-1").exit_code == 0
    assert fake_server.requests == [
        ("POST", "/experiments/e1/events", [{"value": 0.5, "request_id": "r1", "metric": "clicks"}]),
        ("POST", "/experiments/e1/events", [{"value": -1.0, "key": "ann", "id": "7"}]),
    ]


@pytest.mark.parametrize(
    "text",
    [
        '[{"key": "a", "value": 1}, {"key": "b", "value": 2}]',
        '{"key": "a", "value": 1}\n\n{"key": "b", "value": 2}\n',
    ],
)
def test_rewards_are_read_from_a_file(command: Command, fake_server: FakeServer, text: str) -> None:
    assert (
        command("reward", "e1", "--file", "-", input=text).stdout == "2 counted, 1 had been counted before\n"
    )
    assert fake_server.requests[0][2] == [{"key": "a", "value": 1}, {"key": "b", "value": 2}]


def test_many_rewards_are_sent_in_several_requests(command: Command, fake_server: FakeServer) -> None:
    lines = "".join(f'{{"key": "{number}", "value": 1}}\n' for number in range(12_000))
    assert command("reward", "e1", "--file", "-", input=lines).stdout.startswith("12000 counted")
    assert [len(document) for _, _, document in fake_server.requests] == [5000, 5000, 2000]


def test_errors_are_reported(command: Command, fake_server: FakeServer) -> None:
    result = command("show", "none")
    assert (result.exit_code, result.stderr) == (1, "Experiment not found: none (404)\n")
    without_value = command("reward", "e1", "--key", "ann")
    assert (without_value.exit_code, without_value.stderr) == (
        2,
        "Give either a VALUE or a --file of events.\n",
    )
    invalid_file = command("reward", "e1", "--file", "-", input="{")
    assert invalid_file.exit_code == 1
    assert "a JSON list, or one on each line" in invalid_file.stderr
