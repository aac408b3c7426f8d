import io
import json
import re
import subprocess
import sys
import threading

import pytest

from serve_app.telemetry import access_log, log_writer
from serve_app.telemetry.access_log import AccessLog


class Pipe(io.StringIO):
    """A stream with an event for writes, which keeps its text after it was closed."""

    def __init__(self):
        super().__init__()
        self.written = threading.Event()
        self.blocks = []

    def write(self, text):
        if text:
            self.blocks.append(text)
            self.written.set()
        return len(text)

    @property
    def text(self):
        return "".join(self.blocks)


def test_line_is_torchserves_with_id_model_and_version():
    pipe = Pipe()
    log = AccessLog(pipe)
    log.write("127.0.0.1:52222", "GET", "/ping", "1.1", 200, 22.7)
    log.write("127.0.0.1:52222", "POST", "/predictions/m", "1.1", 503, 1.2, "an-id", "m", "1.0")
    log.close()
    first, second = pipe.text.splitlines()
    timestamp = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3} - "
    assert re.fullmatch(timestamp + re.escape('/127.0.0.1:52222 "GET /ping HTTP/1.1" 200 22'), first)
    tail = '/127.0.0.1:52222 "POST /predictions/m HTTP/1.1" 503 1 id=an-id model=m version=1.0'
    assert re.fullmatch(timestamp + re.escape(tail), second)


def test_json_format_has_the_same_fields():
    pipe = Pipe()
    log = AccessLog(pipe, form="json")
    log.write("h:1", "GET", '/a"b', "1.1", 200, 0.25, "id", "m", "2")
    log.close()
    line = json.loads(pipe.text)
    line.pop("time")
    assert line == {
        "client": "h:1",
        "method": "GET",
        "path": '/a"b',
        "http_version": "1.1",
        "status": 200,
        "milliseconds": 0.25,
        "request_id": "id",
        "model": "m",
        "version": "2",
    }


def test_path_cannot_forge_a_line():
    pipe = Pipe()
    log = AccessLog(pipe)
    log.write("h:1", "GET", '/x\n2024-01-01T00:00:00,000 - /h:1 "GET /y', "1.1", 200, 0)
    log.close()
    assert len(pipe.text.splitlines()) == 1


def test_names_that_clients_choose_are_not_cached():
    """A path may name models of 64 KB that do not exist; the field is escaped nevertheless."""
    log = AccessLog(Pipe())
    before = access_log._escape_cached.cache_info().currsize
    for i in range(3):
        log.write("h:1", "GET", "/", "1.1", 404, 0, model=f"{i} " * 100, version=f"{i} " * 100)
    log.close()
    assert access_log._escape_cached.cache_info().currsize <= before + 2  # method and HTTP's version


def test_lines_are_written_in_blocks_without_closing():
    pipe = Pipe()
    log = AccessLog(pipe)
    with log._writer._write_lock:  # the thread waits, however long the lines take
        for i in range(1000):
            log.write("h:1", "GET", f"/{i}", "1.1", 200, 0)
    assert pipe.written.wait(60)
    log.close()
    assert len(pipe.blocks) == 1
    assert [re.search(r"GET /(\d+)", line)[1] for line in pipe.text.splitlines()] == [
        str(i) for i in range(1000)
    ]


def test_concurrent_writes_lose_and_repeat_no_line(monkeypatch):
    monkeypatch.setattr(log_writer, "PERIOD", 0.001)
    pipe = Pipe()
    log = AccessLog(pipe)

    def write(name):
        for i in range(2000):
            log.write("h:1", "GET", f"/{name}-{i}", "1.1", 200, 0)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    paths = re.findall(r"GET /(\w-\d+)", pipe.text)
    assert len(paths) == len(set(paths)) == 8000


def test_slow_stream_does_not_block_callers():
    gate = threading.Event()

    class Slow(Pipe):
        def write(self, text):
            gate.wait(60)
            return super().write(text)

    pipe = Slow()
    log = AccessLog(pipe)
    for _ in range(10):
        log.write("h:1", "GET", "/", "1.1", 200, 0)
    assert not pipe.blocks
    gate.set()
    log.close()
    assert len(pipe.text.splitlines()) == 10


def test_file_is_appended_to_and_its_folder_created(tmp_path):
    file = tmp_path / "logs" / "access_log.log"
    for _ in range(2):
        log = AccessLog(file)
        log.write("h:1", "GET", "/", "1.1", 200, 0)
        log.close()
        log.close()
    assert len(file.read_text().splitlines()) == 2


