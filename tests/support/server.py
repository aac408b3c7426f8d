"""A real server in processes of its own."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from serve_app.cli.server_process import ServerProcess, read_env
from serve_app.client import Client
from serve_app.control.cluster_metrics import COLLECT_TIMEOUT_S
from tests.support.archives import make_archive
from tests.support.load import Load
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
POOL_MIB = 200  # of the shared server's pool ``p``


class Server:
    """A real server with its own ports, model store and state."""

    prometheus_port = 0  # of the Prometheus that it queries, where it has one

    def __init__(self, home: Path, env: dict[str, str] | None = None, **settings: Any) -> None:
        """Store the settings; by default model URLs may be files, and packages are those in ``wheels``."""
        settings.setdefault("store", {"allowed_urls": ["file://.*", "http(s)?://.*"]})
        # A machine that stalls for longer than the default would leave changes unacknowledged.
        settings["control"] = {"acknowledge_timeout": 60, **settings.get("control", {})}
        wheels = {"pip_index_url": "none", "pip_find_links": [str(home / "wheels")]}
        settings["runtime"] = {**wheels, **settings.get("runtime", {})}
        self.home = home
        self.store = home / "model_store"
        self.store.mkdir()
        document = yaml.safe_load((ROOT / "configs/app.yaml").read_text())
        document["http_options"]["port"] = free_port()
        document["applications"][0]["args"] = {
            "home": str(home),
            "management": {"port": free_port(), "metrics_port": free_port()},
            "grpc": {"port": free_port(), "management_port": free_port()},
            **settings,
        }
        self._config = home / "app.yaml"
        self._config.write_text(yaml.safe_dump(document))
        variables = {"RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": free_port(), **(env or {})}
        lines = [f"{name}={value}" for name, value in variables.items()]
        self._env = home / "serve.env"
        self._env.write_text((ROOT / "configs/serve.env").read_text() + "\n".join(lines) + "\n")
        self.process = ServerProcess(self._config, self._env)
        self.client = Client(self.process.inference, self.process.management, timeout=60)
        self.http = httpx.Client(base_url=self.process.inference, timeout=60)
        self.management = httpx.Client(base_url=self.process.management, timeout=120)

    @property
    def url(self) -> str:
        return self.process.inference

    @property
    def grpc_port(self) -> int:
        document = yaml.safe_load(self._config.read_text())
        port: int = document["applications"][0]["args"]["grpc"]["port"]
        return port

    def ray_port(self, name: str) -> int:
        return int(read_env(self._env)[name])

    def start(self, timeout: float = 300.0) -> None:
        self.process.start()
        deadline = time.monotonic() + timeout
        while not self.client.ready():
            assert self.process.exit_code() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.1)

    def stop(self) -> None:
        self.process.stop()

    def close(self) -> None:
        self.stop()
        for client in (self.client, self.http, self.management):
            client.close()

    def log(self) -> str:
        return self.process.log.read_text(errors="replace")[-5000:]

    def wait(self, condition: Callable[[], Any], timeout: float = 120.0, description: str = "") -> Any:
        """Wait until ``condition()`` is true, and return its result."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                if result := condition():
                    return result
            except (httpx.HTTPError, json.JSONDecodeError, KeyError):
                pass
            assert time.monotonic() < deadline, f"not within {timeout} s: {description}\n{self.log()}"
            time.sleep(0.05)

    def register(self, archive: Path, **parameters: Any) -> httpx.Response:
        """Copy an archive into the model store and register it."""
        target = self.store / archive.name
        if target != archive:
            target.write_bytes(archive.read_bytes())
        requested = {"url": archive.name, "initial_workers": 1, **parameters}
        return self.management.post("/models", params=requested)

    def workers(self, model: str, version: str | None = None) -> list[dict[str, Any]]:
        path = f"/models/{model}" + (f"/{version}" if version else "")
        return self.management.get(path).json()[0]["workers"]

    def pids(self, model: str, version: str | None = None) -> list[int]:
        return [w["pid"] for w in self.workers(model, version) if w["status"] == "READY"]

    def actors(self, name: str) -> list[psutil.Process]:
        """Return the Ray workers of this server whose title contains ``name``."""
        found = []
        for process in self.process.processes():
            try:
                if name in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples with ``labels``."""
        total = 0.0
        for line in self.read_metrics().splitlines():
            head, _, value = line.rpartition(" ")
            if head.split("{")[0] == name and all(f'{k}="{v}"' in head for k, v in labels.items()):
                total += float(value)
        return total

    def read_metrics(self, **parameters: Any) -> str:
        """Return the metrics page, if possible one for which no process was too slow.

        Management waits for the samples of each process for a limited time. A page that took longer may
        have an earlier sample.
        """
        deadline = time.monotonic() + 30
        while True:
            began = time.monotonic()
            page = httpx.get(self.process.metrics, params=parameters or None, timeout=60).text
            ended = time.monotonic()
            if ended - began < COLLECT_TIMEOUT_S or ended > deadline:
                return page


def check_rows_outlive_their_replica(server: Server, folder: Path) -> None:
    """Kill one of two busy replicas: the gateway answers every row all the same."""
    handler = """
import os, time
def handle(data, context):
    if data is None:
        return None
    time.sleep(0.3)
    return [str(os.getpid())] * len(data)
"""
    assert server.register(make_archive(folder, "pair", handler), initial_workers=2).status_code == 200
    victim = server.pids("pair")[0]
    with Load(f"{server.url}/%70redictions/pair", connections=8) as load:
        server.wait(lambda: len(load.answers) == 2, description="answers of both replicas")
        os.kill(victim, signal.SIGKILL)
        server.wait(lambda: len(load.answers) >= 3, description="an answer of the replacement")
    assert not load.failed, load.failed
    server.management.delete("/models/pair")
