"""Crash reports of real processes, each ended in another way."""

import os
import signal
import subprocess
import sys
import time

import pytest

from serve_app.telemetry import crash_reports
from serve_app.telemetry.crash_reports import CrashReporter, collect_reports

REPLICA = """
import os, sys
from pathlib import Path
from serve_app.telemetry.crash_reports import CrashReporter
reporter = CrashReporter(Path(sys.argv[1]), "m--1.0", "d1", "r1")
if sys.argv[2] != "loading":
    reporter.set_ready()
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def die(tmp_path):
    """Provide a function that runs ``code`` in a replica, or kills it, and returns the reports."""

    def die(code="", kill=None, phase="serving", stderr="err"):
        folder = tmp_path / "replicas"
        with open(tmp_path / stderr if stderr else os.devnull, "w") as err:
            process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-c", REPLICA + code, str(folder), phase],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err if stderr else subprocess.DEVNULL,
                text=True,
            )
            with process:
                assert process.stdout.readline() == "ready\n"
                assert collect_reports(folder) == [], "it lives"
                if kill is not None:
                    process.send_signal(kill)
                else:
                    process.stdin.write("now\n")
                    process.stdin.flush()
                process.wait(120)
        reports = collect_reports(folder)
        assert collect_reports(folder) == [] and not list(folder.iterdir()), "reported once"
        return reports

    return die


def test_closed_reporter_leaves_no_file(die):
    assert die("reporter.close()") == []


def test_os_exit_is_reported_with_status_and_stack(die):
    [report] = die("def authors():\n    os._exit(3)\nauthors()\n")
    assert (report.app, report.digest, report.replica, report.loading) == ("m--1.0", "d1", "r1", False)
    assert report.cause.startswith("The replica's process ended while it served: it called os._exit(3) at\n")
    assert "in authors" in report.cause
    assert report.started <= report.when <= time.time() < report.started + 60


def test_kill_is_reported_with_the_last_lines_of_standard_error(die):
    server_line = "2026-11-28 22:05:59,057 [WARNING] serve_app.deployments.gateway - of the server"
    [report] = die(
        f"sys.stderr.write('a library says\\n{server_line}\\n'); sys.stderr.flush(); os.kill(os.getpid(), 9)",
        phase="loading",
    )
    assert report.loading and not report.out_of_memory
    first, *rest = report.cause.splitlines()
    assert first.startswith(
        "The replica's process ended while it loaded the model: it ended without a report"
    )
    assert "SIGKILL" in first
    assert rest == ["The last lines of its standard error:", "a library says"]


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import ctypes\ndef authors():\n    ctypes.string_at(0)\nauthors()", "Segmentation fault"),
        ("def authors():\n    os.abort()\nauthors()", "Aborted"),
    ],
)
def test_native_crash_is_reported_with_the_handlers_frames(die, code, name):
    [report] = die(code)
    assert f"while it served: its native code crashed: {name}\n" in report.cause
    assert "in authors" in report.cause
    assert "Fatal Python error" not in report.cause and "Extension modules" not in report.cause


def test_kill_without_a_standard_error_file(die):
    [report] = die(kill=signal.SIGKILL, stderr=None)
    assert report.cause.endswith("or its native code called exit()")


def test_sigterm_is_reported(die):
    [report] = die(
        "import signal, time\nsignal.signal(15, lambda *_: sys.exit(0))\nos.kill(os.getpid(), 15)\n"
    )
    assert "its interpreter has exited: by SIGTERM" in report.cause


def test_out_of_memory_is_detected_by_the_kernels_count(die, monkeypatch):
    kills = crash_reports._oom_kills()
    monkeypatch.setattr(crash_reports, "_oom_kills", lambda: kills + 1)
    [report] = die(kill=signal.SIGKILL)
    assert report.out_of_memory
    assert "the system killed it: memory ran out" in report.cause
    assert "on this machine rose by 1 while it ran" in report.cause


def test_first_report_holds_and_children_do_not_report(die):
    [report] = die(
        "child = os.fork()\n"
        "if child == 0:\n    os._exit(7)\n"
        "os.waitpid(child, 0)\n"
        "reporter.report('the handler gave no answer')\n"
        "os._exit(70)\n"
    )
    assert report.cause == "The replica's process ended while it served: the handler gave no answer"


def test_own_file_is_excluded_and_a_full_disk_is_survived(tmp_path, monkeypatch):
    exit_ = os._exit
    reporter = CrashReporter(tmp_path, "m--1.0", "d1", "me")
    assert collect_reports(tmp_path, exclude="me") == []
    reporter.close()
    assert os._exit is exit_
    monkeypatch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    without_file = CrashReporter(tmp_path, "m--1.0", "d1", "r2")
    without_file.set_ready()
    without_file.close()
    assert list(tmp_path.iterdir()) == []


def test_new_file_is_not_collected(tmp_path):
    (tmp_path / "new.words").touch()
    assert collect_reports(tmp_path) == []
    assert (tmp_path / "new.words").exists()
