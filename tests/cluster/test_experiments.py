"""An experiment on a real server: what is answered is counted, whatever is killed meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.archives import make_archive, says
from tests.support.load import Load
from tests.support.server import Server

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

DOCUMENT = {
    "name": "which one",
    "arms": {"a": {"version": "1.0", "weight": 7000}, "b": {"version": "2.0", "weight": 3000}},
    "baseline": "a",
    "metrics": [
        {"name": "clicks", "kind": "reward"},
        {"name": "seconds"},
        {"name": "failures", "kind": "error_rate"},
    ],
}


@pytest.fixture(scope="module")
def split(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Register a model of two versions that answer with their number."""
    folder = tmp_path_factory.mktemp("archives")
    for version in ("1.0", "2.0"):
        assert server.register(make_archive(folder, "split", says(version), version)).status_code == 200
    yield "split"
    for experiment in server.client.experiments("split"):
        server.client.stop_experiment(experiment["id"])
    server.client.unregister("split", "2.0")
    server.client.unregister("split")


@pytest.fixture
def id(server: Server, split: str) -> Iterator[str]:
    id = server.client.start_experiment(split, DOCUMENT)["id"]
    yield id
    server.client.stop_experiment(id)


def calls(result: dict[str, Any]) -> dict[str, int]:
    return {arm["version"]: arm["calls"] for arm in result["arms"].values()}


def test_calls_are_dealt_out_from_the_answer_on_and_rewards_taken_at_once(
    server: Server, split: str, id: str
) -> None:
    answers = [server.http.post(f"/predictions/{split}", content=b"x") for _ in range(200)]
    given = Counter(answer.text for answer in answers)
    assert sum(given.values()) == 200
    assert 100 < given["1.0"] < 180, given
    assert all(answer.headers["x-model-version"] == answer.text for answer in answers)
    last = answers[-1].headers["x-request-id"]
    assert server.client.reward(id, {"request_id": last, "value": 1}) == {"counted": 1, "repeated": 0}
    assert server.client.reward(id, {"request_id": last, "value": 1}) == {"counted": 0, "repeated": 1}
    result = server.wait(
        lambda: (s := server.client.experiment(id)) and calls(s) == given and s, description="every call"
    )
    clicks = result["metrics"]["clicks"]["arms"]
    assert sum(arm["count"] * arm["mean"] for arm in clicks.values()) == pytest.approx(1)
    assert not result["sample_ratio"]["alarm"]
    unknown = server.management.post(f"/experiments/{id}/events", json={"request_id": "nobody's", "value": 1})
    assert (unknown.status_code, unknown.headers["x-torchrelay-reason"]) == (404, "exposure_not_found")
    assert "nobody's" in unknown.json()["message"]
    assert server.http.post(f"/predictions/{split}/2.0", content=b"x").text == "2.0"
    assert calls(server.client.experiment(id)) == given, "who names a version takes no part"


def test_a_version_that_takes_part_stays(server: Server, split: str, id: str) -> None:
    for path in (f"/models/{split}/2.0", f"/models/{split}/1.0"):
        refused = server.management.delete(path)
        assert refused.status_code in (403, 409), refused.text
    assert "which one" in server.management.delete(f"/models/{split}/2.0").json()["message"]
    refused = server.management.put(f"/models/{split}/traffic", json={"versions": {"1.0": 5000, "2.0": 5000}})
    assert refused.status_code == 409
    assert "which one" in refused.json()["message"]


def test_nothing_is_lost_or_counted_twice_while_management_is_killed(
    server: Server, split: str, id: str
) -> None:
    [management] = server.actors("Management")
    with Load(f"{server.url}/predictions/{split}", connections=4) as load:
        server.wait(lambda: sum(calls(server.client.experiment(id)).values()) > 200, description="calls")
        management.kill()
        server.wait(lambda: server.client.experiment(id)["state"] == "running", description="Management")
        before = sum(calls(server.client.experiment(id)).values())
        server.wait(
            lambda: sum(calls(server.client.experiment(id)).values()) > before + 200, description="more calls"
        )
    assert not load.failed, load.failed
    answered = {version: count for (_, version), count in load.answers.items()}
    server.wait(
        lambda: calls(server.client.experiment(id)) == answered, description=f"every call of {answered}"
    )


def test_what_was_measured_stays(server: Server, split: str) -> None:
    id = server.client.start_experiment(split, {**DOCUMENT, "key": {"header": "x-user"}})["id"]
    given = {
        user: server.http.post(f"/predictions/{split}", content=b"x", headers={"x-user": user}).text
        for user in (f"u{n}" for n in range(40))
    }
    server.wait(lambda: sum(calls(server.client.experiment(id)).values()) == 40, description="every call")
    over = server.client.stop_experiment(id)
    assert over["state"] == "stopped"
    answers = {
        server.http.post(f"/predictions/{split}", content=b"x", headers={"x-user": u}).text for u in given
    }
    assert answers == {"1.0"}, "the policy deals them out again"
    assert server.client.reward(id, {"key": "u7", "value": 1}) == {"counted": 1, "repeated": 0}, (
        "rewards may come late"
    )
    assert calls(server.client.experiment(id)) == Counter(given.values())
