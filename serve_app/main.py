"""The builder of the Serve application for ``serve run configs/app.yaml``."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from serve_app.control.async_predictions.blob_store import parse_location
from serve_app.deployments.applications import server_application
from serve_app.deployments.gateway import Gateway
from serve_app.deployments.management import Management
from serve_app.settings import HOME, load
from serve_app.telemetry import torchserve

LOG_DIR_ENV = "LOG_LOCATION"  # TorchServe's variable for the folder of the logs
METRICS_DIR_ENV = "METRICS_LOCATION"  # and for that of the metrics' logs


def build(args: dict[str, Any]) -> Any:
    """Build the Serve application from the ``args`` of configs/app.yaml."""
    settings = load(args, "the args of configs/app.yaml")
    if not settings.home:
        settings = dataclasses.replace(settings, home=os.environ.get(HOME) or os.getcwd())
    telemetry = dataclasses.replace(
        settings.telemetry,
        log_dir=os.environ.get(LOG_DIR_ENV) or settings.telemetry.log_dir,
        metrics_dir=os.environ.get(METRICS_DIR_ENV) or settings.telemetry.metrics_dir,
    )
    settings = dataclasses.replace(settings, telemetry=telemetry)
    # Errors in these settings stop the start here, where the operator sees them.
    torchserve.load_catalog(settings)
    parse_location(settings)
    return server_application(Gateway, Management, settings)
