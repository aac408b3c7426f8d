"""What the benchmark sets up before it measures traffic."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from serve_app.domain import experiment, traffic_policy
from serve_app.load_test import LoadProfile, LoadResult
from tests.benchmarks import report, traffic
from tests.benchmarks.servers import Peer
from tests.benchmarks.targets import Contender

pytestmark = pytest.mark.nightly


class ScriptedPeer(Peer):
    """A peer that records what is sent to it."""

    sent: list[tuple[str, str, object]] = []

    def tell(self, method: str, path: str, document: object) -> None:
        self.sent.append((method, path, document))

    def register(self, archive: Path, name: str, **how: int) -> str:
        self.sent.append(("register", name, archive))
        return self.url(name)

    def add_version(self, archive: Path, name: str, **how: int) -> None:
        self.sent.append(("add", name, archive))


def test_what_it_asks_for_is_what_the_server_takes():
    peer = ScriptedPeer("Torchrelay", "http://127.0.0.1:1")
    peer.sent.clear()
    for setup in traffic.SETUPS:
        setup.put(peer, "m")
    assert [(method, path) for method, path, _ in peer.sent] == [
        *[("PUT", "/models/m/traffic")] * 2,
        ("POST", "/models/m/experiments"),
    ]
    read = [traffic_policy.read(document) for _, _, document in peer.sent[:2]]
    assert [one.policy for one in read] == ["weighted", "sticky"]
    assert len(experiment.read(peer.sent[2][2]).arms) == 2


def test_a_policy_is_in_force_while_its_contender_is_measured_and_not_after():
    peer = ScriptedPeer("Torchrelay", "http://127.0.0.1:1")
    peer.sent.clear()

    def measure(load: LoadProfile) -> LoadResult:
        peer.sent.append(("measured", "", None))
        return LoadResult("asyncio", 1, 1.0, 1, 1, 0.1, 0.1, 0.1, 0.1)

    whole = {"policy": "weighted", "versions": {"1.0": 10_000}}
    contender = traffic.under(whole, report.WHOLE, Contender("plain", measure), peer, "m")
    contender.measure(LoadProfile(connections=1))
    assert contender.name == report.WHOLE
    assert peer.sent == [
        ("PUT", "/models/m/traffic", whole),
        ("measured", "", None),
        ("DELETE", "/models/m/traffic", None),
    ]


def test_the_second_version_is_the_first_under_another_number(tmp_path: Path):
    archive = tmp_path / "echo.mar"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("echo.py", "pass")
        file.writestr(
            "MAR-INF/MANIFEST.json", json.dumps({"model": {"modelName": "echo", "modelVersion": "1.0"}})
        )
    peer = ScriptedPeer("Torchrelay", "http://127.0.0.1:1")
    peer.sent.clear()
    assert (
        traffic.two_versions(peer, archive, tmp_path, "m", batch_size=1) == "http://127.0.0.1:1/predictions/m"
    )
    second = peer.sent[1][2]
    with zipfile.ZipFile(second) as file:
        assert json.loads(file.read("MAR-INF/MANIFEST.json"))["model"]["modelVersion"] == "2.0"
        assert file.read("echo.py") == b"pass"


def test_a_rate_makes_an_open_loop_of_the_load():
    seen: list[LoadProfile] = []

    def measure(load: LoadProfile) -> LoadResult:
        seen.append(load)
        return LoadResult("asyncio", 1, 1.0, 1, 1, 0.1, 0.1, 0.1, 0.1)

    traffic.at_rate(Contender(report.ALONE, measure), 50.0).measure(LoadProfile(connections=4))
    assert (seen[0].rate, seen[0].connections) == (50.0, 4)


def test_the_assignment_is_described():
    assert "sticky by header" in traffic.assignment()
