"""The application that ``serve run configs/app.yaml`` builds."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from serve_app.control.results import place_of
from serve_app.deployments.options import server_app
from serve_app.settings import load
from serve_app.telemetry import torchserve

HOME = "TORCHRELAY_HOME"  # where relative paths of the settings start; the working directory when unset
LOGS = "LOG_LOCATION"  # TorchServe's variable for the folder of the logs
METRICS = "METRICS_LOCATION"  # and for that of the metrics' logs


def build(args: dict[str, Any]) -> Any:
    """Ray Serve's builder: the ``args`` of configs/app.yaml in, the application out."""
    settings = load(args, "the args of configs/app.yaml")
    if not settings.home:
        settings = dataclasses.replace(settings, home=os.environ.get(HOME) or os.getcwd())
    if place := os.environ.get(LOGS):
        settings = dataclasses.replace(settings, telemetry=dataclasses.replace(settings.telemetry, log_dir=place))
    if place := os.environ.get(METRICS):
        settings = dataclasses.replace(settings, telemetry=dataclasses.replace(settings.telemetry, metrics_dir=place))
    # What is wrong with these ends it here, where an operator looks.
    torchserve.catalogue_of(settings)
    place_of(settings)
    return server_app(settings)
