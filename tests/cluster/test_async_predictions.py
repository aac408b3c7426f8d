"""Asynchronous predictions in a whole server: taken in by a replica, run by Management, through its death
as well.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.archives import make_archive
from tests.support.server import Server

pytestmark = pytest.mark.cluster

# "wait" holds the worker until a file is there.
HANDLER = """
import os
import time


def handle(data, context):
    if data is None:
        return None
    for row in data:
        said = row["body"].decode()
        while said.startswith("wait ") and not os.path.exists(said[5:]):
            time.sleep(0.02)
    return ["about " + row["body"].decode().split()[0] for row in data]
"""
ASYNC = {"Prefer": "respond-async"}


def test_what_was_accepted_outlives_the_process_that_runs_it(server: Server, tmp_path: Path) -> None:
    assert server.register(make_archive(tmp_path, "later", HANDLER)).status_code == 200
    go = tmp_path / "go"
    routes = ("/predictions/later", "/%70redictions/later")  # its replica's own, and through the gateway
    where = []
    for route in routes:
        accepted = server.http.post(route, content=f"wait {go}", headers=ASYNC)
        assert (accepted.status_code, accepted.headers["preference-applied"]) == (202, "respond-async"), (
            accepted.text
        )
        where.append(accepted.headers["location"])
    server.wait(
        lambda: server.http.get(where[0]).json()["state"] == "running", description="the prediction to run"
    )
    assert server.http.get(f"{where[1]}/result").status_code == 202
    cancelled = server.http.post(routes[0], content="wait for ever", headers=ASYNC).headers["location"]
    assert server.http.delete(cancelled).json()["state"] == "cancelled"

    (management,) = server.actors("ServeReplica:torchrelay:Management")
    os.kill(management.pid, signal.SIGKILL)
    go.touch()
    for one in where:
        server.wait(
            lambda one=one: server.http.get(one).json()["state"] == "done",
            description="its end, after the death",
        )
        answer = server.http.get(f"{one}/result")
        assert (answer.status_code, answer.text, answer.headers["x-model-version"]) == (
            200,
            "about wait",
            "1.0",
        )
    assert server.http.get(f"{cancelled}/result").status_code == 410
    assert server.metric("torchrelay_async_predictions_ended_total", model="later", state="done") == 2
    assert server.metric("torchrelay_requests_total", model="later", status="ok") >= 2
    assert server.management.delete("/models/later").status_code == 200
