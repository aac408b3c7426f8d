"""HAProxy, as Ray Serve runs it on each node, with our limits, error pages and recovery.

Ray Serve 2.60 starts HAProxy from an actor on each node and renders its configuration from a template. The
template has no timeout of a request's head, admits any local user to HAProxy's control, and answers 404 while
no routes are known. The actor detects the death of HAProxy by a poll of its health, and replaces itself.

``install`` is called in Ray Serve's controller (``RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH``), which then
starts our subclass of that actor. Every change to Ray's text is made here, and fails where that differs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.serve._private import controller as ray_controller
from ray.serve._private import haproxy as ray_haproxy
from ray.serve._private.common import RequestProtocol
from ray.serve._private.constants import RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S, SERVE_LOGGER_NAME
from ray.serve._private.utils import get_head_node_id

from serve_app.deployments.ray_internals import actor_classes, control_loop, fallback_proxy
from serve_app.deployments.ray_internals.replica_channels import LOST_HOST_TIMEOUT_S
from serve_app.errors import ConfigurationError, RelayError, ReplicaDied, ResourceNotFound, Unavailable
from serve_app.net.bind import describe_port_owner
from serve_app.protocols.http import json_errors
from serve_app.protocols.http.server import unix_listener
from serve_app.settings import HAPROXY_TLS_BIND, HAPROXY_TLS_CERTIFICATE

log = logging.getLogger(SERVE_LOGGER_NAME)  # the file of the actor, haproxy_<node>.log

# The names of the environment variables that configs/serve.env documents.
MAX_CONNECTIONS = "RAY_SERVE_HAPROXY_MAXCONN"
MAX_CONNECTIONS_PER_SOURCE = "TORCHRELAY_MAX_CONNECTIONS_PER_SOURCE"
MAX_REQUESTS_PER_SOURCE = "TORCHRELAY_MAX_REQUESTS_PER_SOURCE"
THREADS = "RAY_SERVE_HAPROXY_NBTHREAD"
LOG_TARGET = "RAY_SERVE_HAPROXY_LOG_TARGET"

HEAD_TIMEOUT_S = 10
_TUNNEL_TIMEOUT_S = 3600  # of an idle WebSocket
_DEFAULT_MAX_CONNECTIONS = 10_000
_DESCRIPTORS_PER_CONNECTION = 2.5  # client, replica, and a pipe of splice() for every fourth
_OTHER_DESCRIPTORS = 500
_CORES_PER_THREAD = (
    4  # one thread forwards 60,000 small requests/s, more than replicas on so many cores answer
)
_MAX_THREADS = 4
_RESTART_DELAYS_S = (0.1, 0.2, 0.5, 1.0)  # then Ray Serve's health check replaces the actor
_CHECK_PERIOD_S = 0.03  # between looks for a HAProxy that starts, which takes 0.05 s without other load
_FAST_CHECKS = 60
_RAYLET_PID = "RAY_RAYLET_PID"


def replica_died() -> bytes:
    """Return TorchServe's page for a replica that dies during a response, as it is sent."""
    error = ReplicaDied()
    status, _ = json_errors.look_up(error)
    body = json_errors.encode_json(json_errors.to_document(error))
    head = (
        f"HTTP/1.1 {status} Internal Server Error\r\n"
        "content-type: application/json\r\n"
        f"content-length: {len(body)}\r\n"
        "cache-control: no-cache; no-store, must-revalidate, private\r\n"
        f"x-torchrelay-reason: {error.reason}\r\n"
        "\r\n"
    )
    return head.encode() + body


class _NoRoutes(Unavailable, reason="starting"):
    template = "The server is starting, and its routes are not known yet. Retry in a second."


def _quote(text: str) -> str:
    """Return ``text`` as a quoted word of HAProxy's configuration, in the template."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("\n", "\\n")
    return f'"{escaped}"'


def _return(error: RelayError, *headers: str) -> str:
    """Return the rule that answers every request with ``error``."""
    status, _ = json_errors.look_up(error)
    body = " ".join(json_errors.encode_json(json_errors.to_document(error)).decode().split())
    hdr = " ".join(f"hdr {header}" for header in (*headers, f"x-torchrelay-reason {error.reason}"))
    content = f"content-type application/json string {_quote(body)}"
    return f"    http-request return status {status} {hdr} {content}"


_ACLS = """\
{%- for backend in backends %}
    acl is_{{ backend.name or 'unknown' }} path_beg \
{{ '/' if not backend.path_prefix or backend.path_prefix == '/' else backend.path_prefix ~ '/' }}
    acl is_{{ backend.name or 'unknown' }} path {{ backend.path_prefix or '/' }}
{%- endfor %}
"""
_ROUTES = """\
    use_backend {{ backend.name or 'unknown' }} if is_{{ backend.name or 'unknown' }}
{%- endfor %}
    default_backend default_backend
