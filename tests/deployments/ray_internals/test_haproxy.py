"""HAProxy's configuration as it is rendered, its error pages, and its restart after its death."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import json
import os
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray.serve._private import haproxy as ray_haproxy
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE
from ray.serve.config import HTTPOptions

from serve_app.deployments.ray_internals import haproxy
from serve_app.errors import ConfigurationError
from serve_app.protocols.http.server import unix_listener
from serve_app.settings import HAPROXY_TLS_BIND, HAPROXY_TLS_CERTIFICATE
from tests.support.certificates import make_pair
from tests.support.listeners import close_listener
from tests.support.ports import free_port


class _Wire:
    def __init__(self, sent: bytes) -> None:
        self._sent = sent

    def makefile(self, *_: object) -> io.BytesIO:
        return io.BytesIO(self._sent)


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apply our changes to Ray Serve in this process, and revert them afterwards."""
    for name in ("HAPROXY_CONFIG_TEMPLATE", "HAProxyApi"):
        monkeypatch.setattr(ray_haproxy, name, getattr(ray_haproxy, name))
    haproxy.apply_changes()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder whose path is short enough for a Unix socket."""
    path = Path(tempfile.mkdtemp(prefix="torchrelay-test-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)  # a HAProxy that is ending may write there


def build(folder: Path, *paths: str) -> Any:
    """Return the handle of a HAProxy in ``folder`` that has a backend without servers for each path."""
    cfg = ray_haproxy.HAProxyConfig(
        http_options=HTTPOptions(host="127.0.0.1", port=free_port()),
        socket_path=str(folder / "admin.sock"),
        server_state_base=str(folder),
        server_state_file=str(folder / "server-state"),
        stats_port=free_port(),
        metrics_port=free_port(),
        is_head=True,
    )
    api = ray_haproxy.HAProxyApi(cfg, config_file_path=str(folder / "haproxy.cfg"))
    api.set_backend_configs(
        {
            str(number): ray_haproxy.BackendConfig(name=f"b{number}", path_prefix=path, app_name=f"a{number}")
            for number, path in enumerate(paths)
        }
    )
    return api


def render(api: Any) -> str:
    api._generate_config_file_internal()
    return Path(api.config_file_path).read_text()


def check(api: Any) -> None:
    """Make HAProxy itself check the rendered file."""
    command = [ray_haproxy.get_haproxy_binary(), "-c", "-f", api.config_file_path]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "[ALERT]" not in result.stderr


@pytest.mark.usefixtures("changed")
def test_haproxy_accepts_the_rendered_file_and_its_limits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_RAYLET_PID", str(os.getpid()))
    api = build(folder, "/", "/predictions/m")
    lines = [line.strip() for line in render(api).splitlines()]
    for line in (
        "timeout http-request 10s",
        "timeout tunnel 3600s",
        "option forwardfor",
        "option srvtcpka",
        f"maxconn {haproxy.max_connections({})}",
        f"stats socket {folder}/admin.sock mode 600 level admin expose-fd listeners",
        f"bind 127.0.0.1:{api.cfg.stats_port}",
        f"bind 127.0.0.1:{api.cfg.metrics_port}",
    ):
        assert lines.count(line) == 1, line
    assert not [line for line in lines if "stick-table" in line or " ssl " in line]
    check(api)


@pytest.mark.usefixtures("changed")
def test_connections_to_replicas_end_where_nothing_is_acknowledged(folder: Path) -> None:
    """HAProxy ignores tcp-ut as a default of servers; tests/hosts has its effect."""
    api = build(folder)
    backend = ray_haproxy.BackendConfig(name="b", path_prefix="/", app_name="a")
    backend.servers = [ray_haproxy.ServerConfig("s", "10.0.0.1", 1)]
    api.set_backend_configs({"b": backend})
    assert "server s 10.0.0.1:1 tcp-ut 5s check " in render(api)
    check(api)


@pytest.mark.usefixtures("changed")
def test_a_taken_port_is_explained(folder: Path) -> None:
    api = build(folder)
    render(api)
    with socket.create_server(("127.0.0.1", api.cfg.frontend_port)):
        command = [ray_haproxy.get_haproxy_binary(), "-f", api.config_file_path]
        output = subprocess.run(command, capture_output=True, text=True, timeout=60).stderr
        explained = haproxy.explain_bind_failure(output)
    assert f"Port {api.cfg.frontend_port}: Address already in use by pid {os.getpid()} (" in explained
    assert "End that process, or change http_options.port" in explained
    assert haproxy.explain_bind_failure("[ALERT] another failure") == ""


@pytest.mark.usefixtures("changed")
def test_limits_per_source_and_tls_are_settings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_pair(folder)
    certificate = folder / "certificate.pem"
    certificate.write_text(certificate.read_text() + (folder / "key.pem").read_text())
    monkeypatch.setenv(haproxy.MAX_CONNECTIONS_PER_SOURCE, "50")
    monkeypatch.setenv(haproxy.MAX_REQUESTS_PER_SOURCE, "1")
    monkeypatch.setenv(HAPROXY_TLS_BIND, bind := f"127.0.0.1:{free_port()}")
    monkeypatch.setenv(HAPROXY_TLS_CERTIFICATE, str(certificate))
    api = build(folder, "/")
    text = render(api)
    assert "tcp-request connection reject if { sc0_conn_cur gt 50 }" in text
    assert "if { sc0_http_req_rate gt 10 }" in text
    assert text.count(" ssl crt ") == 1
    check(api)

    async def scenario() -> None:
        context = ssl.create_default_context(cafile=str(certificate))
        async with httpx.AsyncClient(verify=context, timeout=60) as client:
            statuses = [(await client.get(f"https://{bind}/-/routes")).status_code for _ in range(12)]
        assert statuses == [200] * 10 + [429] * 2

    running(api, scenario)


def test_connections_are_as_many_as_the_file_descriptors_suffice_for(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {20_000: 7_800, 1024: 209, 1 << 20: 10_000, resource.RLIM_INFINITY: 10_000}
    for hard, expected in limits.items():
        monkeypatch.setattr(resource, "getrlimit", lambda _, hard=hard: (1024, hard))
        assert haproxy.max_connections({}) == expected
    assert haproxy.max_connections({haproxy.MAX_CONNECTIONS: "65536"}) == 65536


@pytest.mark.parametrize("text", [*haproxy._EDITS, *haproxy._REQUIRED])
def test_another_template_is_refused_with_its_difference(text: str) -> None:
    changed_text = text.swapcase()
    with pytest.raises(ConfigurationError, match="0 times, not once; install the version of ray"):
        haproxy.adapt_template(HAPROXY_CONFIG_TEMPLATE.replace(text, changed_text))
    with pytest.raises(ConfigurationError, match="2 times"):
        haproxy.adapt_template(HAPROXY_CONFIG_TEMPLATE + text)


@pytest.mark.usefixtures("changed")
def test_the_page_of_a_dead_replica_is_torchserves(folder: Path) -> None:
    page = Path(build(folder).cfg.error_file_path).read_bytes()
    answer = http.client.HTTPResponse(_Wire(page))  # type: ignore[arg-type]
    answer.begin()
    assert answer.status == 500
    assert answer.getheader("x-torchrelay-reason") == "replica_died"
    assert answer.getheader("content-type") == "application/json"
    body = answer.read()
    assert len(body) == int(answer.getheader("content-length") or 0)
    assert json.loads(body) == {"code": 500, "type": "InternalServerException", "message": "Worker died."}


def get(api: Any, path: str) -> tuple[int, dict[str, str], bytes]:
    """Return the answer of HAProxy; the status is 0 while nothing listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{api.cfg.frontend_port}{path}", timeout=60) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()
    except OSError:
        return 0, {}, b""


