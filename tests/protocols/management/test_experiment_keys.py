"""Keys of the experiments' routes, and rewards on the inference port."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from serve_app.domain.access import AccessTable, KeyGrant, Right
from tests.support.experiment_services import BY_CALL, DOCUMENT, ONE_REWARD, Cluster, assert_refused


def may(*rights: Right, models: tuple[str, ...] = ("*",)) -> KeyGrant:
    return KeyGrant(frozenset(rights), models)


ACCESS = AccessTable(
    {
        sha256(key.encode()).digest(): grant
        for key, grant in {
            "infer": may("infer"),
            "infer_team": may("infer", models=("team-*",)),
            "observe": may("observe"),
            "observe_team": may("observe", models=("team-*",)),
            "manage": may("observe", "manage"),
            "manage_team": may("observe", "manage", models=("team-*",)),
        }.items()
    }
)


def test_what_a_key_is_for(cluster: Cluster) -> None:
    id = cluster.begin(ONE_REWARD)
    of_team = cluster.begin(
        {**DOCUMENT, "arms": {n: {"version": "1.0", "weight": 5000} for n in "ab"}}, "team-a"
    )
    cluster.call("r0", "ann")
    cluster.tell()
    cluster.open_port(ACCESS)

    def ask(method: str, path: str, key: str, document: Any = None) -> tuple[int, Any]:
        return cluster.ask(method, path, document, headers={"Authorization": f"Bearer {key}"})

    def denied(response: tuple[int, Any]) -> None:
        assert_refused(response, 400, "InvalidKeyException")

    event = {"key": "ann", "value": 1}
    assert ask("POST", f"/experiments/{id}/events", "infer", event)[1] == {"counted": 1, "repeated": 0}
    assert ask("POST", f"/experiments/{id}/events", "manage", event)[1] == {"counted": 0, "repeated": 1}
    for key in ("observe", "infer_team", "manage_team"):
        denied(ask("POST", f"/experiments/{id}/events", key, event))
    for key in ("observe", "manage"):
        assert ask("GET", f"/experiments/{id}", key)[0] == 200
    for key in ("infer", "observe_team", "manage_team"):
        denied(ask("GET", f"/experiments/{id}", key))
        denied(ask("DELETE", f"/experiments/{id}", key))
        denied(ask("DELETE", f"/experiments/{id}?purge=true", key))
        denied(ask("GET", "/models/m/experiments", key))
        denied(ask("POST", "/models/m/experiments", key, DOCUMENT))
    denied(ask("DELETE", f"/experiments/{id}", "observe"))
    assert [e["id"] for e in ask("GET", "/experiments", "observe_team")[1]["experiments"]] == [of_team]
    assert [e["id"] for e in ask("GET", "/experiments", "observe")[1]["experiments"]] == [of_team, id]
    denied(cluster.ask("GET", "/experiments"))
    assert ask("DELETE", f"/experiments/{of_team}", "manage_team")[1]["state"] == "stopped"


def test_rewards_are_taken_on_the_inference_port_and_nothing_else_of_experiments(
    cluster: Cluster, inference: Callable[..., Any]
):
    id = cluster.begin(BY_CALL)
    cluster.call("r1")
    cluster.tell()
    app = inference(control_api=cluster.owner)
    reported = app(
        "POST", f"/experiments/{id}/events", b'{"request_id": "r1", "value": 1}', loop=cluster.loop
    )
    assert (reported.status, json.loads(reported.body)) == (200, {"counted": 1, "repeated": 0})
    for method, path in (
        ("GET", f"/experiments/{id}"),
        ("DELETE", f"/experiments/{id}"),
        ("GET", "/experiments"),
    ):
        assert app(method, path, loop=cluster.loop).status == 404
    assert app("GET", f"/experiments/{id}/events", loop=cluster.loop).status == 405