"""
# What Ray's template must contain exactly once, and what replaces it.
_EDITS = {
    # Ray's default target is a port of syslog where nothing listens: a datagram, 7 µs, for each request.
    "    log {{ config.log_target }} local0 info\n": """\
    {%- if config.has_log_target %}
    log {{ config.log_target }} local0 info
    {%- endif %}
""",
    # A map costs the same for 1,000 routes as for one; two rules for each route are evaluated in their order.
    _ACLS: f"""\
{{%- if config.metrics_enabled or has_ingress_request_router %}}
{_ACLS}{{%- endif %}}
""",
    _ROUTES: """\
{%- endfor %}
    use_backend %[path,concat(/),map_beg({{ config.routes_file }},default_backend)]
    default_backend default_backend
""",
    " mode 666 level admin": " mode 600 level admin",
    "    option abortonclose\n": f"""    option abortonclose
    option forwardfor
    timeout tunnel {_TUNNEL_TIMEOUT_S}s
    # For responses that are awaited from a lost host.
    option srvtcpka
    srvtcpka-idle 3s
    srvtcpka-intvl 2s
    srvtcpka-cnt 2
""",
    "{{ server.host }}:{{ server.port }} check{% if": "{{ server.address }} check{% if",
    # A process of HAProxy that a reload replaced checks no server's health. A request of one of its
    # connections tries the replicas that have ended since then, until each is marked down. With 3 retries,
    # the default, 5 of 9,000 requests failed while two of three replicas ended eight times.
    "    # Servers in this backend\n": """\
    {%- if config.retries is none %}
    retries {{ config.observe_error_limit * backend.servers|length + 3 }}
    {%- endif %}
    # Servers in this backend
""",
    # The statistics have no authentication: they stay on the address of the inference port.
    "    bind :{{ config.metrics_port }}": "    bind {{ config.frontend_host }}:{{ config.metrics_port }}",
    "  bind *:{{ config.stats_port }}": "  bind {{ config.frontend_host }}:{{ config.stats_port }}",
    "    bind {{ config.frontend_host }}:{{ config.frontend_port }}\n": """\
    bind {{ config.frontend_host }}:{{ config.frontend_port }}
    {%- if config.tls_bind %}
    bind {{ config.tls_bind }} ssl crt "{{ config.tls_certificate }}" ssl-min-ver TLSv1.2 alpn http/1.1
    {%- endif %}
    {%- if config.connections_per_source or config.requests_per_source %}
    stick-table type ipv6 size 100k expire 60s store conn_cur,http_req_rate(10s)
    tcp-request connection track-sc0 src
    {%- endif %}
    {%- if config.connections_per_source %}
    tcp-request connection reject if { sc0_conn_cur gt {{ config.connections_per_source }} }
    {%- endif %}
    {%- if config.requests_per_source %}
    {%- set limit = config.requests_per_source * 10 %}
    http-request return status 429 hdr retry-after 10 if { sc0_http_req_rate gt {{ limit }} }
    {%- endif %}
""",
    "    nbthread {{ config.nbthread }}\n": """\
    nbthread {{ config.nbthread }}
    {%- if config.watchdog_file %}
    lua-load {{ config.watchdog_file }}
    {%- endif %}
