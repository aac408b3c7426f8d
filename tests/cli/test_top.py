"""`torchrelay top`, against the real control plane behind its management API."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from typer.testing import CliRunner, Result

from serve_app.cli.app import app
from serve_app.cli.machine_checks import check_models
from serve_app.domain.access import ROLES, AccessTable, KeyGrant
from serve_app.settings import ManagementSettings, Settings
from tests.support.archives import ECHO, make_archive
from tests.support.control_server import ControlServer, serve_control
from tests.support.control_services import ControlServices
from tests.support.grpc_calls import access_table
from tests.support.http_server import respond, serving
from tests.support.ports import free_port

pytestmark = pytest.mark.integration


@contextlib.contextmanager
def serve_models(home: Path, *names: str, access: AccessTable | None = None) -> Iterator[ControlServer]:
    with serve_control(home, access) as server:
        for name in names:
            archive = make_archive(server.store, name, ECHO)
            parameters = {"url": archive.name, "initial_workers": 1, "synchronous": "true"}
            headers = {"authorization": "Bearer secret"}
            url = f"{server.url}/models"
            httpx.post(url, params=parameters, headers=headers, timeout=60).raise_for_status()
        yield server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ControlServer]:
    with serve_models(tmp_path, "alpha", "beta") as server:
        yield server


@contextlib.contextmanager
def load(server: ControlServer, model: str, status: str = "ok") -> Iterator[None]:
    """Count requests of a model meanwhile, as a gateway does.

    They are fewer than a hundred in an interval of `top`, so that its percentiles are exact.
    """
    stopped = threading.Event()

    def count() -> None:
        while not stopped.wait(0.05):
            server.services.meters.request(model, "1.0", status, 0.02)

    thread = threading.Thread(target=count)
    thread.start()
    yield
    stopped.set()
    thread.join()


def top(server: ControlServer, *arguments: str, **env: str) -> Result:
    variables = {"TORCHRELAY_MANAGEMENT": server.url, "TORCHRELAY_METRICS": server.url, **env}
    return CliRunner().invoke(app, ["top", "--interval", "0.3", *arguments], env=variables)


def rows(result: Result) -> dict[str, list[str]]:
    """Return the cells of the printed rows by model, in their order."""
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    return {line[0]: line[1:] for line in lines if line and line[0] in ("alpha", "beta")}


def test_a_model_of_the_start_without_a_place_is_shown_by_every_command(tmp_path: Path) -> None:
    async def start(services: ControlServices) -> None:
        services.serve.starting = {"alpha--1.0"}
        await services.models.load_model_store(on_loaded)
        while not services.health.waiting:
            await services.reconcile_loop.wait_for_round()
        await services.reconcile_loop.wait_for_round()

    async def on_loaded() -> None: ...

    with serve_control(tmp_path) as server:
        make_archive(server.store, "alpha", ECHO, config={"num_gpus": 1})
        make_archive(server.store, "beta", ECHO)
        (server.store / "gamma.mar").write_bytes(b"no archive")
        server.run(start(server.services))
        reason = "No node of the cluster can hold a replica of alpha 1.0, which requires 1 GPU"
        with httpx.Client(base_url=server.url, timeout=60) as http:
            described = {name: http.get(f"/models/{name}").json()[0] for name in ("alpha", "beta")}
        assert described["alpha"]["waitingFor"].startswith(reason)
        assert "waitingFor" not in described["beta"]
        shown = top(server, "--once", COLUMNS="300")
        states = {line.split()[0]: line.split()[-1] for line in shown.output.splitlines() if " of 1" in line}
        assert (states["alpha"], states["beta"]) == ("waiting", "ready")
        assert f"alpha 1.0: {reason}" in shown.output
        address = {"TORCHRELAY_MANAGEMENT": server.url, "TORCHRELAY_INFERENCE": server.url, "COLUMNS": "400"}
        status = CliRunner().invoke(app, ["status"], env=address).output
        assert reason in status
        assert re.search(r"gamma .* not loaded \d\d:\d\d:\d\d .*\n.*gamma.mar", status), status
        port = urlsplit(server.url).port
        assert port is not None
        check, broken = check_models(Settings(management=ManagementSettings(port=port)))
        assert (broken.name, broken.state, broken.found) == ("gamma", "warning", "not loaded")
        assert (check.name, check.state, check.found) == ("alpha 1.0", "warning", "0 of 1 replicas")
        assert check.fix.startswith(reason)


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b'{"models": [{}]}'])
def test_doctor_names_another_server_on_the_port_of_management(body: bytes) -> None:
    with serving(partial(respond, status=200, body=body)) as address:
        port = urlsplit(address).port
        assert port is not None
        [check] = check_models(Settings(management=ManagementSettings(port=port)))
    assert (check.state, check.found) == ("absent", "no management API responds there")


def test_one_table_shows_the_load_of_an_interval(server: ControlServer) -> None:
    with load(server, "beta", "handler_failed"):
        result = top(server, "--once")
    found = rows(result)
    assert list(found) == ["beta", "alpha"], "sorted by rate"
    version, mark, *cells = found["alpha"]
    assert (version, mark, cells[:3]) == ("1.0", "*", ["1", "of", "1"])
    assert cells[3:7] == ["0", "0", "–", "–"]
    assert cells[-1] == "ready"
    rate, error_rate = map(float, found["beta"][5:7])
    assert rate == error_rate > 0
    assert found["beta"][7:11] == ["20.0", "ms", "20.0", "ms"], "exact, not a bound of the histogram"
    assert "2 of 2 replicas" in result.output


def test_orders_and_limits(server: ControlServer) -> None:
    with load(server, "beta"):
        assert list(rows(top(server, "--sort", "name"))) == ["alpha", "beta"]
        assert list(rows(top(server, "--sort", "p99"))) == ["beta", "alpha"]
        assert list(rows(top(server, "--sort", "memory"))) == ["alpha", "beta"]
        limited = top(server, "--limit", "1")
    assert list(rows(limited)) == ["beta"]
    assert "and 1 more" in limited.output
    wrong = top(server, "--sort", "size")
    assert wrong.exit_code == 2
    assert "'size' is none of rate, errors" in " ".join(wrong.output.replace("│", "").split())


def test_no_server_is_an_error_with_the_address() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    result = CliRunner().invoke(app, ["top", "--once"], env={"TORCHRELAY_MANAGEMENT": url})
    assert result.exit_code == 1
    assert f"No server responds at {url}" in result.output


def test_wrong_metrics_address_is_an_error_with_the_option(server: ControlServer) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    for metrics in (url, f"{server.url}/elsewhere"):
        result = top(server, "--once", TORCHRELAY_METRICS=metrics)
        assert result.exit_code == 1
        assert f"The metrics page {metrics}/metrics cannot be read" in result.output
        assert "--metrics" in result.output


def test_keys_are_required_and_sent(tmp_path: Path) -> None:
    access = access_table(secret=KeyGrant(ROLES["manage"], name="ops"))
    with serve_models(tmp_path, "alpha", access=access) as server:
        refused = top(server, "--once", TORCHRELAY_TOKEN="")
        assert refused.exit_code == 1
        assert "Set a key with TORCHRELAY_TOKEN" in refused.output
        assert "alpha" in rows(top(server, "--once", "--token", "secret"))


class Terminal:
    """A ``torchrelay top`` on a terminal of its own."""

    def __init__(self, server: ControlServer) -> None:
        self._terminal, slave = pty.openpty()
        env = {**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "40"}
        command = [sys.executable, "-m", "serve_app.cli", "top", "--interval", "0.2"]
        addresses = ["--management", server.url, "--metrics", server.url]
        self.process = subprocess.Popen(
            [*command, *addresses], stdin=slave, stdout=slave, stderr=slave, env=env
        )
        os.close(slave)
        self.output = ""

    def press(self, key: str) -> None:
        os.write(self._terminal, key.encode())

    def wait_for(self, text: str, timeout: float = 60.0) -> None:
        """Read the terminal until a text appears after all that was read before."""
        deadline, seen = time.monotonic() + timeout, ""
        while text not in seen:
            assert time.monotonic() < deadline, self.output
            if select.select([self._terminal], [], [], 0.1)[0]:
                seen += os.read(self._terminal, 65536).decode("utf-8", "replace")
        self.output += seen

    def close(self) -> int:
        with contextlib.suppress(OSError):  # the terminal is closed with the process
            while os.read(self._terminal, 65536):
                pass
        code = self.process.wait(60)
        os.close(self._terminal)
        return code


def test_view_on_a_terminal_takes_keys_and_outlives_the_server(tmp_path: Path) -> None:
    with serve_models(tmp_path, "alpha", "beta") as server:
        terminal = Terminal(server)
        try:
            terminal.wait_for("sorted by rate")
            terminal.press("n")
            terminal.wait_for("sorted by name")
        except BaseException:
            terminal.process.kill()
            raise
    terminal.wait_for("The server does not respond")
    terminal.press("q")
    assert terminal.close() == 0


def test_hosts_have_a_line_with_their_gpus(server: ControlServer) -> None:
    recorders = server.services.meters.torchserve
    for name, value in (("CPUUtilization", 25.0), ("MemoryUsed", 3072.0), ("MemoryUtilization", 40.0)):
        recorders.child(name, "Host").record(value)
    recorders.child("GPUUtilization", "Host", "0").record(90.0)
    recorders.child("GPUMemoryUsed", "Host", "0").record(2048.0)
    line = f"{socket.gethostname()}  CPU 25 %  memory 3.00 GiB (40 %)  GPU 0 90 %, 2.00 GiB"
    assert line in top(server, "--once").output
