"""The main job on a real cluster: register, predict, second version, switch and scale under load."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.support.archives import ECHO, make_archive, says
from tests.support.load import Load
from tests.support.server import Server

pytestmark = pytest.mark.cluster

THREADS = """
import torch
def handle(data, context):
    return None if data is None else [torch.get_num_threads()] * len(data)
"""


def test_register_predict_and_describe(server: Server, tmp_path: Path) -> None:
    answer = server.register(make_archive(tmp_path, "echo", ECHO))
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"status": 'Model "echo" Version: 1.0 registered with 1 initial workers'}
    got = server.http.post("/predictions/echo", json={"a": 1})
    assert (got.status_code, got.json()) == (200, {"a": 1})
    assert len(got.headers.get_list("x-request-id")) == 1
    assert server.http.post("/predictions/echo/1.0", content=b"raw").content == b"raw"
    assert server.http.post("/predictions/echo/9", content=b"").status_code == 404
    assert server.http.post("/predictions/none", content=b"").json() == {
        "code": 404,
        "type": "ModelNotFoundException",
        "message": "Model not found: none",
    }
    [described] = server.management.get("/models/echo").json()
    assert (described["modelVersion"], described["workers"][0]["status"]) == ("1.0", "READY")
    server.wait(
        lambda: server.workers("echo")[0]["memoryUsage"] > 10_000_000, description="the replica's memory"
    )
    again = server.register(make_archive(tmp_path, "echo", ECHO))
    assert (again.status_code, again.json()["type"]) == (409, "ConflictStatusException")


def test_a_replica_runs_pytorch_in_one_thread_by_default(server: Server, tmp_path: Path) -> None:
    assert server.register(make_archive(tmp_path, "threads", THREADS)).status_code == 200
    assert server.http.post("/predictions/threads", content=b"x").json() == 1
    server.management.delete("/models/threads")


def test_the_fast_path_and_the_gateway_answer_alike(server: Server) -> None:
    def requested(path: str) -> httpx.Response:
        answers: list[httpx.Response] = []

        def stays() -> (
            bool
        ):  # a HAProxy that another one replaces closes each connection with its next answer
            answers.append(server.http.post(path, content=b"same"))
            return "connection" not in answers[-1].headers

        server.wait(stays, description="an answer by the HAProxy that stays")
        return answers[-1]

    fast = requested("/predictions/echo")
    # HAProxy compares paths as they are written, so an escaped letter brings this one to the gateway.
    slow = requested("/%70redictions/echo")
    assert fast.content == slow.content == b"same"
    same = {"x-request-id", "date", "server-timing", "server"}
    assert {k: v for k, v in fast.headers.items() if k not in same} == {
        k: v for k, v in slow.headers.items() if k not in same
    }


def routes(server: Server) -> dict[str, str]:
    """HAProxy's live table: route to application."""
    return server.http.get("/-/routes").json()


@pytest.mark.slow
def test_set_default_back_and_forth_under_load(server: Server, tmp_path: Path) -> None:
    for version in ("1.0", "2.0"):
        answer = server.register(make_archive(tmp_path, "ab", says(f"version {version}"), version))
        assert answer.status_code == 200, answer.text
    pids = {v: server.pids("ab", v) for v in ("1.0", "2.0")}
    assert server.http.post("/predictions/ab").text == "version 1.0"
    with Load(f"{server.url}/predictions/ab", connections=32) as load:
        for turn in range(6):
            version = ("2.0", "1.0")[turn % 2]
            assert server.management.put(f"/models/ab/{version}/set-default").status_code == 200
            # In force everywhere when it was acknowledged: on both ways, at once.
            assert server.http.post("/predictions/ab").text == f"version {version}"
            assert server.http.post("/%70redictions/ab").text == f"version {version}"
            if (
                turn % 3 == 0
            ):  # in some of the turns the routes themselves arrive, under load, before the next switch
                app = f"ab--{version}"
                server.wait(
                    lambda app=app: routes(server).get("/predictions/ab") == app, description="the route"
                )
    assert not load.failed, load.failed
    assert set(load.answers) == {(200, "version 1.0"), (200, "version 2.0")}
    assert {v: server.pids("ab", v) for v in ("1.0", "2.0")} == pids, "a switch restarts nobody"


class Strangers(Load):
    """Each request over a connection of its own."""

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=self.connections, max_keepalive_connections=0)
        async with httpx.AsyncClient(limits=limits, timeout=60) as client:
            await asyncio.gather(*(self._one(client) for _ in range(self.connections)))


