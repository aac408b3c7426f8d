"""Why a process died, told by what it left: real processes, each ended in its own way."""

import os
import signal
import subprocess
import sys
import time

import pytest

from serve_app.telemetry import last_words
from serve_app.telemetry.last_words import LastWords, dead

REPLICA = """
import os, sys
from pathlib import Path
from serve_app.telemetry.last_words import LastWords
words = LastWords(Path(sys.argv[1]), "m--1.0", "d1", "r1")
if sys.argv[2] != "loading":
    words.ready()
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def die(tmp_path):
    """Lets a replica run ``code``, or be killed by a signal; what is known of it then."""

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
                assert dead(folder) == [], "it lives"
                if kill is not None:
                    process.send_signal(kill)
                else:
                    process.stdin.write("now\n")
                    process.stdin.flush()
                process.wait(30)
        deaths = dead(folder)
        assert dead(folder) == [] and not list(folder.iterdir()), "told once"
        return deaths

    return die


def test_a_replica_that_closes_leaves_nothing(die):
    assert die("words.close()") == []


def test_os_exit_is_told_with_its_code_and_its_place(die):
    [death] = die("def authors():\n    os._exit(3)\nauthors()\n")
    assert (death.app, death.digest, death.replica, death.loading) == ("m--1.0", "d1", "r1", False)
    assert death.why.startswith("The replica's process ended while it served: it called os._exit(3) at\n")
    assert "in authors" in death.why
    assert abs(death.when - time.time()) < 60


def test_a_kill_is_told_with_the_last_lines_of_standard_error(die):
    [death] = die("sys.stderr.write('a library says\\n'); sys.stderr.flush(); os.kill(os.getpid(), 9)", phase="loading")
    assert death.loading and not death.out_of_memory
    first, *rest = death.why.splitlines()
    assert first.startswith("The replica's process ended while it loaded the model: it ended without a word")
    assert "SIGKILL" in first
    assert rest == ["The last lines of its standard error:", "a library says"]


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import ctypes\ndef authors():\n    ctypes.string_at(0)\nauthors()", "Segmentation fault"),
        ("def authors():\n    os.abort()\nauthors()", "Aborted"),
    ],
)
def test_a_crash_of_native_code_is_named_with_the_authors_frames(die, code, name):
    [death] = die(code)
    assert f"while it served: native code of it crashed: {name}\n" in death.why
    assert "in authors" in death.why
    assert "Fatal Python error" not in death.why and "Extension modules" not in death.why


def test_where_standard_error_is_no_file_the_rest_is_told(die):
    [death] = die(kill=signal.SIGKILL, stderr=None)
    assert death.why.endswith("or native code of it called exit()")


def test_sigterm_ends_the_interpreter(die):
    [death] = die("import signal, time\nsignal.signal(15, lambda *_: sys.exit(0))\nos.kill(os.getpid(), 15)\n")
    assert "its interpreter was told to end: by SIGTERM" in death.why


def test_memory_that_ran_out_is_told_by_the_kernels_count(die, monkeypatch):
    kills = last_words._kills()
    monkeypatch.setattr(last_words, "_kills", lambda: kills + 1)
    [death] = die(kill=signal.SIGKILL)
    assert death.out_of_memory
    assert "the system killed it: memory ran out" in death.why
    assert "on this machine rose by 1 while it ran" in death.why


def test_its_own_word_stands_and_a_child_of_its_does_not_speak_for_it(die):
    [death] = die(
        "child = os.fork()\n"
        "if child == 0:\n    os._exit(7)\n"
        "os.waitpid(child, 0)\n"
        "words.say('the handler gave no answer')\n"
        "os._exit(70)\n"
    )
    assert death.why == "The replica's process ended while it served: the handler gave no answer"


def test_nobody_asks_for_itself_and_a_full_disk_costs_the_words_alone(tmp_path, monkeypatch):
    exit_ = os._exit
    words = LastWords(tmp_path, "m--1.0", "d1", "me")
    assert dead(tmp_path, but="me") == []
    words.close()
    assert os._exit is exit_
    monkeypatch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    quiet = LastWords(tmp_path, "m--1.0", "d1", "r2")
    quiet.ready()
    quiet.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_was_just_made_is_left_alone(tmp_path):
    (tmp_path / "new.words").touch()
    assert dead(tmp_path) == []
    assert (tmp_path / "new.words").exists()
