"""What the benchmark sets up before it measures traffic."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

from serve_app import experiment, policy
from serve_app.bench import Load, Result, report, traffic
from serve_app.bench.contenders import Contender
from serve_app.bench.peers import Peer


class Told(Peer):
    """A peer that keeps what it is told, in place of a server."""

    told: list[tuple[str, str, object]] = []

    def tell(self, method: str, path: str, document: object) -> None:
        self.told.append((method, path, document))

    def register(self, archive: Path, name: str, **how: int) -> str:
        self.told.append(("register", name, archive))
        return self.url(name)

    def add_version(self, archive: Path, name: str, **how: int) -> None:
        self.told.append(("add", name, archive))


def test_what_it_asks_for_is_what_the_server_takes():
    peer = Told("Torchrelay", "http://127.0.0.1:1")
    peer.told.clear()
    for setup in traffic.SETUPS:
        setup.put(peer, "m")
    assert [(method, path) for method, path, _ in peer.told] == [
        *[("PUT", "/models/m/traffic")] * 2,
        ("POST", "/models/m/experiments"),
    ]
    read = [policy.read(document) for _, _, document in peer.told[:2]]
    assert [one.policy for one in read] == ["weighted", "sticky"]
    assert len(experiment.read(peer.told[2][2]).arms) == 2


def test_a_policy_is_in_force_while_its_contender_is_measured_and_not_after():
    peer = Told("Torchrelay", "http://127.0.0.1:1")
    peer.told.clear()

    def measure(load: Load) -> Result:
        peer.told.append(("measured", "", None))
        return Result("asyncio", 1, 1.0, 1, 1, 0.1, 0.1, 0.1, 0.1)

    whole = {"policy": "weighted", "versions": {"1.0": 10_000}}
    contender = traffic.under(whole, report.WHOLE, Contender("plain", measure), peer, "m")
    contender.measure(Load(connections=1))
    assert contender.name == report.WHOLE
    assert peer.told == [
        ("PUT", "/models/m/traffic", whole),
        ("measured", "", None),
        ("DELETE", "/models/m/traffic", None),
    ]


def test_the_second_version_is_the_first_under_another_number(tmp_path: Path):
    archive = tmp_path / "echo.mar"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("echo.py", "pass")
        file.writestr("MAR-INF/MANIFEST.json", json.dumps({"model": {"modelName": "echo", "modelVersion": "1.0"}}))
    peer = Told("Torchrelay", "http://127.0.0.1:1")
    peer.told.clear()
    assert traffic.two_versions(peer, archive, tmp_path, "m", batch_size=1) == "http://127.0.0.1:1/predictions/m"
    second = peer.told[1][2]
    with zipfile.ZipFile(second) as file:
        assert json.loads(file.read("MAR-INF/MANIFEST.json"))["model"]["modelVersion"] == "2.0"
        assert file.read("echo.py") == b"pass"


def test_a_rate_makes_an_open_loop_of_the_load():
    seen: list[Load] = []

    def measure(load: Load) -> Result:
        seen.append(load)
        return Result("asyncio", 1, 1.0, 1, 1, 0.1, 0.1, 0.1, 0.1)

    traffic.at_rate(Contender(report.ALONE, measure), 50.0).measure(Load(connections=4))
    assert (seen[0].rate, seen[0].connections) == (50.0, 4)


def test_the_assignment_is_told_in_words():
    assert "sticky by header" in traffic.assignment()
