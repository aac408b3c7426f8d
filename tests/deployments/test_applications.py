"""The options of Ray Serve applications: fractions, bounds, surge, and a code version that changes with the
code.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter

from serve_app import main
from serve_app.control.reconciler import DeployAction
from serve_app.control.registry import DesiredState
from serve_app.deployments.applications import model_application
from serve_app.deployments.options import (
    TUNABLE_FIELDS,
    autoscaling_config,
    code_version,
    max_ongoing_requests,
    user_config,
)
from serve_app.deployments.ray_internals.fork_worker import MODEL_ENVIRONMENT, PRELOAD
from serve_app.domain.autoscaling import Autoscaling
from serve_app.domain.model import ModelSpec
from serve_app.settings import Settings, load

pytestmark = pytest.mark.integration


SPEC = ModelSpec(
    "m",
    "1.0",
    "m.mar",
    "d" * 64,
    "file:///m.mar",
    "",
    "python",
    2,
    2,
    batch_size=8,
    num_cpus=0.5,
    num_gpus=0.25,
)
LATENCY = Autoscaling(policy="latency", target_p95_ms=40.0, downscale_to_zero_delay_s=7.0)


def deployment(spec: ModelSpec = SPEC, before: bool = False, memory: int = 0):
    scaling = autoscaling_config(spec, before)
    action = DeployAction(DesiredState(spec, None), None, scaling=scaling, memory=memory)
    return model_application(Settings(), action)._bound_deployment


def test_a_version_claims_its_fractions_and_rolls_without_a_hole() -> None:
    found = deployment()
    assert found.name == "m--1.0"
    options = found.ray_actor_options
    assert (options["num_cpus"], options["num_gpus"], "memory" in options) == (0.5, 0.25, False)
    environment = {**MODEL_ENVIRONMENT, PRELOAD: "none"}  # there is no fork server here
    assert options["runtime_env"] == {"env_vars": environment}
    assert deployment(memory=300).ray_actor_options == {**options, "memory": 300}
    assert found.num_replicas == 2
    config = found._deployment_config
    assert (config.max_surge_percent, config.max_queued_requests) == (100, -1)
    assert config.max_ongoing_requests == max_ongoing_requests(SPEC) > SPEC.job_queue_size + SPEC.batch_size


def test_classes_are_stored_by_reference() -> None:
    config = deployment()._deployment_config
    assert len(config.to_proto_bytes()) < 1000, "with Ray's router by value it has 109,000 bytes"
    restored = DeploymentConfig.from_proto_bytes(config.to_proto_bytes()).request_router_config
    assert restored.is_default_request_router()
    assert restored.get_request_router_class() is PowerOfTwoChoicesRequestRouter
    assert (restored.initial_backoff_s, restored.max_backoff_s) == (0.005, 0.02)
    assert len(deployment()._replica_config.serialized_deployment_def) < 5000, "by value it has 24,000 bytes"
    gateway = main.build({})._bound_deployment
    [_, management] = gateway.init_args
    for found, limit in ((gateway, 5000), (management._bound_deployment, 200)):
        assert len(found._replica_config.serialized_deployment_def) < limit, found.name


def test_a_sharded_version_claims_a_bundle_for_each_rank() -> None:
    found = deployment(SPEC.with_(tensor_parallel=2, pipeline_parallel=2, num_gpus=1.0))
    assert found._replica_config.placement_group_bundles == [{"CPU": 0.5, "GPU": 1.0}] * 4
    assert found._replica_config.placement_group_strategy == "STRICT_PACK"
    claiming = deployment(SPEC.with_(tensor_parallel=2, num_gpus=1.0), memory=300)
    bundle = {"CPU": 0.5, "GPU": 1.0, "memory": 300}
    assert claiming._replica_config.placement_group_bundles == [bundle] * 2
    spread = deployment(SPEC.with_(pipeline_parallel=3, num_cpus=0, num_gpus=0, placement_strategy="SPREAD"))
    assert spread._replica_config.placement_group_bundles == [{"CPU": 0.001}] * 3
    assert spread._replica_config.placement_group_strategy == "SPREAD"
    assert deployment()._replica_config.placement_group_bundles is None


def test_the_bound_can_be_set() -> None:
    assert deployment(SPEC.with_(max_ongoing_requests=7))._deployment_config.max_ongoing_requests == 7


@pytest.mark.parametrize(
    "change",
    [
        {"digest": "e" * 64},
        {"handler": "o.py"},
        {"num_gpus": 0.5},
        {"tensor_parallel": 2},
        {"batcher": "ray"},
    ],
)
def test_what_only_a_new_replica_can_take_over_changes_the_version(change) -> None:
    assert deployment(SPEC.with_(**change))._version != deployment()._version


@pytest.mark.parametrize(
    "change",
    [
        dict.fromkeys(TUNABLE_FIELDS, 5),
        {"min_workers": 3, "max_workers": 3},
        {"max_workers": 3, "autoscaling": LATENCY},
        {"url": "x"},
        {"max_concurrent_requests": 5},
        {"routing": "prefix"},
    ],
)
def test_what_a_running_replica_takes_over_does_not(change) -> None:
    assert deployment(SPEC.with_(**change))._version == deployment()._version


def test_settings_are_part_of_the_version() -> None:
    assert code_version(SPEC, Settings()) == code_version(SPEC, Settings())
    assert code_version(SPEC, load({"runtime": {"decode_input_request": False}})) != code_version(
        SPEC, Settings()
    )


@pytest.mark.parametrize(
    "change", [{"auth": {"mode": "on"}}, {"management": {"port": 9}}, {"grpc": {"port": 9}}]
)
def test_what_no_replica_reads_is_not(change) -> None:
    assert code_version(SPEC, load(change)) == code_version(SPEC, Settings())


def test_one_management_on_the_head_and_a_gateway_a_node() -> None:
    gateway = main.build({"inference": {"gateways": 3}})._bound_deployment
    assert (gateway.num_replicas, gateway._replica_config.max_replicas_per_node) == (3, 1)
    [management] = [a for a in gateway.init_args if hasattr(a, "_bound_deployment")]
    assert management._bound_deployment.ray_actor_options["resources"] == {"node:__internal_head__": 0.001}


def test_a_label_selector_chooses_the_nodes_of_gateways() -> None:
    options = {"num_cpus": 0}
    assert main.build({})._bound_deployment.ray_actor_options == options
    selector = {"ray.io/node-group": "!headgroup"}
    gateway = main.build({"inference": {"gateway_label_selector": selector}})._bound_deployment
    assert gateway.ray_actor_options == options | {"label_selector": selector}


@pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning")
def test_the_autoscaler_is_configured_for_versions_that_follow_their_load() -> None:
    reported = deployment(SPEC.with_(min_workers=0, max_workers=3, autoscaling=LATENCY))._deployment_config
    # As Ray Serve's controller has it, and tells it when it is looked at.
    seen = DeploymentConfig.from_proto_bytes(reported.to_proto_bytes()).autoscaling_config
    assert (seen.min_replicas, seen.max_replicas, seen.initial_replicas) == (0, 3, None)
    assert (seen.target_ongoing_requests, seen.metrics_interval_s, seen.look_back_period_s) == (
        16.0,
        1.0,
        10.0,
    )
    assert (seen.upscale_delay_s, seen.downscale_delay_s, seen.downscale_to_zero_delay_s) == (3.0, 60.0, 7.0)
    assert isinstance(seen.policy.get_policy()(**seen.policy.policy_kwargs), Callable)
    shown = seen.model_dump()
    wanted = autoscaling_config(SPEC.with_(min_workers=0, max_workers=3, autoscaling=LATENCY), True)
    assert {key: shown[key] for key in wanted} == wanted, "or the reconciler would deploy it again and again"
    wanted = autoscaling_config(SPEC.with_(max_workers=3), False)
    reported = deployment(SPEC.with_(max_workers=3))._deployment_config
    shown = DeploymentConfig.from_proto_bytes(reported.to_proto_bytes()).autoscaling_config.model_dump()
    assert {key: shown[key] for key in wanted} == wanted


def test_one_that_it_has_had_stays_with_it_between_equal_bounds() -> None:
    assert autoscaling_config(SPEC, was_autoscaled=False) is None
    fixed = autoscaling_config(SPEC, was_autoscaled=True)
    assert (fixed["min_replicas"], fixed["max_replicas"]) == (2, 2)


def test_a_replica_hears_how_far_to_look_back_and_of_nothing_else() -> None:
    fixed = user_config(Settings(), DesiredState(SPEC, None))
    assert "look_back_period_s" not in fixed
    follows = DesiredState(SPEC.with_(max_workers=3, autoscaling=LATENCY), None)
    assert user_config(Settings(), follows) == {**fixed, "look_back_period_s": 10.0}
