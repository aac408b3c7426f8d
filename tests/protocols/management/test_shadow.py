"""Shadows through the HTTP API: real routes, state, database, data plane and mirror; models are
functions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson
import pytest
import sqlalchemy as sa

from serve_app.control import registry_changes
from serve_app.control.persistence.schema import SHADOW_MISMATCHES, SHADOW_STATS
from serve_app.control.result_history import ResultHistory
from serve_app.control.shadow.service import ShadowService
from serve_app.control.traffic import TrafficService
from serve_app.dataplane.data_plane import DataPlane, RoutingTableReader
from serve_app.dataplane.shadow.mirror import ShadowMirror, ShadowPair
from serve_app.dataplane.shadow.stats import ShadowStats
from serve_app.domain.access import AccessTable, KeyGrant
from serve_app.domain.model import ModelRef, ModelSpec
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart
from serve_app.domain.routing_table import RoutingTable, VersionRoute
from serve_app.domain.traffic_policy import ShadowPolicy
from serve_app.errors import HandlerFailed
from serve_app.telemetry.metrics import Meters
from tests.support.coroutine_backend import CoroutineBackend
from tests.support.service_api import ServiceApi

SHADOW = {"shadow": {"version": "2.0", "compare": {"kind": "label", "at": "digit"}}}


def predict(version: str, digit: int) -> dict[str, Any]:
    """Answer as the models: 2.0 returns 8 for every third digit and fails for 9; both fail below 0."""
    if digit < 0 or (version == "2.0" and digit == 9):
        raise HandlerFailed("traceback")
    return {"digit": 8 if version == "2.0" and digit % 3 == 0 else digit, "version": version}


class Cluster(ServiceApi):
    """Management and one gateway, on one loop."""

    def __init__(self, folder: Path, management: Callable[..., Any]) -> None:
        self.reader = RoutingTableReader()
        self.meters = Meters()
        self.copies: list[InferenceRequest] = []
        super().__init__(folder, management, {("m", version): 1 for version in ("1.0", "2.0", "3.0")})
        self.mirror = self.run(self._mirror())
        self.plane = DataPlane(self.reader, self.meters, self._remote, mirror=self.mirror)

    def create_service(self) -> ShadowService:
        service = ShadowService(self.state, self.database, ResultHistory(self.database, "shadow"))
        self.run(service.load())
        return service

    def open_port(self, access: AccessTable | None) -> None:
        super().open_port(access)
        traffic, api = TrafficService(self.state), self._app.control_api
        api.get_traffic, api.set_traffic = traffic.get_traffic, traffic.set_traffic

    async def _mirror(self) -> ShadowMirror:
        return ShadowMirror(lambda: self.reader.table, self._remote, self.meters)

    def _remote(self, ref: ModelRef, row: VersionRoute) -> Any:
        cluster = self

        class Target(CoroutineBackend):
            async def infer(self, call: InferenceRequest) -> InferenceResponse:
                if call.priority == "shadow":
                    cluster.copies.append(call)
                return InferenceResponse(
                    orjson.dumps(predict(ref.version, orjson.loads(call.inputs[0].value)["digit"]))
                )

        return Target()

    def close(self) -> None:
        self.run(self.owner.close())
        super().close()

    def put(self, version: str, digest: str = "d") -> None:
        spec = ModelSpec("m", version, "m.mar", digest * 64, "archive", min_workers=1, max_workers=1)
        self.run(self.state.commit(registry_changes.apply_archive(self.state.registry, spec)))

    def set(self, document: Any = SHADOW) -> None:
        status, result = self.ask("PUT", "/models/m/traffic", document)
        assert status == 200, result

    def calls(self, *digits: int, version: str | None = None, **more: Any) -> list[str]:
        """Return the versions that answered, once every copy has finished and its report has arrived."""
        models = {
            name: replace(
                row, versions={v: replace(r, phase="ready", replicas=1) for v, r in row.versions.items()}
            )
            for name, row in self.board.table.models.items()
        }
        self.reader.update(RoutingTable(self.reader.table.generation + 1, models))

        async def ask(digit: int) -> str:
            body = orjson.dumps({"digit": digit, **more})
            inputs = (InputPart("body", body, "application/json"),)
            reply = await self.plane.infer(InferenceRequest("m", version, inputs, request_id=f"r{digit}"))
            return orjson.loads(reply.body)["version"]

        async def main() -> list[str]:
            result = [await ask(digit) for digit in digits]
            while self.mirror._tasks:
                await asyncio.wait(self.mirror._tasks)
            if (seen := self.mirror.drain()) is not None:
                self._number += 1
                self.owner.put("gateway", self._number, seen)
            return result

        return self.run(main())

    def known(self) -> Any:
        status, result = self.ask("GET", "/models/m/shadow")
        assert status == 200, result
        return result

    def rows(self) -> tuple[int, int]:
        with self.database.transaction() as connection:
            counts = [
                sa.select(sa.func.count()).select_from(table) for table in (SHADOW_STATS, SHADOW_MISMATCHES)
            ]
            pairs, kept = (connection.execute(count).scalar_one() for count in counts)
        return pairs, kept


@pytest.fixture
def cluster(tmp_path: Path, management: Callable[..., Any]) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, management)
    yield cluster
    cluster.run(cluster.mirror.close())
    cluster.close()
    cluster.loop.close()


def test_the_agreement_over_time_is_kept_until_a_reset(cluster: Cluster) -> None:
    assert cluster.ask("GET", "/models/m/shadow/history")[0] == 404
    cluster.set()
    for digits, compared in ((range(10), [6, 3, 1]), (range(1), [0, 1, 0])):
        cluster.calls(*digits)
        cluster.run(cluster.owner.close())  # stores
        [trend] = cluster.ask("GET", "/models/m/shadow/history")[1]["against"]
        [point] = trend["points"]
        assert [point[name] for name in ("agreed", "disagreed", "error")] == compared
        assert cluster.ask("DELETE", "/models/m/shadow")[0] == 200


def test_shadow_comparison_is_reported(cluster: Cluster) -> None:
    cluster.set()
    assert set(cluster.calls(*range(10))) == {"1.0"}, "the shadow answers nobody, and breaks nothing"
    result = cluster.known()
    assert result["model"] == "m"
    assert result["shadow"]["version"] == "2.0"
    assert result["shadow"]["compare"]["kind"] == "label"
    [pair] = result["against"]
    assert pair["since"] > 0
    assert pair["calls"] == {"agreed": 6, "disagreed": 3, "error": 1, "skipped": 0, "dropped": 0}
    assert pair["reasons"] == {"disagreed": {"label": 3}, "error": {"handler_failed": 1}}
    assert (pair["version"], pair["shadow"]) == ("1.0", "2.0")
    assert pair["agreement_rate"] == pytest.approx(6 / 9)
    assert pair["label_flip_rate"] == pytest.approx(3 / 9)
    assert pair["error_rate"] == pytest.approx(1 / 10)
    assert pair["measures"] == {"label_flipped": pytest.approx(3 / 9)}
    assert set(pair["latency"]) == {"live", "shadow"}
    assert 0 < pair["latency"]["live"]["p50_ms"] <= pair["latency"]["live"]["p99_ms"]
    first = pair["disagreements"][0]
    assert (first["request_id"], first["reason"], first["distance"]) == ("r0", "label", 1.0)
    assert first["inputs"] == [{"name": "body", "content_type": "application/json", "json": {"digit": 0}}]
    assert first["live"] == {"status": 200, "json": {"digit": 0, "version": "1.0"}}
    assert first["shadow"] == {"status": 200, "json": {"digit": 8, "version": "2.0"}}
    assert [copy.request_id for copy in cluster.copies] == [f"r{n}-shadow" for n in range(10)]


def test_only_calls_that_name_no_version_are_copied(cluster: Cluster) -> None:
    cluster.set()
    cluster.calls(1, 2, version="1.0")
    cluster.calls(1, 2, version="2.0")
    assert cluster.copies == []
    assert cluster.known()["against"] == []
    cluster.set({"policy": "weighted", "versions": {"2.0": 5000, "3.0": 5000}, **SHADOW})
    answered = cluster.calls(*[1] * 100)
    [pair] = cluster.known()["against"]
    assert pair["version"] == "3.0", "nor those that the shadow has answered itself"
    assert pair["calls"]["agreed"] == len(cluster.copies) == answered.count("3.0")


def test_failed_live_request_is_not_copied(cluster: Cluster) -> None:
    cluster.set()
    with pytest.raises(HandlerFailed):
        cluster.calls(-1)
    cluster.calls(1)
    assert len(cluster.copies) == 1
    assert cluster.known()["against"][0]["reasons"] == {"skipped": {"live_failed": 1}}
    assert cluster.known()["against"][0]["error_rate"] == 0.0


def test_live_calls_alone_are_counted_as_calls(cluster: Cluster) -> None:
    cluster.set()
    cluster.calls(*range(10))
    samples = cluster.meters.samples()
    requests = {labels: value for name, labels, value in samples if name == "torchrelay_requests_total"}
    assert requests == {(("model", "m"), ("status", "ok"), ("version", "1.0")): 10}
    copies = {
        dict(labels)["outcome"]: value
        for name, labels, value in cluster.meters.samples()
        if name == "torchrelay_shadow_requests_total"
    }
    assert copies == {"agreed": 6, "disagreed": 3, "error": 1}
    flips = [
        value for name, _, value in cluster.meters.samples() if name == "torchrelay_shadow_label_flips_total"
    ]
    assert flips == [3]


def test_figures_add_up_and_outlive_management(cluster: Cluster) -> None:
    cluster.set()
    cluster.calls(0, 1)
    cluster.calls(2, 3)
    before = cluster.known()
    assert before["against"][0]["calls"]["agreed"] == 2
    cluster.close()
    cluster.open()
    assert cluster.known() == before
    cluster.calls(4, 6)
    after = cluster.known()["against"][0]
    assert (after["calls"]["agreed"], after["calls"]["disagreed"]) == (3, 3)
    assert after["since"] == before["against"][0]["since"]
    assert [kept["inputs"][0]["json"]["digit"] for kept in after["disagreements"]] == [0, 3, 6]
    cluster.run(cluster.owner.close())
    assert cluster.rows() == (1, 3)


def test_resent_reports_count_once(cluster: Cluster) -> None:
    cluster.set()
    figures = ShadowStats(20)
    figures.count("agreed", calls=5)
    shadow = cluster.state.registry.models["m"].policy.shadow
    assert isinstance(shadow, ShadowPolicy)
    for number in (1, 1, 2, 1):
        cluster.owner.put("replica", number, [(ShadowPair("m", "1.0", shadow), figures)])
    assert cluster.known()["against"][0]["calls"]["agreed"] == 10


def test_what_comes_late_of_a_shadow_before_is_not_counted(cluster: Cluster) -> None:
    cluster.set()
    before = cluster.state.registry.models["m"].policy.shadow
    assert before is not None
    cluster.set({"shadow": {"version": "3.0"}})
    figures = ShadowStats(20)
    figures.count("agreed")
    cluster.owner.put("replica", 1, [(ShadowPair("m", "1.0", before), figures)])
    assert cluster.owner._records == {}
    cluster.calls(4)
    cluster.put("3.0", digest="e")  # the same number, another archive, and nobody has asked meanwhile
    cluster.calls(5)
    assert (
        cluster.known()["against"][0]["calls"]["agreed"] + cluster.known()["against"][0]["calls"]["disagreed"]
        == 1
    )


def test_the_worst_are_bounded_and_redacted_where_they_are_stored(cluster: Cluster) -> None:
    cluster.set({"shadow": {**SHADOW["shadow"], "keep": 2, "redact": ["user", "version"]}})
    cluster.calls(0, 3, 6, user="Ann")
    [pair] = cluster.known()["against"]
    assert pair["calls"]["disagreed"] == 3
    assert [kept["inputs"][0]["json"] for kept in pair["disagreements"]] == [
        {"digit": 0, "user": "[redacted]"},
        {"digit": 3, "user": "[redacted]"},
    ]
    assert pair["disagreements"][0]["live"]["json"] == {"digit": 0, "version": "[redacted]"}
    cluster.run(cluster.owner.close())
    with cluster.database.transaction() as connection:
        stored = b"".join(row.document for row in connection.execute(sa.select(SHADOW_MISMATCHES)))
    assert b"Ann" not in stored
    assert stored.count(b"[redacted]") == 6
    cluster.set({"shadow": {**SHADOW["shadow"], "keep": 0}})
    cluster.calls(0, 3)
    [pair] = cluster.known()["against"]
    assert (pair["calls"]["disagreed"], pair["disagreements"]) == (2, [])
    cluster.run(cluster.owner.close())
    assert cluster.rows() == (1, 0)


def test_figures_begin_anew_with_what_they_are_about(cluster: Cluster) -> None:
    def compared() -> list[tuple[str, str, int]]:
        return [
            (pair["version"], pair["shadow"], pair["calls"]["agreed"] + pair["calls"]["disagreed"])
            for pair in cluster.known()["against"]
        ]

    cluster.set()
    cluster.calls(0, 1)
    cluster.set({"shadow": {**SHADOW["shadow"], "percent": 50}})
    assert compared() == [("1.0", "2.0", 2)], "another share changes nothing"
    cluster.set({"shadow": {**SHADOW["shadow"], "compare": {"kind": "auto"}}})
    assert compared() == []
    cluster.calls(0, 1)
    assert compared() == [("1.0", "2.0", 2)]
    cluster.set({"shadow": {"version": "3.0"}})
    cluster.calls(4)
    assert compared() == [("1.0", "3.0", 1)]
    cluster.put("3.0", digest="e")  # the same number, another archive
    assert compared() == []
    cluster.calls(4)
    cluster.set({"policy": "weighted", "versions": {"1.0": 1, "2.0": 9999}, "shadow": {"version": "3.0"}})
    cluster.calls(4, 5, 6)
    assert compared()[-1] == ("2.0", "3.0", 3), "each live version has figures of its own"


def test_what_is_of_a_version_that_is_removed_goes_with_it(cluster: Cluster) -> None:
    cluster.set()
    cluster.calls(0, 1)
    cluster.set({})
    cluster.run(cluster.owner.close())
    assert cluster.rows() == (1, 1)
    cluster.run(cluster.state.commit(registry_changes.unregister(cluster.state.registry, "m", "2.0")[0]))
    cluster.run(cluster.owner.close())
    assert cluster.rows() == (0, 0)


def test_figures_that_cannot_be_read_keep_nobody_from_starting(cluster: Cluster) -> None:
    cluster.set()
    cluster.calls(0, 1)
    cluster.close()
    cluster.open()
    with cluster.database.transaction() as connection:
        connection.execute(
            sa.update(SHADOW_STATS).values(document=b'{"shadow": {"version": "2.0", "colour": "blue"}}')
        )
    cluster.close()
    cluster.open()
    assert cluster.known()["against"] == []
    assert cluster.rows() == (0, 0), "they go, with the inputs that were kept"
    cluster.calls(3)
    assert cluster.known()["against"][0]["calls"]["disagreed"] == 1


def test_the_last_figures_stay_without_the_shadow_until_they_are_forgotten(cluster: Cluster) -> None:
    status, result = cluster.ask("GET", "/models/m/shadow")
    assert (status, result["type"]) == (404, "ResourceNotFoundException")
    assert "PUT /models/m/traffic" in result["message"]
    cluster.set()
    assert cluster.known()["against"] == [], "and one that was just set has none"
    cluster.calls(0, 1)
    cluster.set({})
    assert cluster.known()["shadow"] is None
    assert cluster.known()["against"][0]["calls"]["agreed"] == 1
    cluster.run(cluster.owner.close())
    assert cluster.rows() == (1, 1)
    status, result = cluster.ask("DELETE", "/models/m/shadow")
    assert status == 200
    assert "deleted" in result["status"]
    assert cluster.rows() == (0, 0), "it is gone when the answer comes"
    assert cluster.ask("GET", "/models/m/shadow")[0] == 404
    cluster.set()
    cluster.calls(0)
    cluster.ask("DELETE", "/models/m/shadow")
    cluster.calls(0)
    assert cluster.known()["against"][0]["calls"]["disagreed"] == 1


def test_other_methods_are_refused(cluster: Cluster) -> None:
    assert cluster.ask("GET", "/models/none/shadow")[0] == 404
    assert cluster.ask("DELETE", "/models/none/shadow")[0] == 404
    assert cluster.ask("POST", "/models/m/shadow", {})[0] == 405
    assert cluster.ask("OPTIONS", "/models/m/shadow")[0] == 200


def test_keys_see_the_shadows_of_their_own_models(cluster: Cluster) -> None:
    def access(*rights: Any, models: tuple[str, ...] = ("*",)) -> tuple[AccessTable, dict[str, Any]]:
        key = "-".join(rights)
        grant = KeyGrant(frozenset(rights), models)
        return AccessTable({sha256(key.encode()).digest(): grant}), {
            "headers": {"authorization": f"Bearer {key}"}
        }

    for rights, models, codes in (
        (("observe",), ("*",), (404, 400)),
        (("manage",), ("*",), (400, 200)),
        (("observe", "manage"), ("team-*",), (400, 400)),
        (("infer",), ("*",), (400, 400)),
    ):
        granted, headers = access(*rights, models=models)
        cluster.close()
        cluster.open()
        cluster.open_port(granted)
        assert cluster.ask("GET", "/models/m/shadow", **headers)[0] == codes[0], rights
        assert cluster.ask("DELETE", "/models/m/shadow", **headers)[0] == codes[1], rights
        assert cluster.ask("GET", "/models/m/shadow")[0] == 400