""",
    "    http-request return status 404 content-type text/plain lf-string \"Path '%[path]' not found. "
    'Ping http://.../-/routes for available routes."': _return(
        _NoRoutes(), f"retry-after {_NoRoutes().retry_after}"
    ),
}
# The rules of the paths that Ray Serve answers itself, one for each application. A request passes all rules
# of the frontend: 42 µs with 100 applications, 30 where they are in a backend.
_SYSTEM_PATHS = ("/-/healthz", "/-/routes")
_SYSTEM_RULES = ("{{ healthz_rules|safe }}\n", 'string "{{ route_info.routes_message }}" if routes\n')
_SYSTEM_BACKEND = "system_endpoints"
# What the template must still use, because we set only its values.
_REQUIRED = ("timeout http-request {{ config.timeout_http_request_s }}s", "maxconn {{ config.maxconn }}")

# HAProxy outlives the actor that started it, so that the actor's death costs no request. It ends with the
# node's raylet, in whichever way that ended. A zombie has the state Z.
_WATCHDOG = """\
core.register_task(function()
    while true do
        core.msleep(2000)
        local file = io.open("/proc/%d/stat")
        local line = file and file:read("l")
        if file then file:close() end
        if not line or line:match("%%) [ZX] ") then os.exit(0) end
    end
end)
"""


def adapt_template(template: str) -> str:
    """Return Ray Serve's template with our changes. Raises ConfigurationError where its text differs."""
    for text in _REQUIRED:
        _check_count(template, text)
    for text, replacement in _EDITS.items():
        _check_count(template, text)
        template = template.replace(text, replacement)
    return _move_system_rules(template)


def _move_system_rules(template: str) -> str:
    """Move the rules of Ray Serve's own paths from the frontend to a backend.

    Where HAProxy counts requests or selects replicas they stay in the frontend, too: those rules follow them.
    """
    for text in _SYSTEM_RULES:
        _check_count(template, text)
    before, _, rest = template.partition(_SYSTEM_RULES[0])
    routes, _, after = rest.partition(_SYSTEM_RULES[1])
    rules = "".join((_SYSTEM_RULES[0], routes, _SYSTEM_RULES[1]))
    end = "\nbackend default_backend\n"
    _check_count(after, end)
    backend = f"\nbackend {_SYSTEM_BACKEND}\n{rules}{_return(ResourceNotFound())}"
    return f"""{before}
{{%- if config.metrics_enabled or has_ingress_request_router %}}
{rules}
{{%- endif %}}
{after.replace(end, backend + end)}"""


def _check_count(template: str, text: str) -> None:
    if template.count(text) != 1:
        raise ConfigurationError(
            "HAProxy's configuration",
            f"the template of ray {ray.__version__} has {text.strip()!r} "
            f"{template.count(text)} times, not once; "
            "install the version of ray that constraints.txt names",
        )


def max_connections(environ: Mapping[str, str]) -> int:
    """Return the operator's limit of connections, or as many as the file descriptors suffice for."""
    if MAX_CONNECTIONS in environ:
        return int(environ[MAX_CONNECTIONS])
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if descriptors == resource.RLIM_INFINITY:
        return _DEFAULT_MAX_CONNECTIONS
    suffices = int((descriptors - _OTHER_DESCRIPTORS) / _DESCRIPTORS_PER_CONNECTION)
    return max(100, min(_DEFAULT_MAX_CONNECTIONS, suffices))


