"""A controller is replaced once it holds too much memory, and only then."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import psutil
import pytest

from serve_app.deployments.ray_internals.controller_memory import restart_if_large


def check(pid: int, limit: int) -> tuple[bool, list[str]]:
    """Return whether the process is large, and the calls of ``restart``."""
    calls: list[str] = []

    async def get_pid() -> int:
        return pid

    large = asyncio.run(restart_if_large(get_pid, lambda: calls.append("restart"), limit))
    return large, calls


def test_a_large_process_is_restarted_once(caplog: pytest.LogCaptureFixture) -> None:
    assert check(os.getpid(), 1 << 20) == (True, ["restart"])
    assert "more than control.controller_memory_limit (1 MiB)" in caplog.text


def test_a_small_process_stays() -> None:
    assert check(os.getpid(), 1 << 40) == (False, [])


def test_a_process_that_has_ended_is_not_restarted() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    with pytest.raises(psutil.NoSuchProcess):
        check(ended.pid, 1)
