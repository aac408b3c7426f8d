"""`torchrelay traffic`, over a server that keeps a registry and answers as the management API does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from serve_app.cli.app import app
from serve_app.cli.traffic import changed
from serve_app.control.registry import Registry, register, set_policy
from serve_app.deployments.traffic import document
from serve_app.doors.torchserve import errors
from serve_app.errors import RelayError
from serve_app.policy import Policy, read, write
from serve_app.types import ModelSpec


class Keeps:
    """Model m with three versions, and its traffic."""

    def __init__(self) -> None:
        self.late = False
        self.registry = Registry()
        for version in ("1.0", "2.0", "3.0"):
            spec = ModelSpec("m", version, "m.mar", "d" * 64, "archive", min_workers=1, max_workers=1)
            self.registry = register(self.registry, spec)
        keeps = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._say(200, document(keeps.registry, "m"))

            def do_PUT(self) -> None:
                self._set(json.loads(self.rfile.read(int(self.headers["content-length"]))))

            def do_DELETE(self) -> None:
                self._set({})

            def _set(self, said: Any) -> None:
                assert self.path == "/models/m/traffic"
                try:
                    keeps.registry = set_policy(keeps.registry, "m", read(said))
                except RelayError as error:
                    return self._say(errors.look_up(error)[0], errors.document(error))
                if keeps.late:
                    return self._say(202, {"status": "Stored, and late."})
                self._say(200, document(keeps.registry, "m"))

            def _say(self, status: int, said: Any) -> None:
                body = json.dumps(said).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def __call__(self, *words: str, stdin: str = "") -> Result:
        url = f"http://127.0.0.1:{self.server.server_port}"
        return CliRunner().invoke(app, ["traffic", "m", *words], input=stdin, env={"TORCHRELAY_MANAGEMENT": url})

    @property
    def policy(self) -> Policy:
        return self.registry.models["m"].policy

    def said(self) -> dict[str, Any]:
        return json.loads(self("--json").output)


@pytest.fixture
def torchrelay() -> Iterator[Keeps]:
    keeps = Keeps()
    thread = threading.Thread(target=keeps.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield keeps
    finally:
        keeps.server.shutdown()
        thread.join()
        keeps.server.server_close()


SPLIT = ("--weights", "1.0=90%", "--weights", "2.0=1000")


def test_the_default_policy_as_a_table(torchrelay: Keeps) -> None:
    shown = torchrelay()
    assert shown.exit_code == 0
    assert "1.0" in shown.output and "100 %" in shown.output and "default" in shown.output
    assert torchrelay.said()["policy"] == "default"


def test_one_after_another_and_nothing_is_forgotten(torchrelay: Keeps) -> None:
    assert torchrelay(*SPLIT).exit_code == 0
    assert torchrelay.policy.versions == {"1.0": 9000, "2.0": 1000}
    torchrelay("--sticky", "header:X-User")
    torchrelay("--label", "canary=2.0", "--label", "stable=1.0", "--header", "x-try")
    torchrelay("--set", json.dumps({**torchrelay.said(), "shadow": {"version": "3.0", "keep": 5}}))
    shown = torchrelay("--shadow", "3.0=2.5%")
    assert shown.exit_code == 0, shown.output
    said = torchrelay.said()
    assert said.pop("in_force")["versions"] == {"1.0": 9000, "2.0": 1000}
    shadow = said.pop("shadow")
    assert (shadow["version"], shadow["percent"], shadow["keep"]) == ("3.0", 2.5, 5)
    assert said == {
        "policy": "sticky",
        "versions": {"1.0": 9000, "2.0": 1000},
        "key": {"header": "x-user"},
        "header": "x-try",
        "labels": {"canary": "2.0", "stable": "1.0"},
    }
    for word in ("90 %", "10 %", "canary", "stable", "shadow of 2.5 %", "the same header x-user", "the header x-try"):
        assert word in shown.output, shown.output
    torchrelay("--weights", "2.0=100%", "--label", "canary=", "--no-shadow", "--not-sticky", "--header", "")
    assert write(torchrelay.policy) == {
        "policy": "weighted",
        "versions": {"2.0": 10_000},
        "labels": {"stable": "1.0"},
    }
    torchrelay("--default")
    assert torchrelay.policy == Policy()


def test_a_shadow_of_another_version_begins_anew() -> None:
    before = {"policy": "default", "shadow": {"version": "2.0", "keep": 5}, "in_force": {}}
    after = changed(before, {"shadow": {"version": "3.0", "percent": 10.0}})
    assert after == {"policy": "default", "shadow": {"version": "3.0", "percent": 10.0}}


def test_a_whole_policy_from_a_file_or_from_here(torchrelay: Keeps, tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text('policy: sticky\nkey: {cookie: user}\nversions: {"1.0": 5000, "2.0": 5000}\n')
    assert torchrelay("--set", str(file)).exit_code == 0
    assert torchrelay.policy.key.cookie == "user"
    assert torchrelay("--set", "-", stdin='{"labels": {"canary": "2.0"}}').exit_code == 0
    assert torchrelay.policy == Policy(labels={"canary": "2.0"})


def test_what_is_stored_and_late_is_said(torchrelay: Keeps) -> None:
    torchrelay.late = True
    shown = torchrelay(*SPLIT)
    assert shown.exit_code == 0
    assert "Stored, and late." in shown.output and "90 %" in shown.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--weights", "2.0=10%"), "sum to 1000 basis points; they must sum to 10000"),
        (("--weights", "9=100%"), "Model version: 9 does not exist for model: m (404)"),
        (("--sticky", "header:u"), "sum to 0 basis points"),
        (("--shadow", "1.0=10%"), "shadow.version 1.0 answers every call itself"),
        (("--label", "2.0=1.0"), "is a version's name too"),
        (("--salt", "s"), 'a salt is for the policy "sticky"'),
    ],
)
def test_a_refusal_is_the_servers_and_changes_nothing(torchrelay: Keeps, words: tuple[str, ...], said: str) -> None:
    refused = torchrelay(*words)
    assert refused.exit_code == 1
    assert said in " ".join(refused.output.split())
    assert torchrelay.policy == Policy()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--weights", "2.0"), "'2.0' has no form such as 2.0=10% or canary=2.0."),
        (("--weights", "2.0=10%", "--weights", "2.0=90%"), "2.0 is named twice."),
        (("--weights", "2.0=0.5"), "'0.5' is no share; write 90%"),
        (("--weights", "2.0=101%"), "'101%' is no share"),
        (("--weights", "2.0=0.001%"), "'0.001%' is no share"),
        (("--weights", "2.0=nan"), "'nan' is no share"),
        (("--weights", "2.0=ten%"), "'ten%' is no share"),
        (("--label", "=2.0"), "'=2.0' has no form"),
        (("--sticky", "x-user"), "'x-user' has no form such as header:x-user"),
        (("--sticky", "query:user"), "'query:user' has no form"),
        (("--sticky", "header:u", "--not-sticky"), "an option and its opposite"),
        (("--shadow", "2.0=10%", "--no-shadow"), "an option and its opposite"),
        (("--default", "--label", "a=2.0"), "--set and --default say everything"),
        (("--default", "--header", ""), "--set and --default say everything"),
        (("--default", "--set", "{}"), "--set and --default say everything"),
        (("--set", "{"), "neither JSON nor YAML"),
        (("--set", "/dev/null"), "a policy is a JSON object"),
        (("--set", "none.yaml"), "none.yaml: No such file or directory"),
    ],
)
def test_what_is_typed_wrong_is_named_before_anybody_is_asked(words: tuple[str, ...], said: str) -> None:
    env = {"TORCHRELAY_MANAGEMENT": "http://127.0.0.1:1", "COLUMNS": "200"}
    refused = CliRunner().invoke(app, ["traffic", "m", *words], env=env)
    assert refused.exit_code == 2
    assert said in " ".join(refused.output.replace("│", "").split())