async def until(condition: Callable[[], Any]) -> None:
    while not await asyncio.to_thread(condition):
        await asyncio.sleep(0.02)


def running(api: Any, scenario: Callable[[], Awaitable[None]]) -> None:
    """Run HAProxy for the time of the scenario."""

    async def run() -> None:
        await api.start()
        try:
            await asyncio.wait_for(scenario(), 120)
        finally:
            await api.stop()

    asyncio.run(run())


async def respond(name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + name.encode())
    writer.close()


@pytest.mark.usefixtures("changed")
def test_unknown_routes_are_503_with_a_time_to_retry(folder: Path) -> None:
    api = build(folder)

    async def scenario() -> None:
        status, headers, body = await asyncio.to_thread(get, api, "/predictions/m")
        assert (status, headers["retry-after"], headers["x-torchrelay-reason"]) == (503, "1", "starting")
        assert json.loads(body)["code"] == 503

    running(api, scenario)


@pytest.mark.usefixtures("changed")
def test_a_path_has_the_longest_route_of_whole_segments(folder: Path) -> None:
    api = build(folder)
    routes = {"/": "root", "/predictions/m": "m", "/predictions/m/x": "x", "/predictions/m--x": "m--x"}

    async def scenario() -> None:
        configs, listeners = {}, []
        for path, name in routes.items():
            listeners.append(await asyncio.start_server(partial(respond, name), "127.0.0.1", 0))
            port = listeners[-1].sockets[0].getsockname()[1]
            servers = [ray_haproxy.ServerConfig("s", "127.0.0.1", port)]
            configs[name] = ray_haproxy.BackendConfig(
                name=name, path_prefix=path, app_name=name, servers=servers
            )
        api.set_backend_configs(configs)
        await api.reload()
        expected = {
            "/": "root",
            "/predictions": "root",
            "/predictions/m": "m",
            "/predictions/m/": "m",
            "/predictions/m/1.0?a=b": "m",
            "/predictions/m/x": "x",
            "/predictions/m/x/y": "x",
            "/predictions/m/xy": "m",
            "/predictions/mm": "root",
            "/predictions/m--x": "m--x",
            "/predictions/M": "root",
            "/-/healthz": "success",
            "/-/health": "root",
        }
        await until(lambda: get(api, "/predictions/m--x")[2] == b"m--x")
        assert {path: (await asyncio.to_thread(get, api, path))[2].decode() for path in expected} == expected
        assert json.loads(get(api, "/-/routes?a=b")[2]) == routes
        status, headers, _ = get(api, "/-/routes/x")
        assert (status, headers["x-torchrelay-reason"]) == (404, "no_route")
        for listener in listeners:
            await close_listener(listener)

    running(api, scenario)