class HAProxyApi(ray_haproxy.HAProxyApi):
    """Ray Serve's handle of HAProxy; ``on_exit`` is called when a process of HAProxy ends."""

    on_exit: Callable[[Any], Awaitable[None]] | None = None

    def __init__(self, cfg: ray_haproxy.HAProxyConfig, *args: Any, **options: Any) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        _configure(cfg, os.environ)
        super().__init__(cfg, *args, **options)

    def _generate_config_file_internal(self) -> None:
        """Write the configuration, with the map from the prefixes of paths to backends that it reads."""
        self.cfg.routes_file = str(Path(self.config_file_path).with_name("routes.map"))
        backends = self.backend_configs.values()
        routes = [
            f"{(backend.path_prefix or '').rstrip('/')}/ {backend.name or 'unknown'}\n"
            for backend in backends
            if backend.protocol == RequestProtocol.HTTP
        ]
        routes += [f"{path}/ {_SYSTEM_BACKEND}\n" for path in _SYSTEM_PATHS]
        Path(self.cfg.routes_file).write_text("".join(routes))
        for backend in backends:
            for server in backend.servers:
                server.address = _get_address(server.host, server.port)
        super()._generate_config_file_internal()

    def _initialize_directories_and_error_files(self) -> None:
        """Create the folder of HAProxy's files, with our error page instead of Ray's."""
        super()._initialize_directories_and_error_files()
        Path(self.cfg.error_file_path).write_bytes(replica_died())
        if raylet := os.environ.get(_RAYLET_PID):
            watchdog = Path(self.config_file_path).with_name("watchdog.lua")
            watchdog.write_text(_WATCHDOG % int(raylet))
            self.cfg.watchdog_file = str(watchdog)

    async def start(self) -> None:
        """Take over a running HAProxy, which serves by the routes that it has; otherwise start one."""
        self._prune_old_procs()
        pid = await self._get_running_pid()
        others = self._find_processes()
        if pid in others:
            log.info("HAProxy (pid %d) of an earlier manager is serving; taking it over.", pid)
            others.discard(pid)
            self._old_procs += [AdoptedProcess(other) for other in others]  # they finish their requests
            self._proc = AdoptedProcess(pid)
            self._watch(self._proc)
            return
        for other in others:  # it does not answer, and may hold the port
            with contextlib.suppress(OSError):
                os.kill(other, signal.SIGKILL)
        await super().start()

    async def restart(self) -> None:
        """Start HAProxy after its death, with the routes that are known."""
        # The state of the servers at the last reload: a replica that was starting then would stay down.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.cfg.server_state_file)
        await super().start()

    async def stop(self) -> None:
        self.on_exit = None
        await super().stop()

    async def _start_and_wait_for_haproxy(
        self, *extra_args: str, timeout_s: int = RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S
    ) -> Any:
        """Start HAProxy in a session of its own; Ray's raylet kills the process group of a dead actor."""
        self._spawn_seq += 1
        base = f"{self.cfg.socket_path}.{self._log_id}.{self._spawn_seq}"
        logs = f"{base}.stdout.log", f"{base}.stderr.log"
        arguments = [ray_haproxy.get_haproxy_binary(), "-db", "-f", self.config_file_path]
        if not self.cfg.enable_so_reuseport:
            arguments.append("-dR")
        with open(logs[0], "wb") as stdout, open(logs[1], "wb") as stderr:  # noqa: ASYNC230
            process: Any = await asyncio.create_subprocess_exec(
                *arguments, *extra_args, stdout=stdout, stderr=stderr, start_new_session=True
            )
        process._stdout_path, process._stderr_path = logs
        try:
            await self._wait_for_hap_availability(process, timeout_s=timeout_s)
        except Exception:
            if process.returncode is None:
                process.kill()
                await process.wait()
            self._retire_log_files(process)
            raise
        log.info("HAProxy (pid %d) is serving; its output is in %s.", process.pid, logs[1])
        self._watch(process)
        return process

    async def _wait_for_hap_availability(
        self, proc: Any, timeout_s: int = RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S
    ) -> None:
        """Look for the answer of a new process more often than Ray does, which waits for half a second."""
        for _ in range(_FAST_CHECKS):
            if proc.returncode is not None or await self._get_running_pid() == proc.pid:
                break
            await asyncio.sleep(_CHECK_PERIOD_S)
        await super()._wait_for_hap_availability(proc, timeout_s)

    def _find_processes(self) -> set[int]:
        pids = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
        return {pid for pid in pids if self._is_our_haproxy(pid)}

    def _watch(self, process: Any) -> None:
        async def report() -> None:
            await wait_for_exit(process.pid)
            if self.on_exit is not None:
                await self.on_exit(process)

        task = asyncio.get_running_loop().create_task(report())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _get_address(host: str, port: int) -> str:
    """Return the address of a replica: its Unix socket where it runs on this host."""
    if (path := unix_listener.find_socket(host, port)) is not None:
        return f"unix@{path}"
    # tcp-ut is for requests without an acknowledgement; HAProxy 2.8 ignores it in `default-server`.
    return f"{host}:{port} tcp-ut {LOST_HOST_TIMEOUT_S}s"


