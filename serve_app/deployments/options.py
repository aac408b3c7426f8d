"""How each deployment is asked for: names, options, and the pinned code version."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import warnings
from collections.abc import Mapping
from typing import Any

from serve_app import __version__
from serve_app.autoscaling import whole
from serve_app.settings import Settings
from serve_app.types import ModelSpec

SERVER = "torchrelay"  # the application that holds the gateway and Management
GATEWAY = "Gateway"
MANAGEMENT = "Management"

# What a running replica takes over without a restart; it travels in user_config.
TUNABLE = ("batch_size", "max_batch_delay", "response_timeout", "client_timeout", "job_queue_size", "retries")
# What no replica ever sees.
_OUTSIDE = (
    "min_workers",
    "max_workers",
    "autoscaling",
    "url",
    "archive",
    "loaded_at_startup",
    "max_retry_timeout",
    "max_concurrent_requests",  # the table says it to everybody
    "graph",
)
# Settings that only Management and the gateway read: another key must not restart every model.
_MANAGEMENTS = ("auth", "management", "grpc")

# Seconds between what a replica, or a handle with calls that wait, tells the autoscaler. Ray's 10 are as long as we
# look back. (Ray means to read it from the environment one day and warns; as of 2.60 it reads it here alone.)
_SAYS_EVERY = 1.0
_POLICIES = {"requests": "Requests", "latency": "Latency"}

_LEAST = 0.001  # of a CPU: a bundle cannot be empty

HEAD = "node:__internal_head__"  # the resource that Ray gives the head node

# The doors write the access log themselves, off the event loop: Ray's stalls it for 17 ms every 1,000 lines.
QUIET = {"enable_access_log": False}

# Parked requests of a handle are dispatched by retries with back-off; Ray's half a second starves a deep queue.
ROUTER = {"initial_backoff_s": 0.005, "max_backoff_s": 0.02}


def tunables(spec: ModelSpec) -> dict[str, Any]:
    """The part of a spec that a running replica takes over in place."""
    return {name: getattr(spec, name) for name in TUNABLE}


def code_version(spec: ModelSpec, settings: Settings) -> str:
    """The digest of everything that only a new replica can take over.

    Ray Serve restarts every replica at every redeploy unless the version is pinned; with the version
    pinned it does not look at init arguments, so all of them are in here.
    """
    fields = {k: v for k, v in dataclasses.asdict(spec).items() if k not in TUNABLE + _OUTSIDE}
    rooms = {room: values for room, values in dataclasses.asdict(settings).items() if room not in _MANAGEMENTS}
    everything = [__version__, fields, rooms]
    return hashlib.sha256(json.dumps(everything, sort_keys=True, default=str).encode()).hexdigest()[:16]


def user_config(spec: ModelSpec, settings: Settings) -> dict[str, Any]:
    """What marks an application as ours, and says exactly what it runs."""
    scaling = spec.scaling
    period = {"look_back_period_s": scaling.look_back_period_s} if scaling is not None else {}
    return {SERVER: tunables(spec), "code": code_version(spec, settings), **period}


def autoscaling(spec: ModelSpec, before: bool) -> dict[str, Any] | None:
    """What Ray Serve's autoscaler is told of a version; None where it has nothing to do with it.

    A version that autoscaling held ``before`` stays with it, between two equal bounds: a replica that is told that
    it is off would report an error every second (Ray 2.60). It names no number to begin with, so that a redeploy
    keeps the replicas that there are.
    """
    scaling = spec.scaling
    if scaling is None:
        if not before:
            return None
        scaling = whole(spec.autoscaling, spec.batch_size)
    targets = {"target_p95_ms": scaling.target_p95_ms} if scaling.policy == "latency" else {}
    return {
        "min_replicas": spec.min_workers,
        "max_replicas": spec.max_workers,
        "target_ongoing_requests": scaling.target_ongoing_requests,
        "upscale_delay_s": scaling.upscale_delay_s,
        "downscale_delay_s": scaling.downscale_delay_s,
        "downscale_to_zero_delay_s": scaling.downscale_to_zero_delay_s,
        "look_back_period_s": scaling.look_back_period_s,
        "metrics_interval_s": _SAYS_EVERY,
        "policy": {
            "policy_function": f"serve_app.deployments.scaling:{_POLICIES[scaling.policy]}",
            "policy_kwargs": targets,
        },
    }


def ongoing(spec: ModelSpec) -> int:
    """How many requests a replica holds: its queue, two batches, and a few that are being refused."""
    return spec.max_ongoing_requests or spec.job_queue_size + 2 * spec.batch_size + 32


def grace(spec: ModelSpec) -> float:
    """Seconds in which a replica that stops may finish what it has: any call, where replicas leave by themselves."""
    return max(10.0, spec.response_timeout + 5.0) if spec.scaling is not None else 10.0


def placement(spec: ModelSpec) -> dict[str, Any]:
    """Where the ranks of a sharded version's replica go: a bundle each, the replica itself into the first."""
    if spec.ranks == 1:
        return {}
    claims = {"CPU": spec.num_cpus, "GPU": spec.num_gpus}
    bundle = {kind: amount for kind, amount in claims.items() if amount} or {"CPU": _LEAST}
    return {
        "placement_group_bundles": [bundle] * spec.ranks,
        "placement_group_strategy": spec.placement_strategy,
    }


