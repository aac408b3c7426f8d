"""KServe's own client against the server; it runs in an environment of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

import handlers

pytestmark = [pytest.mark.integration, pytest.mark.nightly]


CLIENTS = Path(__file__).parents[2] / "support/client_programs"
SCRIPT = CLIENTS / "kserve_rest.py"


def test_kserve_rest_client(kserve_python: Path, models: Any, listening: Any) -> None:
    models.add("identity", lambda data, context: [dict(row) for row in data], form="arrays")
    models.add("asleep", lambda data, context: [], replicas=0)
    with listening(models.app()) as address:
        process = subprocess.run(
            [kserve_python, SCRIPT, f"http://{address}"],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert "every call was answered" in process.stdout, process.stderr


def test_kserve_rest_client_of_the_first_protocol(kserve_python: Path, models: Any, listening: Any) -> None:
    twice = handlers.load_envelope("kserve")(lambda data, context: [row["data"] * 2 for row in data])
    models.add("twice", twice.handle)
    models.add("asleep", lambda data, context: [], replicas=0)
    with listening(models.app()) as address:
        command = [kserve_python, CLIENTS / "kserve_v1.py", f"http://{address}"]
        process = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert "every call was answered" in process.stdout, process.stderr
