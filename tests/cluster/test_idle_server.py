"""What an idle server consists of, and what it does."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

from tests.support.archives import ECHO, make_archive
from tests.support.server import Server

pytestmark = pytest.mark.cluster

# Waits for five seconds with at most twelve rounds; Ray's own interval has fifty.
COUNT_ROUNDS = """
import sys, time, ray
address, namespace, controller = sys.argv[1:]
ray.init(address, namespace=namespace, log_to_driver=False)
controller = ray.get_actor(controller)
def rounds():
    return ray.get(controller.get_health_metrics.remote())["num_control_loops"]
while True:
    before = rounds()
    time.sleep(5)
    if rounds() - before <= 12:
        break
"""


def _parents(process: psutil.Process) -> str:
    return " ".join(" ".join(parent.cmdline()) for parent in process.parents())


def test_agents_and_proxies_that_nothing_uses_do_not_run(server: Server) -> None:
    assert not server.actors("DashboardAgent")
    assert not server.actors("ray::ProxyActor")
    [manager] = server.actors("ray::HAProxyManager")
    fallback = server.ray_port("RAY_SERVE_FALLBACK_PROXY_HTTP_PORT")
    listens = {c.laddr.port for c in manager.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert fallback in listens


def test_every_process_with_ray_is_a_fork(server: Server) -> None:
    titles = ("RuntimeEnvAgent", "HAProxyManager", "ServeController", "ServeReplica")
    for title in titles:
        for process in server.actors(f"ray::{title}"):
            with contextlib.suppress(psutil.NoSuchProcess):  # a replica of an earlier test has just ended
                assert "fork_server" in _parents(process), title


def test_the_controller_of_an_idle_server_runs_few_rounds(server: Server, tmp_path: Path) -> None:
    assert server.register(make_archive(tmp_path, "rests", ECHO)).status_code == 200
    supervisor = min(server.process.processes(), key=lambda process: process.create_time())
    # Ray reads the mode of its authentication once in a process.
    command = [
        sys.executable,
        "-c",
        COUNT_ROUNDS,
        supervisor.cmdline()[4],
        SERVE_NAMESPACE,
        SERVE_CONTROLLER_NAME,
    ]
    environment = {**os.environ, "RAY_AUTH_MODE": "token"}
    subprocess.run(command, env=environment, check=True, timeout=120)
