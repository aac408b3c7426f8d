"""A TorchServe installation under Torchrelay answers as it did under TorchServe, but for what is
explained.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]

EXAMPLE = Path(__file__).parents[2] / "examples" / "from_torchserve"


def test_one_installation_under_both_servers() -> None:
    ports = ",".join(str(free_port()) for _ in range(3))
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "side_by_side.py"), "--recorded", "--ports", ports],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    last = done.stdout.strip().splitlines()[-1]
    assert last in (EXAMPLE / "README.md").read_text()
