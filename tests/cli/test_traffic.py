"""`torchrelay traffic`, against a fake of the management API over a real registry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from serve_app.cli.app import app
from serve_app.cli.commands.traffic import apply_changes
from serve_app.control.registry import Registry
from serve_app.control.registry_changes import register, set_policy
from serve_app.control.traffic import to_document
from serve_app.domain.model import ModelSpec
from serve_app.domain.traffic_policy import TrafficPolicy, read, write
from serve_app.errors import RelayError
from serve_app.protocols.http import json_errors


class FakeServer:
    """A management API with the traffic policy of a model m with three versions."""

    def __init__(self) -> None:
        self.late = False
        self.registry = Registry()
        for version in ("1.0", "2.0", "3.0"):
            spec = ModelSpec("m", version, "m.mar", "d" * 64, "archive", min_workers=1, max_workers=1)
            self.registry = register(self.registry, spec)
        self.url = ""

    def respond(self, method: str, path: str, policy: Any) -> tuple[int, Any]:
        if method != "GET":
            assert path == "/models/m/traffic"
            try:
                self.registry = set_policy(self.registry, "m", read(policy or {}))
            except RelayError as error:
                return json_errors.look_up(error)[0], json_errors.to_document(error)
            if self.late:
                return 202, {"status": "Stored, and late."}
        return 200, to_document(self.registry, "m")

    def __call__(self, *arguments: str, stdin: str = "") -> Result:
        return CliRunner().invoke(
            app, ["traffic", "m", *arguments], input=stdin, env={"TORCHRELAY_MANAGEMENT": self.url}
        )

    @property
    def policy(self) -> TrafficPolicy:
        return self.registry.models["m"].policy

    def document(self) -> dict[str, Any]:
        return json.loads(self("--json").output)


@pytest.fixture
def torchrelay(serve_json: Any) -> FakeServer:
    fake_server = FakeServer()
    fake_server.url = serve_json(fake_server.respond)
    return fake_server


SPLIT = ("--weights", "1.0=90%", "--weights", "2.0=1000")


def test_default_policy_is_shown_as_a_table(torchrelay: FakeServer) -> None:
    result = torchrelay()
    assert result.exit_code == 0
    assert "1.0" in result.output and "100 %" in result.output and "default" in result.output
    assert torchrelay.document()["policy"] == "default"


def test_each_change_keeps_the_other_parts(torchrelay: FakeServer) -> None:
    assert torchrelay(*SPLIT).exit_code == 0
    assert torchrelay.policy.versions == {"1.0": 9000, "2.0": 1000}
    torchrelay("--sticky", "header:X-User")
    torchrelay("--label", "canary=2.0", "--label", "stable=1.0", "--header", "x-try")
    torchrelay("--set", json.dumps({**torchrelay.document(), "shadow": {"version": "3.0", "keep": 5}}))
    result = torchrelay("--shadow", "3.0=2.5%")
    assert result.exit_code == 0, result.output
    policy_document = torchrelay.document()
    assert policy_document.pop("active")["versions"] == {"1.0": 9000, "2.0": 1000}
    shadow = policy_document.pop("shadow")
    assert (shadow["version"], shadow["percent"], shadow["keep"]) == ("3.0", 2.5, 5)
    assert policy_document == {
        "policy": "sticky",
        "versions": {"1.0": 9000, "2.0": 1000},
        "key": {"header": "x-user"},
        "header": "x-try",
        "labels": {"canary": "2.0", "stable": "1.0"},
    }
    for text in (
        "90 %",
        "10 %",
        "canary",
        "stable",
        "shadow of 2.5 %",
        "the same header x-user",
        "the header x-try",
    ):
        assert text in result.output, result.output
    torchrelay("--weights", "2.0=100%", "--label", "canary=", "--no-shadow", "--not-sticky", "--header", "")
    assert write(torchrelay.policy) == {
        "policy": "weighted",
        "versions": {"2.0": 10_000},
        "labels": {"stable": "1.0"},
    }
    torchrelay("--default")
    assert torchrelay.policy == TrafficPolicy()


def test_shadow_of_another_version_has_default_settings() -> None:
    before = {"policy": "default", "shadow": {"version": "2.0", "keep": 5}, "active": {}}
    after = apply_changes(before, {"shadow": {"version": "3.0", "percent": 10.0}})
    assert after == {"policy": "default", "shadow": {"version": "3.0", "percent": 10.0}}


def test_whole_policy_from_a_file_or_stdin(torchrelay: FakeServer, tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text('policy: sticky\nkey: {cookie: user}\nversions: {"1.0": 5000, "2.0": 5000}\n')
    assert torchrelay("--set", str(file)).exit_code == 0
    assert torchrelay.policy.key.cookie == "user"
    assert torchrelay("--set", "-", stdin='{"labels": {"canary": "2.0"}}').exit_code == 0
    assert torchrelay.policy == TrafficPolicy(labels={"canary": "2.0"})


def test_delayed_change_is_reported(torchrelay: FakeServer) -> None:
    torchrelay.late = True
    result = torchrelay(*SPLIT)
    assert result.exit_code == 0
    assert "Stored, and late." in result.output and "90 %" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--weights", "2.0=10%"), "sum to 1000 basis points; they must sum to 10000"),
        (("--weights", "9=100%"), "Model version: 9 does not exist for model: m (404)"),
        (("--sticky", "header:u"), "sum to 0 basis points"),
        (("--shadow", "1.0=10%"), "shadow.version 1.0 answers every call itself"),
        (("--label", "2.0=1.0"), "is a version's name too"),
        (("--salt", "s"), 'a salt is for the policy "sticky"'),
    ],
)
def test_server_errors_change_nothing(
    torchrelay: FakeServer, arguments: tuple[str, ...], message: str
) -> None:
    result = torchrelay(*arguments)
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())
    assert torchrelay.policy == TrafficPolicy()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--weights", "2.0"), "'2.0' is not of the form VERSION=SHARE"),
        (("--weights", "2.0=10%", "--weights", "2.0=90%"), "2.0 is given twice."),
        (("--weights", "2.0=0.5"), "'0.5' is not a share; write 90%"),
        (("--weights", "2.0=101%"), "'101%' is not a share"),
        (("--weights", "2.0=0.001%"), "'0.001%' is not a share"),
        (("--weights", "2.0=nan"), "'nan' is not a share"),
        (("--weights", "2.0=ten%"), "'ten%' is not a share"),
        (("--label", "=2.0"), "'=2.0' is not of the form LABEL=VERSION"),
        (("--sticky", "x-user"), "'x-user' is not of a form such as header:x-user"),
        (("--sticky", "query:user"), "'query:user' is not of a form"),
        (("--sticky", "header:u", "--not-sticky"), "an option and its opposite"),
        (("--shadow", "2.0=10%", "--no-shadow"), "an option and its opposite"),
        (("--default", "--label", "a=2.0"), "--set and --default replace the whole policy"),
        (("--default", "--header", ""), "--set and --default replace the whole policy"),
        (("--default", "--set", "{}"), "--set and --default replace the whole policy"),
        (("--set", "{"), "neither JSON nor YAML"),
        (("--set", "/dev/null"), "a policy is a JSON object"),
        (("--set", "none.yaml"), "none.yaml: No such file or directory"),
    ],
)
def test_invalid_options_send_no_request(arguments: tuple[str, ...], message: str) -> None:
    env = {"TORCHRELAY_MANAGEMENT": "http://127.0.0.1:1", "COLUMNS": "200"}
    result = CliRunner().invoke(app, ["traffic", "m", *arguments], env=env)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", "").split())
