"""A server under chaos: `torchrelay start` with a supervisor, and the processes that faults select."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.support.archives import ECHO, make_archive, says
from tests.support.server import ROOT, Server

_RESTART_DELAY_S = 0.5  # of the supervisor
LETTERS = """
from ts.handler_utils.utils import send_intermediate_predict_response

def handle(data, context):
    if data is None:
        return None
    text = bytes(data[0].get("body") or data[0].get("data")).decode()
    for letter in text[:-1]:
        send_intermediate_predict_response([letter], context.request_ids, "one", 200, context)
    return [text[-1]]
"""
# Touches the given number of MiB and keeps them until the next request.
HOG = """
kept = []
def handle(data, context):
    if data is None:
        return None
    kept[:] = [bytes([1]) * (int(bytes(data[0]["body"])) << 20)]
    return ["full"] * len(data)
"""
EXPERIMENT = {
    "name": "chaos",
    "arms": {"a": {"version": "1.0", "weight": 5000}, "b": {"version": "2.0", "weight": 5000}},
    "baseline": "a",
    "metrics": [{"name": "seconds", "kind": "latency"}, {"name": "failures", "kind": "error_rate"}],
}


class ChaosServer(Server):
    """A server as an operator runs it: in the foreground, under a supervisor that starts it again."""

    def __init__(self, home: Path, env: dict[str, str] | None = None, **settings: Any) -> None:
        super().__init__(home, env, **settings)
        self.experiment = ""  # the id of the experiment on ``split``
        self.restarts = 0
        self._closing = threading.Event()
        self._command: subprocess.Popen[bytes] | None = None
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self._run_ids: set[str] = set()

    @property
    def output(self) -> Path:
        """The output of `torchrelay start`, all starts together."""
        return self.home / "start.log"

    def start(self, timeout: float = 300.0) -> None:
        self._closing.clear()
        self._supervisor.start()
        deadline = time.monotonic() + timeout
        while not self.client.ready():
            assert time.monotonic() < deadline, f"{self.output.read_text()[-3000:]}\n{self.log()}"
            time.sleep(0.1)
        self._register_models()

    def stop(self) -> None:
        self.note_run()
        self._closing.set()
        if self._supervisor.ident is not None:
            self.process.stop()
            if self._command is not None:
                self._command.terminate()
            self._supervisor.join(30)

    def note_run(self) -> None:
        """Remember the id of the present run, by which orphans are found later."""
        with contextlib.suppress(OSError):
            self._run_ids.add((self.home / "state/server.run").read_text().split()[0])

    def orphans(self) -> list[str]:
        """Return the processes that a run of this server has left behind, as "name (pid)"."""
        alive = {process.pid for process in self.process.processes()} if not self._closing.is_set() else set()
        found = []
        for process in psutil.process_iter(["name"]):
            with contextlib.suppress(OSError, psutil.Error):
                environment = Path(f"/proc/{process.pid}/environ").read_bytes().decode(errors="replace")
                if process.pid not in alive and any(run in environment for run in self._run_ids):
                    found.append(f"{process.info['name']} ({process.pid})")
        return found

    def is_up(self) -> bool:
        """Return whether the models have their replicas and the management API answers."""
        with contextlib.suppress(httpx.HTTPError, LookupError, ValueError):
            return len(self._ready("echo")) >= 2 and all(
                self._ready(*model) for model in (("split", "1.0"), ("split", "2.0"), ("letters",), ("hog",))
            )
        return False

    def _ready(self, model: str, version: str | None = None) -> list[int]:
        path = f"/models/{model}" + (f"/{version}" if version else "")
        workers = self.management.get(path, timeout=3).json()[0]["workers"]
        return [worker["pid"] for worker in workers if worker["status"] == "READY"]

    def _register_models(self) -> None:
        archives = [
            make_archive(self.store, "echo", ECHO),
            make_archive(self.store, "split", says("1.0"), "1.0"),
            make_archive(self.store, "split", says("2.0"), "2.0"),
            make_archive(self.store, "routed", ECHO, "1.0"),
            make_archive(self.store, "routed", ECHO, "2.0"),
            make_archive(self.store, "letters", LETTERS),
            make_archive(self.store, "hog", HOG),
        ]
        for archive in archives:
            answer = self.register(archive, initial_workers=2 if archive.name.startswith("echo") else 1)
            assert answer.status_code == 200, answer.text
        self.experiment = self.client.start_experiment("split", EXPERIMENT)["id"]

    def _supervise(self) -> None:
        command = [sys.executable, "-m", "serve_app.cli", "start", str(self._config), "--env", str(self._env)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        while not self._closing.is_set():
            with self.output.open("ab") as output:
                self._command = subprocess.Popen(
                    command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output
                )
            self._command.wait()
            self.restarts += 1
            self._closing.wait(_RESTART_DELAY_S)


Find = Callable[[ChaosServer], list[psutil.Process]]


def _titled(title: str) -> Find:
    """Return a function that finds the processes with this Ray title or name."""

    def find(server: ChaosServer) -> list[psutil.Process]:
        return sorted(_matching(server, title), key=lambda process: -process.create_time())

    return find


def _matching(server: ChaosServer, title: str) -> Iterator[psutil.Process]:
    for process in server.process.processes():
        with contextlib.suppress(psutil.Error):
            if process.name() == title or (process.cmdline() or [""])[0].startswith(f"ray::{title}"):
                yield process


def _module(name: str) -> Find:
    """Return a function that finds the processes that run this module, without their forks that Ray names."""

    def find(server: ChaosServer) -> list[psutil.Process]:
        found = []
        for process in server.process.processes():
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[1:3] == ["-m", name]:
                    found.append(process)
        return found

    return find


def _replicas(server: ChaosServer) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in server.pids("echo")]


def _first_process(server: ChaosServer) -> list[psutil.Process]:
    session = int((server.home / "state/server.run").read_text().split()[1])
    return [psutil.Process(session)]


PROCESSES: dict[str, Find] = {
    "replica": lambda server: _replicas(server)[:1],
    "all replicas": _replicas,
    "gateway": _titled("ServeReplica:torchrelay:Gateway"),
    "Management": _titled("ServeReplica:torchrelay:Management"),
    "Serve controller": _titled("ServeController"),
    "HAProxy": lambda server: _titled("haproxy")(server)[:1],  # the newest; older ones finish requests
    "HAProxy manager": _titled("HAProxyManager"),
    "fork servers": _module("serve_app.deployments.ray_internals.fork_server"),
    "runtime environment agent": _titled("RuntimeEnvAgent"),
    "raylet": _titled("raylet"),
    "GCS": _titled("gcs_server"),
    "supervisor": _first_process,
}
