"""`torchrelay start` where it fails: it reports the cause and the remedy, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from serve_app.cli.app import app
from serve_app.cli.dev_server import DevServer
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


def test_a_port_of_another_server(start, tmp_path: Path) -> None:
    """The process that listens on the port has the variables of a server that was started elsewhere."""
    stop = "cd /srv && torchrelay stop /srv/app.yaml"
    program = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1]); input()"
    with subprocess.Popen(
        [sys.executable, "-u", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TORCHRELAY_STOP": stop},
    ) as other:
        port = int(other.stdout.readline())
        result = start(port=port, management={"port": free_port(), "metrics_port": free_port()})
        other.communicate(b"\n")
    assert f"by pid {other.pid} (" in result.stderr
    assert f"End that server of Torchrelay by `{stop}`, or change http_options.port in" in result.stderr


def test_a_port_that_does_not_exist(start) -> None:
    result = start(port=99_999, management={"port": free_port(), "metrics_port": free_port()})
    assert result.exit_code == 1
    assert "Port 99999: a port is at most 65535. Change http_options.port in " in result.stderr


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


def test_a_model_store_that_is_no_folder(start, tmp_path: Path) -> None:
    (tmp_path / "model_store").write_text("an archive?")
    result = start(management={"port": free_port(), "metrics_port": free_port()})
    assert result.exit_code == 1
    expected = f"model store {tmp_path / 'model_store'}: it is a file; set store.model_store to a folder"
    assert expected in result.stderr
    assert not (tmp_path / "state").exists()


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


@pytest.fixture
def left_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., subprocess.Popen]]:
    """Provide a function that starts a process, which server.run of this folder names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "state").mkdir()
    with contextlib.ExitStack() as processes:

        def run(run_id: str, **variables: str) -> subprocess.Popen:
            process = subprocess.Popen(
                ["sleep", "60"], env={**os.environ, **variables}, start_new_session=True
            )
            processes.callback(process.wait)
            processes.callback(process.kill)
            (tmp_path / "state/server.run").write_text(f"{run_id} {process.pid}")
            return process

        yield run


def test_stop_ends_the_server_of_the_default_configuration(left_running) -> None:
    """`torchrelay serve` has left its configuration in the same folder."""
    assert DevServer(free_port()).create().config.is_file()
    run_id = uuid.uuid4().hex
    process = left_running(run_id, TORCHRELAY_RUN=run_id)
    result = CliRunner().invoke(app, ["stop"])
    assert (result.exit_code, result.stdout) == (0, "Torchrelay has stopped.\n")
    assert process.wait(60) == -signal.SIGINT


@pytest.mark.parametrize("damage", ["", " damaged"])
def test_stop_leaves_a_process_of_another_session_alone(left_running, damage: str) -> None:
    """server.run is damaged, or its session has another process's number since the machine has crashed."""
    process = left_running(uuid.uuid4().hex + damage)
    result = CliRunner().invoke(app, ["stop"])
    assert (result.exit_code, result.stdout) == (0, "Torchrelay is not running here.\n")
    assert process.poll() is None


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
def signal_handlers() -> Iterator[None]:
    """Restore the handlers that ``ServerProcess.wait`` replaces."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers):
        signal.signal(number, handler)


@pytest.mark.usefixtures("signal_handlers")
@pytest.mark.slow
def test_a_server_that_another_process_stops_has_not_failed(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.process.start()
    other = threading.Thread(target=ServerProcess(server.process.config, server.process._env).stop)
    other.start()
    assert server.process.wait() == 0
    other.join()
    server.close()


@pytest.mark.usefixtures("signal_handlers")
def test_a_server_that_is_killed_has_failed(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.process.start()
    os.kill(server.process.pid, signal.SIGKILL)
    assert server.process.wait() == -signal.SIGKILL
    server.close()


@pytest.mark.parametrize("name", [pytest.param("raylet", marks=pytest.mark.nightly), "gcs_server"])
@pytest.mark.usefixtures("signal_handlers")
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
    _, alive = psutil.wait_procs(started, timeout=60)
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
    _, alive = psutil.wait_procs(started, timeout=60)
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


@pytest.mark.parametrize(
    "signals", [[signal.SIGTERM], [signal.SIGHUP], [signal.SIGTERM, signal.SIGTERM, signal.SIGINT]]
)
def test_a_start_that_a_signal_ends_leaves_no_process_and_keeps_the_log(
    tmp_path: Path, signals: list[signal.Signals]
) -> None:
    """The first process is a script that ignores the first request to end."""
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin/serve"
    script.write_text("#!/bin/sh\ntrap '' INT TERM\necho script $$\nwhile :; do sleep 0.1; done\n")
    script.chmod(0o700)
    document = yaml.safe_load((ROOT / "configs/app.yaml").read_text())
    document["http_options"]["port"] = free_port()
    closed = {"grpc": {"port": 0, "management_port": 0}, "management": {"port": 0, "metrics_port": 0}}
    document["applications"][0]["args"] = {"home": str(tmp_path), **closed}
    (tmp_path / "app.yaml").write_text(yaml.safe_dump(document))
    (tmp_path / "serve.env").write_text("RAY_SERVE_ENABLE_HA_PROXY=0\n")
    (tmp_path / "model_store").mkdir()
    program = (
        f"import sys; sys.executable = {str(tmp_path / 'bin/python')!r}; from serve_app.cli.app import app; "
        "app(['start', 'app.yaml', '--env', 'serve.env'])"
    )
    log, written = tmp_path / "state/logs/server.log", []
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env={**os.environ, "RAY_ADDRESS": "none"},
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # nohup ignores it
        ) as start:
            assert start.stdout is not None
            while not log.exists() or "script" not in log.read_text() or log.read_text() in written:
                assert start.poll() is None
                time.sleep(0.01)
            written.append(log.read_text())
            for number in signals:
                start.send_signal(number)
                if start.stdout is not None:
                    assert start.stdout.readline() in ("Stopping …\n", "")
            assert start.wait(60) == 130
        pid = int(written[-1].split()[1])
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert (log.read_text(), Path(f"{log}.1").read_text()) == (written[1], written[0])


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("(ServeReplica:a pid=1) ready\n", ""),
        (
            "(x:Management pid=1) Management cannot start: control.database_url: damaged\nother\n",
            "Management cannot start: control.database_url: damaged",
        ),
        (
            "(G pid=7) Gateway cannot start: Traceback (most recent call last):\n(M pid=8) later\n",
            "Gateway cannot start: Traceback (most recent call last):",
        ),
        (
            "(G pid=7) Gateway cannot start: Traceback (most recent call last):\n(G pid=7)   File x, line 1\n"
            "(G pid=7)     call()\n(G pid=7) ValueError: no\n(G pid=7) more\n",
            "Gateway cannot start: ValueError: no",
        ),
    ],
)
def test_the_log_has_the_reason_of_a_failed_start(tmp_path: Path, log: str, expected: str) -> None:
    document = yaml.safe_load((ROOT / "configs/app.yaml").read_text())
    document["applications"][0]["args"] = {"home": str(tmp_path)}
    (tmp_path / "app.yaml").write_text(yaml.safe_dump(document))
    server = ServerProcess(tmp_path / "app.yaml", ROOT / "configs/serve.env")
    assert server.find_start_failure() == "", "there is no log"
    server.log.parent.mkdir(parents=True)
    server.log.write_text(log + "line\n" * 100)
    assert server.find_start_failure() == expected
    assert server.last_lines(3).splitlines()[: 1 if expected else 0] == ([expected] if expected else [])
