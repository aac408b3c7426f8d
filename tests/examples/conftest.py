"""Runs an example's files against the real server, and leaves nothing of it there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.server import Server

EXAMPLES = Path(__file__).parents[2] / "examples"
Run = Callable[..., str]


@pytest.fixture
def run(server: Server) -> Run:
    """Run a file of the examples against this server; return its output."""

    def run(file: str, *arguments: str) -> str:
        addresses = {
            "TORCHRELAY_INFERENCE": server.process.inference,
            "TORCHRELAY_MANAGEMENT": server.process.management,
            "TORCHRELAY_METRICS": server.process.metrics.removesuffix("/metrics"),
        }
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / file), *arguments],
            env={**os.environ, **addresses},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture
def nothing_stays(server: Server) -> Iterator[None]:
    """Unregisters what a test has registered, and takes its archives out of the store."""
    models = {model["modelName"] for model in server.client.models()}
    archives = set(server.store.iterdir())
    yield
    for model in {model["modelName"] for model in server.client.models()} - models:
        for version in sorted(server.client.describe(model), key=lambda v: v["modelVersion"], reverse=True):
            server.management.delete(f"/models/{model}/{version['modelVersion']}")
        server.management.delete(f"/models/{model}")
    for archive in set(server.store.iterdir()) - archives:
        shutil.rmtree(archive) if archive.is_dir() else archive.unlink()
