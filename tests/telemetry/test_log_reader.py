"""The records of the log files that the management API returns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serve_app.domain.log_query import LogQuery
from serve_app.settings import load
from serve_app.telemetry.access_log import AccessLog
from serve_app.telemetry.log_reader import read_records
from serve_app.telemetry.logs import ProcessIdentity

TEXT = """\
2026-11-20T13:24:41,180 [INFO ] Management serve_app.deployments.management - the first
2026-11-20T13:24:42,180 [ERROR] W-1-digits_1.0 serve_app.deployments.replica - it failed
Traceback (most recent call last):
  ValueError: <b>no</b>
2026-11-20T13:24:43,180 [WARN ] Management serve_app.deployments.management - Zürich
"""
ROWS = [
    {"time": "t1", "level": "INFO", "logger": "h", "message": "one", "model": "digits", "replica": "r1"},
    {"time": "t2", "level": "ERROR", "logger": "h", "message": "two", "model": "other", "trace_id": "ab"},
]


def read(folder: Path, content: str, file: str = "ts_log.log", **query: Any) -> list[Any]:
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "logs" / file).write_text(content)
    return read_records(load({"home": str(folder)}), LogQuery(**query))


def test_the_newest_record_is_first_and_a_traceback_belongs_to_its_record(tmp_path: Path) -> None:
    last, error, first = read(tmp_path, TEXT)
    assert (last["level"], last["message"]) == ("WARNING", "Zürich")
    assert error["message"].endswith("  ValueError: <b>no</b>")
    assert first["source"] == "Management serve_app.deployments.management"
    assert first["time"] == "2026-11-20T13:24:41,180"


@pytest.mark.parametrize(
    ("query", "messages"),
    [
        ({"limit": 1}, ["Zürich"]),
        ({"level": "ERROR"}, ["it failed"]),
        ({"model": "digits"}, ["it failed"]),
        ({"model": "digit"}, []),
        ({"text": "valueerror"}, ["it failed"]),
        ({"text": "absent"}, []),
    ],
)
def test_filters(tmp_path: Path, query: dict[str, Any], messages: list[str]) -> None:
    assert [record["message"].splitlines()[0] for record in read(tmp_path, TEXT, **query)] == messages


def test_json_records_have_their_other_fields_in_the_message(tmp_path: Path) -> None:
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in ROWS)
    two, one = read(tmp_path, text, "model_log.log", log="model")
    assert one == {"time": "t1", "level": "INFO", "source": "r1 h", "message": "one model=digits"}
    assert two["message"] == "two model=other trace_id=ab"
    assert [
        record["time"] for record in read(tmp_path, text, "model_log.log", log="model", model="digits")
    ] == ["t1"]


def test_access_log_and_missing_and_broken_files(tmp_path: Path) -> None:
    line = '2026-11-20T13:24:41,180 - /127.0.0.1:1 "GET /ping HTTP/1.1" 200 0 id=1 model=digits version=1\n'
    [record] = read(tmp_path, line, "access_log.log", log="access", model="digits")
    assert record["message"].startswith('/127.0.0.1:1 "GET')
    assert read_records(load({"home": str(tmp_path / "none")}), LogQuery()) == []
    assert read(tmp_path, "{broken\n")[0]["message"] == "{broken"


def test_a_record_is_of_the_model_that_wrote_it(tmp_path: Path) -> None:
    def line(model: str, message: str, version: str = "1.0") -> str:
        thread = ProcessIdentity.of_replica(model, version, "k3j9x2ab").name
        return f"2026-11-20T13:24:42,180 [INFO ] {thread}-stdout MODEL_LOG - {message}\n"

    text = (
        line("spam", "mine")
        + line("team-b-spam", "of another team")
        + line("team-b", "W-1-spam_1.0 and model=spam version=1 and")
        + line("team-b", '{"model":"spam"}\n{"model":"spam","message":"a part of the record"}')
        + line("rank0-spam", "a name")
        + line("spam", "a version with an underscore", "b_1")
        + line("spam_b", "the same letters", "1")
    )
    found = {}
    for model in ("spam", "spam_b", "rank0-spam"):
        records = read(tmp_path, text, "model_log.log", log="model", model=model)
        found[model] = [record["message"] for record in records]
    assert found == {
        "spam": ["a version with an underscore", "mine"],
        "spam_b": ["the same letters"],
        "rank0-spam": ["a name"],
    }


def test_a_json_record_is_of_the_model_in_its_field(tmp_path: Path) -> None:
    rows = [
        {"time": "t1", "level": "INFO", "message": "mine", "model": "spam"},
        {"time": "t2", "level": "INFO", "message": "mine, too", "model": "spam", "more": {"model": "other"}},
        {"time": "t3", "level": "INFO", "message": 'x" ,"model":"spam", W-1-spam_1', "model": "other"},
        {"time": "t4", "level": "INFO", "message": "nested", "more": {"model": "spam"}},
    ]
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    found = read(tmp_path, text, "model_log.log", log="model", model="spam")
    assert [record["time"] for record in found] == ["t2", "t1"]


@pytest.mark.parametrize("form", ["text", "json"])
def test_an_access_record_is_of_the_model_that_served_the_request(tmp_path: Path, form: Any) -> None:
    (tmp_path / "logs").mkdir()
    log = AccessLog(tmp_path / "logs/access_log.log", form)
    paths = {
        "spam": ("/predictions/spam",),
        "other": ('/x" 200 0 id=1 model=spam version=1', "/x model=spam version=1.0 key=k", "/x?model=spam"),
        "": ("/x model=spam version=1.0",),
    }
    for model, targets in paths.items():
        for target in targets:
            log.write("127.0.0.1:1", "GET", target, "1.1", 200, 1.0, "id-1", model, "1.0", key="k")
    log.close()
    [record] = read_records(load({"home": str(tmp_path)}), LogQuery("access", model="spam"))
    assert "/predictions/spam" in record["message"]


def test_only_the_end_of_a_large_file_is_searched(tmp_path: Path) -> None:
    line = "2026-11-20T13:24:41,180 [INFO ] a b - {}\n"
    text = line.format("early") + line.format("x" * 1000) * 9000 + line.format("late")
    assert read(tmp_path, text, text="early") == []
    assert len(read(tmp_path, text, text="late")) == 1
