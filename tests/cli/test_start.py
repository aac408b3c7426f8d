"""`torchrelay start` where it fails: it reports the cause and the remedy, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from serve_app.cli.app import app
from serve_app.cli.errors import StartError
from serve_app.cli.server_process import ServerProcess
from tests.support.ports import free_port
from tests.support.server import Server

pytestmark = pytest.mark.integration


ROOT = Path(__file__).parents[2]


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Result]:
    """Provide a function that runs the command with the shipped files, changed by ``args`` and ``line``."""

    def run(port: int | None = None, line: str = "", **args: object) -> Result:
        document = yaml.safe_load((ROOT / "configs/app.yaml").read_text())
        document["http_options"]["port"] = port or free_port()
        ports = {"port": free_port(), "management_port": free_port()}
        document["applications"][0]["args"] = {"home": str(tmp_path), "grpc": ports, **args}
        config, env = tmp_path / "app.yaml", tmp_path / "serve.env"
        config.write_text(yaml.safe_dump(document))
        env.write_text((ROOT / "configs/serve.env").read_text() + line)
        return run_command("start", config, env)

    return run


def run_command(command: str, config: Path, env: Path = ROOT / "configs/serve.env") -> Result:
    return CliRunner().invoke(app, [command, str(config), "--env", str(env)], env={"COLUMNS": "1000"})


@pytest.fixture
def taken() -> Iterator[int]:
    """Provide a port that this process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_inference_port_in_use(start, taken: int, tmp_path: Path) -> None:
    result = start(port=taken, management={"port": free_port(), "metrics_port": free_port()})
    assert result.exit_code == 1
    assert f"Port {taken}: Address already in use by pid {os.getpid()} (" in result.stderr
    assert f"End that process, or change http_options.port in {tmp_path / 'app.yaml'}." in result.stderr
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("setting", ["port", "metrics_port"])
def test_management_port_in_use(start, taken: int, setting: str) -> None:
    ports = {"port": free_port(), "metrics_port": free_port(), setting: taken}
    result = start(management=ports)
    assert result.exit_code == 1
    assert f"Port {taken}: Address already in use by pid {os.getpid()} (" in result.stderr
    assert f"change management.{setting} in " in result.stderr


@pytest.mark.parametrize("setting", ["port", "management_port"])
def test_grpc_port_in_use(start, taken: int, setting: str) -> None:
    ports = {"port": free_port(), "metrics_port": free_port()}
    result = start(
        management=ports, grpc={"port": free_port(), "management_port": free_port(), setting: taken}
    )
    assert result.exit_code == 1
    assert f"Port {taken}: Address already in use by pid {os.getpid()} (" in result.stderr
    assert f"change grpc.{setting} in " in result.stderr


def test_ray_port_in_use(start, taken: int, tmp_path: Path) -> None:
    ports = {"port": free_port(), "metrics_port": free_port()}
    result = start(management=ports, line=f"RAY_SERVE_HAPROXY_STATS_PORT={taken}\n")
    assert result.exit_code == 1
    assert f"Port {taken}: " in result.stderr
    assert f"change RAY_SERVE_HAPROXY_STATS_PORT in {tmp_path / 'serve.env'}." in result.stderr


def test_an_unknown_setting(start, tmp_path: Path) -> None:
    result = start(control={"load_model": "none"})
    assert result.exit_code == 1
    assert (
        f"{tmp_path / 'app.yaml'}: unknown key 'control.load_model'; did you mean 'load_models'?"
        in result.stderr
    )


def test_setting_of_the_wrong_type(start, tmp_path: Path) -> None:
    result = start(runtime={"job_queue_size": "many"})
    assert result.exit_code == 1
    assert f"{tmp_path / 'app.yaml'}: runtime.job_queue_size: " in result.stderr
    assert "(got 'many')" in result.stderr


def test_invalid_key_setting(start, tmp_path: Path) -> None:
    ports = {"port": free_port(), "metrics_port": free_port()}
    wrong = {"plain-secret": "a key does not stand here in plain text", "env:NO_SUCH_KEY": "NO_SUCH_KEY"}
    for key, message in wrong.items():
        keys = [{"name": "ops", "key": key}]
        result = start(port=free_port(), management=ports, auth={"mode": "on", "keys": keys})
        assert result.exit_code == 1
        assert f"{tmp_path / 'app.yaml'}: auth.keys, the key named 'ops': " in result.stderr
        assert message in result.stderr
        assert "plain-secret" not in result.stderr


