"""``/audit`` and the refusals that the management APIs record."""

from __future__ import annotations

import asyncio
import json
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import pytest

from serve_app.control.audit import AuditTrail
from serve_app.control.persistence.database import Database
from serve_app.domain.access import AccessTable, KeyGrant
from serve_app.domain.audit import Actor, AuditQuery
from serve_app.proto import management_pb2, management_pb2_grpc
from serve_app.settings import load
from serve_app.telemetry.audit_log import set_actor
from tests.support.openapi_checks import assert_described

ACCESS = AccessTable(
    {
        sha256(b"ops").digest(): KeyGrant(frozenset(("observe", "manage")), ("m*",), name="operators"),
        sha256(b"watch").digest(): KeyGrant(frozenset(("observe",)), name="watchers"),
    }
)


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


def test_records_need_a_key_that_manages_and_are_those_of_its_models(management: Any) -> None:
    app = management(access=ACCESS)
    for headers, status in (({}, 400), (key("watch"), 400), (key("ops"), 200)):
        assert app("GET", "/audit?limit=5&actor=a&since=1.5&result=ok", b"", headers).status == status
    query = AuditQuery(limit=5, actor="a", since=1.5, result="ok")
    assert app.control_api.audit_queries == [(query, ("m*",))]


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=1001", "limit=x", "since=nan", "since=-1", "before_id=99999999999"]
)
def test_invalid_parameters_are_refused(management: Any, query: str) -> None:
    assert management()("GET", f"/audit?{query}").status == 400


def test_audit_log_is_read_only(management: Any) -> None:
    for method in ("POST", "PUT", "DELETE"):
        assert management()(method, "/audit").status == 405


@pytest.mark.parametrize(
    ("method", "path", "headers", "name", "reason"),
    [
        ("POST", "/models?url=m.mar", {}, "anonymous", "missing_token"),
        ("DELETE", "/models/m", key("none"), "anonymous", "invalid_token"),
        ("PUT", "/models/m", key("watch"), "watchers", "missing_permission"),
        ("PUT", "/models/n", key("ops"), "operators", "model_not_allowed"),
        ("GET", "/token?type=management", key("ops"), "operators", "missing_permission"),
        ("POST", "/models", {"Origin": "http://elsewhere.example"}, "anonymous", "cross_site"),
    ],
)
def test_refused_changes_are_recorded(
    management: Any, method: str, path: str, headers: dict[str, str], name: str, reason: str
) -> None:
    app = management(access=ACCESS)
    app.loop = asyncio.new_event_loop()
    assert app(method, path, b"", headers).status in (400, 403)
    app.loop.run_until_complete(asyncio.sleep(0))
    app.loop.close()
    address = "127.0.0.1:40000"
    assert app.control_api.refusals == [(Actor(name, address), method, path.partition("?")[0], reason)]


def test_refused_reads_and_answered_changes_are_not(management: Any) -> None:
    app = management(access=ACCESS)
    app("GET", "/models")
    app("POST", "/models?url=m-1.0.mar", b"", key("ops"))
    assert not app.control_api.refusals


def test_refused_grpc_calls_are_recorded(managed_by_grpc: Any) -> None:
    server = managed_by_grpc(ACCESS)
    stub = management_pb2_grpc.ManagementAPIsServiceStub(server.channel)
    request = management_pb2.UnregisterModelRequest(model_name="m")
    with pytest.raises(grpc.RpcError):
        stub.UnregisterModel(request, metadata=[("authorization", "Bearer watch")])
    deadline = time.monotonic() + 60
    while not server.control_api.refusals and time.monotonic() < deadline:  # no client waits for the record
        time.sleep(0.01)
    [(actor, action, path, reason)] = server.control_api.refusals
    assert (actor.name, action, reason) == ("watchers", "gRPC", "missing_permission")
    assert path.endswith("/UnregisterModel")


def test_page_has_the_stored_records(management: Any, tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/registry.db")
    trail = AuditTrail(database, load({"home": str(tmp_path)}))
    app = management()

    async def renew(kind: str) -> None:
        """Change nothing."""

    async def list_audit_records(*args: Any) -> Any:
        if not await trail.list_audit_records(*args):
            set_actor(Actor("ops", "192.0.2.1:5"))
            await trail.record_calls("renew_key", renew)("inference")
        return await trail.list_audit_records(*args)

    app.control_api.list_audit_records = list_audit_records
    response = app("GET", "/audit?limit=5")
    assert_described("GET", "/audit", response)
    [record] = json.loads(response.body)["records"]
    assert (record["actor"], record["action"], record["subject"]) == ("ops", "renew_key", "inference")
    database.close()
