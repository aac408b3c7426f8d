"""The program that deploys a configuration on a running Ray, or shuts Ray Serve down.

``python -m serve_app.deployments.ray_internals.deploy ADDRESS [CONFIG]``: without a configuration it shuts
down. It deploys as `serve run` does, but builds the application in its own process: Ray's task needs a
further worker, 2 s.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ray
import yaml
from ray import serve
from ray._common.utils import import_attr
from ray.serve._private import api
from ray.serve.config import gRPCOptions
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ServeDeploySchema

_KEYS = {"name", "route_prefix", "import_path", "args"}  # of an application that is built here


def main() -> None:
    """Deploy or shut down, as the arguments request."""
    address, *config = sys.argv[1:]
    ray.init(address, namespace="serve", log_to_driver=False)
    if config:
        deploy(yaml.safe_load(Path(config[0]).read_text()))
    else:
        serve.shutdown()


def deploy(document: dict[str, Any]) -> None:
    """Start Ray Serve and deploy the applications of a configuration; do not wait until they run."""
    config = ServeDeploySchema.model_validate(document)
    try:
        client = api._get_global_client()  # restored with Ray's state
    except RayServeException:
        client = None
    if client is None:
        # As `serve.start`, which waits for the proxies, 1.5 s: here they start beside the application.
        api._create_controller_and_proxy_refs(
            config.http_options.model_dump(),
            gRPCOptions(**config.grpc_options.model_dump()),
            None,
            None,
            api._coerce_controller_options(config.controller_options),
            config.proxy_location,
        )
        client = api._get_global_client()
    applications = document["applications"]
    if len(applications) > 1 or not applications[0].keys() <= _KEYS:
        client.deploy_apps(config)
        return
    (application,) = applications
    built = api.call_user_app_builder_with_args_if_necessary(
        import_attr(application["import_path"]), application.get("args") or {}
    )
    target = serve.RunTarget(built, application["name"], application.get("route_prefix", "/"))
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


if __name__ == "__main__":
    main()
