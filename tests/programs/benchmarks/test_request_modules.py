"""The modules that a request passes through, and their limits."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Lower a number whenever fewer modules suffice; a reader has to open each of them.
LIMITS = {"registration": 10, "prediction": 28}


@pytest.mark.integration
def test_few_modules_take_part_in_a_request() -> None:
    command = [sys.executable, "-m", "tests.benchmarks.request_modules"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    counts = {}
    for line in output.splitlines():
        name, colon, rest = line.partition(": ")
        if colon:
            counts[name] = int(rest.split()[0])
    assert counts.keys() == LIMITS.keys()
    assert all(counts[name] <= limit for name, limit in LIMITS.items()), output
