"""Calls are dealt out anew while 32 connections ask: none fails, and each change holds when it is
answered.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from serve_app.cli.app import app
from serve_app.load_test.http_load import measure
from serve_app.load_test.profile import LoadProfile as Connections
from serve_app.load_test.profile import LoadRequest
from tests.support.archives import make_archive
from tests.support.load import Load
from tests.support.server import Server

pytestmark = pytest.mark.cluster

FAST, GATEWAY = "/predictions/split", "/%70redictions/split"
HANDLER = """
def handle(data, context):
    if data is None:
        return None
    if any(bytes(row.get("body") or b"") == b"fail" for row in data):
        raise ValueError("asked to")
    return ["{version}"] * len(data)
"""


@pytest.fixture(scope="module")
def split(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Register a model of two versions that answer with their number."""
    folder = tmp_path_factory.mktemp("a")
    for version in ("1.0", "2.0"):
        answer = server.register(
            make_archive(folder, "split", HANDLER.replace("{version}", version), version)
        )
        assert answer.status_code == 200, answer.text
    yield server
    for version in ("2.0", "1.0"):
        server.management.delete("/models/split/traffic")
        assert server.management.delete(f"/models/split/{version}").status_code == 200


def put(server: Server, document: dict[str, Any]) -> dict[str, Any]:
    answer = server.management.put("/models/split/traffic", json=document)
    assert answer.status_code == 200, answer.text
    return answer.json()["active"]["versions"]


def owner(server: Server) -> str | None:
    """Return the application that owns the model's route; None for the gateway."""
    return server.http.get("/-/routes").json().get(FAST)


def versions(server: Server, count: int = 10, **headers: str) -> Counter[str]:
    """Who answers so many fresh calls, on both ways, as header and body say."""
    found: Counter[str] = Counter()
    for _ in range(count):
        shown = {name.replace("_", "-"): value for name, value in headers.items()}
        with httpx.Client(base_url=server.url, headers=shown, timeout=60) as client:
            for path in (FAST, GATEWAY):
                answer = client.post(path, content=b"x")
                assert answer.status_code == 200, answer.text
                assert answer.headers.get_list("x-model-version") == [answer.text]
                found[answer.text] += 1
    return found


@pytest.mark.nightly
def test_from_policy_to_policy_under_load(split: Server) -> None:
    with Load(f"{split.url}{FAST}", connections=32) as load:
        split.wait(lambda: sum(load.answers.values()) > 100, description="the load")
        assert put(split, {"versions": {"1.0": 9000, "2.0": 1000}}) == {"1.0": 9000, "2.0": 1000}
        before = Counter(load.answers)
        split.wait(lambda: len(load.answers - before) == 2, description="answers of both versions")
        assert put(split, {"versions": {"2.0": 10_000}}) == {"2.0": 10_000}
        assert versions(split).keys() == {"2.0"}
        halves = {"1.0": 5000, "2.0": 5000}
        put(split, {"policy": "sticky", "key": {"header": "x-user"}, "versions": halves})
        assert set(versions(split, 50)) == {"1.0", "2.0"}, "who shows no key is dealt out call by call"
        for who in ("ann", "bob", "cid"):
            assert len(versions(split, x_user=who)) == 1
        put(split, {"versions": {"1.0": 10_000}})
        assert versions(split).keys() == {"1.0"}
        put(split, {"versions": {"2.0": 10_000}})
        assert versions(split).keys() == {"2.0"}
        assert split.management.delete("/models/split/traffic").status_code == 200
        assert versions(split).keys() == {"1.0"}
    assert not load.failed, load.failed
    split.wait(lambda: owner(split) == "split--1.0", description="the fast path")


