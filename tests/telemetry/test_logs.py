"""ts_log.log and model_log.log of a process of the server."""

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
from serve_app.telemetry.log_writer import AsyncWriter, FileSink
from serve_app.telemetry.logs import ProcessIdentity

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3} "
REPLICA = ProcessIdentity.of_replica("digits", "1.0", "k3j9x2ab")


@pytest.fixture
def process_logs(tmp_path, monkeypatch):
    """Provide the logging of this process with its files; undo it afterwards."""
    loggers = [
        found for found in logging.root.manager.loggerDict.values() if isinstance(found, logging.Logger)
    ]
    enabled = [logger for logger in loggers if not logger.disabled]
    out, err = io.StringIO(), io.StringIO()
    console = io.StringIO()

    class ProcessLogs:
        def __call__(self, identity=REPLICA, own=None, **telemetry):
            monkeypatch.setattr(sys, "stdout", out)
            monkeypatch.setattr(sys, "stderr", err)
            settings = Settings(telemetry=TelemetrySettings(**telemetry), home=str(tmp_path))
            logs.configure(settings, identity, own, stream=console)

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

    ProcessLogs.out, ProcessLogs.err, ProcessLogs.console = out, err, console
    yield ProcessLogs()
    logs.close()
    for logger in enabled:  # dictConfig has disabled them, also for later tests
        logger.disabled = False


def in_batch(*ids):
    return logs.REQUESTS.set(ids)


def test_server_records_are_in_ts_log_and_on_the_console(process_logs):
    process_logs()
    logging.getLogger("serve_app.somewhere").warning("loud %s", 1)
    logging.getLogger("serve_app.somewhere").debug("too quiet")
    process_logs.close()
    line = r"\[WARN \] W-k3j9x2ab-digits_1.0 serve_app.somewhere - loud 1\n"
    assert re.fullmatch(STAMP + line, process_logs.server)
    assert "[WARNING] serve_app.somewhere - loud 1\n" in process_logs.console.getvalue()
    assert logging.getLogger("serve_app").propagate


def test_handler_output_is_in_model_log(process_logs):
    process_logs()
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
    process_logs.close()
    thread = r"W-k3j9x2ab-digits_1\.0"
    assert re.fullmatch(
        STAMP + rf"\[INFO \] {thread} authors - seen 2 rows id=one,two\n"
        rf"{STAMP}\[INFO \] {thread}-stdout MODEL_LOG - a print 3 id=one,two\n"
        rf"{STAMP}\[WARN \] {thread}-stderr MODEL_LOG - , and the other\n"
        rf"{STAMP}\[INFO \] {thread}-stdout MODEL_LOG - half a line half\n"
        rf"{STAMP}\[ERROR\] {thread} root - from the root\n"
        rf"{STAMP}\[ERROR\] {thread} authors - it went wrong\nTraceback [\s\S]*KeyError: 'why'\n",
        process_logs.model,
    ), process_logs.model
    assert process_logs.out.getvalue() == "a print 3\nhalf a line half\n", "standard output stays as it is"
    assert process_logs.err.getvalue().startswith(", and the other\nfrom the root\nit went wrong\nTraceback")
    assert "seen 2 rows" not in process_logs.err.getvalue()


def test_json_lines_have_model_replica_and_requests(process_logs):
    process_logs(log_format="json")
    token = in_batch("one")
    logging.getLogger("authors").warning("two\nlines")
    logs.REQUESTS.reset(token)
    print("half a character: \udcff")
    logging.getLogger("serve_app.x").error("the server")
    process_logs.close()
    first, second = (json.loads(line) for line in process_logs.model.splitlines())
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
    assert json.loads(process_logs.server)["message"] == "the server"


def test_management_writes_no_model_log(process_logs, tmp_path):
    process_logs(ProcessIdentity("Management"), log_format="json")
    logging.getLogger("serve_app.x").info("here")
    print("not a handler's")
    process_logs.close()
    assert json.loads(process_logs.server)["process"] == "Management"
    assert not (tmp_path / "logs/model_log.log").exists()


