"""The server as an operating system's process: `serve run`, and everything that it starts."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import psutil
import yaml

from serve_app import tls
from serve_app.cli import tls_front
from serve_app.client import NEVER, Client
from serve_app.errors import ConfigurationError
from serve_app.ports import holder
from serve_app.settings import INFERENCE_HOST, Settings, load

_GRACE = 3.0  # seconds for a clean end, before what is left is killed
_CLOSING = 3.0  # seconds in which the sockets of a process that was just killed must be gone
_MARK = "TORCHRELAY_RUN"  # in the environment of every process of one start, however it was daemonised

# Ports that Ray Serve takes beside ours, and the variables that move them.
_RAY_PORTS = {
    8404: "RAY_SERVE_HAPROXY_STATS_PORT",
    8500: "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    9101: "RAY_SERVE_HAPROXY_METRICS_PORT",
}


class StartError(Exception):
    """Why the server did not start, in words for the one who started it."""


def read_env(path: Path) -> dict[str, str]:
    """The KEY=VALUE lines of an environment file. Raises StartError, naming file and line."""
    values = {}
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise StartError(f"{path}: {error.strerror}; name another file with --env") from None
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if line and not line.startswith("#"):
            key, equals, value = line.partition("=")
            if not equals or not key.replace("_", "").isalnum():
                raise StartError(f"{path}, line {number}: {line!r} is not KEY=VALUE")
            values[key] = value
    return values


class ServerProcess:
    """One server, started from a configuration and an environment file.

    ``names`` says where an operator changes what stands in the configuration, if not there:
    ``{"http_options.port": "inference_address in config.properties"}``.
    """

    def __init__(self, config: Path, env: Path, names: Mapping[str, str] | None = None) -> None:
        self.config = config
        self._env = env
        self._names = names or {}
        try:
            document = yaml.safe_load(config.read_text())
        except OSError as error:
            raise StartError(f"{config}: {error.strerror}; run this in the project's folder, or name a file") from None
        except yaml.YAMLError as error:
            raise StartError(f"{config}: {error}") from None
        try:
            http = document.get("http_options") or {}
            self._http = (str(http.get("host", "127.0.0.1")), int(http.get("port", 8000)))
            self._pair = [Path(http[name]) for name in ("ssl_certfile", "ssl_keyfile") if http.get(name)]
            args = document["applications"][0].get("args")
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            wanted = "a mapping http_options with a port and a list applications whose first has import_path and args"
            raise StartError(f"{config}: not a configuration of `serve run`, which is {wanted}") from None
        try:
            self.settings: Settings = load(args, str(config))
        except ConfigurationError as error:
            raise StartError(str(error)) from None
        if len(self._pair) == 1:
            raise StartError(f"{config}: http_options: ssl_certfile and ssl_keyfile go together; give both")
        self._document = document
        self._plain_port: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def inference(self) -> str:
        return _address(*self._http, secure=bool(self._pair))

    @property
    def local(self) -> str:
        """The inference address for this machine; without TLS where there is a way round it."""
        return self.inference if self._plain_port is None else _address("127.0.0.1", self._plain_port)

    @property
    def management(self) -> str:
        m = self.settings.management
        return _address(m.host, m.port, secure=bool(m.certificate_file)) if m.port else self.local

    @property
    def metrics(self) -> str:
        m = self.settings.management
        if m.metrics_port:
            return _address(m.metrics_host, m.metrics_port, secure=bool(m.certificate_file)) + "/metrics"
        return (self.management if m.also_metrics else self.local) + "/metrics"

    @property
    def grpc(self) -> dict[str, str]:
        """The gRPC ports that there are to be, as ``host:port``."""
        g = self.settings.grpc
        ports = {"inference": (g.host, g.port), "management": (g.management_host, g.management_port)}
        secure = " (TLS)" if g.certificate_file else ""
        return {name: _authority(*where) + secure for name, where in ports.items() if where[1]}

    def client(self, timeout: float) -> Client:
        """A client on this machine, with the keys of the server's file and trust in its certificates."""
        token = os.environ.get("TORCHRELAY_TOKEN", "")
        files = {"key_file": self.settings.key_file, "verify": self._trust}
        return Client(self.local, self.management, timeout, token, **files, retries=NEVER)

    @property
    def pid(self) -> int | None:
        """The first process of a server that was started here."""
        return self._process.pid if self._process is not None else None

    @property
    def _trust(self) -> ssl.SSLContext | bool:
        own = self.settings.management.certificate_file
        certificates = [*self._pair[:1], *([self.settings.root / own] if own else [])]
        return tls.trusting(*certificates) if certificates else True

    @property
    def makes_keys(self) -> bool:
        """Whether there will be a key file."""
        return self.settings.auth.torchserve_tokens and self.settings.wants_keys(self._http[0])

    @property
    def log(self) -> Path:
        return self.settings.state_dir / "logs" / "server.log"

    @property
    def _mark_file(self) -> Path:
        return self.settings.state_dir / "server.run"

    def start(self, detached: bool = False) -> None:
        """Start `serve run` in the environment of the file. Raises StartError."""
        env = {**read_env(self._env), **os.environ}
        if self.processes():
            raise StartError(f"a server of {self.settings.state_dir} is running; `torchrelay stop` ends it")
        self._check_keys(env)
        self._check_ports(env)
        config = self._end_tls(env) if self._pair else self.config
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            # A shell without job control starts its background jobs so, and `serve run` would never hear us.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        env[_MARK] = mark = uuid.uuid4().hex
        env[INFERENCE_HOST] = self._http[0]
        env["PYTHONUNBUFFERED"] = "1"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = [str(Path(sys.executable).parent / "serve"), "run", str(config)]
        if "RAY_ADDRESS" not in env:
            # A Ray of its own: without a word `serve run` looks for one that somebody started here, dead ones too.
            command += ["--address", "local"]
        with self.log.open("wb") as log:
            # A session of its own: Ctrl-C in the terminal reaches this process alone, which ends the rest in order.
            self._process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._mark_file.write_text(f"{mark} {self._process.pid}")

    def ended(self) -> int | None:
        """The exit code, once the server has ended by itself."""
        return self._process.poll() if self._process is not None else None

    def wait(self) -> int:
        """Wait for the end, or for Ctrl-C or SIGTERM, which bring it about."""
        assert self._process is not None

        def leave(*_: object) -> None:
            raise KeyboardInterrupt

        signal.signal(signal.SIGTERM, leave)
        try:
            return self._process.wait()
        except KeyboardInterrupt:
            self.stop()
            return 0

    def stop(self) -> bool:
        """End the server and everything that it started; False where there was nothing to end."""
        ours = self.processes()
        if not ours:
            if self._process is not None:  # whoever killed it, it is ours to reap
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_GRACE)
            return False
        first = min(ours, key=lambda process: process.create_time())
        with contextlib.suppress(psutil.Error):
            first.send_signal(signal.SIGINT)
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline and first.is_running() and first.status() != psutil.STATUS_ZOMBIE:
            if self._process is not None:
                self._process.poll()
            time.sleep(0.05)
        for _ in range(3):  # a process that is being killed may still have started another
            left = self.processes()
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, timeout=1)
        if self._process is not None:
            self._process.wait()
        self._mark_file.unlink(missing_ok=True)
        if self.settings.key_run.exists():  # the keys were made for the server that has just ended
            self.settings.key_file.unlink(missing_ok=True)
            self.settings.key_run.unlink()
        return True

    def last_lines(self, count: int = 15) -> str:
        """The end of the log, for a message."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            return f"no log at {self.log}"
        return "\n".join(lines[-count:]) + f"\nThe whole log: {self.log}"

    def processes(self) -> list[psutil.Process]:
        """Every live process of this server: it carries its mark, or belongs to its session."""
        try:
            mark, session = self._mark_file.read_text().split()
        except (OSError, ValueError):
            return []
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if os.getsid(process.pid) == int(session) or mark in _environment(process):
                    found.append(process)
        return found

    def _named(self, key: str) -> str:
        return self._names.get(key) or f"{key} in {self.config}"

    def _end_tls(self, env: dict[str, str]) -> Path:
        """Make HAProxy speak TLS, where it stands in front; returns the configuration that `serve run` gets then."""
        try:
            tls.server(self._pair[0], self._pair[1], ("http_options.ssl_certfile", "http_options.ssl_keyfile"))
        except ConfigurationError as error:
            raise StartError(f"{self.config}: {error}") from None
        if env.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":
            return self.config  # Ray's Python proxy does it itself
        config, self._plain_port, more = tls_front.put_up(self._document, self.settings.state_dir / "tls", env)
        env.update(more)
        return config

    def _check_keys(self, env: dict[str, str]) -> None:
        """What Management would stumble over, said before anything runs."""
        try:
            tls.of_management(self.settings)
            tls.of_grpc(self.settings)
            if self.settings.wants_keys(self._http[0]):
                for key in self.settings.auth.keys:
                    key.digest(env)
        except ConfigurationError as error:
            raise StartError(f"{self.config}: {error}") from None

    def _check_ports(self, env: dict[str, str]) -> None:
        m, g = self.settings.management, self.settings.grpc
        wanted = {
            self._http[1]: (self._http[0], self._named("http_options.port")),
            m.port: (m.host, self._named("management.port")),
            m.metrics_port: (m.metrics_host, self._named("management.metrics_port")),
            g.port: (g.host, self._named("grpc.port")),
            g.management_port: (g.management_host, self._named("grpc.management_port")),
        }
        if env.get("RAY_SERVE_ENABLE_HA_PROXY") == "1":
            for port, name in _RAY_PORTS.items():
                wanted[int(env.get(name, port))] = ("0.0.0.0", f"{name} in {self._env}")
        wanted.pop(0, None)  # no listener of its own
        for port, (host, setting) in wanted.items():
            deadline = time.monotonic() + _CLOSING
            while (error := _cannot_bind(host, port)) is not None:
                who = holder(port)
                if who or time.monotonic() > deadline:
                    raise StartError(f"Port {port}: {error}{who}. End that process, or change {setting}.")
                time.sleep(0.1)


def _environment(process: psutil.Process) -> str:
    # Read raw where that is possible: Ray's workers write their title over the front of it, where psutil gives up.
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/environ").read_bytes().decode(errors="replace")
    return str(process.environ())


def _cannot_bind(host: str, port: int) -> str | None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror
    return None


def _address(host: str, port: int, secure: bool = False) -> str:
    return f"http{'s' * secure}://{_authority(host, port)}"


def _authority(host: str, port: int) -> str:
    host = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"{host}:{port}"
