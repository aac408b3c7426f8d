"""Runs of uv's resolver, which skip their test where the package index fails or is slow."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

# What uv prints where an index is not reached, is overloaded, or responds too slowly.
_NO_INDEX = re.compile(
    "error sending request|error decoding response|Failed to fetch|dns error"
    "|server error|Too Many Requests|timed out"
)
_TIMEOUT_S = 240  # below the limit of a test


def run_uv(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``uv pip`` with the arguments, and return the process that has succeeded."""
    command = [sys.executable, "-m", "uv", "pip", *arguments]
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"needs a package index: uv ran for {_TIMEOUT_S} s")
    if _NO_INDEX.search(done.stderr):
        pytest.skip("needs a package index")
    assert done.returncode == 0, done.stderr
    return done
