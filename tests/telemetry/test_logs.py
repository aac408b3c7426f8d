"""ts_log.log and model_log.log, as a process of the server writes them."""

import asyncio
import builtins
import dataclasses
import io
import json
import logging
import logging.config
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from serve_app.errors import ConfigurationError
from serve_app.settings import Settings, TelemetrySettings
from serve_app.telemetry import logs
from serve_app.telemetry.logs import Speaker
from serve_app.telemetry.sink import Drain, File

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3} "
REPLICA = Speaker.of_replica("digits", "1.0", "k3j9x2ab")


@pytest.fixture
def say(tmp_path, monkeypatch):
    """Configures this process, and gives what its files hold when all was written; everything is put back."""
    out, err = io.StringIO(), io.StringIO()
    console = io.StringIO()

    class Said:
        def __call__(self, speaker=REPLICA, own=None, **telemetry):
            monkeypatch.setattr(sys, "stdout", out)
            monkeypatch.setattr(sys, "stderr", err)
            settings = Settings(telemetry=TelemetrySettings(**telemetry), home=str(tmp_path))
            logs.configure(settings, speaker, own, stream=console)

        def close(self):
            logs.close()

        def file(self, name):
            return (tmp_path / "logs" / name).read_text()

        @property
        def server(self):
            return self.file("ts_log.log")

        @property
        def model(self):
            return self.file("model_log.log")

    Said.out, Said.err, Said.console = out, err, console
    yield Said()
    logs.close()


def in_batch(*ids):
    return logs.REQUESTS.set(ids)


def test_what_the_server_says_stands_in_its_file_in_torchserves_layout_and_on_the_console(say):
    say()
    logging.getLogger("torchrelay.somewhere").warning("loud %s", 1)
    logging.getLogger("torchrelay.somewhere").debug("too quiet")
    say.close()
    line = r"\[WARN \] W-k3j9x2ab-digits_1.0 torchrelay.somewhere - loud 1\n"
    assert re.fullmatch(STAMP + line, say.server)
    assert "[WARNING] torchrelay.somewhere - loud 1\n" in say.console.getvalue()
    assert logging.getLogger("torchrelay").propagate


def test_what_a_handler_logs_prints_and_writes_to_standard_error(say):
    say()
    token = in_batch("one", "two")
    logging.getLogger("authors").info("seen %d rows", 2)
    print("a print", 3)
    logs.REQUESTS.reset(token)
    print("half a line", end="")
    print(", and the other", file=sys.stderr)
    print(" half")
    logging.getLogger().error("from the root")
    try:
        raise KeyError("why")
    except KeyError:
        logging.getLogger("authors").exception("it went wrong")
    say.close()
    thread = r"W-k3j9x2ab-digits_1\.0"
    assert re.fullmatch(
        STAMP + rf"\[INFO \] {thread} authors - seen 2 rows id=one,two\n"
        rf"{STAMP}\[INFO \] {thread}-stdout MODEL_LOG - a print 3 id=one,two\n"
        rf"{STAMP}\[WARN \] {thread}-stderr MODEL_LOG - , and the other\n"
        rf"{STAMP}\[INFO \] {thread}-stdout MODEL_LOG - half a line half\n"
        rf"{STAMP}\[ERROR\] {thread} root - from the root\n"
        rf"{STAMP}\[ERROR\] {thread} authors - it went wrong\nTraceback [\s\S]*KeyError: 'why'\n",
        say.model,
    ), say.model
    assert say.out.getvalue() == "a print 3\nhalf a line half\n", "standard output stays as it is"
    assert say.err.getvalue().startswith(", and the other\nfrom the root\nit went wrong\nTraceback")
    assert "seen 2 rows" not in say.err.getvalue()