def _configure(cfg: Any, environ: Mapping[str, str]) -> None:
    """Set the values of Ray's configuration and those that our template reads."""
    cfg.timeout_http_request_s = HEAD_TIMEOUT_S
    cfg.maxconn = max_connections(environ)
    cfg.has_log_target = LOG_TARGET in environ
    if THREADS not in environ:
        cfg.nbthread = min(_MAX_THREADS, max(1, len(os.sched_getaffinity(0)) // _CORES_PER_THREAD))
    cfg.connections_per_source = int(environ.get(MAX_CONNECTIONS_PER_SOURCE) or 0)
    cfg.requests_per_source = int(environ.get(MAX_REQUESTS_PER_SOURCE) or 0)
    cfg.tls_bind = environ.get(HAPROXY_TLS_BIND, "")
    cfg.tls_certificate = environ.get(HAPROXY_TLS_CERTIFICATE, "")
    cfg.watchdog_file = ""


class AdoptedProcess:
    """A HAProxy that an earlier actor started: the part of asyncio's Process that Ray Serve uses."""

    _stdout_path = _stderr_path = ""  # its own actor wrote its logs

    def __init__(self, pid: int) -> None:
        self.pid = pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; its code is known only to its parent."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return -1
        return -1 if state in "ZX" else None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    async def wait(self) -> None:
        await wait_for_exit(self.pid)


async def wait_for_exit(pid: int) -> None:
    """Return as soon as the process ends; the kernel reports it."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def explain_bind_failure(output: str) -> str:
    """Return which process has the port that HAProxy's output names, with the remedy; else an empty text."""
    failed = re.search(r"cannot bind socket \(([^)]+)\) for \[.*:(\d+)\]", output)
    if failed is None:
        return ""
    cause, port = failed[1], int(failed[2])
    remedy = "change http_options.port, or the variable of serve.env that has this port"
    return f"\nPort {port}: {cause}{describe_port_owner(port)}. End that process, or {remedy}."


_RayHAProxyManager: Any = ray_haproxy.HAProxyManager.__ray_metadata__.modified_class.__ray_actor_class__


class HAProxyManager(_RayHAProxyManager):
    """Ray Serve's actor, which starts HAProxy again as soon as the kernel reports its death.

    On the head node it has Ray Serve's fallback proxy, too.
    """

    def __init__(self, http_options: Any, grpc_options: Any, **options: Any) -> None:
        apply_changes()
        super().__init__(http_options, grpc_options, **options)
        self._haproxy.on_exit = self._restart
        self._fallback: fallback_proxy.FallbackProxy | None = None
        if options["node_id"] == get_head_node_id():
            self._fallback = fallback_proxy.FallbackProxy(http_options, grpc_options, **options)

    async def ready(self) -> str:
        if self._fallback is not None:
            with contextlib.suppress(Exception):  # Ray has logged it; HAProxy serves without a fallback
                await self._fallback.ready()
        try:
            state: str = await super().ready()
        except RuntimeError as error:
            raise RuntimeError(f"{error}{explain_bind_failure(str(error))}") from None
        return state

    async def receive_asgi_messages(self, request_metadata: Any) -> Any:
        """Return what the fallback proxy has received of a request; replicas call this."""
        assert self._fallback is not None
        return await self._fallback.receive_asgi_messages(request_metadata)

    async def receive_grpc_messages(self, session_id: str) -> Any:
        assert self._fallback is not None
        return await self._fallback.receive_grpc_messages(session_id)

    async def _restart(self, ended: Any) -> None:
        """Start HAProxy again, unless it ended because another one has replaced it."""
        async with self._reload_lock:
            for delay in _RESTART_DELAYS_S:
                if self._haproxy._proc is not ended or self._haproxy.on_exit is None:
                    return
                _report(f"HAProxy (pid {ended.pid}) died, and no request is accepted; starting it again.")
                try:
                    await self._haproxy.restart()
                except Exception as error:
                    _report(f"HAProxy did not start: {error}")
                    await asyncio.sleep(delay)


def _report(message: str) -> None:
    """Log an error in the actor's file, and write it to the server's log, which has no other of it."""
    log.error("%s", message)
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()


def apply_changes() -> None:
    """Make Ray Serve use our handle and our template in this process. Raises ConfigurationError."""
    if ray_haproxy.HAProxyApi is not HAProxyApi:
        ray_haproxy.HAPROXY_CONFIG_TEMPLATE = adapt_template(ray_haproxy.HAPROXY_CONFIG_TEMPLATE)
        ray_haproxy.HAProxyApi = HAProxyApi


def install() -> None:
    """Make Ray Serve's controller, in whose process this runs, start our actor on every node.

    Raises ConfigurationError where the installed version of Ray Serve differs; then no server starts.
    """
    adapt_template(ray_haproxy.HAPROXY_CONFIG_TEMPLATE)
    ray_controller.HAProxyManager = ray.remote(num_cpus=0)(HAProxyManager)
    fallback_proxy.install()
    control_loop.install()
    actor_classes.share_replica_class()
