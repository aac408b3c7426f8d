"""A server in a container of the image, for programs that expect a ``Server``."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from serve_app.client import Client
from tests.support.container_images import ROOT, Container, Images
from tests.support.server import Server

_USER = 1000  # of the image
_HOME = "/srv/torchrelay"
# The rights of cluster/README.md; the server listens on the machine's loopback.
_OPTIONS = (
    *("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
    *("--tmpfs", "/tmp:exec", "--volume", "/home/torchrelay", "--shm-size", "2g", "--memory", "8g"),
)


class ContainerServer(Server):
    """A server whose home is the volume of a container."""

    def __init__(self, home: Path, image: str, **settings: Any) -> None:
        self._images = Images()
        self._image = image
        self.home = home
        self.store = home / "model_store"
        document = yaml.safe_load((ROOT / "configs/container.yaml").read_text())
        document["http_options"]["host"] = "127.0.0.1"
        args = document["applications"][0]["args"]
        args["management"] |= {"host": "127.0.0.1", "metrics_host": "127.0.0.1"}
        args["grpc"] |= {"host": "127.0.0.1", "management_host": "127.0.0.1"}
        args |= {"auth": {"mode": "off"}, **settings}
        for folder in (self.store, home / "state"):
            folder.mkdir()
        (home / "app.yaml").write_text(yaml.safe_dump(document))
        for path in (home, *home.rglob("*")):
            os.chown(path, _USER, _USER)
        self._container: Container | None = None
        self.process = _ContainerProcess(self)  # type: ignore[assignment]
        self.client = Client(self.process.inference, self.process.management, timeout=60)
        self.http = httpx.Client(base_url=self.process.inference, timeout=60)
        self.management = httpx.Client(base_url=self.process.management, timeout=120)

    @property
    def container(self) -> Container:
        assert self._container is not None, "start() comes first"
        return self._container

    def start(self, timeout: float = 300.0) -> None:
        command = ("torchrelay", "start", "--foreground", f"{_HOME}/app.yaml")
        volume = ("--volume", f"{self.home}:{_HOME}")
        self._container = Container(
            self._images, self._image, *_OPTIONS, *volume, command=command, network="host"
        )
        deadline = time.monotonic() + timeout
        while not self.client.ready():
            assert self.container.state["Running"] and time.monotonic() < deadline, self.log()
            time.sleep(0.2)

    def stop(self) -> None:
        if self._container is not None:
            self._container.stop()
            self._container.remove()
            self._container = None

    def log(self) -> str:
        return self.container.logs()

    def register(self, archive: Path, **parameters: Any) -> httpx.Response:
        target = self.store / archive.name
        if target != archive:
            target.write_bytes(archive.read_bytes())
        os.chown(target, _USER, _USER)
        return super().register(target, **parameters)


class _ContainerProcess:
    """The addresses and the processes of a server in a container."""

    inference = "http://127.0.0.1:8080"
    management = "http://127.0.0.1:8081"
    metrics = "http://127.0.0.1:8082/metrics"

    def __init__(self, server: ContainerServer) -> None:
        self._server = server

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the container."""
        with contextlib.suppress(psutil.Error):
            first = psutil.Process(self._server.container.state["Pid"])
            return [first, *first.children(recursive=True)]
        return []