@pytest.mark.usefixtures("changed")
def test_a_request_passes_the_same_rules_with_any_number_of_applications(folder: Path) -> None:
    api = build(folder)
    api.cfg.metrics_enabled = False  # as configs/serve.env has it

    def frontend(applications: int) -> str:
        api.set_backend_configs(
            {
                f"b{i}": ray_haproxy.BackendConfig(name=f"b{i}", path_prefix=f"/{i}", app_name=f"a{i}")
                for i in range(applications)
            }
        )
        rules = render(api).partition("\nfrontend http_frontend\n")[2]
        return rules.partition("\nbackend ")[0]

    assert frontend(1) == frontend(20)


@pytest.mark.usefixtures("changed")
def test_a_replica_of_this_host_gets_its_requests_over_its_unix_socket(folder: Path) -> None:
    """The TCP port of the first replica accepts nothing; the other replica has TCP only."""
    api = build(folder)

    def answers() -> set[bytes]:
        return {get(api, "/")[2] for _ in range(4)}

    async def scenario() -> None:
        silent, tcp_port = free_port(), free_port()
        path = unix_listener.get_socket_path(silent)
        unix = await asyncio.start_unix_server(partial(respond, "unix"), path)
        tcp = await asyncio.start_server(partial(respond, "tcp"), "127.0.0.1", tcp_port)
        servers = [
            ray_haproxy.ServerConfig("s1", "127.0.0.1", silent),
            ray_haproxy.ServerConfig("s2", "127.0.0.1", tcp_port),
        ]
        backend = ray_haproxy.BackendConfig(name="b", path_prefix="/", app_name="a", servers=servers)
        api.set_backend_configs({"b": backend})
        await api.reload()
        assert f"server s1 unix@{path} check" in render(api)
        await until(lambda: answers() == {b"unix", b"tcp"})
        await api.reload()  # with the state of the servers
        assert await asyncio.to_thread(answers) == {b"unix", b"tcp"}
        await close_listener(unix)
        assert path is not None
        path.unlink(missing_ok=True)  # as a replica that stops: its requests go to the other one
        assert await asyncio.to_thread(answers) == {b"tcp"}
        await close_listener(tcp)

    running(api, scenario)


