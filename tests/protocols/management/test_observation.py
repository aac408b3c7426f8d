"""``/access``, ``/events``, ``/logs`` and the history of experiments."""

from __future__ import annotations

import asyncio
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from serve_app.control.api import ControlPlane
from serve_app.control.lifecycle_events import EventLog
from serve_app.domain.access import ROLES, AccessTable, KeyGrant
from serve_app.domain.model import EventQuery
from serve_app.protocols.http_app import management_app
from serve_app.settings import Settings
from tests.support.experiment_services import Cluster
from tests.support.openapi_checks import assert_described
from tests.support.protocol_fakes import FakeControlAPI, send_request

ACCESS = AccessTable(
    {
        sha256(name.encode()).digest(): KeyGrant(frozenset(rights), models, name=name)
        for name, rights, models in (
            ("ops", ("infer", "observe", "manage"), ("*",)),
            ("team", ("infer", "observe", "manage"), ("m*",)),
            ("watch", ("observe",), ("*",)),
            ("app", ("infer",), ("*",)),
        )
    }
)


def get(app: Any, path: str, key: str = "") -> tuple[int, Any]:
    response = app("GET", path, b"", {"Authorization": f"Bearer {key}"} if key else {})
    assert_described("GET", path, response)
    return response.status, json.loads(response.body)


@pytest.mark.parametrize("name", ["ops", "watch", "app"])
def test_any_key_may_see_its_own_rights(management: Any, name: str) -> None:
    status, document = get(management(access=ACCESS), "/access", name)
    grant = ACCESS.grants[sha256(name.encode()).digest()]
    assert (status, document["name"], document["required"]) == (200, name, True)
    assert set(document["rights"]) == grant.rights


def test_an_unknown_key_has_no_rights_and_a_server_without_keys_grants_all(management: Any) -> None:
    assert get(management(access=ACCESS), "/access", "wrong")[0] == 400
    status, document = get(management(), "/access")
    assert (status, document["required"], document["models"]) == (200, False, ["*"])


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/logs", "ops", 200),
        ("/logs", "watch", 400),
        ("/logs", "app", 400),
        ("/logs", "team", 400),  # the server's log has records of every model
        ("/logs?log=server&model=m1", "team", 400),
        ("/logs?log=model&model=m1", "team", 200),
        ("/logs?log=model&model=other", "team", 400),
        ("/events", "watch", 200),
        ("/events", "app", 400),
    ],
)
def test_logs_need_a_key_that_manages(management: Any, path: str, key: str, status: int) -> None:
    assert get(management(access=ACCESS), path, key)[0] == status


@pytest.mark.parametrize(
    "query",
    [
        "log=other",
        "level=loud",
        "limit=0",
        "limit=1001",
        "limit=x",
        "limit=%D9%A3",
        "limit=000000001999999",
        f"limit={'1' * 5000}",
        f"text={'x' * 201}",
    ],
)
def test_invalid_log_queries_are_refused(management: Any, query: str) -> None:
    status, document = get(management(), f"/logs?{query}")
    assert (status, document["type"]) == (400, "BadRequestException")


def test_the_key_of_one_model_reads_the_records_of_no_other(tmp_path: Path) -> None:
    line = "2026-11-20T13:24:42,180 [INFO ] W-k3j9x2ab-{}_1.0 authors - hello\n"
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/model_log.log").write_text(line.format("spam") + line.format("team-b-spam"))
    grant = KeyGrant(ROLES["manage"], ("spam",), name="spam")
    access = AccessTable({sha256(b"spam").digest(): grant})
    settings = Settings(home=str(tmp_path))
    app = management_app(ControlPlane(FakeControlAPI(), settings, lambda: access), settings)

    def read(query: str) -> Any:
        headers = {"Authorization": "Bearer spam"}
        return json.loads(send_request(app, "GET", f"/logs?log=model{query}", b"", headers).body)

    assert [record["source"] for record in read("&model=spam")["records"]] == ["W-k3j9x2ab-spam_1.0 authors"]
    assert "records" not in read("&model=team-b-spam")


def test_events_are_listed_newest_first_and_filtered() -> None:
    async def main() -> None:
        log = EventLog()
        for name in ("m1", "m2", "other"):
            history = log.open(name, version="1.0")
            log.append(history, "loading")
            log.append(history, "failed" if name == "m2" else "ready")
        every = log.list_events(EventQuery(), ("*",))
        assert [event.id for event in every] == sorted((event.id for event in every), reverse=True)
        assert len(every) == 9
        assert {event.model for event in log.list_events(EventQuery(), ("m*",))} == {"m1", "m2"}
        assert [event.model for event in log.list_events(EventQuery(stage="failed"), ("*",))] == ["m2"]
        assert len(log.list_events(EventQuery(limit=2, model="m1"), ("*",))) == 2

    asyncio.run(main())


def test_the_results_of_an_experiment_are_kept_over_time(cluster: Cluster) -> None:
    id = cluster.begin()
    for number in range(40):
        cluster.call(f"r{number}", f"user-{number}")
    cluster.tell()
    assert cluster.ask("DELETE", f"/experiments/{id}")[0] == 200
    status, history = cluster.ask("GET", f"/experiments/{id}/history")
    assert (status, history["id"]) == (200, id)
    first, last = history["points"]
    assert sum(first["units"].values()) == 0
    assert sum(last["units"].values()) == 40
    assert last["time"] >= first["time"]
    latency = last["metrics"]["seconds"]["b"]
    assert set(latency) == {"difference", "low", "high"}
    cluster.known(id)  # a result that did not change adds no point
    assert len(cluster.ask("GET", f"/experiments/{id}/history")[1]["points"]) == 2
    cluster.ask("DELETE", f"/experiments/{id}?purge=true")
    assert cluster.ask("GET", f"/experiments/{id}/history")[0] == 404
    with cluster.database.transaction() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM torchrelay_result_history").scalar() == 0
