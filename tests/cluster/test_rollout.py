"""Rollouts on a real server: Management dies in the midst of one, and a version that cannot start takes no
call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.archives import make_archive, says
from tests.support.load import Load, Trickle
from tests.support.server import Server

pytestmark = pytest.mark.cluster

BROKEN = """
def handle(data, context):
    raise ValueError("no weights")
"""


@pytest.fixture(scope="module")
def rolls(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Register three versions: one that answers, one without workers, one that cannot load."""
    folder = tmp_path_factory.mktemp("a")
    for version, handler, workers in (("1.0", says("old"), 1), ("2.0", says("new"), 0), ("3.0", BROKEN, 0)):
        answer = server.register(make_archive(folder, "rolls", handler, version), initial_workers=workers)
        assert answer.status_code == 200, answer.text
    yield server
    server.client.set_default("rolls", "1.0")
    for version in ("3.0", "2.0", "1.0"):
        assert server.management.delete(f"/models/rolls/{version}").status_code == 200


def ended(server: Server) -> dict[str, Any] | None:
    result = server.client.rollout("rolls")
    return None if result["state"] in ("starting", "running", "paused") else result


def test_a_version_that_cannot_start_takes_no_call(rolls: Server) -> None:
    with Trickle(f"{rolls.url}/predictions/rolls", connections=2) as load:
        rolls.client.start_rollout("rolls", {"to": "3.0", "steps": [50, 100], "bake_s": 0, "min_calls": 0})
        over = rolls.wait(lambda: ended(rolls), description="the end of the rollout")
    assert over["state"] == "rolled_back"
    why = (
        "no worker of 3.0 runs: ValueError: no weights; 1.0 has all requests, 3.0 loses the workers that "
        "it was given"
    )
    assert over["decisions"][-1]["reason"] == why
    assert set(load.answers) == {(200, "old")}
    [described] = rolls.client.describe("rolls", "3.0")
    assert (described["minWorkers"], described["maxWorkers"]) == (0, 0)


@pytest.mark.nightly
def test_management_dies_and_the_rollout_goes_on(rolls: Server) -> None:
    [management] = rolls.actors("Management")
    plan = {"to": "2.0", "steps": [20, 100], "bake_s": 4, "min_calls": 20, "guardrails": {"p99": None}}
    with Load(f"{rolls.url}/predictions/rolls", connections=4) as load:
        rolls.client.start_rollout("rolls", plan)

        def measured() -> dict[str, Any] | None:
            result = rolls.client.rollout("rolls")
            return result if result["figures"]["candidate"]["calls"] >= 20 else None

        before = rolls.wait(measured, description="calls of the first step")
        management.kill()
        after = rolls.wait(lambda: rolls.client.rollout("rolls"), description="Management")
        assert after["id"] == before["id"]
        assert after["decisions"][: len(before["decisions"])] == before["decisions"]
        counted = after["figures"]["candidate"]["calls"]
        assert after["step"] > before["step"] or counted >= before["figures"]["candidate"]["calls"]
        over = rolls.wait(lambda: ended(rolls), timeout=60, description="the end of the rollout")
    assert over["state"] == "promoted", over["decisions"]
    assert [decision["verdict"] for decision in over["decisions"]] == ["started", "step", "step", "promoted"]
    assert set(load.answers) == {(200, "old"), (200, "new")}, load.failed
    rolls.wait(
        lambda: rolls.http.get("/-/routes").json()["/predictions/rolls"] == "rolls--2.0",
        description="the fast path",
    )