def test_json_has_a_line_for_each_record_with_model_replica_and_requests(say):
    say(log_format="json")
    token = in_batch("one")
    logging.getLogger("authors").warning("two\nlines")
    logs.REQUESTS.reset(token)
    print("half a character: \udcff")
    logging.getLogger("torchrelay.x").error("the server")
    say.close()
    first, second = (json.loads(line) for line in say.model.splitlines())
    assert re.fullmatch(STAMP.strip(), first.pop("time"))
    assert first == {
        "level": "WARNING",
        "logger": "authors",
        "message": "two\nlines",
        "model": "digits",
        "version": "1.0",
        "replica": "k3j9x2ab",
        "request_ids": ["one"],
    }
    assert second["message"] == "half a character: \\udcff"
    assert "request_ids" not in second
    assert json.loads(say.server)["message"] == "the server"


def test_management_writes_no_model_log_and_says_who_it_is(say, tmp_path):
    say(Speaker("Management"), log_format="json")
    logging.getLogger("torchrelay.x").info("here")
    print("not a handler's")
    say.close()
    assert json.loads(say.server)["process"] == "Management"
    assert not (tmp_path / "logs/model_log.log").exists()


def test_a_model_has_a_level_of_its_own_and_the_operators_word_wins(say):
    say(own="ERROR")
    assert not logging.getLogger("authors").isEnabledFor(logging.WARNING)
    say.close()
    say(own="ERROR", log_levels={"digits": "debug", "other": "CRITICAL"})
    logging.getLogger("authors").debug("fine")
    logging.getLogger("torchrelay.x").debug("fine too")
    say.close()
    assert "[DEBUG]" in say.model and "[DEBUG]" in say.server


@pytest.mark.parametrize(
    ("telemetry", "where"),
    [({"log_level": "LOUD"}, "telemetry.log_level"), ({"log_levels": {"m": "LOUD"}}, "telemetry.log_levels, m")],
)
def test_an_unknown_level_is_refused_by_name(say, telemetry, where):
    with pytest.raises(ConfigurationError, match=f"{where}: there is no level 'LOUD'; known here: DEBUG, INFO"):
        say(Speaker("Management"), **telemetry)


def test_an_author_who_configures_logging_breaks_nothing(say):
    say()
    server = logging.getLogger("torchrelay.model")
    logging.basicConfig(format="ignored", level=logging.CRITICAL)
    logging.getLogger("authors").info("heard all the same")
    logging.basicConfig(format="own %(message)s", stream=sys.stderr, level=logging.INFO, force=True)
    logging.getLogger("authors").info("by the author's handler")
    logging.config.dictConfig({"version": 1, "root": {"level": "INFO", "handlers": []}})
    logs.mend()
    server.warning("the server still speaks")
    say.close()
    assert "authors - heard all the same" in say.model
    assert "-stderr MODEL_LOG - own by the author's handler" in say.model
    assert "the server still speaks" in say.server
    assert "the server still speaks" in say.console.getvalue()


def test_a_megabyte_on_one_line_is_cut_and_what_comes_after_it_is_whole(say):
    say()
    print("x" * 1_000_000)
    print("after")
    say.close()
    first, second = say.model.splitlines()
    assert len(first) < 70_000 and first.endswith("… (934464 characters more)")
    assert second.endswith("MODEL_LOG - after")
    assert len(say.out.getvalue()) == 1_000_007


def test_threads_that_print_at_once_keep_their_lines_whole(say):
    say()

    def write(name):
        for i in range(300):
            sys.stdout.write(f"{name}-")
            sys.stdout.write(f"{i}\n")

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    say.close()
    assert sorted(re.findall(r"- (\w-\d+)\n", say.model)) == sorted(f"{n}-{i}" for n in "abcd" for i in range(300))


def test_a_print_that_somebody_else_has_replaced_is_heard_too(say, tmp_path, monkeypatch):
    printed = []

    def elsewhere(*objects, sep=" ", end="\n", file=None, flush=False):  # does not write to sys.stdout
        printed.append(sep.join(map(str, objects)) + end)

    monkeypatch.setattr(builtins, "print", elsewhere)
    say()
    print("one", 2, sep="-")
    with (tmp_path / "authors").open("w") as file:
        print("a", "file", "of the author's", file=file, flush=True)
    say.close()
    assert builtins.print is elsewhere
    assert printed == ["one-2\n"]
    assert "-stdout MODEL_LOG - one-2\n" in say.model
    assert (tmp_path / "authors").read_text() == "a file of the author's\n"