def test_operators_level_takes_precedence_over_the_models(process_logs):
    process_logs(own="ERROR")
    assert not logging.getLogger("authors").isEnabledFor(logging.WARNING)
    process_logs.close()
    process_logs(own="ERROR", log_levels={"digits": "debug", "other": "CRITICAL"})
    logging.getLogger("authors").debug("fine")
    logging.getLogger("serve_app.x").debug("fine too")
    process_logs.close()
    assert "[DEBUG]" in process_logs.model and "[DEBUG]" in process_logs.server


@pytest.mark.parametrize(
    ("telemetry", "where"),
    [
        ({"log_level": "LOUD"}, "telemetry.log_level"),
        ({"log_levels": {"m": "LOUD"}}, "telemetry.log_levels, m"),
    ],
)
def test_unknown_level_is_refused(process_logs, telemetry, where):
    with pytest.raises(ConfigurationError, match=f"{where}: unknown level 'LOUD'; known levels: DEBUG, INFO"):
        process_logs(ProcessIdentity("Management"), **telemetry)


def test_handler_that_configures_logging(process_logs):
    process_logs()
    server = logging.getLogger("serve_app.model")
    logging.basicConfig(format="ignored", level=logging.CRITICAL)
    logging.getLogger("authors").info("heard all the same")
    logging.basicConfig(format="own %(message)s", stream=sys.stderr, level=logging.INFO, force=True)
    logging.getLogger("authors").info("by the author's handler")
    logging.config.dictConfig({"version": 1, "root": {"level": "INFO", "handlers": []}})
    logs.restore_loggers()
    server.warning("the server still speaks")
    process_logs.close()
    assert "authors - heard all the same" in process_logs.model
    assert "-stderr MODEL_LOG - own by the author's handler" in process_logs.model
    assert "the server still speaks" in process_logs.server
    assert "the server still speaks" in process_logs.console.getvalue()


def test_a_fault_of_each_request_writes_a_bounded_number_of_records(process_logs):
    process_logs()
    logger = logging.getLogger("serve_app.busy")
    for number in range(1000):
        logger.error("request %d failed", number)
    logger.error("another fault")
    process_logs.close()
    lines = process_logs.server.splitlines()
    assert len(lines) == 201 and lines[-1].endswith("another fault")
    limited = re.search(
        r"request 199 failed \(200 like it within 60 s; others are left out for (\d+) s\)$", lines[-2]
    )
    assert limited and 0 < int(limited[1]) <= 60
    assert len(process_logs.console.getvalue().splitlines()) == 201


def test_left_out_records_are_counted_in_the_next_period():
    now = [0.0]
    limiter = logs.RepeatLimiter(limit=2, period=10.0, clock=lambda: now[0])

    def passed(level=logging.WARNING, line=1):
        record = logging.LogRecord("serve_app.x", level, "x.py", line, "%s is full", ("disk",), None)
        first = limiter.filter(record)
        assert limiter.filter(record) == first, "a second handler decides alike"
        return record.getMessage() if first else None

    assert [passed() for _ in range(4)] == [
        "disk is full",
        "disk is full (2 like it within 10 s; others are left out for 10 s)",
        None,
        None,
    ]
    assert passed(line=2) == passed(logging.DEBUG) == "disk is full"
    now[0] = 11.0
    assert passed() == "disk is full (2 like it were left out before)"
    now[0] = 30.0
    assert passed() == "disk is full"


def test_a_record_that_cannot_be_formatted_does_not_fail_at_the_limit():
    limiter = logs.RepeatLimiter(limit=1)
    record = logging.LogRecord("serve_app.x", logging.ERROR, "x.py", 1, "%d is full", ("disk",), None)
    assert limiter.filter(record), "its handlers report the fault, as without a limit"


def test_long_lines_are_cut(process_logs):
    process_logs()
    print("x" * 1_000_000)
    print("after")
    process_logs.close()
    first, second = process_logs.model.splitlines()
    assert len(first) < 70_000 and first.endswith("… (934464 characters more)")
    assert second.endswith("MODEL_LOG - after")
    assert len(process_logs.out.getvalue()) == 1_000_007


def test_concurrent_prints_keep_lines_whole(process_logs):
    process_logs()

    def write(name):
        for i in range(300):
            sys.stdout.write(f"{name}-")
            sys.stdout.write(f"{i}\n")

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    process_logs.close()
    assert sorted(re.findall(r"- (\w-\d+)\n", process_logs.model)) == sorted(
        f"{n}-{i}" for n in "abcd" for i in range(300)
    )


