"""The short form of the chaos tests, and the figures of its reports."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.server import ROOT


@pytest.mark.slow
def test_one_fault_stays_within_its_documented_limit(tmp_path: Path) -> None:
    run_faults(tmp_path, "--only", "kill replica")


@pytest.mark.nightly
def test_the_short_form_stays_within_the_documented_limits(tmp_path: Path) -> None:
    run_faults(tmp_path)


def run_faults(folder: Path, *options: str) -> None:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--short", "--output", str(folder), *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    print(f"{time.monotonic() - began:.0f} s\n{done.stdout}\n{done.stderr[-5000:]}")
    assert done.returncode == 0, done.stdout
    assert (folder / "chaos.md").read_text().startswith("Machine: ")
