"""`torchrelay start` where it cannot: it says why, names the cure, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from parts import Server, free_port

ROOT = Path(__file__).parents[2]


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command over the shipped files, with ``args`` and a line of serve.env as the test wants them."""

    def run(port: int | None = None, line: str = "", **args: object) -> subprocess.CompletedProcess[str]:
        document = yaml.safe_load((ROOT / "configs/app.yaml").read_text())
        document["http_options"]["port"] = port or free_port()
        ports = {"port": free_port(), "management_port": free_port()}
        document["applications"][0]["args"] = {"home": str(tmp_path), "grpc": ports, **args}
        config, env = tmp_path / "app.yaml", tmp_path / "serve.env"
        config.write_text(yaml.safe_dump(document))
        env.write_text((ROOT / "configs/serve.env").read_text() + line)
        return subprocess.run(
            [sys.executable, "-m", "serve_app.cli", "start", str(config), "--env", str(env)],
            env={**os.environ, "COLUMNS": "1000"},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that this process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_the_inference_port_is_in_use(start, taken: int, tmp_path: Path) -> None:
    done = start(port=taken, management={"port": free_port(), "metrics_port": free_port()})
    assert done.returncode == 1
    assert f"Port {taken}: Address already in use by pid {os.getpid()} (" in done.stderr
    assert f"End that process, or change http_options.port in {tmp_path / 'app.yaml'}." in done.stderr
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("setting", ["port", "metrics_port"])
def test_a_port_of_ours_is_in_use(start, taken: int, setting: str) -> None:
    ports = {"port": free_port(), "metrics_port": free_port(), setting: taken}
    done = start(management=ports)
    assert done.returncode == 1
    assert f"Port {taken}: Address already in use by pid {os.getpid()} (" in done.stderr
    assert f"change management.{setting} in " in done.stderr


@pytest.mark.parametrize("setting", ["port", "management_port"])
def test_a_grpc_port_is_in_use(start, taken: int, setting: str) -> None:
    ports = {"port": free_port(), "metrics_port": free_port()}
    done = start(management=ports, grpc={"port": free_port(), "management_port": free_port(), setting: taken})
    assert done.returncode == 1
    assert f"Port {taken}: Address already in use by pid {os.getpid()} (" in done.stderr
    assert f"change grpc.{setting} in " in done.stderr


def test_a_port_of_rays_is_in_use(start, taken: int, tmp_path: Path) -> None:
    ports = {"port": free_port(), "metrics_port": free_port()}
    done = start(management=ports, line=f"RAY_SERVE_HAPROXY_STATS_PORT={taken}\n")
    assert done.returncode == 1
    assert f"Port {taken}: " in done.stderr
    assert f"change RAY_SERVE_HAPROXY_STATS_PORT in {tmp_path / 'serve.env'}." in done.stderr


def test_an_unknown_setting(start, tmp_path: Path) -> None:
    done = start(control={"load_model": "none"})
    assert done.returncode == 1
    assert f"{tmp_path / 'app.yaml'}: unknown key 'control.load_model'; did you mean 'load_models'?" in done.stderr


def test_a_setting_of_the_wrong_kind(start, tmp_path: Path) -> None:
    done = start(runtime={"job_queue_size": "many"})
    assert done.returncode == 1
    assert f"{tmp_path / 'app.yaml'}: runtime.job_queue_size: " in done.stderr
    assert "(got 'many')" in done.stderr


def test_a_key_of_ones_own_that_is_wrong(start, tmp_path: Path) -> None:
    ports = {"port": free_port(), "metrics_port": free_port()}
    wrong = {"plain-secret": "a key does not stand here in plain text", "env:NO_SUCH_KEY": "NO_SUCH_KEY"}
    for key, said in wrong.items():
        keys = [{"name": "ops", "key": key}]
        done = start(port=free_port(), management=ports, auth={"mode": "on", "keys": keys})
        assert done.returncode == 1
        assert f"{tmp_path / 'app.yaml'}: auth.keys, the key named 'ops': " in done.stderr
        assert said in done.stderr
        assert "plain-secret" not in done.stderr


def test_a_certificate_that_is_not_there(start, tmp_path: Path) -> None:
    ports = {"port": free_port(), "metrics_port": free_port()}
    pair = {"certificate_file": "no.pem", "private_key_file": "no.key"}
    done = start(port=free_port(), management={**ports, **pair})
    assert done.returncode == 1
    assert "management.certificate_file: " in done.stderr
    assert "no.pem: No such file or directory; name a file that the server's user can read" in done.stderr


def test_a_broken_line_in_the_environment_file(start, tmp_path: Path) -> None:
    number = len((ROOT / "configs/serve.env").read_text().splitlines()) + 1
    done = start(line="RAY_SERVE_ENABLE_HA_PROXY 1\n")
    assert done.returncode == 1
    assert f"{tmp_path / 'serve.env'}, line {number}: 'RAY_SERVE_ENABLE_HA_PROXY 1' is not KEY=VALUE" in done.stderr


@pytest.mark.parametrize(
    "text", ["applications: [", "- a list", "applications: {}", "applications: [text]", "applications: [args: a]"]
)
@pytest.mark.parametrize("command", ["start", "stop"])
def test_a_configuration_that_is_none(tmp_path: Path, command: str, text: str) -> None:
    config = tmp_path / "app.yaml"
    config.write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "serve_app.cli", command, str(config), "--env", str(ROOT / "configs/serve.env")],
        env={**os.environ, "COLUMNS": "1000"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stderr
    assert f"{config}: " in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_with_brackets_is_said_as_it_stands(tmp_path: Path) -> None:
    """What HAProxy and file names say in brackets is no markup."""
    config = tmp_path / "[" / "b].yaml"
    done = subprocess.run(
        [sys.executable, "-m", "serve_app.cli", "start", str(config), "--env", str(ROOT / "configs/serve.env")],
        env={**os.environ, "COLUMNS": "1000"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert f"Torchrelay did not start. {config}: No such file or directory" in done.stderr


def test_a_server_that_somebody_killed_is_reaped_by_a_stop(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.process.start()
    pid = server.process.pid
    os.kill(pid, signal.SIGKILL)
    server.wait(lambda: server.process.processes() == [], what="its end")
    assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert server.process.stop() is False, "there was nothing to end"
    assert not psutil.pid_exists(pid)
    server.close()
