"""The servers of the benchmark as context managers; all but the bare one take archives by an API."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from tests.benchmarks.environments import CACHE, PeerFailed, interpreter

ROOT = Path(__file__).parents[2]  # the checkout, where this is not installed
# Ports that Ray Serve takes beside ours: of its own for each server, so that several can run at once.
RAY_PORTS = (
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
)
_PORTS = range(20_000, 29_000)  # that neither the kernel nor Ray gives to anybody
_MARK = "TORCHRELAY_BENCH"  # in the environment of everything that a peer starts, however it was daemonised


@dataclass(frozen=True)
class Peer:
    """A running server: where it answers, and the tree of processes that it is."""

    name: str
    base: str  # of the inference API, no slash at the end
    management: str = ""  # of the management API; "" where there is none
    pid: int = 0  # the root of its processes; 0: unknown, started by somebody else
    mark: str = ""  # in the environment of all of them
    began: float = 0.0  # when its command was given, on time.monotonic's clock; 0: unknown
    ready_seconds: float = 0.0  # from then to the first healthy ping
    store: bool = False  # whether it takes archives of its model store only, by bare name
    token: str = ""  # of its management API
    grpc: str = ""  # host:port of its inference API by gRPC; "" where there is none

    def url(self, model: str) -> str:
        return f"{self.base}/predictions/{model}"

    def register(
        self,
        archive: Path,
        name: str,
        *,
        workers: int = 1,
        batch_size: int = 1,
        max_batch_delay: int | None = None,
    ) -> str:
        """Register an archive as ``name``, in place of what had the name, and wait for its workers.

        ``max_batch_delay`` is in milliseconds; None leaves it to the server. Returns the model's URL.
        Raises PeerFailed.
        """
        self.unregister(name)
        url = archive.name if self.store else archive.resolve().as_uri()
        params = {"url": url, "model_name": name, "batch_size": batch_size, "initial_workers": workers}
        if max_batch_delay is not None:
            params["max_batch_delay"] = max_batch_delay
        self._manage("POST", "/models", f"registering {archive.name} as {name}", **params, synchronous="true")
        return self.url(name)

    def add_version(self, archive: Path, name: str, *, batch_size: int = 1) -> None:
        """Register the version in an archive beside the model's others, and wait for its worker.

        Raises PeerFailed.
        """
        params = {"url": archive.resolve().as_uri(), "model_name": name, "batch_size": batch_size}
        self._manage("POST", "/models", f"registering {archive.name} as {name}", **params, initial_workers=1)

    def unregister(self, name: str) -> None:
        """Unregister a model, if it is there."""
        self._manage("DELETE", f"/models/{name}", f"unregistering {name}", also=404)

    def tell(self, method: str, path: str, document: Any) -> None:
        """Send a JSON document to the management API. Raises PeerFailed."""
        self._manage(method, path, f"{method} {path}", document)

    def scale(self, name: str, workers: int) -> None:
        """Set a model's workers and wait until they are there. Raises PeerFailed."""
        params = {"min_worker": workers, "max_worker": workers, "synchronous": "true"}
        self._manage("PUT", f"/models/{name}", f"scaling {name} to {workers}", **params)

    def with_(self, token: str) -> Peer:
        """Return the same server, managed with a token."""
        return replace(self, token=token)

    def _manage(
        self, method: str, path: str, doing: str, document: Any = None, also: int = 200, **params: str | int
    ) -> None:
        requested: dict[str, Any] = {"params": params, "headers": bearer(self.token), "timeout": 180}
        if document is not None:
            requested["json"] = document
        try:
            answer = httpx.request(method, self.management + path, **requested)
        except httpx.HTTPError as error:
            raise PeerFailed(f"{self.name}: {doing} failed: {error!r}") from error
        if not answer.is_success and answer.status_code != also:
            raise PeerFailed(f"{self.name}: {doing} gave {answer.status_code}: {answer.text.strip()}")

    def processes(self) -> list[psutil.Process]:
        """Its processes now; none where the root is unknown or gone."""
        return _tree(self.pid, self.mark) if self.pid else []

    def memory(self) -> tuple[int, str]:
        """Bytes of the whole tree, and how they were counted: ``PSS`` (shared pages once) or ``RSS``."""
        total, kind = 0, "PSS"
        for process in self.processes():
            try:
                total += process.memory_full_info().pss
            except psutil.NoSuchProcess:
                continue
            except (psutil.AccessDenied, AttributeError):
                kind = "RSS"
                break
        if kind == "RSS":
            total = sum(p.memory_info().rss for p in self.processes())
        return total, kind

    def idle_cpu(self, seconds: float = 3.0) -> float:
        """Cores that the tree keeps busy while nobody asks it anything."""

        def spent() -> float:
            total = 0.0
            for process in self.processes():
                try:
                    times = process.cpu_times()
                    total += times.user + times.system
                except psutil.Error:
                    continue
            return total

        before, began = spent(), time.monotonic()
        time.sleep(seconds)
        return max(0.0, spent() - before) / (time.monotonic() - began)


