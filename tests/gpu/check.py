"""Check the server on a GPU: correctness, shares of memory, recovery, throughput and generation.

``python -m tests.gpu.check`` runs every step of ``tests/gpu/steps.py`` in a process of its own, with a limit
of time. Each result is written at once to ``results.jsonl`` and ``results.md`` of ``--output``, and what the
steps print to ``log.txt``. ``--device cpu`` runs a tiny form of all steps. The exit code is 1 where a step
failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import psutil

from tests.support.server import ROOT

# Step -> its limit in seconds on a GPU. The short ones come first, as they explain the figures of the others.
LIMITS = {
    "tests": 90,
    "shares": 100,
    "memory": 60,
    "kill": 60,
    "ranks": 60,
    "throughput": 420,
    "generation": 150,
}
_END_TIMEOUT_S = 15.0  # for a step that is interrupted, in which it stops its server


class Report:
    """The results so far, in two files that are complete after each result."""

    def __init__(self, folder: Path, machine: str) -> None:
        self._folder, self._machine = folder, machine
        self._results: list[dict[str, Any]] = []
        (folder / "results.jsonl").write_text("")

    @property
    def failed(self) -> bool:
        return any("error" in result for result in self._results)

    def add(self, step: str, result: dict[str, Any]) -> None:
        self._results.append({"step": step, **result})
        with (self._folder / "results.jsonl").open("a") as lines:
            lines.write(json.dumps(self._results[-1]) + "\n")
        (self._folder / "results.md").write_text(self._format())
        print(step, json.dumps(result), flush=True)

    def _format(self) -> str:
        """Return a table for each step; a column for each figure that one of its results has."""
        lines = [f"Machine: {self._machine}", ""]
        for step in dict.fromkeys(result["step"] for result in self._results):
            rows = [result for result in self._results if result["step"] == step]
            columns = list(dict.fromkeys(key for row in rows for key in row if key != "step"))
            lines += [f"## {step}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
            for row in rows:
                cells = (_format_cell(row.get(column, "")) for column in columns)
                lines.append(f"| {' | '.join(cells)} |")
            lines.append("")
        return "\n".join(lines)


def _format_cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3g}"
    return " ".join(str(value).replace("|", "\\|").split())


def run_step(step: str, device: str, limit: float, report: Report, log: IO[str]) -> None:
    """Run a step, and add its results as they come; after ``limit`` seconds it is ended."""
    command = [sys.executable, "-m", "tests.gpu.steps", step, device]
    began, is_late = time.monotonic(), threading.Event()
    log.write(f"\n=== {step}\n")
    log.flush()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True) as process:

        def end() -> None:
            is_late.set()
            _end(process)

        timer = threading.Timer(limit, end)
        timer.start()
        assert process.stdout is not None
        try:
            for line in process.stdout:
                report.add(step, json.loads(line))
            code = process.wait()
        except KeyboardInterrupt:
            _end(process)
            raise
        finally:
            timer.cancel()
    result: dict[str, Any] = {"case": "end", "seconds": time.monotonic() - began}
    if is_late.is_set():
        result["error"] = f"it took more than {limit:.0f} s"
    elif code:
        result["error"] = f"it ended with {code}"
    report.add(step, result)


def _end(process: subprocess.Popen[str]) -> None:
    """Interrupt a step, and kill what is left of it."""
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
    for child in started:
        if child.is_running():
            child.kill()


def describe_machine(device: str) -> str:
    """Return the device and the releases of what computes on it."""
    import torch
    import transformers

    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("No GPU is here that torch can use; --device cpu checks the tiny form.")
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    releases = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}, {releases}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.check", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, default=ROOT / "build/gpu")
    parser.add_argument("--steps", nargs="+", choices=LIMITS, default=list(LIMITS))
    parser.add_argument("--seconds", type=float, default=570, help="for all steps; the last ones may be cut")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server of a step ends, too
    options.output.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + options.seconds
    report = Report(options.output, describe_machine(options.device))
    with (options.output / "log.txt").open("w") as log:
        for step in options.steps:
            left = until - time.monotonic()
            if left < _END_TIMEOUT_S:
                report.add(step, {"case": "end", "error": "no time is left for it"})
            else:
                limit = min(LIMITS[step] if options.device == "cuda" else left, left - _END_TIMEOUT_S / 2)
                run_step(step, options.device, limit, report, log)
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
