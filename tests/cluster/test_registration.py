"""Registrations on a real cluster: what archives require, and how they come up, and the events that report
it.
"""

from __future__ import annotations

import io
import json
import os
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray._private.utils import get_num_cpus
from rich.console import Console

from serve_app.cli import progress
from tests.support.archives import ECHO, make_archive, says
from tests.support.http_server import serving_folder
from tests.support.server import Server

pytestmark = pytest.mark.cluster

VERSION = """
import tinypkg
def handle(data, context):
    return None if data is None else [tinypkg.VERSION] * len(data)
"""


# The archive's own packages have the names of Torchrelay's; base and errors are only in Torchrelay's.
OWN_PACKAGES = {
    "handlers/__init__.py": "",
    "handlers/preprocess.py": "def decode(body):\n    return body.decode().upper()\n",
    "serve_app/__init__.py": "SUFFIX = '!'\n",
}
OWN_PACKAGES_HANDLER = """
from handlers.base import BaseHandler
from handlers.errors import PredictionException
from handlers.preprocess import decode
from serve_app import SUFFIX

class Shout(BaseHandler):
    def initialize(self, context):
        self.initialized = True

    def handle(self, data, context):
        bodies = [row.get("body") or row.get("data") for row in data]
        if not all(bodies):
            raise PredictionException("nothing to shout", 422)
        return [decode(body) + SUFFIX for body in bodies]
"""


