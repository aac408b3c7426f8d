"""The log files of a real server, as text and as JSON; and one that tells its callers more, or less."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.archives import ECHO, make_archive
from tests.support.server import Server

pytestmark = pytest.mark.cluster

SPEAKS = """
import logging, sys
log = logging.getLogger("authors")
log.info("imported")
def handle(data, context):
    if data is None:
        return None
    log.debug("details")
    log.info("got %d rows", len(data))
    print("printed")
    print("complained", file=sys.stderr)
    if data[0]["body"] == b"raise":
        raise KeyError("the handler's own words")
    return ["fine"] * len(data)
"""
SLEEPS = """
import time
def handle(data, context):
    if data is None:
        return None
    time.sleep(float(data[0]["body"]))
    return ["slept"] * len(data)
"""


def test_text_files_in_torchserves_layout(server: Server, tmp_path: Path) -> None:
    assert server.register(make_archive(tmp_path, "speaks", SPEAKS)).status_code == 200
    answer = server.http.post("/predictions/speaks", content=b"x")
    assert answer.text == "fine"
    id_ = answer.headers["x-request-id"]

    def text(file: str) -> str:
        path = server.home / "logs" / file
        return path.read_text() if path.exists() else ""

    line = (
        rf"\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{{3}} \[(\w+) *\] (W-\w+-speaks_1\.0\S*) (\S+) - (.*) id={id_}"
    )

    def lines() -> list[tuple[str, ...]]:
        found = re.findall(line, text("model_log.log"))
        return found if len(found) == 3 else []

    (level, who, *result), printed, complained = server.wait(lines, description="the handler's lines")
    replica = who
    assert (level, *result) == ("INFO", "authors", "got 1 rows")
    assert printed == ("INFO", f"{replica}-stdout", "MODEL_LOG", "printed")
    assert complained == ("WARN", f"{replica}-stderr", "MODEL_LOG", "complained")
    assert re.search(rf"\[INFO \] {replica} authors - imported\n", text("model_log.log"))
    assert "details" not in text("model_log.log")

    failed = server.http.post("/predictions/speaks", content=b"raise").headers["x-request-id"]
    server.wait(lambda: f"(requests {failed})" in text("ts_log.log"), description="the failure")
    result_ = text("ts_log.log")
    assert re.search(
        rf"\[ERROR\] {replica} serve_app.runtime.runner - speaks--1.0: the handler failed", result_
    )
    assert 'KeyError: "the handler\'s own words"' in result_
    assert " Management serve_app." in result_
    server.wait(lambda: f"id={id_} model=speaks" in text("access_log.log"), description="the access log")
    server.management.delete("/models/speaks")


@pytest.fixture(scope="module")
def other(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """JSON logs elsewhere, late answers dropped, handlers' messages shown, answers of a thousand bytes at
    most.
    """
    home = tmp_path_factory.mktemp("other")
    made = Server(
        home,
        telemetry={"log_format": "json", "log_levels": {"speaks": "DEBUG"}},
        inference={"late_response": "drop", "handler_errors": "message"},
        runtime={"max_response_size": 1000},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOG_LOCATION", str(home / "elsewhere"))
        try:
            made.start()
            yield made
        finally:
            made.close()


def lines(server: Server, file: str) -> list[dict[str, Any]]:
    path = server.home / "elsewhere" / file
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.nightly
def test_json_files_where_log_location_says(other: Server, tmp_path: Path) -> None:
    assert other.register(make_archive(tmp_path, "speaks", SPEAKS)).status_code == 200
    answer = other.http.post("/predictions/speaks", content=b"raise", headers={"x-request-id": "theirs"})
    id_ = answer.headers["x-request-id"]
    assert id_ != "theirs"
    assert answer.json()["detail"] == 'KeyError: "the handler\'s own words"'

    def of_the_request() -> list[dict[str, Any]]:
        found = [s for s in lines(other, "model_log.log") if s.get("request_ids") == [id_]]
        return found if len(found) == 4 else []

    result = other.wait(of_the_request, description="the handler's lines")
    assert [(s["level"], s["message"]) for s in result] == [
        ("DEBUG", "details"),
        ("INFO", "got 1 rows"),
        ("INFO", "printed"),
        ("WARNING", "complained"),
    ]
    assert {(s["model"], s["version"]) for s in result} == {("speaks", "1.0")}
    [replica] = {s["replica"] for s in result}
    failure = other.wait(
        lambda: [
            s for s in lines(other, "ts_log.log") if id_ in s["message"] and s.get("replica") == replica
        ],
        description="the failure",
    )
    assert "own words" in failure[0]["message"]
    [request] = other.wait(
        lambda: [s for s in lines(other, "access_log.log") if s["request_id"] == id_],
        description="the request",
    )
    assert (request["status"], request["model"], request["client_ids"]) == (
        503,
        "speaks",
        {"x-request-id": "theirs"},
    )


@pytest.mark.nightly
def test_a_request_that_is_too_late_gets_no_answer_and_leaves_nothing_behind(
    other: Server, tmp_path: Path
) -> None:
    config = {"minWorkers": 1, "clientTimeoutInMills": 200}
    assert other.register(make_archive(tmp_path, "sleeps", SLEEPS, config=config)).status_code == 200
    other.wait(lambda: answered(other), description="an answer in time")
    # HAProxy loads its table anew when the route arrives, and does not pass on who leaves what it held then.
    for path in ("/predictions/sleeps", "/%70redictions/sleeps"):  # at the replica, and by way of the gateway
        other.wait(
            lambda path=path: leaves_unanswered(other, path), timeout=60, description="a caller that leaves"
        )
    other.wait(lambda: answered(other), description="an answer in time to those that come after them")
    limit = {"x-request-timeout-seconds": "0.1"}
    own = other.http.post("/predictions/sleeps", content=b"0.5", headers=limit)
    assert (own.status_code, own.headers["x-torchrelay-reason"]) == (504, "deadline")


def answered(server: Server) -> bool:
    """Send a request that must be answered in time; repeat it where the machine stood still."""
    return httpx.post(f"{server.url}/predictions/sleeps", content=b"0", timeout=5).text == "slept"


def leaves_unanswered(server: Server, path: str) -> bool:
    """Return whether the server ended a request within two seconds after its client disconnected."""

    def left() -> list[dict[str, Any]]:
        return [
            s for s in lines(server, "access_log.log") if s["status"] == 499 and s.get("model") == "sleeps"
        ]

    before = len(left())
    with httpx.Client(base_url=server.url, timeout=0.8) as client, pytest.raises(httpx.ReadTimeout):
        client.post(path, content=b"0.4")
    until = time.monotonic() + 2
    while len(left()) == before and time.monotonic() < until:
        time.sleep(0.05)
    return len(left()) > before and left()[-1]["milliseconds"] > 700


@pytest.mark.nightly
def test_an_answer_over_max_response_size_is_an_error_and_no_death(other: Server, tmp_path: Path) -> None:
    assert other.register(make_archive(tmp_path, "echo", ECHO)).status_code == 200
    pids = other.pids("echo")
    assert len(other.http.post("/predictions/echo", content=b"x" * 1000).content) == 1000
    answer = other.http.post("/predictions/echo", content=b"x" * 1001)
    assert (answer.status_code, answer.headers["x-torchrelay-reason"]) == (503, "response_too_large")
    assert "larger than max_response_size (1000 bytes)" in answer.json()["message"]
    assert other.pids("echo") == pids


def test_management_requests_are_in_the_access_log_too(server: Server) -> None:
    server.management.get("/models", params={"limit": "77"})
    log = server.home / "logs/access_log.log"
    server.wait(
        lambda: log.exists() and '"GET /models?limit=77 HTTP/1.1" 200 ' in log.read_text(),
        description="the request",
    )
