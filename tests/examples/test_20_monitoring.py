"""The Prometheus of the example scrapes a real server and has results; errors name the remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import prometheus_server
from tests.support.archives import ECHO, make_archive
from tests.support.load import Load
from tests.support.ports import free_port
from tests.support.server import ROOT, Server

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]

EXAMPLE = ROOT / "examples/20_monitoring/run.py"


@pytest.mark.usefixtures("nothing_stays")
@pytest.mark.skipif(not prometheus_server.installed, reason=prometheus_server.MISSING)
def test_20_monitoring(server: Server, run, tmp_path: Path) -> None:
    assert server.register(make_archive(tmp_path, "watched", ECHO)).status_code == 200
    port = free_port()
    with Load(f"{server.url}/predictions/watched", connections=1):
        printed = run("20_monitoring/run.py", "--once", "--interval", "1", "--port", str(port))
    assert f"Prometheus scrapes {server.process.metrics} every 1 s: http://127.0.0.1:{port}" in printed
    sections = {section.partition(":")[0]: section.splitlines()[2:] for section in printed.split("\n\n")[1:]}
    assert "  model=watched, version=1.0: 1" in sections["running replicas"]
    [rate] = [line for line in sections["requests per second"] if "model=watched, status=ok" in line]
    assert float(rate.rpartition(" ")[2]) > 1
    [latency] = [line for line in sections["p99 latency in seconds"] if "model=watched" in line]
    assert 0 < float(latency.rpartition(" ")[2]) < 60


def fail(**env: str) -> str:
    """Run the example, which must fail, and return its error."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], env={**os.environ, **env}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    return done.stderr


def test_missing_prometheus_is_named_with_its_package(tmp_path: Path) -> None:
    assert "install the package `prometheus`" in fail(PATH=str(tmp_path))


def test_a_server_that_does_not_run_is_named(tmp_path: Path) -> None:
    program = tmp_path / "prometheus"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    address = f"http://127.0.0.1:{free_port()}"
    error = fail(PATH=str(tmp_path), TORCHRELAY_METRICS=address)
    assert f"{address}/metrics does not answer" in error and "make run" in error
