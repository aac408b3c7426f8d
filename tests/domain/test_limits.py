"""The limits of numbers, from every source, and that every number has one."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from serve_app.control.api import ControlPlane
from serve_app.control.archive_ingestion import build_spec, build_workflow_spec
from serve_app.domain import limits, workflow_graph
from serve_app.domain.autoscaling import Autoscaling
from serve_app.domain.limits import Limits
from serve_app.domain.model import ModelSpec, Registration
from serve_app.domain.rollout import Guardrails, RolloutPlan
from serve_app.domain.traffic_policy import ShadowPolicy, TrafficPolicy
from serve_app.errors import BadRequest, ConfigurationError, LimitExceeded
from serve_app.model_store.archive import Archive, Manifest, ModelConfig
from serve_app.model_store.workflow_archive import WorkflowModel
from serve_app.settings import Settings, VersionSettings, load

MANIFEST = Manifest("m", handler="handler.py", config_file="model-config.yaml")
ARCHIVE = Archive("m.mar", Path(), MANIFEST, digest="d" * 64, uri="file:///cache/m")


def build(config: str = "", settings: dict | None = None, **requested: Any) -> ModelSpec:
    registration = Registration("m.mar", **requested)
    return build_spec(registration, ARCHIVE, ModelConfig.parse(config), load(settings), at_startup=False)


@pytest.mark.parametrize(
    ("key", "value", "setting"),
    [
        ("minWorkers", "1000000", "workers"),
        ("maxWorkers", "1001", "workers"),
        ("batchSize", "10001", "batch_size"),
        ("maxBatchDelay", "3600001", "batch_delay_s"),
        ("responseTimeout", "604801", "timeout_s"),
        ("startupTimeout", "99999999", "timeout_s"),
        ("maxRetryTimeoutInSec", "99999999", "timeout_s"),
        ("clientTimeoutInMills", "604800001", "timeout_s"),
        ("jobQueueSize", "100001", "queue_size"),
        ("parallelLevel", "1025", "parallel_degree"),
        ("tensor_parallel", "1025", "parallel_degree"),
        ("pipeline_parallel", "1025", "parallel_degree"),
        ("torchrun", "{nproc-per-node: 5000}", "parallel_degree"),
        ("sequenceMaxIdleMSec", "604800001", "timeout_s"),
        ("sequenceTimeoutMSec", "604800001", "timeout_s"),
        ("maxNumSequence", "100001", "sequences"),
        ("maxSequenceJobQueueSize", "100001", "queue_size"),
        ("num_cpus", "1.0e+300", "cpus"),
        ("num_gpus", "1025", "gpus"),
        ("max_ongoing_requests", "1000001", "concurrent_requests"),
        ("maxConcurrentRequests", "1000001", "concurrent_requests"),
        ("threads", "1025", "threads"),
        ("micro_batching", "{micro_batch_size: 10001}", "batch_size"),
        ("micro_batching", "{parallelism: {preprocess: 1025}}", "threads"),
        ("autoscaling", "{target_ongoing_requests: 1.0e+300}", "autoscaling_target"),
        ("autoscaling", "{upscale_delay_s: 1.0e+300}", "timeout_s"),
        ("engine", "{num_blocks: 100000001}", "cache_tokens"),
        ("batchSize", "18446744073709551615", "batch_size"),
        ("batchSize", "1.0e+308", "batch_size"),
        ("minWorkers", ".inf", "workers"),
        ("minWorkers", ".nan", "workers"),
        ("minWorkers", "-.inf", "workers"),
    ],
)
def test_an_archives_number_beyond_its_limit_is_refused(key: str, value: str, setting: str) -> None:
    with pytest.raises(LimitExceeded) as caught:
        build(f"{key}: {value}")
    assert (caught.value.place, caught.value.setting) == ("m.mar/model-config.yaml", setting)
    assert f"limits.{setting}" in str(caught.value)


def test_the_product_of_the_parallel_degrees_has_the_same_limit() -> None:
    assert build("tensor_parallel: 32\npipeline_parallel: 32\nnum_gpus: 1").ranks == 1024
    with pytest.raises(LimitExceeded):
        build("tensor_parallel: 64\npipeline_parallel: 32\nnum_gpus: 1")


def test_a_number_is_refused_also_where_another_source_has_precedence() -> None:
    with pytest.raises(LimitExceeded, match="the registration: initial_workers is 5000"):
        build("minWorkers: 2", initial_workers=5000)
    with pytest.raises(LimitExceeded, match=r"m.mar/model-config.yaml: batchSize is 99999"):
        build("batchSize: 99999", batch_size=4)


@pytest.mark.parametrize("value", ["'7'", "[7]", "null", "{a: 1}", "true", "4.5", "''", "abc", "-3"])
@pytest.mark.parametrize(
    "key", ["minWorkers", "batchSize", "jobQueueSize", "maxBatchDelay", "maxNumSequence"]
)
def test_what_is_no_number_of_torchserves_has_no_effect(key: str, value: str) -> None:
    one = build(f"{key}: {value}")
    assert one.min_workers <= 1 and one.batch_size == 1 and one.job_queue_size == 100


@pytest.mark.parametrize("value", ["'7'", "[7]", "null", "{a: 1}", "true", "''", "abc", "-3", ".nan"])
@pytest.mark.parametrize("key", ["num_cpus", "tensor_parallel", "max_ongoing_requests", "threads"])
def test_what_is_no_number_of_ours_is_refused(key: str, value: str) -> None:
    with pytest.raises(BadRequest):
        build(f"torchrelay: {{{key}: {value}}}")


def test_the_keys_of_the_author_have_no_limit() -> None:
    assert build("handler: {max_workers: 5000000, batch_size: 1.0e+300}\ninference: 10000000").batch_size == 1


def test_a_setting_raises_a_limit() -> None:
    assert build("minWorkers: 2000", {"limits": {"workers": 2000}}).min_workers == 2000
    with pytest.raises(ConfigurationError, match="workers is a number above 0"):
        load({"limits": {"workers": 0}})


@pytest.mark.parametrize(
    "settings",
    [
        {"control": {"models": {"m": {"1.0": {"min_workers": 1001}}}}},
        {"control": {"models": {"m": {"1.0": {"batch_size": 10**30}}}}},
        {"control": {"traffic": {"m": {"shadow": {"version": "2", "timeout_s": 1e300}}}}},
        {"control": {"reconcile_period": -1}},
        {"control": {"reconcile_period": math.nan}},
        {"runtime": {"default_workers_per_model": 1001}},
        {"runtime": {"job_queue_size": 100_001}},
        {"runtime": {"num_cpus": math.inf}},
        {"runtime": {"default_response_timeout": 10**9}},
        {"store": {"max_ratio": math.nan}},
        {"inference": {"max_request_size": 10**30}},
        {"async_predictions": {"retention_s": math.inf}},
    ],
)
def test_a_setting_beyond_its_limit_stops_the_start(settings: dict) -> None:
    with pytest.raises(ConfigurationError):
        load(settings)


def test_a_workflow_has_the_same_limits() -> None:
    document = {"steps": {"a": {"model": "m", "timeout_s": 1e300}}, "name": "wf"}
    with pytest.raises(LimitExceeded, match=r"steps\.a\.timeout_s"):
        build_workflow_spec(Registration("wf.war"), workflow_graph.read(document), Settings())


class RefusingApi:
    """A control plane that nothing may reach."""

    def __getattr__(self, name: str) -> Any:
        async def refuse(*args: object) -> None:
            raise AssertionError(f"{name} was called")

        return refuse


@pytest.mark.parametrize("value", [1_000_001, 2**70, math.nan, math.inf, 1e308, "8", [8]])
@pytest.mark.parametrize("name", ["batch_size", "initial_workers", "response_timeout"])
def test_a_registration_is_refused_before_anything_is_fetched(name: str, value: Any) -> None:
    control = ControlPlane(RefusingApi(), Settings())  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match=name):
        asyncio.run(control.register(Registration("m.mar", **{name: value})))


@pytest.mark.parametrize("document", [{"to": "2", "bake_s": 1e9}, {"to": "2", "min_calls": 10**12}])
def test_a_rollout_is_refused(document: dict) -> None:
    control = ControlPlane(RefusingApi(), Settings())  # type: ignore[arg-type]
    with pytest.raises(LimitExceeded):
        asyncio.run(control.start_rollout("m", document))


def test_an_experiment_has_a_bounded_number_of_arms_and_metrics() -> None:
    control = ControlPlane(RefusingApi(), Settings())  # type: ignore[arg-type]
    arms = {f"a{i}": {"version": "1", "weight": 10} for i in range(1000)}
    document = {"name": "e", "arms": arms, "metrics": [{"name": "l"}], "baseline": "a0"}
    with pytest.raises(BadRequest, match="arms are 1000, and at most 100"):
        asyncio.run(control.start_experiment("m", document))
    arms = {f"a{i}": {"version": "1", "weight": 5000} for i in range(2)}
    metrics = [{"name": f"l{i}"} for i in range(101)]
    document = {"name": "e", "arms": arms, "metrics": metrics, "baseline": "a0"}
    with pytest.raises(BadRequest, match="metrics are 101, and at most 100"):
        asyncio.run(control.start_experiment("m", document))


def test_an_integer_of_any_size_is_described() -> None:
    with pytest.raises(LimitExceeded, match="a number of 33220 bits"):
        limits.check({"batchSize": 10**10_000}, Limits(), "here")


# Numbers that their own module bounds, or that cost nothing however large they are.
_BOUNDED_ELSEWHERE = {
    "workers",
    "profile",
    "raw",
    "steps",
    "error_rate",
    "p99",
    "non_finite",
    "empty",
    "out_of_memory",
    "percent",
    "keep",
    "parallel",
    "retries",
    "versions",
    "allocation",
    "target_value",  # a divisor, in the unit of its query
}


def numbers_of(kind: Any) -> Iterator[str]:
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if any(part in (int, float) for part in parts_of(hints[field.name])):
            yield field.name


def parts_of(annotation: Any) -> Iterator[Any]:
    yield annotation
    if get_origin(annotation) in (types.UnionType, tuple) or get_args(annotation):
        for part in get_args(annotation):
            yield from parts_of(part)


@pytest.mark.parametrize(
    "kind",
    [
        Registration,
        ModelConfig,
        VersionSettings,
        Autoscaling,
        RolloutPlan,
        Guardrails,
        ShadowPolicy,
        TrafficPolicy,
        WorkflowModel,
        workflow_graph.WorkflowStep,
        workflow_graph.WorkflowSource,
    ],
)
def test_every_number_has_a_limit(kind: Any) -> None:
    free = [name for name in numbers_of(kind) if not limits.has_limit(name)]
    assert set(free) <= _BOUNDED_ELSEWHERE, free