def test_a_folder_that_cannot_be_written_costs_lines_and_nothing_else(say, tmp_path):
    (tmp_path / "logs").write_text("a file, where the folder should be")
    say()
    print("said")
    logging.getLogger("torchrelay.x").warning("to the console alone")
    say.close()
    assert say.out.getvalue() == "said\n"
    console = say.console.getvalue()
    assert "to the console alone" in console
    assert "the model_log.log cannot be written" in console and "its lines are lost until it can" in console


def test_a_process_that_an_author_forks_writes_its_own_lines_once(tmp_path):
    code = """
import os, sys
from serve_app.settings import Settings
from serve_app.telemetry import logs
logs.configure(Settings(home=sys.argv[1]), logs.Speaker.of_replica("m", "1", "r"))
print("the parent, before")
child = os.fork()
if child == 0:
    print("the child")
    os._exit(0)
os.waitpid(child, 0)
print("the parent, after")
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, timeout=300)
    lines = (tmp_path / "logs/model_log.log").read_text().splitlines()
    said = sorted(line.rpartition(" - ")[2] for line in lines if "-stdout MODEL_LOG" in line)
    assert said == ["the child", "the parent, after", "the parent, before"]


def test_lines_that_come_faster_than_they_can_be_written_are_counted(monkeypatch):
    monkeypatch.setattr("serve_app.telemetry.sink.ROOM", 100)
    gate, written = threading.Event(), []

    class Slow:
        def write(self, text):
            written.append(text)
            gate.wait(60)

        def close(self):
            pass

    drain = Drain(Slow(), "slow", period=0.0)
    for _ in range(10):
        drain.put("x" * 60)
    while not written:
        pass
    for _ in range(10):
        drain.put("y" * 60)
    gate.set()
    drain.close()
    text = "".join(written)
    kept = text.count("x" * 60) + text.count("y" * 60)
    lost = sum(int(n) for n in re.findall(r"\((\d+) lines are lost", text))
    assert kept + lost == 20 and lost > 0


def test_a_write_that_was_cut_short_does_not_glue_two_lines(tmp_path, monkeypatch):
    file = File(tmp_path / "log")
    real, full = os.write, []

    def short(descriptor, block):
        if not full:
            full.append(True)
            return real(descriptor, block[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", short)
    with pytest.raises(OSError, match="No space"):
        file.write("first\n")
    monkeypatch.setattr(os, "write", real)
    file.write("second\n")
    file.close()
    assert (tmp_path / "log").read_text() == "fir\nsecond\n"


def test_log_location_moves_the_folder(tmp_path, monkeypatch):
    assert Settings(home=str(tmp_path)).access_log == tmp_path / "logs/access_log.log"
    elsewhere = dataclasses.replace(Settings(), telemetry=TelemetrySettings(log_dir=str(tmp_path / "var")))
    assert elsewhere.log_dir == Path(tmp_path / "var")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConfigurationError("log_level", "no such level"), "Gate cannot start: log_level: no such level\n"),
        (KeyError("x"), "Gate cannot start: Traceback (most recent call last):\n"),
    ],
)
def test_what_keeps_a_deployment_from_starting_is_on_the_console(monkeypatch, error, told):
    class Gate:
        @logs.told
        async def __init__(self, settings):
            if settings:
                raise error

    console = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", console)
    gate = Gate.__new__(Gate)
    asyncio.run(Gate.__init__(gate, None))
    assert console.getvalue() == ""
    with pytest.raises(type(error)):
        asyncio.run(Gate.__init__(gate, "settings"))
    assert console.getvalue().startswith(told)