def test_missing_certificate(start, tmp_path: Path) -> None:
    ports = {"port": free_port(), "metrics_port": free_port()}
    pair = {"certificate_file": "no.pem", "private_key_file": "no.key"}
    result = start(port=free_port(), management={**ports, **pair})
    assert result.exit_code == 1
    assert "management.certificate_file: " in result.stderr
    assert "no.pem: No such file or directory; name a file that the server's user can read" in result.stderr


def test_invalid_line_in_the_environment_file(start, tmp_path: Path) -> None:
    number = len((ROOT / "configs/serve.env").read_text().splitlines()) + 1
    result = start(line="RAY_SERVE_ENABLE_HA_PROXY 1\n")
    assert result.exit_code == 1
    assert (
        f"{tmp_path / 'serve.env'}, line {number}: 'RAY_SERVE_ENABLE_HA_PROXY 1' is not KEY=VALUE"
        in result.stderr
    )


@pytest.mark.parametrize(
    "text",
    ["applications: [", "- a list", "applications: {}", "applications: [text]", "applications: [args: a]"],
)
@pytest.mark.parametrize("command", ["start", "stop"])
def test_invalid_configuration(tmp_path: Path, command: str, text: str) -> None:
    config = tmp_path / "app.yaml"
    config.write_text(text)
    result = run_command(command, config)
    assert result.exit_code == 1, result.stderr
    assert f"{config}: " in result.stderr
    assert "Traceback" not in result.stderr


def test_brackets_in_errors_are_printed_literally(tmp_path: Path) -> None:
    """Brackets in messages of HAProxy and in file names are no markup."""
    config = tmp_path / "[" / "b].yaml"
    result = run_command("start", config)
    assert result.exit_code == 1
    assert f"Torchrelay did not start. {config}: No such file or directory" in result.stderr


@pytest.fixture
def sigterm_handler() -> Iterator[None]:
    """Restore the handler that ``ServerProcess.wait`` replaces."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.usefixtures("sigterm_handler")
@pytest.mark.slow
def test_a_server_that_another_process_stops_has_not_failed(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.process.start()
    other = threading.Thread(target=ServerProcess(server.process.config, server.process._env).stop)
    other.start()
    assert server.process.wait() == 0
    other.join()
    server.close()


@pytest.mark.usefixtures("sigterm_handler")
def test_a_server_that_is_killed_has_failed(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.process.start()
    os.kill(server.process.pid, signal.SIGKILL)
    assert server.process.wait() == -signal.SIGKILL
    server.close()


@pytest.mark.parametrize("name", [pytest.param("raylet", marks=pytest.mark.nightly), "gcs_server"])
@pytest.mark.usefixtures("sigterm_handler")
@pytest.mark.slow
def test_the_end_of_a_process_of_ray_ends_the_server_and_leaves_no_process(tmp_path: Path, name: str) -> None:
    server = Server(tmp_path)
    server.process.start()
    started: list[psutil.Process] = []

    def kill() -> None:
        server.wait(
            lambda: {"raylet", "gcs_server"} <= {process.name() for process in server.process.processes()}
        )
        started.extend(server.process.processes())
        next(process for process in started if process.name() == name).kill()

    killer = threading.Thread(target=kill)
    killer.start()
    assert server.process.wait() == 1
    killer.join()
    assert "ended; without it no replica can be started" in server.process.cause
    _, alive = psutil.wait_procs(started, timeout=5)
    assert alive == []
    server.close()


@pytest.mark.slow
def test_a_start_that_fails_leaves_no_process(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.process.start()
    server.wait(lambda: "gcs_server" in {process.name() for process in server.process.processes()})
    started = server.process.processes()
    os.kill(server.process.pid, signal.SIGKILL)
    with pytest.raises(StartError, match="The server ended with code -9"):
        for _ in server.process.poll(60, "not ready"):
            pass
    _, alive = psutil.wait_procs(started, timeout=5)
    assert alive == []
    server.close()


@pytest.mark.slow
def test_killed_server_is_reaped_by_stop(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.process.start()
    pid = server.process.pid
    os.kill(pid, signal.SIGKILL)
    server.wait(lambda: server.process.processes() == [], description="its end")
    assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert server.process.stop() is False, "there was nothing to end"
    assert not psutil.pid_exists(pid)
    server.close()