def bearer(token: str) -> dict[str, str]:
    """Return the header that carries a token; empty without one."""
    return {"authorization": f"Bearer {token}"} if token else {}


def keys(run: Path) -> dict[str, str]:
    """Return the tokens in the key file of the Torchrelay that runs in ``run``, by kind."""
    result = json.loads((run / "key_file.json").read_text())
    return {kind: entry["key"] for kind, entry in result.items()}


def free_ports(count: int) -> list[int]:
    """Loopback ports that nobody listens on now, and that no connection gets meanwhile."""
    free: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):  # servers that start together take others
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                free.append(port)
        if len(free) == count:
            return free
    raise PeerFailed(f"there are no {count} free ports between {_PORTS.start} and {_PORTS.stop}")


@contextmanager
def attached(name: str, base: str, management: str = "", pid: int = 0) -> Iterator[Peer]:
    """Return a server that runs already; it is left running."""
    yield Peer(name, base.rstrip("/"), management.rstrip("/"), pid)


@contextmanager
def started(
    name: str,
    command: Sequence[str],
    base: str,
    management: str = "",
    *,
    folder: Path,
    env: Mapping[str, str] | None = None,
    timeout: float = 240.0,
    health: str = "/ping",
) -> Iterator[Peer]:
    """Run ``command`` until the block ends; its output goes to ``folder/<name>.log``.

    It is ready when ``health`` answers 200. Raises PeerFailed when it ends before, or takes longer than
    ``timeout`` seconds. At the end it gets what Ctrl-C gives; whatever is left of it then is killed. Where
    this process is terminated, that is the end.
    """
    base, management = base.rstrip("/"), management.rstrip("/")
    log = folder / f"{re.sub('[^A-Za-z0-9]+', '-', name).lower()}.log"
    mark = uuid.uuid4().hex
    # So that a checkout that is not installed works from any folder.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, **(env or {}), _MARK: mark}
    began = time.monotonic()
    with _ending_when_terminated(), log.open("wb") as out:
        streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
        process = None  # a termination inside of Popen leaves a process that is known by its mark alone
        try:
            process = subprocess.Popen(
                command, cwd=folder, env=environment, start_new_session=True, **streams
            )
            with httpx.Client(timeout=2.0) as client:
                while not _healthy(client, base + health):
                    if process.poll() is not None:
                        raise PeerFailed(
                            f"{name} ended with {process.returncode} before it was ready:\n{_tail(log)}"
                        )
                    if time.monotonic() - began > timeout:
                        raise PeerFailed(f"{name} was not ready after {timeout:g} s:\n{_tail(log)}")
                    time.sleep(0.02)
            ready = time.monotonic() - began
            yield Peer(name, base, management, process.pid, mark, began, ready)
        finally:
            _end(process, mark)


