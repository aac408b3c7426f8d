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
import sysconfig
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

TORCHSERVE = "0.12.0"
ROOT = Path(__file__).parents[2]  # the checkout, where this is not installed
# Ports that Ray Serve takes beside ours: of its own for each server, so that several can run at once.
_RAY_PORTS = (
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
)
_PORTS = range(20_000, 29_000)  # that neither the kernel nor Ray gives to anybody
_MARK = "TORCHRELAY_BENCH"  # in the environment of everything that a peer starts, however it was daemonised
CACHE = Path("~/.cache/torchrelay-bench").expanduser()


class PeerFailed(Exception):
    """A server to compare with cannot be had or did not start; the message says why."""


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
    timeout: float = 120.0,
    store: bool = False,
) -> Iterator[Peer]:
    """Run ``command`` until the block ends; its output goes to ``folder/<name>.log``.

    Ready is when ``/ping`` answers 200. Raises PeerFailed when it ends before, or takes longer than
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
        process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **streams)
        try:
            with httpx.Client(timeout=2.0) as client:
                while not _healthy(client, base):
                    if process.poll() is not None:
                        raise PeerFailed(
                            f"{name} ended with {process.returncode} before it was ready:\n{_tail(log)}"
                        )
                    if time.monotonic() - began > timeout:
                        raise PeerFailed(f"{name} was not ready after {timeout:g} s:\n{_tail(log)}")
                    time.sleep(0.02)
            ready = time.monotonic() - began
            yield Peer(name, base, management, process.pid, mark, began, ready, store)
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
    lines += [f"{name}={port}" for name, port in zip(_RAY_PORTS, free_ports(len(_RAY_PORTS)))]
    (run / "serve.env").write_text("\n".join(lines) + "\n")
    return inference, management, grpc


@contextmanager
def torchserve(folder: Path, model_store: Path, cache: Path = CACHE) -> Iterator[Peer]:
    """TorchServe from PyPI in a virtual environment of its own, with this interpreter's torch.

    Logs only warnings, and those into files: the kindest setting that it has. Raises PeerFailed when
    Java or the package cannot be had.
    """
    java_version()
    python = environment(cache)
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
    with started("TorchServe", command, base, control, folder=run, env=own, store=True) as peer:
        yield replace(peer, grpc=f"127.0.0.1:{grpc1}")


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


def environment(cache: Path = CACHE) -> Path:
    """Return the interpreter of TorchServe's environment; create the environment when it is missing."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    environment = cache / f"torchserve-{TORCHSERVE}-py{here}"
    python, done = environment / "bin" / "python", environment / "installed"
    packages = Path(sysconfig.get_path("purelib"))
    made_of = f"{packages}\n{_TRANSFORMS}"
    if done.is_file() and done.read_text() == made_of:
        return python
    shutil.rmtree(environment, ignore_errors=True)
    try:
        subprocess.run(
            [sys.executable, "-m", "venv", str(environment)], check=True, capture_output=True, text=True
        )
        (site,) = environment.glob("lib/python*/site-packages")
        # After its own packages come this interpreter's: the same torch, and nothing is downloaded twice.
        (site / "shared.pth").write_text(f"{packages}\n")
        install = [str(python), "-m", "pip", "install", "-q"]
        # Its image handlers import captum, which asks for an older numpy than torch does.
        for what in ([f"torchserve=={TORCHSERVE}", "matplotlib", "tqdm"], ["--no-deps", "captum"]):
            subprocess.run([*install, *what], check=True, capture_output=True, text=True)
        (site / "torchvision").mkdir(exist_ok=True)
        (site / "torchvision" / "__init__.py").touch()
        (site / "torchvision" / "transforms.py").write_text(_TRANSFORMS)
    except subprocess.CalledProcessError as error:
        raise PeerFailed(
            f"pip could not install torchserve {TORCHSERVE}:\n{error.stderr.strip()[-1000:]}"
        ) from error
    done.write_text(made_of)
    return python


# TorchServe's image handlers import torchvision, whose wheel does not go with every build of torch. Its
# transforms of an image are Pillow's, as ours are, so ours stand in for them and both servers do the same
# work.
_TRANSFORMS = """from handlers.builtin.vision import CenterCrop, Compose, Normalize, Resize, ToTensor

__all__ = ["CenterCrop", "Compose", "Normalize", "Resize", "ToTensor"]
"""

_LOG4J2 = """<?xml version="1.0" encoding="UTF-8"?>
<Configuration status="WARN">
  <Appenders><File name="file" fileName="${env:LOG_LOCATION}/torchserve.log"/></Appenders>
  <Loggers><Root level="warn"><AppenderRef ref="file"/></Root></Loggers>
</Configuration>
"""


def _healthy(client: httpx.Client, base: str) -> bool:
    try:
        return client.get(f"{base}/ping").status_code == 200
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


def _end(process: subprocess.Popen, mark: str, max_wait: float = 10.0) -> None:
    """End the process as Ctrl-C would, then whatever of its tree is left."""
    tree = _tree(process.pid, mark)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max_wait)
    _, alive = psutil.wait_procs({*tree, *_tree(process.pid, mark)}, timeout=0.2)
    for left in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()
    psutil.wait_procs(alive, timeout=max_wait)
    process.wait()


def _tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
