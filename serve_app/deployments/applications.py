"""Factories of the Serve applications: one for each version, one for the gateway and Management."""

from __future__ import annotations

import os
import warnings
from functools import cache
from typing import Any

from ray import serve

from serve_app.control.reconciler import ATTEMPT, MEMORY, DeployAction
from serve_app.deployments import options
from serve_app.deployments.management_client import MANAGEMENT
from serve_app.deployments.options import COMMON_OPTIONS
from serve_app.deployments.ray_internals.fork_worker import MODEL_ENVIRONMENT, PRELOAD
from serve_app.deployments.serving_process.pool_host import PoolHost
from serve_app.deployments.serving_process.replica import ModelReplica
from serve_app.domain.model import ModelSpec
from serve_app.domain.pool import POOLS
from serve_app.net.fork_client import SOCKET
from serve_app.settings import Settings

GATEWAY = "Gateway"
HEAD_RESOURCE = "node:__internal_head__"  # which Ray gives the head node


def model_application(settings: Settings, action: DeployAction) -> Any:
    """Return the Serve application of one version of one model, or of a pool, as ``action`` has it."""
    spec, scaling = action.desired.spec, action.scaling
    replica = _http_deployment(PoolHost if spec.name == POOLS else ModelReplica)
    replicas: dict[str, Any] = {"num_replicas": action.desired.min_replicas}
    if scaling is not None:
        replicas = {"autoscaling_config": dict(scaling)}
    common = {**COMMON_OPTIONS, "graceful_shutdown_timeout_s": options.drain_timeout(spec, settings)}
    with warnings.catch_warnings():
        # Ray deprecates metrics_interval_s, which nothing replaces yet.
        warnings.simplefilter("ignore", DeprecationWarning)
        deployment = replica.options(
            **common,
            **replicas,
            name=spec.ref.app,
            max_ongoing_requests=options.max_ongoing_requests(spec),
            max_queued_requests=-1,  # the batcher's own limit applies first, with the protocol's own error
            max_surge_percent=100,  # new replicas start before old ones stop: an update refuses no request
            max_constructor_retry_count=3,
            user_config={
                **options.user_config(settings, action.desired),
                ATTEMPT: action.attempt,
                MEMORY: action.memory,
            },
            ray_actor_options=_actor_options(spec, action.memory),
            **options.placement_options(spec, action.memory),
        )
    deployment._version = options.code_version(spec, settings)
    return deployment.bind(spec, settings.without_secrets())


@cache
def _http_deployment(serving_class: Any) -> Any:
    """Return the deployment of a class that serves HTTP itself.

    A decorator would replace the class by the deployment. Serve would then store the class by value, 24 KiB,
    with each start of a replica and in each checkpoint of the controller.
    """
    return serve.deployment(serve.ingress()(serving_class))


def _actor_options(spec: ModelSpec, memory: int) -> dict[str, Any]:
    """Return the options of a replica's actor; the fork server, where there is one, starts it with torch.

    A version with packages of its own may need another release of torch or of another preloaded package.
    """
    actor_options = options.actor_resources(spec, memory)
    preload = {PRELOAD: "none"} if spec.requirements or SOCKET not in os.environ else {}
    actor_options["runtime_env"] = {"env_vars": {**MODEL_ENVIRONMENT, **preload}}
    return actor_options


def _gateway_options(settings: Settings) -> dict[str, Any]:
    """Return the options of a gateway's actor; a label selector can keep it off the head."""
    selector = dict(settings.inference.gateway_label_selector)
    return {"num_cpus": 0, **({"label_selector": selector} if selector else {})}


def server_application(gateway: Any, management: Any, settings: Settings) -> Any:
    """Return the Serve application of the classes ``gateway`` and ``management``."""
    management = serve.deployment(management).options(
        **{**COMMON_OPTIONS, "graceful_shutdown_timeout_s": 3},
        name=MANAGEMENT,
        num_replicas=1,
        max_ongoing_requests=100_000,  # every reader holds one long poll
        max_constructor_retry_count=2,
        # The database, the volume and the ports are on the head node.
        ray_actor_options={"num_cpus": 0, "resources": {HEAD_RESOURCE: 0.001}},
    )
    gateway = _http_deployment(gateway).options(
        **COMMON_OPTIONS,
        name=GATEWAY,
        num_replicas=settings.inference.gateways,
        max_replicas_per_node=1,
        max_ongoing_requests=10_000,
        max_surge_percent=100,
        ray_actor_options=_gateway_options(settings),
    )
    return gateway.bind(settings, management.bind(settings))
