"""Health and management, with both clients."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.client import health
from serve_app.domain.model import ModelSpec
from serve_app.domain.routing_table import RoutingTable
from tests.support.inference_functions import ClientFactory

pytestmark = pytest.mark.integration


def test_health_operations(
    make_client: ClientFactory, inference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "CHECK_TIMEOUT_S", 60.0)
    client = make_client(inference())
    assert client.live()
    assert client.ready()
    assert client.readiness() == {"ready": True, "loading": [], "failed": []}
    starting = make_client(inference(table=RoutingTable(1, {}, startup_complete=False)))
    assert not starting.ready()
    assert starting.readiness()["ready"] is False


def test_management_operations(make_client: ClientFactory, management: Any) -> None:
    server = management()
    for index in range(120):
        server.control_api.put(ModelSpec(f"m{index:03}", "1.0", "m.mar", "", ""))
    client = make_client(None, server)
    assert len(client.models()) == 120, "all pages of them"
    assert "registered" in client.register("new.mar", initial_workers=1, synchronous=True)
    assert client.describe("new")[0]["modelVersion"] == "1.0"
    server.control_api.metadata = {"labels": 3}
    assert client.describe("new", customized=True)[0]["customizedMetadata"] == {"labels": 3}
    assert "customizedMetadata" not in client.describe("new")[0]
    with pytest.raises(ValueError, match="one version"):
        client.describe("new", "all", customized=True)
    assert client.scale("new", min_worker=2, synchronous=True) == "Workers scaled to 2 for model: new"
    client.register("new-2.0.mar", initial_workers=None)
    assert "2.0" in client.set_default("new", "2.0")
    assert "unregistered" in client.unregister("new", "1.0")
    client.set_traffic("new", {"versions": {"2.0": 10000}})
    client.start_rollout("new", {"to": "3.0"})
    client.update_rollout("new", "pause")
    client.delete_experiment("e1")
    operations = [operation[0] for operation in server.control_api.operations]
    assert operations[-4:] == ["set_traffic", "start_rollout", "update_rollout", "delete_experiment"]


def test_rewards_are_accepted_by_either_port(
    make_client: ClientFactory, inference: Any, management: Any
) -> None:
    rewarded = []

    class RewardCounter:
        async def record_rewards(self, id: str, *_: Any) -> dict[str, int]:
            rewarded.append(id)
            return {"counted": 1, "repeated": 0}

    server = management()
    client = make_client(inference(control_api=RewardCounter()), server)
    assert client.reward("e1", {"key": "u", "value": 1}, port="inference") == {"counted": 1, "repeated": 0}
    client.reward("e2", {"key": "u", "value": 1})
    assert rewarded == ["e1"]
    assert [operation[:2] for operation in server.control_api.operations] == [("record_rewards", "e2")]
