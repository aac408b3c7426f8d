"""What an idle server consists of, and what it does."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
import ray
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

from tests.support.archives import ECHO, make_archive
from tests.support.server import Server

pytestmark = pytest.mark.cluster


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
            assert "fork_server" in _parents(process), title


def test_the_controller_of_an_idle_server_runs_few_rounds(
    server: Server, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    assert server.register(make_archive(tmp_path, "rests", ECHO)).status_code == 200
    supervisor = min(server.process.processes(), key=lambda process: process.create_time())
    ray.init(supervisor.cmdline()[4], namespace=SERVE_NAMESPACE, log_to_driver=False)
    request.addfinalizer(ray.shutdown)
    controller = ray.get_actor(SERVE_CONTROLLER_NAME)

    def rounds() -> int:
        return int(ray.get(controller.get_health_metrics.remote())["num_control_loops"])

    def rounds_a_second() -> float:
        before, began = rounds(), time.monotonic()
        time.sleep(5.0)
        return (rounds() - before) / (time.monotonic() - began)

    server.wait(lambda: rounds_a_second() < 2.5, timeout=60, description="a steady controller")
