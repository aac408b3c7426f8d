"""The audit trail over a real database: the records of changes, failures, refusals and automatic steps."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from serve_app.control import registry_changes
from serve_app.control.audit import AuditTrail
from serve_app.control.persistence.database import Database
from serve_app.control.registry import Registry
from serve_app.control.replica_health import HealthTracker
from serve_app.control.state import AcknowledgementPolicy, StateStore
from serve_app.control.table_publisher import TablePublisher
from serve_app.control.traffic import TrafficService
from serve_app.deployments.transport.control_rpc import ControlDispatcher
from serve_app.domain.adapter import AdapterSpec
from serve_app.domain.audit import Actor, AuditQuery
from serve_app.domain.model import ModelSpec
from serve_app.domain.traffic_policy import TrafficPolicy, read
from serve_app.errors import ModelNotFound, Unavailable
from serve_app.settings import Settings, load
from serve_app.telemetry.audit_log import run_as_server
from serve_app.telemetry.metrics_aggregator import MetricsAggregator

OPS = Actor("ops", "192.0.2.1:5")
SPLIT = read({"versions": {"1.0": 9000, "2.0": 1000}})


class Control:
    """A control plane with one model, whose traffic can be changed."""

    def __init__(self, url: str, settings: Settings) -> None:
        self.database = Database(url)
        registry = Registry()
        for version in ("1.0", "2.0"):
            spec = ModelSpec("m", version, "m.mar", "d" * 64, "archive", min_workers=1, max_workers=1)
            registry = registry_changes.register(registry, spec)
        self.database.save(Registry(), registry)

        async def nobody() -> set[str]:
            return set()

        self.state = StateStore(
            self.database,
            registry,
            TablePublisher(MetricsAggregator()),
            HealthTracker(),
            None,
            AcknowledgementPolicy(nobody, 0.05),
            lambda before, after: None,
        )
        self.trail = self.state.audit_trail = AuditTrail(self.database, settings)
        self.traffic = TrafficService(self.state)
        self.dispatcher = ControlDispatcher(self.traffic, self, trail=self.trail)

    async def renew_key(self, kind: str) -> None:
        """Replace a key, without a change of the registry."""

    async def call(self, name: str, *args: Any, actor: Actor = OPS) -> Any:
        return await self.dispatcher.dispatch(name, args, {}, actor)

    async def records(self, **query: Any) -> list[dict[str, Any]]:
        return [dict(record) for record in await self.trail.list_audit_records(AuditQuery(**query), ("*",))]


@pytest.fixture
def run(url: str, tmp_path: Path) -> Callable[..., None]:
    def start(test: Callable[[Control], Awaitable[None]], **telemetry: Any) -> None:
        async def run_test() -> None:
            control = Control(url, load({"home": str(tmp_path), "telemetry": telemetry}))
            try:
                await test(control)
            finally:
                await control.trail.close()
                control.database.close()

        asyncio.run(run_test())

    return start


def read_lines(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "logs/audit_log.log").read_text().splitlines()]


def test_change_is_recorded_with_author_before_and_after(run: Any, tmp_path: Path) -> None:
    async def test(control: Control) -> None:
        before = time.time()
        await control.call("set_traffic", "m", SPLIT)
        [record] = await control.records()
        assert before <= record.pop("time") <= time.time()
        assert record.pop("id")
        fields = ("actor", "address", "action", "subject", "result")
        assert [record[name] for name in fields] == ["ops", OPS.address, "set_traffic", "m", "ok"]
        assert list(record["before"]) == list(record["after"]) == ["models/m"]
        assert list(record["after"]["models/m"]) == ["policy"]
        assert record["after"]["models/m"]["policy"]["versions"] == {"1.0": 9000, "2.0": 1000}

    run(test)
    [line] = read_lines(tmp_path)
    assert (line["actor"], line["action"], line["subject"]) == ("ops", "set_traffic", "m")
    assert line["after"]["models/m"]["policy"]["versions"] == {"1.0": 9000, "2.0": 1000}
    assert (tmp_path / "logs/audit_log.log").stat().st_mode & 0o777 == 0o600


def test_failures_and_changes_beside_the_registry_are_recorded(run: Any) -> None:
    async def test(control: Control) -> None:
        assert isinstance(await control.call("set_traffic", "none", SPLIT), ModelNotFound)
        await control.call("renew_key", "management")
        await control.call("get_traffic", "m")
        records = await control.records()
        assert [(r["action"], r["subject"], r["result"], r["after"]) for r in records] == [
            ("renew_key", "management", "ok", None),
            ("set_traffic", "none", "failed: model_not_found", None),
        ]

    run(test)


def test_steps_of_the_server_are_recorded_as_its_own(run: Any) -> None:
    async def test(control: Control) -> None:
        declared = {"m": {"versions": {"1.0": 5000, "2.0": 5000}}}
        await asyncio.create_task(run_as_server("startup", control.traffic.apply_declared_policies(declared)))
        [record] = await control.records()
        assert (record["actor"], record["action"], record["subject"]) == ("torchrelay", "startup", "m")

    run(test)


def test_record_and_change_are_stored_together_or_not_at_all(run: Any) -> None:
    async def test(control: Control) -> None:
        with control.database.transaction() as connection:
            connection.execute(sa.text("DROP TABLE torchrelay_audit_log"))
        with pytest.raises(Unavailable):
            await control.state.commit(registry_changes.set_policy(control.state.registry, "m", SPLIT))
        assert control.database.load().models["m"].policy == TrafficPolicy()

    run(test)


def test_refusals_are_bounded_and_never_replace_changes(run: Any, tmp_path: Path) -> None:
    async def test(control: Control) -> None:
        await control.call("set_traffic", "m", SPLIT)
        for number in range(250):
            await control.call("record_refusal", "POST", f"/models/\0\ud800{number}", "invalid_token")
        await control.trail.flush()
        records = await control.records(result="refused", limit=1000)
        assert len(records) == 101
        assert records[0]["result"] == "refused: 150 more in this second"
        assert records[-1]["subject"] == "/models/\\0\\ud8000"
        await control.trail.prune()
        assert len(await control.records(result="refused", limit=1000)) == 10
        assert len(await control.records(action="set_traffic")) == 1

    run(test, audit_records=100)


def test_old_records_are_deleted(run: Any) -> None:
    async def test(control: Control) -> None:
        await control.call("renew_key", "inference")
        with control.database.transaction() as connection:
            connection.execute(sa.text("UPDATE torchrelay_audit_log SET time = time - 2 * 86400"))
        await control.call("renew_key", "management")
        await control.trail.prune()
        assert [record["subject"] for record in await control.records()] == ["management"]

    run(test, audit_days=1)


def test_records_are_filtered_and_paged(run: Any) -> None:
    async def test(control: Control) -> None:
        for number in range(5):
            await control.call("renew_key", f"k{number}", actor=Actor(f"a{number % 2}"))
        newest = await control.records(limit=2)
        assert [record["subject"] for record in newest] == ["k4", "k3"]
        rest = await control.records(before_id=newest[-1]["id"], actor="a0")
        assert [record["subject"] for record in rest] == ["k2", "k0"]
        assert [r["subject"] for r in await control.records(subject="k1", action="renew_key")] == ["k1"]
        assert await control.records(since=time.time() + 60) == []
        assert await control.records(result="%") == []
        limited = await control.trail.list_audit_records(AuditQuery(), ("k[34]",))
        assert [record["subject"] for record in limited] == ["k4", "k3"]

    run(test)


def test_urls_are_recorded_without_credentials(run: Any) -> None:
    async def test(control: Control) -> None:
        url = "https://user:password@store.example/m.mar?X-Amz-Signature=secret"
        adapters = (AdapterSpec("a", url, "d" * 64, "archive"),)
        config = {"text": "x" * 5000}
        spec = ModelSpec("n", "1.0", url, "d" * 64, "archive", config=config, adapters=adapters)
        await control.state.commit(registry_changes.register(control.state.registry, spec))
        [record] = await control.records()
        assert record["subject"] == "n"
        after = record["after"]["versions/n/1.0"]
        assert after["url"] == after["adapters"][0]["url"] == "https://store.example/m.mar"
        assert "password" not in str(record) and "secret" not in str(record)
        assert len(after["config"]) == 1001
        assert not record["before"]

    run(test)