# What all of our deployments have in common: they are looked at often, and stop soon.
_COMMON: dict[str, Any] = {
    "health_check_period_s": 2,
    "health_check_timeout_s": 10,
    "graceful_shutdown_timeout_s": 10,
    "graceful_shutdown_wait_loop_s": 0.5,
    "request_router_config": ROUTER,
    "logging_config": QUIET,
}


def model_app(
    spec: ModelSpec, settings: Settings, scaling: Mapping[str, Any] | None, extra: dict[str, Any]
) -> Any:
    """The Serve application that runs one version of one model; ``extra`` goes into its user_config.

    ``scaling`` is what ``autoscaling`` made of the spec.
    """
    from serve_app.deployments.model import ModelReplica

    number = {"num_replicas": spec.min_workers} if scaling is None else {"autoscaling_config": dict(scaling)}
    common = {**_COMMON, "graceful_shutdown_timeout_s": grace(spec)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of metrics_interval_s, which nothing replaces yet
        deployment = ModelReplica.options(
            **common,
            **number,
            name=spec.ref.app,
            max_ongoing_requests=ongoing(spec),
            max_queued_requests=-1,  # the batcher's own bound answers first, in the caller's dialect
            max_surge_percent=100,  # new before old: a roll leaves no hole
            max_constructor_retry_count=3,
            user_config={**user_config(spec, settings), **extra},
            ray_actor_options={"num_cpus": spec.num_cpus, "num_gpus": spec.num_gpus},
            **placement(spec),
        )
    deployment._version = code_version(spec, settings)
    return deployment.bind(spec, settings)


def server_app(settings: Settings) -> Any:
    """The Serve application of the gateway and Management."""
    from serve_app.deployments.gateway import Gateway
    from serve_app.deployments.management import Management

    management = Management.options(
        **{**_COMMON, "graceful_shutdown_timeout_s": 3},
        name=MANAGEMENT,
        num_replicas=1,
        max_ongoing_requests=100_000,  # every reader holds one long poll
        max_constructor_retry_count=2,
        ray_actor_options={"num_cpus": 0, "resources": {HEAD: 0.001}},  # its database, volume and ports are there
    )
    gateway = Gateway.options(
        **_COMMON,
        name=GATEWAY,
        num_replicas=settings.inference.gateways,
        max_replicas_per_node=1,
        max_ongoing_requests=10_000,
        max_surge_percent=100,
        ray_actor_options={"num_cpus": 0},
    )
    return gateway.bind(settings, management.bind(settings))
