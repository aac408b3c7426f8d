"""Drift through the HTTP API: real routes, state and database; reports as replicas send them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from serve_app.control import registry_changes
from serve_app.control.drift.service import DriftService
from serve_app.control.persistence.schema import DRIFT_WINDOWS
from serve_app.dataplane.capture.recorder import CaptureReport
from serve_app.domain.access import AccessTable, KeyGrant
from serve_app.domain.drift_window import FeatureWindow
from serve_app.domain.model import ModelRef, ModelSpec
from serve_app.settings import Settings, TelemetrySettings
from serve_app.telemetry.metrics import Meters
from tests.support.service_api import ServiceApi

POLICY = {"reference": 200, "window": 200}


class Cluster(ServiceApi):
    """The service behind the API, and replicas that report windows of random ages."""

    def __init__(self, folder: Path, management: Callable[..., Any]) -> None:
        self.folder = folder
        self.meters = Meters()
        self.random = np.random.default_rng(5)
        super().__init__(folder, management, {("plain", "1.0"): 1})
        self.put()

    def close(self) -> None:
        self.run(self.owner.close())
        super().close()

    def create_service(self) -> DriftService:
        settings = Settings(telemetry=TelemetrySettings(capture_destinations=("s3://b/.*",)))
        service = DriftService(self.state, self.database, self.meters, lambda spec: self.folder, settings)
        self.loop.run_until_complete(service.load())
        return service

    def put(self, version: str = "1.0", digest: str = "d" * 64, **policy: Any) -> None:
        config = {"capture": {**POLICY, **policy}}
        spec = ModelSpec("m", version, "m.mar", digest, "a", min_workers=1, max_workers=1, config=config)
        self.run(self.state.commit(registry_changes.apply_archive(self.state.registry, spec)))

    def report(
        self,
        requests: int,
        age: float = 40.0,
        version: str = "1.0",
        digest: str = "d" * 64,
        source: str = "replica-1",
        features: int = 0,
        **more: Any,
    ) -> None:
        """Report requests in windows of fifty, as a replica does."""
        for start in range(0, requests, 50):
            window = FeatureWindow(50)
            for _ in range(min(50, requests - start)):
                rest = [(f"input.f{i}", 1.0) for i in range(features)]
                window.add([("input.age", self.random.normal(age, 10)), ("input.pet", "cat"), *rest])
            self._number += 1
            dropped, error = more.get("dropped", {}), more.get("error", "")
            at = float(self._number) if error else 0.0
            ref = ModelRef("m", version)
            report = CaptureReport(ref, digest, window.requests, dropped, error, at, window)
            self.owner.put(source, self._number, report)

    def drift(self, version: str = "1.0") -> Any:
        status, document = self.ask("GET", f"/models/m/{version}/drift")
        assert status == 200, document
        (found,) = document["versions"]
        return found

    def restart(self) -> None:
        self.close()
        self.open()

    def gauges(self) -> dict[str, float]:
        self.run(self.owner._update_gauges())
        return {
            f"{name}/{dict(labels).get('feature', '')}": value
            for name, labels, value in self.meters.samples()
        }

    def rows(self) -> int:
        with self.database.transaction() as connection:
            return len(connection.execute(sa.select(DRIFT_WINDOWS)).all())


def levels(found: Any) -> dict[str, str]:
    return {feature["name"]: feature["level"] for feature in found["features"]}


def test_the_first_requests_are_the_reference_and_the_next_ones_are_compared(cluster: Cluster) -> None:
    empty = cluster.drift()
    assert (empty["level"], empty["reference"], empty["current"], empty["features"]) == (
        "none",
        None,
        None,
        [],
    )
    cluster.report(100)
    assert cluster.drift()["reference"]["complete"] is False
    assert cluster.drift()["current"] is None
    cluster.report(100, source="replica-2")
    assert cluster.drift()["reference"] | {"since": 0, "until": 0} == {
        "source": "requests",
        "requests": 200,
        "complete": True,
        "since": 0,
        "until": 0,
    }
    cluster.report(200)
    assert levels(cluster.drift()) == {"input.age": "none", "input.pet": "none"}
    cluster.report(250, age=60)
    found = cluster.drift()
    assert levels(found) == {"input.age": "major", "input.pet": "none"}
    assert (found["level"], found["current"]["complete"]) == ("major", True)
    assert 200 <= found["current"]["requests"] <= 250, "the window rolls"
    assert found["features"][0]["name"] == "input.age"
    assert found["capture"]["captured"] == 650


def test_a_report_that_is_sent_again_counts_once(cluster: Cluster) -> None:
    cluster.report(50)
    cluster._number -= 1
    cluster.report(50)
    assert cluster.drift()["reference"]["requests"] == 50


def test_a_restart_keeps_the_reference_and_the_window(cluster: Cluster) -> None:
    cluster.report(200)
    cluster.report(200, age=60)
    before = cluster.drift()
    cluster.restart()
    after = cluster.drift()
    assert after["reference"] == before["reference"]
    assert after["features"] == before["features"]
    assert after["level"] == "major"


def test_a_reset_makes_the_window_the_reference(cluster: Cluster) -> None:
    status, error = cluster.ask("POST", "/models/m/1.0/drift/reset")
    assert (status, error["type"]) == (409, "ConflictStatusException")
    cluster.report(200)
    cluster.report(200, age=60)
    status, document = cluster.ask("POST", "/models/m/1.0/drift/reset")
    assert status == 200
    found = document["versions"][0]
    assert (found["reference"]["source"], found["reference"]["requests"], found["current"]) == (
        "reset",
        200,
        None,
    )
    cluster.restart()
    cluster.report(200, age=60)
    assert cluster.drift()["level"] == "none"
    cluster.report(250, age=40)
    assert cluster.drift()["level"] == "major"


def test_gauges_and_a_line_of_the_log_follow_the_level(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.report(400)
    assert cluster.gauges()["torchrelay_drift_psi/input.age"] < 0.25
    cluster.report(250, age=70)
    with caplog.at_level(logging.WARNING):
        gauges = cluster.gauges()
    assert gauges["torchrelay_drift_psi/input.age"] > 0.25
    assert gauges["torchrelay_drift_ks/input.age"] > 0.5
    assert "torchrelay_drift_ks/input.pet" not in gauges, "categories have none"
    assert "m--1.0: major drift of input.age (PSI" in caplog.text
    cluster.run(cluster.state.commit(registry_changes.unregister(cluster.state.registry, "m", "1.0")[0]))
    cluster.owner._drop_outdated()
    assert not any("drift" in name for name in cluster.gauges())


def test_features_beyond_the_bound_are_counted(cluster: Cluster) -> None:
    cluster.put("2.0", max_features=5)
    cluster.report(400, version="2.0", features=10)
    found = cluster.drift("2.0")
    assert len(found["features"]) == 5
    assert found["omitted_features"] == 7


def test_another_version_is_the_reference(cluster: Cluster) -> None:
    cluster.put("2.0", reference_version="1.0")
    cluster.report(200)
    cluster.report(200, age=60, version="2.0")
    found = cluster.drift("2.0")
    assert (found["reference"]["source"], found["level"]) == ("version:1.0", "major")
    document = cluster.ask("GET", "/models/m/drift")[1]
    assert [found["version"] for found in document["versions"]] == ["1.0", "2.0"]
    cluster.put("3.0", reference_version="none")
    cluster.report(200, version="3.0")
    assert cluster.drift("3.0")["reference"] is None


def test_a_file_is_the_reference(cluster: Cluster) -> None:
    ages = cluster.random.normal(40, 10, 500)
    file = cluster.folder / "reference.jsonl"
    file.write_text("\n".join(json.dumps({"age": age, "pet": "cat"}) for age in ages))
    cluster.put("2.0", reference="reference.jsonl")
    cluster.report(200, age=60, version="2.0")
    found = cluster.drift("2.0")
    assert (found["reference"]["source"], found["reference"]["requests"]) == ("file:reference.jsonl", 500)
    assert levels(found) == {"input.age": "major", "input.pet": "none"}
    file.unlink()
    cluster.restart()
    assert cluster.drift("2.0")["level"] == "major", "it is read once"


def test_lost_requests_are_shown(cluster: Cluster) -> None:
    cluster.report(50, dropped={"queue_full": 3}, error="disk full")
    cluster.report(50, dropped={"queue_full": 4})
    capture = cluster.drift()["capture"]
    assert (capture["dropped"], capture["last_error"]) == ({"queue_full": 7}, "disk full")
    assert capture["last_error_time"] > 0


def test_a_new_archive_starts_anew_and_a_removed_version_leaves_nothing(cluster: Cluster) -> None:
    cluster.report(400)
    cluster.run(cluster.owner._save())
    assert cluster.rows() == 1
    cluster.put(digest="e" * 64)
    cluster.report(50)
    assert cluster.drift()["reference"] is None, "a report of the old archive is ignored"
    cluster.report(50, digest="e" * 64)
    assert cluster.drift()["reference"]["requests"] == 50
    cluster.run(cluster.state.commit(registry_changes.unregister(cluster.state.registry, "m", "1.0")[0]))
    cluster.owner._drop_outdated()
    cluster.run(cluster.owner._save())
    assert cluster.rows() == 0


def test_statistics_that_cannot_be_read_are_dropped(cluster: Cluster) -> None:
    cluster.report(200)
    cluster.run(cluster.owner.close())
    with cluster.database.transaction() as connection:
        connection.execute(sa.update(DRIFT_WINDOWS).values(document=b"broken"))
    cluster.database.close()
    cluster.open()
    assert cluster.drift()["reference"] is None


def test_models_without_capture_and_unknown_ones(cluster: Cluster) -> None:
    for path, status, words in (
        ("/models/plain/drift", 404, "capture"),
        ("/models/plain/1.0/drift", 404, "capture"),
        ("/models/none/drift", 404, "none"),
        ("/models/m/9.9/drift", 404, "9.9"),
    ):
        found, error = cluster.ask("GET", path)
        assert (found, words in error["message"]) == (status, True), path
    assert cluster.ask("POST", "/models/m/9.9/drift/reset")[0] == 404
    assert cluster.ask("POST", "/models/plain/1.0/drift/reset")[0] == 409
    assert cluster.ask("PUT", "/models/m/drift", {})[0] == 405


def test_keys_read_and_reset_the_drift_of_their_own_models(cluster: Cluster) -> None:
    for rights, models, codes in (
        (("observe",), ("*",), (200, 400)),
        (("manage",), ("*",), (400, 200)),
        (("observe", "manage"), ("team-*",), (400, 400)),
        (("infer",), ("*",), (400, 400)),
    ):
        cluster.report(400)
        grant = KeyGrant(frozenset(rights), models)  # type: ignore[arg-type]
        cluster.open_port(AccessTable({sha256(b"key").digest(): grant}))
        headers = {"authorization": "Bearer key"}
        assert cluster.ask("GET", "/models/m/drift", headers=headers)[0] == codes[0], rights
        assert cluster.ask("POST", "/models/m/1.0/drift/reset", headers=headers)[0] == codes[1], rights
        assert cluster.ask("GET", "/models/m/drift")[0] == 400


def test_files_for_an_object_store_need_its_permission(cluster: Cluster) -> None:
    store = cluster.owner.store_capture
    assert "no object store" in cluster.run(store(ModelRef("m", "1.0"), "a.jsonl", b""))
    assert "no object store" in cluster.run(store(ModelRef("none", "1.0"), "a.jsonl", b""))
    cluster.put("2.0", destination="s3://other/x")
    assert "capture_destinations" in cluster.run(store(ModelRef("m", "2.0"), "a.jsonl", b""))
    cluster.put("3.0", destination="s3://b/x")
    assert "is no name" in cluster.run(store(ModelRef("m", "3.0"), "../a.jsonl", b""))


def test_another_archive_of_the_name_has_its_own_warnings(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    for digest in ("d" * 64, "e" * 64):
        cluster.put(digest=digest)
        cluster.report(200, digest=digest)
        cluster.report(200, age=80.0, digest=digest)
        assert cluster.gauges()["torchrelay_drift_psi/input.age"] > 0.2
    warnings = [record.getMessage() for record in caplog.records if "drift of" in record.getMessage()]
    assert len(warnings) == 2
