"""The CPU time of a request by stage."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.integration
@pytest.mark.slow
def test_every_path_is_measured() -> None:
    code = (
        "import json; from tests.benchmarks.request_budget import _PATHS, measure;"
        "print(json.dumps([measure('echo', 4, 200, *variant) for _, *variant in _PATHS]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for figures in json.loads(done.stdout):
        stages = sum(microseconds for stage, microseconds in figures.items() if stage != "total")
        assert figures["total"] >= stages * (1 - 1e-9) > 0  # sums are rounded
        assert figures["parse and admit"] > 0 and figures["handler thread"] > 0


@pytest.mark.integration
@pytest.mark.nightly
def test_the_cost_of_capture_is_measured() -> None:
    code = (
        "from tests.benchmarks import request_budget; request_budget._TURN = 200;"
        "print(*request_budget.measure_capture('echo', 4, 400, 1.0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # A difference of two turns of 200 requests, in microseconds, which noise may turn negative.
    for microseconds in done.stdout.split():
        assert abs(float(microseconds)) < 1000