def test_scale_up_and_down_under_load(server: Server) -> None:
    [first] = server.pids("echo")
    url = f"{server.url}/predictions/echo"
    with Load(url, connections=6) as load, Strangers(url, connections=2) as strangers:
        up = server.management.put("/models/echo", params={"min_worker": 2, "synchronous": "true"})
        assert (up.status_code, up.json()) == (200, {"status": "Workers scaled to 2 for model: echo"})
        assert len(server.pids("echo")) == 2 and first in server.pids("echo")
        down = server.management.put("/models/echo", params={"min_worker": 1, "synchronous": "true"})
        assert down.status_code == 200, down.text
        assert len(server.pids("echo")) == 1
    assert not load.failed and not strangers.failed, (load.failed, strangers.failed)
    assert strangers.answers[200, "x"] > 20
    later = server.management.put("/models/echo", params={"min_worker": 1})
    assert (later.status_code, later.json()) == (202, {"status": "Processing worker updates..."})


def test_no_workers_is_reported_and_scaling_from_zero(server: Server, tmp_path: Path) -> None:
    answer = server.register(make_archive(tmp_path, "idle", ECHO), initial_workers=0)
    assert answer.json()["status"].startswith('Model "idle" Version: 1.0 registered with 0 initial workers.')
    refused = server.http.post("/predictions/idle", content=b"x")
    assert refused.status_code == 503
    assert refused.headers["x-torchrelay-reason"] == "no_replica"
    assert refused.json()["message"].startswith('Model "idle" has no worker to serve inference request.')
    assert (
        server.management.put("/models/idle", params={"min_worker": 1, "synchronous": "true"}).status_code
        == 200
    )
    assert server.http.post("/predictions/idle", content=b"x").content == b"x"
    assert (
        server.management.put("/models/idle", params={"min_worker": 0, "synchronous": "true"}).status_code
        == 200
    )
    assert server.pids("idle") == []
    statuses: list[int] = []  # while HAProxy's table still has the replica that is leaving, it answers

    def refused_again() -> bool:
        statuses.append(server.http.post("/predictions/idle", content=b"x").status_code)
        return statuses[-1] != 200

    server.wait(refused_again, description="the end of the last replica")
    assert statuses[-1] == 503


def test_unregister_and_the_default_version(server: Server, tmp_path: Path) -> None:
    for version in ("1.0", "2.0"):
        server.register(make_archive(tmp_path, "gone", says(version), version), initial_workers=0)
    kept = server.management.delete("/models/gone/1.0")
    assert (kept.status_code, kept.json()["type"]) == (403, "InvalidModelVersionException")
    assert server.management.delete("/models/gone/2.0").json() == {"status": 'Model "gone" unregistered'}
    assert server.management.delete("/models/gone").status_code == 200
    assert server.http.post("/predictions/gone").status_code == 404
    assert server.management.get("/models/gone").status_code == 404


def test_a_call_that_comes_while_the_model_loads_waits_for_it(server: Server, tmp_path: Path) -> None:
    slow = "import time\ntime.sleep(1)\n" + ECHO
    answer = server.register(make_archive(tmp_path, "slow", slow), synchronous="false")
    assert (answer.status_code, answer.json()) == (202, {"status": "Processing worker updates..."})
    assert server.http.post("/predictions/slow", content=b"first").content == b"first"
    server.management.delete("/models/slow")


def test_metrics_are_summed_over_replicas_and_gateways(server: Server) -> None:
    labels = {"model": "echo", "version": "1.0"}
    before = server.metric("torchrelay_requests_total", **labels)
    for path in ("/predictions/echo", "/%70redictions/echo"):
        for _ in range(5):
            server.http.post(path, content=b"x")
    assert server.metric("torchrelay_requests_total", **labels) == before + 10
    assert server.metric("torchrelay_replicas", **labels) == 1
    assert server.metric("torchrelay_batch_size_count", **labels) >= 10
    assert server.metric("torchrelay_http_responses_total", code="200") >= 10


def test_rows_that_wait_are_shown_while_they_wait(server: Server, tmp_path: Path) -> None:
    handler = """
import time
def handle(data, context):
    if data is None:
        return None
    time.sleep(1)
    return ["done"] * len(data)
"""
    assert server.register(make_archive(tmp_path, "held", handler)).status_code == 200
    with Load(f"{server.url}/predictions/held", connections=4) as load:
        server.wait(
            lambda: server.management.get("/models/held").json()[0]["jobQueueStatus"]["pendingRequests"] >= 2,
            description="rows in the queue",
        )
        server.wait(
            lambda: server.metric("torchrelay_queue_depth", model="held") >= 2,
            description="rows in the metric",
        )
    assert not load.failed, load.failed
    server.management.delete("/models/held")