def test_full_disk_is_logged_and_survived(caplog, monkeypatch):
    monkeypatch.setattr(log_writer, "PERIOD", 0.001)
    failed = threading.Event()

    class Full(Pipe):
        full = True

        def write(self, text):
            if self.full and text:
                failed.set()
                raise OSError(28, "No space left on device")
            return super().write(text)

    pipe = Full()
    log = AccessLog(pipe)
    log.write("h:1", "GET", "/lost", "1.1", 200, 0)
    assert failed.wait(60)
    pipe.full = False
    log.write("h:1", "GET", "/kept", "1.1", 200, 0)
    log.close()
    assert "/kept" in pipe.text
    assert [record.getMessage() for record in caplog.records if "No space left" in record.getMessage()]


def test_many_processes_append_whole_lines_and_a_full_file_is_renamed(tmp_path):
    path = tmp_path / "logs" / "access_log.log"
    code = (
        "import sys; from serve_app.telemetry.access_log import AccessLog\n"
        "log = AccessLog(sys.argv[1], limit=200_000)\n"
        "for i in range(3000):\n"
        "    log.write('127.0.0.1:1', 'GET', f'/{sys.argv[2]}/{i}', '1.1', 200, 1.0)\n"
        "    if i % 500 == 499: log._writer.flush()\n"
        "log.close()\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(path), str(n)]) for n in range(3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    kept = [*path.parent.iterdir()]
    assert {file.name for file in kept} == {"access_log.log", "access_log.log.1"}
    lines = [line for file in kept for line in file.read_text().splitlines()]
    assert all(line.endswith(" 200 1") and " - /127.0.0.1:1 " in line for line in lines), "no line is split"


def test_moved_file_is_replaced_by_a_new_one(tmp_path):
    path = tmp_path / "access_log.log"
    access = AccessLog(path)
    access.write("127.0.0.1:1", "GET", "/first", "1.1", 200, 1.0)
    access._writer.flush()
    path.rename(tmp_path / "moved")
    access.write("127.0.0.1:1", "GET", "/second", "1.1", 200, 1.0)
    access.close()
    assert "/first" in (tmp_path / "moved").read_text()
    assert "/second" in path.read_text() and "/first" not in path.read_text()


HOSTILE = [
    '/x" 200 1\n2026-01-01T00:00:00,000 - /192.0.2.9:1 "GET /y',
    "/\r\x1b[2K\x9b2J\x7f\x00",
    "/a b",
    "/\u2028\u0085\ud800é",
    '/back\\slash"',
]


def write_line(form, **fields):
    pipe = Pipe()
    log = AccessLog(pipe, form=form)
    known = {"client": "h:1", "method": "GET", "path": "/p", "http_version": "1.1"}
    log.write(**{**known, "status": 200, "milliseconds": 0, "request_id": "id", **fields})
    log.close()
    return pipe.text


@pytest.mark.parametrize("field", ["client", "method", "path", "http_version", "model", "version", "key"])
@pytest.mark.parametrize("value", HOSTILE)
def test_no_field_ends_its_line_its_quotes_or_itself(field, value):
    others = {"model": "m"} if field == "version" else {}
    plain = write_line("text", **others, **{field: "/p" if field == "path" else "p"})
    line = write_line("text", **others, **{field: value})
    assert line.isascii() and line[:-1].isprintable()
    assert (line.count('"'), line.count(" "), line.count("\n")) == (2, plain.count(" "), 1)
    encoded = write_line("json", **others, **{field: value})
    assert encoded.isascii() and encoded[:-1].isprintable()
    assert json.loads(encoded)[field] == value


def test_key_is_logged_by_its_name():
    line = write_line("text", model="m", version="1.0", key="team a")
    assert line.rstrip().endswith("version=1.0 key=team%20a")
    assert json.loads(write_line("json", key="team a"))["key"] == "team a"


@pytest.mark.parametrize(("mode", "folder_mode"), [(0o600, 0o700), (0o640, 0o750)])
def test_file_has_its_mode_whatever_the_umask_and_its_age(tmp_path, mode, folder_mode):
    folder = tmp_path / "logs"
    folder.mkdir(mode=0o700)
    path = folder / "access_log.log"
    path.touch(0o644)
    log = AccessLog(path, mode=mode)
    log.write("h:1", "GET", "/", "1.1", 200, 0)
    log.close()
    assert (path.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (mode, folder_mode)
