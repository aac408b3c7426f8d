"""The supervisor's copies of the logs of Ray's workers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from serve_app.cli.supervisor import LogCopier, rotate

WORKER = "worker-0a-01000000-17"


@pytest.fixture
def copy(tmp_path: Path) -> object:
    """Return a function that copies what is new in ``tmp_path`` and returns it."""
    target = tmp_path / "server.log"
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    copier = LogCopier(tmp_path, descriptor)

    def copy_once() -> str:
        before = target.stat().st_size
        copier.copy()
        return target.read_text()[before:]

    yield copy_once
    os.close(descriptor)


def test_lines_have_the_name_of_their_actor(tmp_path: Path, copy) -> None:
    (tmp_path / f"{WORKER}.out").write_text(":job_id:01000000\n:actor_name:ServeReplica:m\nhello\n")
    assert copy() == "(ServeReplica:m pid=17) hello\n"
    assert copy() == ""


def test_an_incomplete_line_is_copied_once_it_has_its_end(tmp_path: Path, copy) -> None:
    with (tmp_path / f"{WORKER}.err").open("a") as log:
        log.write("first\nsec")
        log.flush()
        assert copy() == "(worker pid=17) first\n"
        log.write("ond\n")
        log.flush()
        assert copy() == "(worker pid=17) second\n"


def test_a_rotated_file_is_read_from_its_start(tmp_path: Path, copy) -> None:
    (tmp_path / f"{WORKER}.out").write_text("a long line\n")
    copy()
    (tmp_path / f"{WORKER}.out").write_text("new\n")
    assert copy() == "(worker pid=17) new\n"


def test_other_logs_are_not_copied_but_errors_of_ray_are(tmp_path: Path, copy) -> None:
    (tmp_path / "dashboard.log").write_text("a\n")
    (tmp_path / "raylet.err").write_text("it failed\n")
    assert copy() == "it failed\n"


def test_a_supervisor_notices_that_the_last_process_of_ray_has_ended() -> None:
    code = """
import subprocess, time
from serve_app.cli.supervisor import has_children
children = [subprocess.Popen(["true"]), subprocess.Popen(["cat"], stdin=subprocess.PIPE)]
assert has_children()
children[1].stdin.close()
while has_children():
    time.sleep(0.01)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_log_of_the_server_is_bounded_while_its_processes_hold_it(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    other = subprocess.Popen(
        [sys.executable, "-c", "import sys; [print(line, end='', flush=True) for line in sys.stdin]"],
        stdin=subprocess.PIPE,
        stdout=descriptor,
        text=True,
    )
    assert other.stdin is not None

    def write(text: str, length: int) -> None:
        assert other.stdin is not None
        other.stdin.write(f"{text}\n")
        other.stdin.flush()
        while log.stat().st_size < length:
            time.sleep(0.01)

    write("before" * 20, 121)
    rotate(descriptor, limit=200)
    assert log.stat().st_size == 121, "it is short enough"
    rotate(descriptor, limit=100)
    write("after", 6)
    assert log.read_text() == "after\n" and (tmp_path / "server.log.1").read_text() == "before" * 20 + "\n"
    other.stdin.close()
    other.wait(60)
    os.close(descriptor)
    reader, writer = os.pipe()
    rotate(writer, limit=0)  # the log of a container is a pipe
    os.close(reader)
    os.close(writer)
