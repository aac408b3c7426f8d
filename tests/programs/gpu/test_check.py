"""The check of a GPU in its tiny form, on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import check, steps
from tests.support.server import ROOT

VARIANTS = {"fp32", "fp16", "bf16", "bf16, compiled", "bf16, CUDA graphs", "bf16, AOTInductor"}


@pytest.mark.nightly
def test_every_step_has_results_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu.check", "--device", "cpu", "--seconds", "900"]
    command += ["--output", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1000)
    log = (tmp_path / "log.txt").read_text()
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{log[-5000:]}"
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    for step in check.LIMITS:
        cases = [result["case"] for result in results if result["step"] == step]
        assert len(cases) > 1 and cases[-1] == "end", step
    measured = {result["case"] for result in results if result.get("p99 ms", 0) > 0}
    assert measured == {"FastAPI, float32", "FastAPI, bfloat16", *VARIANTS}
    assert not any(result.get("errors") for result in results)
    table = (tmp_path / "results.md").read_text()
    assert table.startswith("Machine: CPU, ")
    assert all(f"## {step}\n" in table for step in check.LIMITS)


@pytest.mark.nightly
def test_a_step_that_fails_or_takes_too_long_is_an_error(tmp_path: Path) -> None:
    report = check.Report(tmp_path, "a machine")
    with (tmp_path / "log.txt").open("w") as log:
        check.run_step("no such step", "cpu", 200, report, log)
        check.run_step("ranks", "cpu", 0.1, report, log)
    errors = [json.loads(line)["error"] for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert errors == ["KeyError: 'no such step'", "it ended with 1", "it took more than 0 s"]
    assert report.failed
    assert "Traceback" in (tmp_path / "log.txt").read_text()


def test_each_step_has_a_limit() -> None:
    assert list(check.LIMITS) == list(steps.STEPS)


def test_the_table_has_each_figure_of_a_step(tmp_path: Path) -> None:
    report = check.Report(tmp_path, "a machine")
    report.add("one", {"case": "a | b", "seconds": 1234.56})
    report.add("one", {"case": "c", "difference": 0.00012345})
    assert not report.failed
    lines = (tmp_path / "results.md").read_text().splitlines()
    assert lines[4:] == [
        "| case | seconds | difference |",
        "|---|---|---|",
        "| a \\| b | 1,234.6 |  |",
        "| c |  | 0.000123 |",
    ]
