"""What Ray Serve is asked for: fractions, bounds, surge, and a code version that changes only with the code."""

from __future__ import annotations

import pytest

from serve_app.deployments.options import TUNABLE, code_version, model_app, ongoing, server_app
from serve_app.settings import Settings, load
from serve_app.types import ModelSpec

SPEC = ModelSpec("m", "1.0", "m.mar", "d" * 64, "file:///m.mar", batch_size=8, num_cpus=0.5, num_gpus=0.25)


def deployment(spec: ModelSpec = SPEC, replicas: int = 2):
    return model_app(spec, Settings(), replicas, {"attempt": 0})._bound_deployment


def test_a_version_claims_its_fractions_and_rolls_without_a_hole() -> None:
    found = deployment()
    assert found.name == "m--1.0"
    assert found.ray_actor_options == {"num_cpus": 0.5, "num_gpus": 0.25}
    assert found.num_replicas == 2
    config = found._deployment_config
    assert (config.max_surge_percent, config.max_queued_requests) == (100, -1)
    assert config.max_ongoing_requests == ongoing(SPEC) > SPEC.job_queue_size + SPEC.batch_size


def test_the_bound_can_be_set() -> None:
    assert deployment(SPEC.with_(max_ongoing_requests=7))._deployment_config.max_ongoing_requests == 7


@pytest.mark.parametrize("change", [{"digest": "e" * 64}, {"handler": "o.py"}, {"num_gpus": 0.5}, {"batcher": "ray"}])
def test_what_only_a_new_replica_can_take_over_changes_the_version(change) -> None:
    assert deployment(SPEC.with_(**change))._version != deployment()._version


@pytest.mark.parametrize("change", [dict.fromkeys(TUNABLE, 5), {"min_workers": 3, "max_workers": 3}, {"url": "x"}])
def test_what_a_running_replica_takes_over_does_not(change) -> None:
    assert deployment(SPEC.with_(**change))._version == deployment()._version


def test_settings_are_part_of_the_version() -> None:
    assert code_version(SPEC, Settings()) == code_version(SPEC, Settings())
    assert code_version(SPEC, load({"runtime": {"decode_input_request": False}})) != code_version(SPEC, Settings())


@pytest.mark.parametrize("change", [{"auth": {"mode": "on"}}, {"management": {"port": 9}}])
def test_what_no_replica_reads_is_not(change) -> None:
    assert code_version(SPEC, load(change)) == code_version(SPEC, Settings())


def test_one_management_on_the_head_and_a_gateway_a_node() -> None:
    gateway = server_app(load({"inference": {"gateways": 3}}))._bound_deployment
    assert (gateway.num_replicas, gateway._replica_config.max_replicas_per_node) == (3, 1)
    [management] = [a for a in gateway.init_args if hasattr(a, "_bound_deployment")]
    assert management._bound_deployment.ray_actor_options["resources"] == {"node:__internal_head__": 0.001}