@pytest.fixture
def wheels(server: Server) -> Path:
    """Create a folder with two versions of one package."""
    folder = server.home / "wheels"  # a setting of every test's server
    folder.mkdir(exist_ok=True)
    for version in ("1.0", "2.0"):
        facts = f"tinypkg-{version}.dist-info"
        with zipfile.ZipFile(folder / f"tinypkg-{version}-py3-none-any.whl", "w") as packed:
            packed.writestr("tinypkg.py", f"VERSION = {version!r}\n")
            packed.writestr(
                f"{facts}/METADATA", f"Metadata-Version: 2.1\nName: tinypkg\nVersion: {version}\n"
            )
            packed.writestr(
                f"{facts}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            packed.writestr(f"{facts}/RECORD", "")
    return folder


def requiring(folder: Path, name: str, requirement: str) -> Path:
    """Return an archive that requires ``requirement``."""
    plain = make_archive(
        folder,
        name,
        VERSION,
        files={"requirements.txt": f"{requirement}\n"},
        config={"useVenv": True},
    )
    with zipfile.ZipFile(plain) as packed:
        contents = {entry: packed.read(entry) for entry in packed.namelist()}
    manifest = json.loads(contents["MAR-INF/MANIFEST.json"])
    manifest["model"]["requirementsFile"] = "requirements.txt"
    contents["MAR-INF/MANIFEST.json"] = json.dumps(manifest).encode()
    with zipfile.ZipFile(plain, "w") as packed:
        for entry, content in contents.items():
            packed.writestr(entry, content)
    return plain


def environments(server: Server) -> list[str]:
    root = server.home / "state/environments"
    return [path.name for path in root.iterdir() if path.name[0] != "."]


@pytest.mark.nightly
def test_two_models_with_two_versions_of_one_package(server: Server, tmp_path: Path, wheels: Path) -> None:
    for name, version in (("one", "1.0"), ("two", "2.0")):
        answer = server.register(requiring(tmp_path, name, f"tinypkg=={version}"))
        assert answer.status_code == 200, answer.text
    assert [server.http.post(f"/predictions/{name}").text for name in ("one", "two")] == ["1.0", "2.0"]
    assert server.management.get("/models/one").json()[0]["useVenv"] is True
    before = environments(server)
    assert len(before) == 2

    refused = server.register(requiring(tmp_path, "three", "tinypkg==9.9"))
    assert refused.status_code == 400
    result = refused.json()
    assert result["type"] == "ModelException"
    assert result["message"] == "Custom pip package installation failed for model three"
    assert "tinypkg==9.9" in result["detail"]
    assert server.management.get("/models/three").status_code == 404
    assert environments(server) == before
    assert [server.http.post(f"/predictions/{name}").text for name in ("one", "two")] == ["1.0", "2.0"]
    for name in ("one", "two"):
        server.management.delete(f"/models/{name}")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """Serve a folder over HTTP; return both."""
    folder = tmp_path / "site"
    folder.mkdir()

    with serving_folder(folder) as address:
        yield folder, address


def follow(server: Server, name: str, **query: str) -> list[tuple[str, dict[str, Any]]]:
    """Return a model's events up to the last one."""
    reported = []
    with server.management.stream("GET", f"/models/{name}/events", params=query) as answer:
        assert answer.status_code == 200
        stage = ""
        for line in answer.iter_lines():
            if line.startswith("event: "):
                stage = line.removeprefix("event: ")
            elif line.startswith("data: "):
                reported.append((stage, json.loads(line.removeprefix("data: "))))
    return reported


def test_a_registration_reports_events_from_the_download_to_the_end(
    server: Server, tmp_path: Path, site: tuple[Path, str]
) -> None:
    folder, address = site
    archive = make_archive(tmp_path, "told", ECHO, files={"samples/a.txt": "a", "weights": b"0" * 3_000_000})
    (folder / "file.mar").write_bytes(archive.read_bytes())
    answers: list[httpx.Response] = []
    requested = {"url": f"{address}/file.mar", "initial_workers": 1, "registration": "mine"}
    post = threading.Thread(
        target=lambda: answers.append(
            httpx.post(f"{server.process.management}/models", params=requested, timeout=120)
        )
    )
    post.start()
    reported = follow(
        server, "file", registration="mine"
    )  # asked for by the URL's name: the manifest's is not known yet
    post.join()
    assert answers[0].status_code == 200, answers[0].text
    stages = [stage for stage, _ in reported]
    order = ["accepted", "downloading", "unpacking", "checking", "starting", "loading", "warming", "ready"]
    assert [stage for stage in order if stage in stages] == order
    assert stages[-1] == "ready"
    last = dict(reported)
    assert last["downloading"]["percent"] == 100
    assert last["downloading"]["total"] == (folder / "file.mar").stat().st_size
    assert last["ready"] | {"time": 0} == {
        "model": "told",
        "version": "1.0",
        "registration": "mine",
        "time": 0,
        "workers": 1,
    }
    assert follow(server, "told")[-1][0] == "ready"
    server.management.delete("/models/told")


def test_a_failure_is_reported_with_its_traceback_without_waiting(server: Server, tmp_path: Path) -> None:
    handler = "def handle(data, context):\n    raise ValueError('why')\n"
    answer = server.register(make_archive(tmp_path, "broken", handler), synchronous="false")
    assert (answer.status_code, answer.json()) == (202, {"status": "Processing worker updates..."})
    reported = follow(server, "broken")
    assert reported[-1][0] == "failed"
    assert "ValueError: why" in reported[-1][1]["detail"]
    server.management.delete("/models/broken")


def test_what_a_model_without_a_place_waits_for_is_reported(server: Server, tmp_path: Path) -> None:
    config = {"num_cpus": get_num_cpus()}
    assert server.register(make_archive(tmp_path, "first", says("x"), config=config)).status_code == 200
    archive = make_archive(tmp_path, "second", says("x"), config=config)
    assert server.register(archive, synchronous="false").status_code == 202

    def waiting() -> Any:
        with server.management.stream("GET", "/models/second/events") as answer:
            for line in answer.iter_lines():
                if line.startswith("data: ") and "waiting_for" in line:
                    return json.loads(line.removeprefix("data: "))["waiting_for"]

    assert waiting() == {"CPU": {"wanted": float(config["num_cpus"]), "free": 0.0}}
    described = server.wait(lambda: server.management.get("/models/second").json()[0].get("waitingFor"))
    assert described.startswith("the cluster lacks resources for a replica")
    server.management.delete("/models/second")
    stage, result = follow(server, "second")[-1]
    assert (stage, result["reason"]) == ("failed", "removed")
    server.management.delete("/models/first")


def test_what_no_node_can_hold_is_refused(server: Server, tmp_path: Path) -> None:
    archive = make_archive(tmp_path, "large", says("x"), config={"num_gpus": 1000})
    refused = server.register(archive)
    assert (refused.status_code, refused.json()["message"]) == (
        409,
        "No node of the cluster can hold a replica of large 1.0, which requires 1000 GPU (the only node "
        "has 0). Require less, or add a larger node; nodes that an autoscaler adds are declared in "
        "control.node_types",
    )
    assert server.management.get("/models/large").status_code == 404
    assert server.register(archive, initial_workers=0).status_code == 200
    assert server.management.put("/models/large", params={"min_worker": 1}).status_code == 409
    assert server.management.get("/models/large").json()[0]["minWorkers"] == 0
    server.management.delete("/models/large")
    many = server.register(make_archive(tmp_path, "many", says("x")), initial_workers=1000)
    assert many.status_code == 409
    assert "1,000 replicas of many 1.0 are required, and the cluster can hold " in many.json()["message"]
    assert server.management.get("/models/many").status_code == 404


def test_the_memory_of_a_replica_is_measured_for_its_next_start(server: Server, tmp_path: Path) -> None:
    handler = "KEPT = b'x' * (50 << 20)\n" + says("x")
    archive = make_archive(tmp_path, "heavy", handler, files={"weights.bin": os.urandom(1 << 20)})
    assert server.register(archive, initial_workers=0).status_code == 200
    estimated = server.management.get("/models/heavy").json()[0]["memory"]
    assert 1 << 20 < estimated < 2 << 20  # the archive's size
    scale = {"min_worker": 1, "synchronous": "true"}
    assert server.management.put("/models/heavy", params=scale).status_code == 200
    server.wait(lambda: server.management.get("/models/heavy").json()[0]["memory"] > 50 << 20)
    server.management.delete("/models/heavy")


def test_the_command_shows_it_and_says_the_answer(server: Server, tmp_path: Path) -> None:
    archive = make_archive(tmp_path, "shown", ECHO)
    (server.store / archive.name).write_bytes(archive.read_bytes())
    screen = Console(file=io.StringIO(), width=100)
    result = progress.register(server.client, screen, archive.name, initial_workers=1, synchronous=True)
    assert result == 'Model "shown" Version: 1.0 registered with 1 initial workers'
    server.management.delete("/models/shown")


def test_an_undeclared_model_has_a_state_too(server: Server, tmp_path: Path) -> None:
    assert server.management.get("/models/never-registered/events").status_code == 404
    assert server.register(make_archive(tmp_path, "unheard", ECHO), initial_workers=0).status_code == 200
    assert follow(server, "unheard")[-1][1]["workers"] == 0
    server.management.delete("/models/unheard")


def test_an_archive_may_contain_packages_with_torchrelays_names(server: Server, tmp_path: Path) -> None:
    archive = make_archive(tmp_path, "shout", OWN_PACKAGES_HANDLER, files=OWN_PACKAGES)
    registered = server.register(archive)
    assert registered.status_code == 200, registered.text
    headers = {"content-type": "application/octet-stream"}
    assert server.http.post("/predictions/shout", content=b"hello", headers=headers).text == "HELLO!"
    refused = server.http.post("/predictions/shout", content=b"", headers=headers)
    assert (refused.status_code, refused.json()["message"]) == (422, "nothing to shout")
    assert server.management.delete("/models/shout").status_code == 200


def test_names_and_versions_with_double_hyphens_are_served_at_once(server: Server, tmp_path: Path) -> None:
    pairs = [("a--b", "c"), ("a", "b--c")]
    for name, version in pairs:
        answer = server.register(make_archive(tmp_path, name, says(f"{name} {version}"), version))
        assert answer.status_code == 200, answer.text
    for name, version in pairs:
        assert server.http.post(f"/predictions/{name}").text == f"{name} {version}"
        assert server.http.post(f"/predictions/{name}/{version}").text == f"{name} {version}"
    for name, version in pairs:
        assert server.management.delete(f"/models/{name}/{version}").status_code == 200
