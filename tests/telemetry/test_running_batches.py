"""The file of running batches, and the reports of crashes that read it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from serve_app.telemetry.crash_reports import collect_reports
from serve_app.telemetry.running_batches import RunningBatch, RunningBatches, read_running

# Two versions run a batch in threads of their own when the process ends as its argument says.
PROCESS = """
import ctypes, faulthandler, os, signal, sys, threading
from pathlib import Path
from serve_app.telemetry.crash_reports import CrashReporter
from serve_app.telemetry.running_batches import RunningBatches

folder, error = Path(sys.argv[1]), sys.argv[2]
os.dup2(os.open(folder / "stderr", os.O_CREAT | os.O_WRONLY), 2)
faulthandler.enable()
reporter = CrashReporter(folder, ".pool--p", "", "host")
running = RunningBatches(folder / "host.running")
idle = running.open_slot("idle--1.0")
with idle.running():
    pass
started, ended = threading.Semaphore(0), threading.Event()

def run(app, end):
    with running.open_slot(app).running():
        started.release()
        ended.wait()
        end()

ends = {
    "exit": lambda: os._exit(3),
    "crash": lambda: ctypes.string_at(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}
threading.Thread(target=run, args=("innocent--1.0", threading.Event().wait), daemon=True).start()
threading.Thread(target=run, args=("guilty--1.0", ends[error]), daemon=True).start()
started.acquire(), started.acquire()
reporter.set_ready()
ended.set()
threading.Event().wait(20)
"""


def test_a_slot_counts_its_batches_and_is_used_again(tmp_path: Path) -> None:
    running = RunningBatches(tmp_path / "host.running")
    first, second = running.open_slot("a--1.0"), running.open_slot("b--1.0")
    first.enter(7)
    first.enter(8)
    first.leave()
    assert read_running(running.path) == [RunningBatch("a--1.0", 8)]
    first.leave()
    second.enter(9)
    assert read_running(running.path) == [RunningBatch("b--1.0", 9)]
    running.close_slot(second)
    assert read_running(running.path) == []
    running.open_slot("much-longer-name--1.0").enter(1)
    assert read_running(running.path) == [RunningBatch("much-longer-name--1.0", 1)]
    running.close()
    assert read_running(running.path) == []


@pytest.mark.integration
@pytest.mark.parametrize(
    ("end", "culprit"), [("exit", "guilty--1.0"), ("crash", "guilty--1.0"), ("kill", "")]
)
def test_a_report_names_the_versions_that_ran(tmp_path: Path, end: str, culprit: str) -> None:
    subprocess.run([sys.executable, "-c", PROCESS, str(tmp_path), end], timeout=240, check=False)
    [report] = collect_reports(tmp_path)
    assert sorted(report.running) == ["guilty--1.0", "innocent--1.0"]
    assert report.culprit == culprit
    if end == "crash":
        assert "string_at" in report.cause
        assert "wait" not in report.cause  # the other threads' frames
    assert report.app == ".pool--p"
    assert not (tmp_path / "host.running").exists()
