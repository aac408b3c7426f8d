"""Options of a version's Serve deployment, computed from its spec, and its pinned code version."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from ray import cloudpickle
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
from ray.serve.config import RequestRouterConfig

from serve_app import __version__
from serve_app.control.registry import DesiredState
from serve_app.deployments.management_client import SERVER
from serve_app.domain.autoscaling import with_defaults
from serve_app.domain.model import ModelRef, ModelSpec
from serve_app.settings import Settings

# Fields that a running replica takes over without a restart; they travel in user_config.
TUNABLE_FIELDS = (
    "batch_size",
    "max_batch_delay",
    "response_timeout",
    "client_timeout",
    "job_queue_size",
    "retries",
)
# Fields that no replica reads.
_EXTERNAL_FIELDS = (
    "archive_bytes",
    "memory",
    "min_workers",
    "max_workers",
    "autoscaling",
    "url",
    "archive",
    "loaded_at_startup",
    "max_retry_timeout",
    "max_concurrent_requests",  # published in the routing table, as the next two
    "routing",
    "adapters",
    "graph",
    "isolated",
    "pin_loaded",
    "pool",  # of a version with replicas of its own; a pool's own spec has none
)
# Settings that only Management and the gateway read: a new key must not restart every model.
_MANAGEMENT_SETTINGS = ("auth", "management", "grpc", "limits", "pools")

# Seconds between two reports of a replica, or of a handle with queued requests, to the autoscaler. Ray's
# default of 10 is as long as our look-back period. Ray 2.60 warns that an environment variable will replace
# this option, but reads it only here.
_METRICS_INTERVAL_S = 1.0
_POLICY_MODULE = "serve_app.deployments.autoscaling_policies"
_POLICY_CLASSES = {"requests": "OngoingRequestsPolicy", "latency": "LatencyPolicy"}
_EQUAL_BOUNDS = "OngoingRequestsPolicy"  # any policy keeps to two equal bounds

_MIN_CPU = 0.001  # of a CPU: a placement group bundle cannot be empty

# Options of all of our deployments: frequent health checks, short shutdown.
COMMON_OPTIONS: dict[str, Any] = {
    "health_check_period_s": 2,
    "health_check_timeout_s": 10,
    "graceful_shutdown_timeout_s": 10,
    "graceful_shutdown_wait_loop_s": 0.5,
    # A handle dispatches queued requests by retries with back-off; Ray's initial 0.5 s starves a deep queue.
    # Ray stores its own router by value, 109 KiB with each start of a replica and twice in each checkpoint.
    "request_router_config": RequestRouterConfig.from_serialized_request_router_cls(
        {"initial_backoff_s": 0.005, "max_backoff_s": 0.02},
        cloudpickle.dumps(PowerOfTwoChoicesRequestRouter),
    ),
    # Ray Serve's own access log stalls the event loop for 17 ms every 1,000 lines; ours is written off it.
    "logging_config": {"enable_access_log": False},
}


def code_version(spec: ModelSpec, settings: Settings) -> str:
    """Return the digest of everything that only a new replica can take over.

    Ray Serve restarts every replica at every redeploy unless the version is pinned. With the version pinned
    it does not compare init arguments, so the digest covers all of them.
    """
    known = _code_versions.get(spec.ref)
    if known is not None and known[0] is spec and known[1] is settings:
        return known[2]
    excluded = TUNABLE_FIELDS + _EXTERNAL_FIELDS
    fields = {name: value for name, value in dataclasses.asdict(spec).items() if name not in excluded}
    sections = {
        section: values
        for section, values in dataclasses.asdict(settings).items()
        if section not in _MANAGEMENT_SETTINGS
    }
    content = json.dumps([__version__, fields, sections], sort_keys=True, default=str)
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    if len(_code_versions) >= _MAX_CODE_VERSIONS:
        _code_versions.clear()
    _code_versions[spec.ref] = (spec, settings, digest)
    return digest


# Each round of the reconcile loop needs the digest of every version, which takes 0.6 ms; specs are frozen.
_code_versions: dict[ModelRef, tuple[ModelSpec, Settings, str]] = {}
_MAX_CODE_VERSIONS = 100_000


def user_config(settings: Settings, desired: DesiredState) -> dict[str, Any]:
    """Return the user_config that marks an application as ours and identifies what it runs."""
    spec, scaling = desired.spec, desired.spec.scaling
    period = {"look_back_period_s": scaling.look_back_period_s} if scaling is not None else {}
    tunables = {name: getattr(spec, name) for name in TUNABLE_FIELDS}
    return {SERVER: tunables, "code": code_version(spec, settings), **period}


def autoscaling_config(spec: ModelSpec, was_autoscaled: bool) -> dict[str, Any] | None:
    """Return the autoscaling_config of a version; None for a version with a fixed number of replicas.

    A version that was autoscaled before keeps its autoscaling_config, with two equal bounds: a replica whose
    autoscaling is switched off reports an error every second (Ray 2.60). The config has no initial number of
    replicas, so that a redeploy keeps the present ones.
    """
    scaling = spec.scaling
    if scaling is None:
        if not was_autoscaled:
            return None
        scaling = with_defaults(spec.autoscaling, spec.batch_size)
    targets = {"target_p95_ms": scaling.target_p95_ms} if scaling.policy == "latency" else {}
    return {
        "min_replicas": spec.min_workers,
        "max_replicas": spec.max_workers,
        "target_ongoing_requests": scaling.target_ongoing_requests,
        "upscale_delay_s": scaling.upscale_delay_s,
        "downscale_delay_s": scaling.downscale_delay_s,
        "downscale_to_zero_delay_s": scaling.downscale_to_zero_delay_s,
        "look_back_period_s": scaling.look_back_period_s,
        "metrics_interval_s": _METRICS_INTERVAL_S,
        "policy": {
            "policy_function": f"{_POLICY_MODULE}:{_POLICY_CLASSES.get(scaling.policy, _EQUAL_BOUNDS)}",
            "policy_kwargs": targets,
        },
    }


def max_ongoing_requests(spec: ModelSpec) -> int:
    """Return how many requests a replica holds: its queue, two batches, and 32 that are being refused."""
    return spec.max_ongoing_requests or spec.job_queue_size + 2 * spec.batch_size + 32


def drain_timeout(spec: ModelSpec, settings: Settings) -> float:
    """Return the seconds in which a stopping replica may finish its requests.

    Autoscaling and recycling stop replicas at any moment, so there the time covers the longest allowed
    request.
    """
    stops_at_any_time = spec.scaling is not None or spec.find_recycling(settings.runtime.recycling).is_limited
    return max(10.0, spec.response_timeout + 5.0) if stops_at_any_time else 10.0


def actor_resources(spec: ModelSpec, memory: int) -> dict[str, Any]:
    """Return the resources that the actor of a replica claims; ``memory`` in bytes."""
    claims = {"num_cpus": spec.num_cpus, "num_gpus": spec.num_gpus}
    return {**claims, "memory": memory} if memory else claims


def placement_options(spec: ModelSpec, memory: int) -> dict[str, Any]:
    """Return the placement group of a sharded version: a bundle for each rank, the replica in the first."""
    if spec.ranks == 1:
        return {}
    resources = {"CPU": spec.num_cpus, "GPU": spec.num_gpus, "memory": memory}
    bundle = {kind: amount for kind, amount in resources.items() if amount} or {"CPU": _MIN_CPU}
    return {
        "placement_group_bundles": [bundle] * spec.ranks,
        "placement_group_strategy": spec.placement_strategy,
    }