@pytest.mark.usefixtures("changed")
def test_a_connection_of_an_old_process_reaches_the_replica_that_is_left(folder: Path) -> None:
    """The old process selects those that ended, too: the replica that is left has more connections."""
    api, count = build(folder), 3

    async def scenario() -> None:
        released = [asyncio.Event() for _ in range(count)]
        arrived: list[int] = []

        async def answer(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            if b" /slow " in head:
                arrived.append(number)
                await released[number].wait()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n%d" % number)
            writer.close()

        listeners = [
            await asyncio.start_server(partial(answer, number), "127.0.0.1", 0) for number in range(count)
        ]
        ports = [listener.sockets[0].getsockname()[1] for listener in listeners]

        async def reload(ports: list[int]) -> None:
            servers = [ray_haproxy.ServerConfig(f"s{port}", "127.0.0.1", port) for port in ports]
            backend = ray_haproxy.BackendConfig(name="b", path_prefix="/", app_name="a", servers=servers)
            api.set_backend_configs({"b": backend})
            await api.reload()

        await reload(ports)
        await until(lambda: get(api, "/")[0] == 200)
        client = http.client.HTTPConnection("127.0.0.1", api.cfg.frontend_port, timeout=60)

        def request() -> tuple[bytes, bool]:
            client.request("POST", "/", b"x")
            response = client.getresponse()
            return response.read(), response.will_close

        assert not (await asyncio.to_thread(request))[1]
        slow = [asyncio.create_task(asyncio.to_thread(get, api, "/slow")) for _ in range(count)]
        await until(lambda: len(arrived) == count)
        assert sorted(arrived) == list(range(count))
        await reload(ports[-1:])
        for listener, event in zip(listeners[:-1], released, strict=False):
            await close_listener(listener)
            event.set()
        while sum(task.done() for task in slow) < count - 1:
            await asyncio.sleep(0.01)
        # The old process closes the connection after this response.
        assert await asyncio.to_thread(request) == (b"%d" % (count - 1), True)
        released[-1].set()
        await asyncio.gather(*slow)
        client.close()
        await close_listener(listeners[-1])

    running(api, scenario)


def test_threads_follow_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, threads in {1: 1, 2: 1, 7: 1, 8: 2, 64: 4}.items():
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        cfg = ray_haproxy.HAProxyConfig()
        haproxy._configure(cfg, {})
        assert (cfg.nbthread, cfg.has_log_target) == (threads, False)
    cfg = ray_haproxy.HAProxyConfig(nbthread=3)
    haproxy._configure(cfg, {haproxy.THREADS: "3", haproxy.LOG_TARGET: "10.0.0.1:514"})
    assert (cfg.nbthread, cfg.has_log_target) == (3, True)


@pytest.mark.usefixtures("changed")
def test_a_log_target_is_rendered_where_one_is_configured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert " local0 " not in render(build(folder, "/"))
    monkeypatch.setenv(haproxy.LOG_TARGET, "127.0.0.1:1514")
    api = build(folder, "/")
    assert " local0 info" in render(api)
    check(api)


@pytest.mark.usefixtures("changed")
def test_a_dead_haproxy_is_reported_at_once_and_starts_again_with_its_routes(folder: Path) -> None:
    api = build(folder, "/m")

    async def scenario() -> None:
        ended: asyncio.Queue[Any] = asyncio.Queue()
        api.on_exit = ended.put
        first = api._proc
        os.kill(first.pid, signal.SIGKILL)
        assert await ended.get() is first
        await api.restart()
        assert api._proc.pid != first.pid
        status, _, body = await asyncio.to_thread(get, api, "/-/routes")
        assert status == 200 and json.loads(body) == {"/m": "a0"}

    running(api, scenario)


@pytest.mark.usefixtures("changed")
def test_a_reload_takes_no_half_second_as_rays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(haproxy, "_FAST_CHECKS", 10_000)  # a busy machine starts HAProxy later
    api, pauses, sleep = build(folder), [], asyncio.sleep

    async def record(seconds: float, *result: Any) -> Any:
        pauses.append(seconds)
        return await sleep(seconds, *result)

    monkeypatch.setattr(asyncio, "sleep", record)

    async def scenario() -> None:
        first = api._proc
        await api.reload()
        assert api._proc is not first

    running(api, scenario)
    assert pauses and max(pauses) < 0.1


@pytest.mark.usefixtures("changed")
def test_another_manager_takes_over_the_haproxy_that_serves(folder: Path) -> None:
    first, second = build(folder, "/m"), build(folder)
    second.cfg.http_options = first.cfg.http_options

    async def scenario() -> None:
        process = first._proc
        await second.start()
        assert second._proc.pid == process.pid and second._proc.returncode is None
        assert (await asyncio.to_thread(get, first, "/-/routes"))[0] == 200  # the routes that it has
        second.set_backend_configs({"x": ray_haproxy.BackendConfig(name="x", path_prefix="/n", app_name="n")})
        await second.reload()
        assert second._proc.pid != process.pid
        await until(lambda: b'"/n"' in get(first, "/-/routes")[2])
        await asyncio.wait_for(process.wait(), 60)
        await second.stop()
        assert second.count_haproxy_processes() == 0

    running(first, scenario)


@pytest.mark.usefixtures("changed")
def test_a_haproxy_that_does_not_answer_is_replaced(folder: Path) -> None:
    first, second = build(folder), build(folder)
    second.cfg.http_options = first.cfg.http_options

    async def scenario() -> None:
        os.unlink(first.cfg.socket_path)
        await second.start()
        assert await asyncio.wait_for(first._proc.wait(), 60) == -signal.SIGKILL
        assert second.count_haproxy_processes() == 1
        await second.stop()

    running(first, scenario)


@pytest.mark.usefixtures("changed")
def test_haproxy_ends_with_the_raylet_of_its_node(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "60"]) as raylet:
        monkeypatch.setenv("RAY_RAYLET_PID", str(raylet.pid))
        api = build(folder)

        async def scenario() -> None:
            raylet.kill()  # and stays a zombie until its parent waits for it
            await asyncio.wait_for(api._proc.wait(), 60)

        running(api, scenario)