@contextmanager
def _ending_when_terminated() -> Iterator[None]:
    """Turn a termination of this process into an exception inside the block, unless a handler exists."""
    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if ours:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def bare(folder: Path) -> Iterator[Peer]:
    """Bare FastAPI on uvicorn, one process."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "tests.benchmarks.bare_fastapi", str(port)]
    env = {"OMP_NUM_THREADS": "1"}
    with started("FastAPI", command, f"http://127.0.0.1:{port}", folder=folder, env=env) as peer:
        yield peer


@contextmanager
def torchrelay(
    folder: Path,
    configs: Path,
    *,
    without: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    name: str = "torchrelay",
) -> Iterator[Peer]:
    """Torchrelay, from ``configs/app.yaml`` and ``serve.env``, on ports and with a state of its own.

    ``without`` names variables of serve.env that are left out, ``settings`` are by room and go over those
    of app.yaml: to measure what they give or cost. It lives in the folder ``name``.
    """
    run = folder / name
    shutil.rmtree(run, ignore_errors=True)
    inference, management, grpc = _configure(run, configs, without, settings or {})
    command = [sys.executable, "-m", "serve_app.cli", "start"]
    command += [str(run / "app.yaml"), "--env", str(run / "serve.env")]
    base, control = f"http://127.0.0.1:{inference}", f"http://127.0.0.1:{management}"
    with started("Torchrelay", command, base, control, folder=run) as peer:
        yield replace(peer, grpc=f"127.0.0.1:{grpc}")


def _configure(
    run: Path, configs: Path, without: Sequence[str], settings: Mapping[str, Any]
) -> tuple[int, int, int]:
    """Write the configuration of a server that lives in ``run``; returns its inference, management and
    gRPC ports.
    """
    (run / "model_store").mkdir(parents=True)
    document = yaml.safe_load((configs / "app.yaml").read_text())
    inference, management, metrics, grpc, grpc_management = free_ports(5)
    document["http_options"] |= {"host": "127.0.0.1", "port": inference}
    args = document["applications"][0].setdefault("args", {})
    own = {
        "store": {"model_store": str(run / "model_store"), "allowed_urls": ["file://.*"]},
        "control": {"state_dir": str(run / "state"), "load_models": "none"},
        "management": {"host": "127.0.0.1", "port": management, "metrics_port": metrics},
        "grpc": {"port": grpc, "management_port": grpc_management},
    }
    for room in {**own, **settings}:
        args[room] = {**(args.get(room) or {}), **own.get(room, {}), **settings.get(room, {})}
    (run / "app.yaml").write_text(yaml.safe_dump(document))
    lines = (configs / "serve.env").read_text().splitlines()
    lines = [line for line in lines if line.partition("=")[0] not in without]
    lines += [f"{name}={port}" for name, port in zip(RAY_PORTS, free_ports(len(RAY_PORTS)))]
    (run / "serve.env").write_text("\n".join(lines) + "\n")
    return inference, management, grpc


@contextmanager
def torchserve(folder: Path, model_store: Path, cache: Path = CACHE) -> Iterator[Peer]:
    """TorchServe from PyPI in a virtual environment of its own, with this interpreter's torch.

    Logs only warnings, and those into files: the kindest setting that it has. Raises PeerFailed when
    Java or the package cannot be had.
    """
    java_version()
    python = interpreter("torchserve", cache)
    inference, management, metrics, grpc1, grpc2 = free_ports(5)
    run = folder / "torchserve"
    shutil.rmtree(run, ignore_errors=True)
    for name in ("tmp", "logs", "metrics"):
        (run / name).mkdir(parents=True)
    config = {
        "inference_address": f"http://127.0.0.1:{inference}",
        "management_address": f"http://127.0.0.1:{management}",
        "metrics_address": f"http://127.0.0.1:{metrics}",
        "grpc_inference_port": grpc1,
        "grpc_management_port": grpc2,
        "disable_token_authorization": "true",
        "enable_model_api": "true",
        "job_queue_size": 1000,
        "disable_system_metrics": "true",
        "install_py_dep_per_model": "true",
        "model_store": model_store.resolve(),
    }
    (run / "config.properties").write_text("".join(f"{k}={v}\n" for k, v in config.items()))
    (run / "log4j2.xml").write_text(_LOG4J2)
    command = [str(python), "-m", "ts.model_server", "--start", "--foreground", "--ncs"]
    command += ["--ts-config", str(run / "config.properties"), "--log-config", str(run / "log4j2.xml")]
    command += ["--model-store", str(model_store.resolve())]
    # Its pid file and worker sockets go to the temporary folder: of its own, or two runs would meet there.
    own = {"TMPDIR": str(run / "tmp"), "TEMP": str(run / "tmp"), "OMP_NUM_THREADS": "1"}
    own |= {"LOG_LOCATION": str(run / "logs"), "METRICS_LOCATION": str(run / "metrics")}
    own |= {"PATH": os.pathsep.join([str(python.parent), os.environ.get("PATH", "")])}
    base, control = f"http://127.0.0.1:{inference}", f"http://127.0.0.1:{management}"
    with started("TorchServe", command, base, control, folder=run, env=own) as peer:
        yield replace(peer, store=True, grpc=f"127.0.0.1:{grpc1}")


def java_version() -> str:
    """Return the version of the Java that TorchServe would use. Raises PeerFailed below 17."""
    home = os.environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java")
    if not java:
        raise PeerFailed("TorchServe needs Java 17, and there is no java on the PATH and no JAVA_HOME")
    result = subprocess.run([java, "-version"], capture_output=True, text=True).stderr
    found = re.search(r'version "(\d+)([^"]*)"', result)
    if not found or int(found[1]) < 17:
        version = result.partition(os.linesep)[0] or "nothing"
        raise PeerFailed(f"TorchServe needs Java 17; {java} says: {version}")
    return found[1] + found[2]


_LOG4J2 = """<?xml version="1.0" encoding="UTF-8"?>
<Configuration status="WARN">
  <Appenders><File name="file" fileName="${env:LOG_LOCATION}/torchserve.log"/></Appenders>
  <Loggers><Root level="warn"><AppenderRef ref="file"/></Root></Loggers>
</Configuration>
"""


def _healthy(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).status_code == 200
    except httpx.HTTPError:
        return False


def _tree(pid: int, mark: str) -> list[psutil.Process]:
    """Return ``pid``, its descendants, and all processes that carry the mark with their descendants."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            if process.pid == pid or (mark and process.environ().get(_MARK) == mark):
                found |= {p.pid: p for p in (process, *process.children(recursive=True))}
        except psutil.Error:
            continue
    return list(found.values())


def _end(process: subprocess.Popen | None, mark: str, max_wait: float = 10.0) -> None:
    """End the process as Ctrl-C would, then whatever of its tree is left."""
    pid = process.pid if process else 0
    tree = _tree(pid, mark)
    if process and process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max_wait)
    _, alive = psutil.wait_procs({*tree, *_tree(pid, mark)}, timeout=0.2)
    for left in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()
    psutil.wait_procs(alive, timeout=max_wait)
    if process:
        process.wait()


def _tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
