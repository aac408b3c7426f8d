"""The pool of a version, and versions that no pool can have."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.control.archive_ingestion import build_spec
from serve_app.domain.model import ModelSpec, Registration
from serve_app.domain.pool import PoolSettings
from serve_app.errors import BadRequest, CannotBePooled, ConfigurationError
from serve_app.model_store.archive import Archive, Manifest, ModelConfig
from serve_app.settings import RuntimeSettings, Settings

ARCHIVE = Archive("m.mar", Path(), Manifest("m", handler="h.py", requirements_file="r.txt"))


POOLS = {"team": PoolSettings(allowed_models=("team-*",))}


def build(
    document: dict[str, Any], default: str = "", startup: bool = False, **registration: Any
) -> ModelSpec:
    settings = Settings(runtime=RuntimeSettings(pool=default), pools=POOLS)
    config = ModelConfig.parse(yaml.safe_dump(document))
    return build_spec(Registration("m.mar", **registration), ARCHIVE, config, settings, startup)


def test_the_file_has_precedence_over_the_settings() -> None:
    assert build({}).pool == ""
    assert build({"pool": "p"}).pool == "p"
    assert build({}, default="q").pool == "q"
    assert build({"pool": "p", "pin_loaded": True}, default="q").pin_loaded
    assert build({"pool": ""}, default="q").pool == ""
    assert not build({"pool": ""}, default="q").is_pooled


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({"useVenv": True}, "Python packages of its own"),
        ({"tensor_parallel": 2}, "shards"),
        ({"parallelType": "pp"}, "torchrun"),
        ({"sequenceBatching": True}, "sequences"),
        ({"batcher": "ray"}, "@serve.batch"),
        ({"threads": 2}, "threads and pin"),
        ({"num_gpus": 1}, "num_cpus and num_gpus"),
        ({"minWorkers": 1, "maxWorkers": 2, "autoscaling": {}}, "autoscaling"),
        ({"capture": {"sample": 0.5}}, "captured"),
    ],
)
def test_a_version_that_needs_a_process_of_its_own_is_refused_or_gets_one(
    document: dict[str, Any], reason: str
) -> None:
    with pytest.raises(CannotBePooled, match=reason) as refused:
        build({**document, "pool": "p"})
    assert "Take pool out of its model-config.yaml" in str(refused.value)
    assert build(document, default="p").pool == ""


def test_a_pool_admits_the_models_that_it_allows() -> None:
    with pytest.raises(CannotBePooled, match=r"pools\.team\.allowed_models admits team-\* only"):
        build({"pool": "team"})
    assert build({"pool": "team"}, model_name="team-m").pool == "team"
    assert build({}, default="team").pool == ""


def test_at_startup_versions_wait_for_their_first_request() -> None:
    assert build({"pool": "p"}, startup=True).min_workers == 0
    assert build({"pool": "p", "minWorkers": 1}, startup=True).min_workers == 1
    assert build({}, startup=True).min_workers == 1
    assert build({"pool": "p"}, initial_workers=1).min_workers == 1


def test_a_pools_name_is_checked() -> None:
    with pytest.raises(ConfigurationError, match=r"pool.*a pool's name"):
        build({"torchrelay": {"pool": "a--b"}})
    with pytest.raises(BadRequest, match=r"runtime\.pool: 'a/b' cannot be a pool's name"):
        build({}, default="a/b")


def test_a_revision_covers_what_a_host_loads() -> None:
    spec = build({"pool": "p"})
    assert spec.revision == build({"pool": "p"}, initial_workers=1).revision
    assert spec.revision == dataclasses.replace(spec, memory=5, isolated="x", max_workers=3).revision
    assert spec.revision != build({"pool": "p"}, batch_size=2).revision
    assert spec.revision != dataclasses.replace(spec, digest="other").revision


def test_settings_of_pools_are_checked() -> None:
    from serve_app.settings import load

    assert load({"pools": {"p": {"memory": 100, "hosts": 2}}}).pools["p"].hosts == 2
    for document in ({"a--b": {}}, {"p": {"hosts": 0}}, {"p": {"memory": 0}}, {"p": {"size": 1}}):
        with pytest.raises(ConfigurationError, match="pools"):
            load({"pools": document})