@pytest.mark.usefixtures("changed")
def test_an_unfinished_head_is_closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(haproxy, "HEAD_TIMEOUT_S", 1)
    api = build(folder)

    async def scenario() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", api.cfg.frontend_port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        writer.close()
        await writer.wait_closed()

    running(api, scenario)


@pytest.mark.slow
@pytest.mark.usefixtures("changed")
def test_a_client_may_wait_longer_than_it_may_pause(folder: Path) -> None:
    """The timeout of a client's pauses does not end a long prediction, nor a quiet WebSocket."""
    api = build(folder)
    api.cfg.timeout_client_s = 1

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"upgrade" in head:
            writer.write(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n")
        await asyncio.sleep(2)
        if b"upgrade" not in head:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n")
            await asyncio.sleep(2)
        writer.write(b"late")
        writer.close()

    async def scenario() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        backend = ray_haproxy.BackendConfig(
            name="b",
            path_prefix="/",
            app_name="a",
            servers=[ray_haproxy.ServerConfig("s", "127.0.0.1", port)],
        )
        backend.health_check_inter = "60s"
        api.set_backend_configs({"b": backend})
        await api.reload()
        for header in (b"connection: close", b"connection: upgrade\r\nupgrade: x"):
            reader, writer = await asyncio.open_connection("127.0.0.1", api.cfg.frontend_port)
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n" + header + b"\r\n\r\n")
            assert (await reader.read()).endswith(b"late")
            writer.close()
        await close_listener(server)

    running(api, scenario)