def test_replaced_print_is_logged_too(process_logs, tmp_path, monkeypatch):
    printed = []

    def elsewhere(*objects, sep=" ", end="\n", file=None, flush=False):  # does not write to sys.stdout
        printed.append(sep.join(map(str, objects)) + end)

    monkeypatch.setattr(builtins, "print", elsewhere)
    process_logs()
    print("one", 2, sep="-")
    with (tmp_path / "authors").open("w") as file:
        print("a", "file", "of the author's", file=file, flush=True)
    process_logs.close()
    assert builtins.print is elsewhere
    assert printed == ["one-2\n"]
    assert "-stdout MODEL_LOG - one-2\n" in process_logs.model
    assert (tmp_path / "authors").read_text() == "a file of the author's\n"


def test_unwritable_folder_loses_lines_only(process_logs, tmp_path):
    (tmp_path / "logs").write_text("a file, where the folder should be")
    process_logs()
    print("said")
    logging.getLogger("serve_app.x").warning("to the console alone")
    process_logs.close()
    assert process_logs.out.getvalue() == "said\n"
    console = process_logs.console.getvalue()
    assert "to the console alone" in console
    assert "the model_log.log cannot be written" in console and "its lines are lost until it can" in console


def test_forked_process_writes_its_own_lines_once(tmp_path):
    code = """
import contextlib, os, sys
from serve_app.settings import Settings
from serve_app.telemetry import log_writer, logs
logs.configure(Settings(home=sys.argv[1]), logs.ProcessIdentity.of_replica("m", "1", "r"))
print("the parent, before")
with contextlib.ExitStack() as locks:  # as if each thread were about to wait, or to write
    for writer in log_writer._writers:
        for lock in (writer._has_lines._cond, writer._closing._cond, writer._write_lock):
            locks.enter_context(lock)
    child = os.fork()
    if child == 0:
        print("the child")
        logs.close()
        os._exit(0)
os.waitpid(child, 0)
print("the parent, after")
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, timeout=300)
    lines = (tmp_path / "logs/model_log.log").read_text().splitlines()
    printed = sorted(line.rpartition(" - ")[2] for line in lines if "-stdout MODEL_LOG" in line)
    assert printed == ["the child", "the parent, after", "the parent, before"]


def test_dropped_lines_are_counted(monkeypatch):
    monkeypatch.setattr("serve_app.telemetry.log_writer.MAX_PENDING", 100)
    gate, written = threading.Event(), []

    class Slow:
        def write(self, text):
            written.append(text)
            gate.wait(60)

        def close(self):
            pass

    writer = AsyncWriter(Slow(), "slow", period=0.0)
    for _ in range(10):
        writer.put("x" * 60)
    while not written:
        pass
    for _ in range(10):
        writer.put("y" * 60)
    gate.set()
    writer.close()
    text = "".join(written)
    written_count = text.count("x" * 60) + text.count("y" * 60)
    lost_count = sum(int(n) for n in re.findall(r"\((\d+) lines are lost", text))
    assert written_count + lost_count == 20 and lost_count > 0


def test_lines_that_two_threads_put_at_once_are_written():
    class Lines(list):
        """Lines among which each append is followed by that of another thread."""

        def append(self, line):
            super().append(line)
            super().append("of another thread")

    written = threading.Event()

    class Sink:
        def write(self, text):
            assert text == "mine\nof another thread\n"
            written.set()

        def close(self):
            pass

    writer = AsyncWriter(Sink(), "shared", period=0.0)
    writer._lines = Lines()
    writer.put("mine")
    assert written.wait(60)
    writer.close()


def test_incomplete_write_does_not_join_two_lines(tmp_path, monkeypatch):
    file = FileSink(tmp_path / "log")
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
    ("error", "message"),
    [
        (ConfigurationError("log_level", "no such level"), "Gate cannot start: log_level: no such level\n"),
        (KeyError("x"), "Gate cannot start: Traceback (most recent call last):\n"),
    ],
)
def test_start_failure_is_printed_on_the_console(monkeypatch, error, message):
    class Gate:
        @logs.report_start_failure
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
    assert console.getvalue().startswith(message)
