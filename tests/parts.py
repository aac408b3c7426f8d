"""Helpers of all tests: archives made in the test, and one real server for the whole run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from serve_app.cli.server_process import ServerProcess, read_env
from serve_app.client import Client

ROOT = Path(__file__).parent.parent

# Which of the processes that run the tests this is.
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
ALLOCATED_PORTS: set[int] = set()


def free_port() -> int:
    """Return a port that is not in use, and that neither the kernel, Ray nor another call allocates."""
    while True:
        port = random.randrange(20_000 + WORKER, 29_000, WORKERS)
        with socket.socket() as probe:
            if port not in ALLOCATED_PORTS and probe.connect_ex(("127.0.0.1", port)):
                ALLOCATED_PORTS.add(port)
                return port


def make_archive(
    folder: Path,
    name: str,
    handler: str,
    version: str = "1.0",
    files: dict[str, str | bytes] | None = None,
    config: dict[str, Any] | None = None,
) -> Path:
    """Create ``name-version.mar`` in ``folder``, whose handler.py is ``handler``."""
    model = {"modelName": name, "modelVersion": version, "handler": "handler.py"}
    contents: dict[str, str | bytes] = {"handler.py": handler, **(files or {})}
    if config is not None:
        model["configFile"] = "model-config.yaml"
        contents["model-config.yaml"] = yaml.safe_dump(config)
    contents["MAR-INF/MANIFEST.json"] = json.dumps(
        {"runtime": "python", "model": model, "archiverVersion": "0.12.0"}
    )
    path = folder / f"{name}-{version}.mar"
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in contents.items():
            archive.writestr(file, content)
    return path


@contextlib.contextmanager
def serving(answer: Callable[[Any], None], version: str = "HTTP/1.0") -> Iterator[str]:
    """Run an HTTP server that answers GET and HEAD by ``answer(handler)``; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = version

        def do_GET(self) -> None:
            answer(self)

        do_HEAD = do_GET

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


ECHO = """
def handle(data, context):
    if data is None:
        return None
    return [row.get("body") or row.get("data") for row in data]
"""


def says(word: str) -> str:
    """Return the source of a handler that answers with ``word``."""
    return f"""
def handle(data, context):
    return None if data is None else [{word!r}] * len(data)
"""


class Server:
    """A real server with its own ports, model store and state."""

    def __init__(self, home: Path, env: dict[str, str] | None = None, **settings: Any) -> None:
        """Store the settings; by default model URLs may be files, and packages are those in ``wheels``."""
        settings.setdefault("store", {"allowed_urls": ["file://.*", "http(s)?://.*"]})
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
        for line in httpx.get(self.process.metrics, timeout=60).text.splitlines():
            head, _, value = line.rpartition(" ")
            if head.split("{")[0] == name and all(f'{k}="{v}"' in head for k, v in labels.items()):
                total += float(value)
        return total


class Load:
    """A closed loop over keep-alive connections in its own thread, with a count of every response."""

    def __init__(self, url: str, connections: int) -> None:
        self.url, self.connections = url, connections
        self.answers: Counter[tuple[int | str, str]] = Counter()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def failed(self) -> dict[tuple[int | str, str], int]:
        return {answer: n for answer, n in self.answers.items() if answer[0] != 200}

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=self.connections, max_keepalive_connections=self.connections)
        async with httpx.AsyncClient(limits=limits, timeout=60) as client:
            await asyncio.gather(*(self._one(client) for _ in range(self.connections)))

    async def _one(self, client: httpx.AsyncClient) -> None:
        while not self._stop.is_set():
            try:
                answer = await client.post(self.url, content=b"x")
                self.answers[answer.status_code, answer.text[:80]] += 1
            except httpx.HTTPError as error:
                self.answers[type(error).__name__, str(error)] += 1


class Trickle(Load):
    """A load of twenty requests a second: enough to notice failures, too little to disturb."""

    async def _one(self, client: httpx.AsyncClient) -> None:
        while not self._stop.is_set():
            answer = await client.post(self.url, content=b"x")
            self.answers[answer.status_code, answer.text[:80]] += 1
            await asyncio.sleep(0.05)


class Pulse:
    """A monitor of stalls of this machine: a sleep of 10 ms that took longer."""

    def __init__(self) -> None:
        self._late: list[tuple[float, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            time.sleep(0.01)
            ended = time.monotonic()
            if ended - began > 0.1:
                self._late.append((began, ended))

    def stalled_seconds(self, since: float) -> float:
        """Return the stalled seconds since then, on time.monotonic's clock."""
        time.sleep(0.05)  # this one may have gone on first
        return sum(ended - max(began, since) for began, ended in self._late if ended > since)


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
