"""The server as an operating system's process: the supervisor, and everything that it starts."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shlex
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import yaml

from serve_app.cli import haproxy_runtime, haproxy_tls, health, server_ports
from serve_app.cli.errors import StartError
from serve_app.cli.process_status import CHECK_PERIOD, environment, is_alive, wait_for_end
from serve_app.client import NO_RETRIES, Client
from serve_app.errors import ConfigurationError
from serve_app.model_store.sources import list_entries
from serve_app.net import private_files, tls
from serve_app.net.bind import describe_process, find_port_owner
from serve_app.settings import INFERENCE_HOST, MIB, Settings, load

# A line of the log, which names the actor that wrote it.
_START_FAILURE = re.compile(
    r"(?P<source>(?:^\(\S+ pid=\d+\) )?)(?P<name>(?:Management|Gateway) cannot start: )(?P<error>.*)"
)
_MAX_SEARCHED_BYTES = 1 << 20  # at the end of the log
_STOP_TIMEOUT = 3.0  # seconds for a clean end, before the rest is killed
_PORT_RELEASE_TIMEOUT = 3.0  # seconds in which the sockets of a killed process must be closed
_MIN_FREE_MIB = 32  # of the state's disk: a full one lets the start wait for its timeout
_RAY_PROCESSES = ("raylet", "gcs_server")  # without either, the controller is gone and nothing can start
_RUN_ID = "TORCHRELAY_RUN"  # in the environment of every process of one start, daemons included
_RUN = re.compile(r"(?P<id>[0-9a-f]{32}) (?P<session>\d+)")  # the content of server.run
_STOP = "TORCHRELAY_STOP"  # likewise: the command that ends them

# The program that adds our limits and TLS to HAProxy; an environment file of an older release lacks it.
_HAPROXY_CALLBACK = (
    "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH",
    "serve_app.deployments.ray_internals.haproxy:install",
)


def read_env(path: Path) -> dict[str, str]:
    """Return the KEY=VALUE lines of an environment file. Raises StartError with file and line."""
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

    ``setting_names`` maps keys of the configuration to where an operator sets them, if not there:
    ``{"http_options.port": "inference_address in config.properties"}``.
    """

    def __init__(self, config: Path, env: Path, setting_names: Mapping[str, str] | None = None) -> None:
        self.config = config
        self._env = env
        self._setting_names = setting_names or {}
        try:
            document = yaml.safe_load(config.read_text())
        except OSError as error:
            raise StartError(
                f"{config}: {error.strerror}; run this in the project's folder, or name a file"
            ) from None
        except yaml.YAMLError as error:
            raise StartError(f"{config}: {error}") from None
        try:
            http = document.get("http_options") or {}
            self._http = (str(http.get("host", "127.0.0.1")), int(http.get("port", 8000)))
            self._tls_files = [Path(http[name]) for name in ("ssl_certfile", "ssl_keyfile") if http.get(name)]
            args = document["applications"][0].get("args")
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            expected = "a mapping http_options with a port, and applications with import_path and args"
            raise StartError(f"{config}: not a configuration of `serve run`, which is {expected}") from None
        try:
            self.settings: Settings = load(args, str(config))
        except ConfigurationError as error:
            raise StartError(str(error)) from None
        if len(self._tls_files) == 1:
            raise StartError(f"{config}: http_options: ssl_certfile and ssl_keyfile go together; give both")
        self._document = document
        self._plain_port: int | None = None
        self._release_ports: Callable[[], object] = lambda: None  # HAProxy's, which are claimed until then
        self._process: subprocess.Popen[bytes] | None = None
        self._interrupts = 0  # signals that ask for the end, received so far
        self._is_creating = False  # its first process, which a signal must not leave unknown
        self.cause = ""  # of an end that was not requested, after ``wait``

    @property
    def inference(self) -> str:
        return _address(*self._http, secure=bool(self._tls_files))

    @property
    def local(self) -> str:
        """The inference address for this machine, without TLS where there is a plain port."""
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
        return (self.management if m.serve_metrics else self.local) + "/metrics"

    @property
    def grpc(self) -> dict[str, str]:
        """The gRPC ports of the configuration, as ``host:port``."""
        g = self.settings.grpc
        ports = {"inference": (g.host, g.port), "management": (g.management_host, g.management_port)}
        secure = " (TLS)" if g.certificate_file else ""
        return {name: _authority(*where) + secure for name, where in ports.items() if where[1]}

    def client(self, timeout: float) -> Client:
        """Return a client on this machine that has the server's key file and trusts its certificates."""
        return Client(
            self.local,
            self.management,
            timeout,
            token=os.environ.get("TORCHRELAY_TOKEN", ""),
            key_file=self.settings.key_file,
            verify=self._verify,
            retries=NO_RETRIES,
        )

    @property
    def pid(self) -> int | None:
        """The first process of a server that was started here."""
        return self._process.pid if self._process is not None else None

    @property
    def _verify(self) -> ssl.SSLContext | bool:
        own = self.settings.management.certificate_file
        certificates = [*self._tls_files[:1], *([self.settings.root / own] if own else [])]
        return tls.client_context(*certificates) if certificates else True

    @property
    def creates_key_file(self) -> bool:
        """Return whether the server creates a key file."""
        return self.settings.auth.torchserve_tokens and self.settings.requires_keys(self._http[0])

    @property
    def log(self) -> Path:
        return self.settings.state_dir / "logs" / "server.log"

    @property
    def _run_file(self) -> Path:
        return self.settings.state_dir / "server.run"

    @property
    def _stop_file(self) -> Path:
        """The file that exists once the server has been stopped."""
        return self.settings.state_dir / "server.stopped"

    def start(self, detached: bool = False, dashboard: bool = False) -> None:
        """Start the server with the variables of the environment file. Raises StartError.

        ``dashboard`` starts Ray's dashboard, too. With RAY_ADDRESS in the environment the server is deployed
        on that Ray by `serve run`. Every file and socket of its processes is for this user alone.
        """
        with private_files.restricted_umask():
            self._start(dashboard)

    def _start(self, dashboard: bool) -> None:
        env = {**read_env(self._env), **os.environ}
        if self.processes():
            raise StartError(f"a server of {self.settings.state_dir} is running; `torchrelay stop` ends it")
        self._check_keys(env)
        self._check_model_store()
        self._check_ports(env)
        self._check_state_dir()
        if env.get("RAY_SERVE_ENABLE_HA_PROXY") == "1":
            env.setdefault(*_HAPROXY_CALLBACK)
            self._release_ports()
            claims = haproxy_runtime.claim_ports(env)
            self._release_ports = weakref.finalize(self, haproxy_runtime.release_ports, claims)
            haproxy_runtime.make_folder(self.settings.state_dir, env)
        config = self._terminate_tls(env) if self._tls_files else self.config
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            # A shell without job control ignores SIGINT in background jobs, and the server would inherit
            # that.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        env[_RUN_ID] = run_id = uuid.uuid4().hex
        env[_STOP] = f"cd {shlex.quote(os.getcwd())} && torchrelay stop {shlex.quote(str(self.config))}"
        env[INFERENCE_HOST] = self._http[0]
        env["PYTHONUNBUFFERED"] = "1"
        try:
            directory = private_files.get_ray_directory()
        except OSError as error:
            raise StartError(str(error)) from None
        if directory is not None:
            env.setdefault("RAY_TMPDIR", str(directory))
        private_files.restrict_ray_token(env.get("RAY_AUTH_TOKEN_PATH", ""))
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._stop_file.unlink(missing_ok=True)
        health.write_address(self.local)
        if "RAY_ADDRESS" in env:
            command = [str(Path(sys.executable).parent / "serve"), "run", str(config)]
        else:
            command = [sys.executable, "-m", "serve_app.deployments.ray_internals.head_node", str(config)]
            if dashboard:
                command.append("--dashboard")
        with contextlib.suppress(FileNotFoundError):  # it may have the cause of the end before this start
            os.replace(self.log, f"{self.log}.1")
        self._is_creating = True
        try:
            self._process = self._create_process(command, env)
            self._run_file.write_text(f"{run_id} {self._process.pid}")
        finally:
            self._is_creating = False
        if self._interrupts:
            raise KeyboardInterrupt

    def _create_process(self, command: list[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:  # appended to, so that it may be truncated
            # A session of its own: Ctrl-C in the terminal reaches only this process, which stops the server
            # in order.
            return subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def show_log(self) -> None:
        """Copy the log of this start to standard output, in a thread that ends with this process."""
        threading.Thread(target=_copy_to_stdout, args=(self.log,), daemon=True).start()

    def exit_code(self) -> int | None:
        """Return the exit code, once the server has ended by itself; None before."""
        return self._process.poll() if self._process is not None else None

    def poll(self, timeout: float, failure: str) -> Iterator[None]:
        """Yield ten times a second, for a caller that waits until the server has started.

        Raises StartError where the server ends; after ``timeout`` seconds it is stopped, and the error is
        ``failure``.
        """
        deadline = time.monotonic() + timeout
        while True:
            if (code := self.exit_code()) is not None:
                self._end_processes()  # the GCS outlives a failed start, and would refuse the next one
                raise StartError(f"The server ended with code {code}:\n{self.last_lines()}")
            if time.monotonic() > deadline:
                self.stop()
                raise StartError(f"{failure} within {timeout:.0f} s:\n{self.last_lines()}")
            yield
            time.sleep(0.1)

    def wait(self) -> int:
        """Wait until the server ends; Ctrl-C, SIGTERM and SIGHUP stop it, twice without a wait.

        The end of the first process, of the raylet or of the GCS ends the server, and the rest is stopped, so
        that a service manager can start it again. Without the raylet requests are answered for a while, but
        no replica can be replaced. Return the exit code, which is 0 after ``stop`` in any process.
        """
        assert self._process is not None
        self.interrupt_on_signals()
        try:
            code = self._wait_for_death()
            if self._stop_file.exists():
                return 0
            self._end_processes()
            return code
        except KeyboardInterrupt:
            self.stop()
            return 0

    def interrupt_on_signals(self) -> None:
        """Raise KeyboardInterrupt at Ctrl-C, at SIGTERM, and at SIGHUP unless it is ignored.

        A start that a service manager, a container engine or a closed terminal ends must leave no process.
        The second signal raises nothing, because it may arrive while the first one stops the server: ``stop``
        then does not wait. While ``start`` creates the first process, none raises; it does so at the end.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as of nohup
                signal.signal(number, self._interrupt)

    def _interrupt(self, *_: object) -> None:
        self._interrupts += 1
        if self._interrupts != 2 and not self._is_creating:
            raise KeyboardInterrupt

    def _wait_for_death(self) -> int:
        """Wait until the first process, the raylet or the GCS has ended; return the first's code, else 1."""
        assert self._process is not None
        needed: dict[str, psutil.Process] = {}
        while True:
            code = self._process.poll()
            if len(needed) < len(_RAY_PROCESSES):  # starting
                for process in self.processes():
                    with contextlib.suppress(psutil.Error):  # it has just ended
                        if process.name() in _RAY_PROCESSES:
                            needed[process.name()] = process
            dead = [
                f"{name} (pid {process.pid})" for name, process in needed.items() if not is_alive(process)
            ]
            if dead and not self._stop_file.exists():
                self.cause = f"Ray's {' and '.join(dead)} ended; without it no replica can be started."
            if code is not None or self.cause:
                return 1 if code is None else code
            if dead or len(needed) < len(_RAY_PROCESSES):
                time.sleep(CHECK_PERIOD)
            else:
                wait_for_end([self._process.pid, *(process.pid for process in needed.values())])

    def stop(self) -> bool:
        """Stop the server and everything that it started; return False where nothing was running."""
        processes = self.processes()
        if not processes:
            haproxy_runtime.remove_folder(self.settings.state_dir)
            self._reap()
            return False
        with contextlib.suppress(OSError):  # of a full disk: the exit code will be another one
            self._stop_file.touch()
        self._end_processes()
        return True

    def _end_processes(self) -> None:
        """End every process of the server: the first by an interrupt, then the rest by SIGKILL."""
        if not (processes := self.processes()):
            self._reap()
            return
        first = min(processes, key=lambda process: process.create_time())
        with contextlib.suppress(psutil.Error):
            first.send_signal(signal.SIGINT)
        deadline = time.monotonic() + _STOP_TIMEOUT
        while self._interrupts < 2 and time.monotonic() < deadline and is_alive(first):
            if self._process is not None:
                self._process.poll()
            time.sleep(0.05)
        for _ in range(3):  # a process that is being killed may still have started another
            remaining = self.processes()
            for process in remaining:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(remaining, timeout=1)
        if self._process is not None:
            self._process.wait()
        with contextlib.suppress(OSError):  # the file system may have become read-only
            self._remove_run_files()

    def _remove_run_files(self) -> None:
        self._run_file.unlink(missing_ok=True)
        haproxy_runtime.remove_folder(self.settings.state_dir)
        if self.settings.key_run_file.exists():  # the keys were made for the server that has just ended
            self.settings.key_file.unlink(missing_ok=True)
            self.settings.key_run_file.unlink()

    def _reap(self) -> None:
        """Wait for the first process, which another process may have killed; it is this process's child."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_TIMEOUT)

    def last_lines(self, count: int = 15) -> str:
        """Return the last lines of the log, for an error message."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            return f"no log at {self.log}"
        failure = _find_start_failure(lines)
        shown = [*([failure] if failure else []), *lines[-count:]]
        return "\n".join(shown) + f"\nThe whole log: {self.log}"

    def find_start_failure(self) -> str:
        """Return why Management or a gateway cannot start, as logged last; empty where none has failed."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _MAX_SEARCHED_BYTES))
                return _find_start_failure(log.read().decode(errors="replace").splitlines())
        except OSError:
            return ""

    def processes(self) -> list[psutil.Process]:
        """Return the live processes of this server: those with its run id, and others of its session.

        The session counts only where one of its processes has the run id: after a crash of the machine its
        number may be that of another one.
        """
        try:
            run = _RUN.fullmatch(self._run_file.read_text())
        except OSError:
            return []
        if run is None:
            return []
        processes, others, is_our_session = [], [], False
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                is_member = os.getsid(process.pid) == int(run["session"])
                if f"{_RUN_ID}={run['id']}" in environment(process):
                    processes.append(process)
                    is_our_session |= is_member
                elif is_member:
                    others.append(process)
        return processes + others if is_our_session else processes

    def _setting_name(self, key: str) -> str:
        if key in self._setting_names:
            return self._setting_names[key]
        if self.config.parent == Path(__file__).parent:  # the next installation replaces it
            return f"{key} in a copy of {self.config}, and start with it: `torchrelay start COPY`"
        return f"{key} in {self.config}"

    def _terminate_tls(self, env: dict[str, str]) -> Path:
        """Configure HAProxy for TLS, where it is the proxy; return the configuration for `serve run`."""
        try:
            tls.server_context(
                self._tls_files[0],
                self._tls_files[1],
                ("http_options.ssl_certfile", "http_options.ssl_keyfile"),
            )
        except ConfigurationError as error:
            raise StartError(f"{self.config}: {error}") from None
        if env.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":
            return self.config  # Ray's Python proxy terminates TLS itself
        config, self._plain_port, variables = haproxy_tls.configure(
            self._document, self.settings.state_dir / "tls"
        )
        env.update(variables)
        return config

    def _check_keys(self, env: dict[str, str]) -> None:
        """Check certificates and keys before anything starts. Raises StartError."""
        try:
            tls.management_context(self.settings)
            tls.grpc_context(self.settings)
            if self.settings.requires_keys(self._http[0]):
                for key in self.settings.auth.keys:
                    key.digest(env)
        except ConfigurationError as error:
            raise StartError(f"{self.config}: {error}") from None

    def _check_model_store(self) -> None:
        """Check that the first start can read the model store. Raises StartError.

        Later ones serve what is registered.
        """
        if self.settings.control.load_models == "all" and not self.log.parent.exists():
            try:
                list_entries(self.settings.model_store)
            except ConfigurationError as error:
                raise StartError(str(error)) from None

    def _check_state_dir(self) -> None:
        """Create the state's folder, and check it. Raises StartError."""
        state, user = self.settings.state_dir, f"the user {os.getuid()}"
        try:
            private_files.make_private_directory(state)
            free = shutil.disk_usage(state).free
        except OSError as error:
            raise StartError(
                f"{state} cannot be created: {error.strerror}; let {user} write there, or change "
                f"{self._setting_name('control.state_dir')}"
            ) from None
        if not os.access(state, os.W_OK | os.X_OK):
            raise StartError(f"{state} is not writable for {user}; change its owner or its mode")
        if free < _MIN_FREE_MIB * MIB:
            raise StartError(
                f"{state}: its disk has {free // MIB} MiB left, and the server needs {_MIN_FREE_MIB}; free "
                f"space there, or change {self._setting_name('control.state_dir')}"
            )

    def _check_ports(self, env: dict[str, str]) -> None:
        ports = server_ports.list_ports(self._http, self.settings, self._setting_name)
        if env.get("RAY_SERVE_ENABLE_HA_PROXY") == "1":
            for name in haproxy_runtime.PORTS.keys() & env.keys():
                ports[int(env[name])] = ("0.0.0.0", f"{name} in {self._env}")
        for port, (host, setting) in ports.items():
            deadline = time.monotonic() + _PORT_RELEASE_TIMEOUT
            while (error := server_ports.bind_error(host, port)) is not None:
                owner, is_in_use = find_port_owner(port), error.errno == errno.EADDRINUSE
                if owner or not is_in_use or time.monotonic() > deadline:
                    remedy = (
                        f"{_describe_end(owner)}, or change {setting}" if is_in_use else f"Change {setting}"
                    )
                    raise StartError(f"Port {port}: {error.strerror}{describe_process(owner)}. {remedy}.")
                time.sleep(0.1)


def _find_start_failure(lines: list[str]) -> str:
    """Return the last report of ``telemetry.logs.report_start_failure``; of a traceback its last line."""
    for number in range(len(lines) - 1, -1, -1):
        if match := _START_FAILURE.search(lines[number]):
            if not match["error"].startswith("Traceback"):
                return match["name"] + match["error"]
            traceback = itertools.takewhile(
                lambda line: line.startswith(match["source"]), lines[number + 1 :]
            )
            causes = [line[len(match["source"]) :] for line in traceback]
            return match["name"] + next((c for c in causes if c[:1].strip()), match["error"])
    return ""


def _describe_end(process: psutil.Process | None) -> str:
    """Return how to end the process; one of another server of Torchrelay ends with that server."""
    with contextlib.suppress(psutil.Error, OSError):
        entries = environment(process).split("\0") if process is not None else ()
        if command := next((e.partition("=")[2] for e in entries if e.startswith(f"{_STOP}=")), ""):
            return f"End that server of Torchrelay by `{command}`"
    return "End that process"


def _address(host: str, port: int, secure: bool = False) -> str:
    return f"http{'s' * secure}://{_authority(host, port)}"


def _authority(host: str, port: int) -> str:
    host = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"{host}:{port}"


def _copy_to_stdout(file: Path) -> None:
    """Copy a file that grows, without an end; one that is shorter than before was rotated."""
    with file.open("rb") as log:
        while True:
            if data := log.read(1 << 16):
                sys.stdout.buffer.write(data)
                sys.stdout.flush()
            else:
                if os.fstat(log.fileno()).st_size < log.tell():
                    log.seek(0)
                time.sleep(0.2)
