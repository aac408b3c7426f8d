"""`torchrelay doctor` on this machine, with programs and files of its own where the machine has none."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from serve_app.cli import machine_checks
from serve_app.cli.app import app

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def write_config(folder: Path, port: int) -> Path:
    """Write an app.yaml whose inference port is ``port``, and which has no other listener."""
    closed = {"port": 0, "metrics_port": 0}
    args = {"management": closed, "grpc": {"port": 0, "management_port": 0}}
    document = {"http_options": {"port": port}, "applications": [{"args": args}]}
    (folder / "app.yaml").write_text(yaml.safe_dump(document))
    return folder / "app.yaml"


def run_doctor(config: Path) -> tuple[int, dict[tuple[str, str], Any], bool]:
    result = CliRunner().invoke(app, ["doctor", str(config), "--json"])
    document = json.loads(result.stdout)
    checks = {(check["section"], check["name"]): check for check in document["checks"]}
    return result.exit_code, checks, document["ready"]


def test_it_lists_what_this_machine_can_run(tmp_path: Path) -> None:
    code, checks, ready = run_doctor(write_config(tmp_path, 0))
    assert (code, ready) == (0, True), [check for check in checks.values() if check["state"] == "failed"]
    assert checks["extras", "server"]["state"] == "ok"
    assert "CUDA" in checks["engines", "torch"]["found"]
    assert "CPUExecutionProvider" in checks["engines", "onnxruntime"]["found"]
    assert "JPEG" in checks["codecs", "images"]["found"]
    assert checks["engines", "vllm"]["fix"] or checks["engines", "vllm"]["found"]
    sections = {section for section, _ in checks}
    assert {"system", "devices", "compilers", "limits", "disk", "ray"} <= sections
    assert all(check["fix"] for check in checks.values() if check["state"] != "ok")


def test_a_port_of_another_process_fails_with_its_pid(tmp_path: Path, taken_port: int) -> None:
    config = write_config(tmp_path, taken_port)
    code, checks, ready = run_doctor(config)
    port = checks["ports", str(taken_port)]
    assert (code, ready, port["state"]) == (1, False, "failed")
    assert f"pid {os.getpid()}" in port["found"]
    assert "http_options.port" in port["fix"]
    shown = CliRunner().invoke(app, ["doctor", str(config)])
    assert shown.exit_code == 1
    assert "No server starts here" in shown.stdout


def test_it_reads_the_gpus_of_nvidia_smi(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, NVIDIA H100, 580.1, 81559, 80000'\n")
    program.chmod(0o755)
    gpus = list(machine_checks.check_gpus({"PATH": str(tmp_path)}))
    assert [(gpu.name, gpu.state) for gpu in gpus] == [("GPU 0", "ok")]
    assert gpus[0].found == "NVIDIA H100, driver 580.1, 80000 of 81559 MiB free"
    program.write_text("#!/bin/sh\necho 'Failed to initialize NVML'\nexit 9\n")
    (broken,) = machine_checks.check_gpus({"PATH": str(tmp_path)})
    assert (broken.state, broken.found) == ("warning", "nvidia-smi fails: Failed to initialize NVML")


def test_engines_that_use_none_of_the_gpus_are_a_warning() -> None:
    engines = {check.name: check for check in machine_checks.check_engines(gpus=2)}
    for name in ("torch", "onnxruntime"):
        assert engines[name].state == "warning" or "GPUs" in engines[name].found, engines[name]
        assert engines[name].fix


def test_versions_are_compared_with_the_constraints(tmp_path: Path) -> None:
    file = tmp_path / "constraints.txt"
    file.write_text("pyyaml==0.1  # old\nnumpy==0.2 ; python_version < '3.11'\nno-such-package==1\n")
    (check,) = machine_checks.check_constraints(file)
    assert check.state == "warning"
    assert "(tested 0.1)" in check.found
    assert "(tested 0.2)" in check.found
    assert "no-such-package" not in check.found


def test_it_names_the_files_to_copy_from() -> None:
    files = {check.name: Path(check.found) for check in machine_checks.list_configurations()}
    assert set(files) == {"app.yaml", "settings.yaml", "model-config.yaml"}
    assert all(file.is_file() for file in files.values())
    assert machine_checks.find_constraints().is_file()


def test_a_token_that_others_can_read_has_the_command_that_restricts_it(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o644)
    found = {c.name: c for c in machine_checks.check_ray({"RAY_AUTH_TOKEN_PATH": str(token)})}["token"]
    assert (found.state, found.fix) == ("warning", f"chmod 600 {token}")
    token.chmod(0o600)
    found = {c.name: c for c in machine_checks.check_ray({"RAY_AUTH_TOKEN_PATH": str(token)})}["token"]
    assert found.state == "ok"


def test_no_check_imports_a_large_package() -> None:
    code = """
import os, sys
from serve_app.cli.machine_checks import check_machine
from serve_app.settings import Settings
list(check_machine(("127.0.0.1", 0), Settings(), os.environ))
large = {"torch", "ray", "onnxruntime", "transformers", "PIL"} & set(sys.modules)
sys.exit(str(large) if large else 0)
"""

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_invalid_configuration_is_named(tmp_path: Path) -> None:
    file = tmp_path / "app.yaml"
    file.write_text("applications: []")
    result = CliRunner().invoke(app, ["doctor", str(file)])
    assert result.exit_code == 1
    assert "not a configuration" in result.stderr