def test_shares_are_met_within_one_percent_over_ten_thousand_calls(split: Server) -> None:
    put(split, {"versions": {"1.0": 9000, "2.0": 1000}})
    given: Counter[bytes] = Counter()
    request = LoadRequest(f"{split.url}{FAST}", body=b"x", check=lambda body: not given.update([body]))
    result = asyncio.run(measure(request, Connections(32, seconds=None, requests=10_000, warmup=0.0)))
    assert not result.errors
    assert result.requests == sum(given.values()) == 10_000
    assert abs(given[b"2.0"] - 1000) <= 100, given


def test_callers_stay_and_few_move(split: Server) -> None:
    def given() -> dict[str, str]:
        return {who: split.http.post(FAST, content=b"x", headers={"X-User": who}).text for who in callers}

    callers = [f"user-{i}" for i in range(200)]
    key = {"policy": "sticky", "key": {"header": "x-user"}}
    put(split, {**key, "versions": {"1.0": 7000, "2.0": 3000}})
    first = given()
    assert given() == first
    put(split, {**key, "versions": {"1.0": 6000, "2.0": 4000}})
    moves = Counter(zip(first.values(), given().values(), strict=True))
    assert moves["2.0", "1.0"] == 0
    assert 5 <= moves["1.0", "2.0"] <= 40, moves
    put(split, {**key, "versions": {"1.0": 7000, "2.0": 3000}})
    assert given() == first
    assert split.management.delete("/models/split/traffic").status_code == 200


def test_labels_testers_and_errors_on_the_fast_path_and_through_the_gateway(split: Server) -> None:
    put(split, {"header": "x-try", "labels": {"canary": "2.0"}})
    split.wait(lambda: owner(split) == "split--1.0", description="the fast path")
    before = split.metric("torchrelay_requests_total", model="split", version="2.0", status="ok")
    for path in (FAST, GATEWAY):
        for tail, headers, version in (
            ("", {}, "1.0"),
            ("/canary", {}, "2.0"),
            ("", {"X-Try": "canary"}, "2.0"),
        ):
            answer = split.http.post(path + tail, content=b"x", headers=headers)
            assert (answer.text, answer.headers["x-model-version"]) == (version, version)
        failed = split.http.post(f"{path}/canary", content=b"fail")
        assert (failed.status_code, failed.headers["x-model-version"]) == (503, "2.0")
        missing = split.http.post(f"{path}/beta", content=b"x")
        assert missing.status_code == 404
        assert "x-model-version" not in missing.headers
    assert split.metric("torchrelay_requests_total", model="split", version="2.0", status="ok") == before + 4
    assert split.metric("torchrelay_requests_total", version="canary") == 0


def test_what_a_policy_names_stays_and_a_wrong_one_changes_nothing(split: Server) -> None:
    put(split, {"versions": {"1.0": 9000, "2.0": 1000}})
    refused = split.management.delete("/models/split/2.0")
    assert (refused.status_code, refused.json()["type"]) == (409, "ConflictStatusException")
    assert "the model's traffic policy (weighted) gives it 1000 basis points" in refused.json()["message"]
    for document, status in (
        ({"versions": {"1.0": 9000, "2.0": 100}}, 400),
        ({"versions": {"1.0": 9000, "3.0": 1000}}, 404),
        ({"versions": {"2.0": 10_000}, "shadow": {"version": "2.0"}}, 400),
    ):
        assert split.management.put("/models/split/traffic", json=document).status_code == status
    assert split.management.get("/models/split/traffic").json()["versions"] == {"1.0": 9000, "2.0": 1000}


def test_the_command(split: Server) -> None:
    def torchrelay(*words: str) -> str:
        env = {"TORCHRELAY_MANAGEMENT": split.process.management}
        done = CliRunner().invoke(app, ["traffic", "split", *words], env=env)
        assert done.exit_code == 0, done.output
        return done.output

    assert "25 %" in torchrelay("--weights", "1.0=75%", "--weights", "2.0=25%", "--sticky", "json:$.user")
    body = json.dumps({"user": 7}).encode()
    assert len({split.http.post(FAST, content=body).text for _ in range(10)}) == 1
    torchrelay("--default")
    assert versions(split, 2) == {"1.0": 4}
