"""The application that ``serve run configs/app.yaml`` builds."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from serve_app.deployments.options import server_app
from serve_app.settings import load

HOME = "TORCHRELAY_HOME"  # where relative paths of the settings start; the working directory when unset


def build(args: dict[str, Any]) -> Any:
    """Ray Serve's builder: the ``args`` of configs/app.yaml in, the application out."""
    settings = load(args, "the args of configs/app.yaml")
    if not settings.home:
        settings = dataclasses.replace(settings, home=os.environ.get(HOME) or os.getcwd())
    return server_app(settings)
