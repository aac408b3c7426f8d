"""Versions that follow their load, in the registry, in the database, and in what is concluded of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serve_app.control.archive_ingestion import build_spec
from serve_app.control.persistence.database import Database
from serve_app.control.registry import (
    DesiredState,
    Registry,
    TableBuilder,
    desired_states,
    find_version,
)
from serve_app.control.registry_changes import register, scale
from serve_app.control.replica_health import HealthTracker, ObservedApp
from serve_app.domain.autoscaling import Autoscaling
from serve_app.domain.model import ModelRef, ModelSpec, ModelStatus, Registration, ReplicaInfo
from serve_app.errors import BadRequest, ConfigurationError, StartFailed
from serve_app.model_store.archive import Archive, Manifest, ModelConfig
from serve_app.settings import load

LATENCY = Autoscaling("latency", target_p95_ms=80.0)
FILE = "minWorkers: 1\nmaxWorkers: 3\nautoscaling: {upscale_delay_s: 1, target_ongoing_requests: 6}"


def made(config: str = "", settings: dict[str, Any] | None = None, at_startup: bool = False) -> ModelSpec:
    """Build the spec of ``m`` 1.0 from its model-config.yaml."""
    return build_spec(
        Registration("m.mar"),
        Archive("m.mar", Path(), Manifest("m", handler="h"), digest="d" * 64, uri="file:///cache/m"),
        ModelConfig.parse(config),
        load(settings or {}),
        at_startup,
    )


def registry(spec: ModelSpec) -> Registry:
    return register(Registry(), spec)


class TestSpec:
    def test_two_numbers_of_workers_turn_it_on(self) -> None:
        assert made("minWorkers: 2\nmaxWorkers: 2").scaling is None
        assert made("minWorkers: 1\nmaxWorkers: 2").scaling == Autoscaling(target_ongoing_requests=2.0)
        own = {"control": {"models": {"m": {"1.0": {"min_workers": 0, "max_workers": 2}}}}}
        assert made("batchSize: 4", own, at_startup=True).scaling == Autoscaling(target_ongoing_requests=8.0)

    def test_the_models_own_file_says_how(self) -> None:
        assert made(FILE).scaling == Autoscaling(upscale_delay_s=1.0, target_ongoing_requests=6.0)
        assert made(FILE.replace("3", "1")).autoscaling is None

    def test_none_is_none_only_for_those_who_know_of_autoscaling(self) -> None:
        none = made("minWorkers: 0\nmaxWorkers: 2\nautoscaling: {}")
        assert (none.min_workers, none.max_workers) == (0, 2)
        torchserves = made("minWorkers: 0\nmaxWorkers: 2")
        assert (torchserves.min_workers, torchserves.max_workers) == (1, 2)

    @pytest.mark.parametrize(
        ("result", "why"),
        [
            ("{policy: latency}", "needs target_p95_ms"),
            ("fast", "is a mapping"),
            ("{upscale_delay: 1}", "upscale_delay_s"),
        ],
    )
    def test_a_file_that_is_wrong_is_refused(self, result: str, why: str) -> None:
        with pytest.raises(ConfigurationError, match=why):
            ModelConfig.parse(f"torchrelay: {{autoscaling: {result}}}")


class TestScale:
    def test_earlier_values_hold_until_autoscaling_is_turned_off(self) -> None:
        whole, _ref = scale(
            registry(made(FILE)), "m", None, 1, 3, {"policy": "latency", "target_p95_ms": "80"}
        )
        now = find_version(whole, "m", None).autoscaling
        assert now == Autoscaling("latency", 6.0, 80.0, upscale_delay_s=1.0)
        whole, _ = scale(whole, "m", None, 0, 8)
        assert find_version(whole, "m", None).autoscaling == now
        whole, _ = scale(whole, "m", None, 2, 2)
        assert find_version(whole, "m", None).autoscaling is None
        whole, _ = scale(whole, "m", None, 1, 2)
        assert find_version(whole, "m", None).autoscaling == made(FILE).autoscaling, "the file's, anew"

    def test_the_bounds_may_stay_as_they_are(self) -> None:
        whole, _ = scale(registry(made(FILE)), "m", "1.0", None, None, {"upscale_delay_s": 9})
        spec = find_version(whole, "m", None)
        assert (spec.min_workers, spec.max_workers, spec.scaling.upscale_delay_s) == (1, 3, 9.0)

    def test_a_refused_change_changes_nothing(self) -> None:
        whole = registry(made("minWorkers: 2"))
        for low, high, result, why in (
            (
                2,
                2,
                {"upscale_delay_s": 1},
                "upscale_delay_s: autoscaling holds between two different numbers",
            ),
            (None, None, {"upscale_delay_s": 1}, "2 to 2 were requested"),
            (1, 2, {"upscale_delay": 1}, "upscale_delay_s"),
        ):
            with pytest.raises(BadRequest, match=why):
                scale(whole, "m", None, low, high, result)
        assert whole == registry(made("minWorkers: 2"))


class TestTable:
    def test_a_version_without_workers_that_may_have_some_runs(self) -> None:
        whole = registry(made().with_(max_workers=2, startup_timeout=7))
        assert set(desired_states(whole)) == {"m--1.0"}
        assert TableBuilder().build(whole, {}, {}, 0, True).models["m"].versions["1.0"].phase == "loading", (
            "nobody has looked yet"
        )
        idle = {ModelRef("m", "1.0"): ModelStatus("idle")}
        row = TableBuilder().build(whole, idle, {}, 0, True).models["m"].versions["1.0"]
        assert (row.phase, row.replicas, row.wake_timeout) == ("idle", 0, 7.0)
        assert (
            TableBuilder()
            .build(registry(made(FILE)), {}, {}, 0, True)
            .models["m"]
            .versions["1.0"]
            .wake_timeout
            == 0.0
        )


def test_it_outlives_the_server(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/registry.db"
    database = Database(url)
    whole = registry(made(FILE).with_(autoscaling=LATENCY))
    try:
        database.save(Registry(), whole)
        after, _ = scale(whole, "m", None, 2, 2)
        assert database.load() == whole
        database.save(whole, after)
        assert database.load() == after
    finally:
        database.close()


class TestReplicaHealth:
    WANT = {"m--1.0": DesiredState(made().with_(max_workers=2, max_retry_timeout=60), "/predictions/m")}
    REF = ModelRef("m", "1.0")

    @pytest.fixture
    def now(self) -> list[float]:
        return [1000.0]

    @pytest.fixture
    def health(self, now: list[float]) -> HealthTracker:
        return HealthTracker(lambda: now[0])

    def app(self, *ids: str, replicas: int = 0, status: str = "RUNNING") -> dict[str, ObservedApp]:
        workers = tuple(ReplicaInfo(i, 1, 0.0, True) for i in ids)
        return {
            "m--1.0": ObservedApp("m--1.0", None, replicas, {}, 0, status, "", workers, {"min_replicas": 0})
        }

    def test_one_that_sleeps_is_healthy_and_settled(self, health: HealthTracker, now: list[float]) -> None:
        health.update(self.WANT, {}, {})
        assert health.statuses[self.REF].phase == "loading"
        health.update(self.WANT, self.app(), {})
        now[0] += 1000
        health.update(self.WANT, self.app(), self.app())
        assert health.statuses[self.REF].phase == "idle"
        assert health.is_healthy(self.WANT["m--1.0"].spec) and health.is_startup_complete(self.WANT)

    def test_it_wakes_up_and_goes_to_sleep_and_has_not_crashed(self, health: HealthTracker) -> None:
        phases = []
        life = [self.app(), self.app(replicas=1), self.app("a", replicas=1), self.app("a"), self.app()]
        for before, after in zip([{}, *life], life):
            health.update(self.WANT, after, before)
            phases.append(health.statuses[self.REF].phase)
        assert phases == ["idle", "loading", "ready", "ready", "idle"]
        assert health.start_delay(self.REF) == 0

    def test_one_that_does_not_wake_up_has_failed(self, health: HealthTracker, now: list[float]) -> None:
        health.update(self.WANT, self.app(replicas=1), self.app())
        health.record_start_failure(self.WANT["m--1.0"].spec, StartFailed("m", "1.0", "Traceback"))
        for status in ("DEPLOYING", "DEPLOY_FAILED"):
            health.update(self.WANT, self.app(replicas=1, status=status), self.app(replicas=1))
            assert health.statuses[self.REF].phase == "failed"
            assert health.get_failure(self.REF).detail == "Traceback"
        assert health.is_healthy(self.WANT["m--1.0"].spec)
        now[0] += 61
        assert not health.is_healthy(self.WANT["m--1.0"].spec)
        health.update(self.WANT, self.app("a", replicas=1), self.app(replicas=1))
        assert health.get_failure(self.REF) is None and health.is_healthy(self.WANT["m--1.0"].spec)
