"""The names of processes and the tables of the footprint."""

from __future__ import annotations

import re
import subprocess
import sys

import psutil
import pytest

from tests.benchmarks.footprint import Footprint, Use, load_times, measure_uses, title

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["ray::ServeReplica:torchrelay:Gateway"], "Gateway"),
        (["ray::ServeReplica:digits--1.0:digits--1.0  "], "digits--1.0"),
        (["ray::ServeController.get_serve_instance_details"], "ServeController"),
        (["/x/ray/core/src/ray/raylet/raylet", "--raylet_socket_name=/x/gcs"], "raylet"),
        (["ray-dashboard-MetricsHead-0", "-c"], "ray-dashboard-MetricsHead"),
        (["python", "-m", "serve_app.deployments.ray_internals.fork_server"], "fork server"),
        (["python", "-m", "serve_app.cli", "start"], "torchrelay start"),
        (["/usr/bin/python3"], "python3"),
    ],
)
def test_a_process_is_named_by_its_command(command: list[str], name: str) -> None:
    assert title(command) == name


def test_a_process_is_measured() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        [use] = measure_uses([psutil.Process(process.pid)], 0.01)
        process.kill()
    assert use.memory > 1
    assert use.cpu >= 0


def test_the_table_has_a_total() -> None:
    text = Footprint([Use("a", 1, 2), Use("b", 3, 4)], 5, 6, 7, 8, 9).markdown()
    assert "| b | 3 | 4.0 |\n| a | 1 | 2.0 |\n| **total** | 4 | 6.0 |" in text
    assert "| CPU seconds until then | 7.0 |" in text


def test_weights_are_loaded_by_size() -> None:
    assert re.search(r"^\| 1 \| \d+\.\d{3} \| \d+\.\d{3} \|$", load_times([1]), re.MULTILINE)
