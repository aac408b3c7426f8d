"""Environments of client packages that require other versions than the server."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import venv
from hashlib import sha256
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).with_name("client_programs")


def client_python(name: str) -> Path:
    """Create the environment of ``client_programs/{name}.txt``, once for each list; return its interpreter.

    Skips the test if pip reaches no index.
    """
    requirements = PROGRAMS / f"{name}.txt"
    digest = sha256(requirements.read_bytes()).hexdigest()[:8]
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    environment = ROOT / f".venv/clients/{name}-{python}-{digest}"
    environment.parent.mkdir(parents=True, exist_ok=True)
    with (environment.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests may run in several processes
        if not (environment / "ready").exists():
            shutil.rmtree(environment, ignore_errors=True)
            venv.create(environment)
            pip = [sys.executable, "-m", "pip", "--python", environment, "--disable-pip-version-check"]
            options = ["install", "-q", "--no-compile", "--retries", "10", "--timeout", "60"]
            process = subprocess.run(
                [*pip, *options, "-r", requirements], capture_output=True, text=True, check=False
            )
            if process.returncode and "from versions: none" in process.stderr:
                pytest.skip(f"needs a package index: {process.stderr[-500:]}")
            assert process.returncode == 0, process.stderr
            (environment / "ready").touch()
    return environment / "bin/python"


def run_client(python: Path, program: str, *arguments: str) -> str:
    """Run a program of ``client_programs``; return its output, which ends with its confirmation."""
    command = [python, PROGRAMS / program, *arguments]
    process = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert process.stdout.endswith("every call was answered\n"), process.stdout + process.stderr
    return process.stdout
