"""Replicas that follow the load, on a real cluster: up and down, from none and back, and overridden by
hand.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.archives import make_archive, says
from tests.support.load import Load
from tests.support.server import Server

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SLOW = """
import os, time
def handle(data, context):
    if data is None:
        return None
    time.sleep(0.1)
    return [str(os.getpid())] * len(data)
"""
QUICK = {
    "upscale_delay_s": 0.3,
    "downscale_delay_s": 0.5,
    "downscale_to_zero_delay_s": 0.5,
    "look_back_period_s": 2,
}
STEADY = {**QUICK, "downscale_delay_s": 3}  # the load may pause for a moment


def put(server: Server, path: str, **parameters: Any) -> tuple[int, str]:
    answer = server.management.put(path, params=parameters)
    return answer.status_code, answer.json()["status"]


def routes(server: Server) -> dict[str, str]:
    return server.http.get("/-/routes").json()


def test_workers_follow_the_load_and_every_call_is_answered(server: Server, tmp_path: Path) -> None:
    assert server.register(make_archive(tmp_path, "tide", SLOW)).status_code == 200
    assert server.register(make_archive(tmp_path, "tide", SLOW, "2.0"), initial_workers=0).status_code == 200
    [first] = server.pids("tide", "1.0")
    output = put(server, "/models/tide/1.0", min_worker=1, max_worker=2, synchronous="true", **STEADY)
    begun = (
        "Workers scaled to 1 for model: tide, version: 1.0; autoscaling holds between 1 and 2 workers from"
        " now on"
    )
    assert output == (200, begun)
    [described] = server.management.get("/models/tide/1.0").json()
    assert (described["minWorkers"], described["maxWorkers"]) == (1, 2)
    assert described["autoscaling"]["target_ongoing_requests"] == 2.0
    with Load(f"{server.url}/predictions/tide/1.0", connections=6) as load:
        server.wait(lambda: len(server.pids("tide", "1.0")) == 2, description="a second worker under load")
        pids = set(server.pids("tide", "1.0"))
        assert first in pids, "that its workers follow the load restarts none of them"
        # A route that moves is a redeploy: it keeps the workers that the load has brought.
        assert server.management.put("/models/tide/2.0/set-default").status_code == 200
        server.wait(
            lambda: routes(server).get("/predictions/tide/1.0") == "tide--1.0",
            description="its explicit route",
        )
        seen = len(load.answers)
        server.wait(lambda: len(load.answers) >= max(2, seen), description="answers of both")
        assert set(server.pids("tide", "1.0")) == pids
    assert not load.failed, load.failed
    assert {int(text) for _, text in load.answers} == pids
    server.wait(lambda: len(server.pids("tide", "1.0")) == 1, description="one worker when the load is gone")
    server.management.delete("/models/tide/1.0")
    server.management.delete("/models/tide/2.0")


def test_the_first_call_of_a_version_that_sleeps_waits_and_is_answered(
    server: Server, tmp_path: Path
) -> None:
    config = {"minWorkers": 0, "maxWorkers": 2, "autoscaling": QUICK}
    answer = server.register(make_archive(tmp_path, "sleeper", says("good morning"), config=config))
    assert (
        answer.json()["status"] == 'Model "sleeper" Version: 1.0 registered with 0 initial workers; '
        "autoscaling holds between 0 and 2 workers from now on"
    )
    ready = "/v1/models/sleeper"
    server.wait(lambda: server.management.get(ready).json()["ready"], description="that it is ready, asleep")
    assert server.http.get("/ping").status_code == 200 and server.client.ready()
    assert server.workers("sleeper") == []

    def on_its_own_route() -> bool:  # calls keep it awake until then
        assert server.http.post("/predictions/sleeper", content=b"x").text == "good morning"
        return routes(server).get("/predictions/sleeper") == "sleeper--1.0"

    assert server.http.post("/predictions/sleeper", content=b"x").text == "good morning"
    server.wait(on_its_own_route, description="its own route")
    server.wait(lambda: "/predictions/sleeper" not in routes(server), description="that it sleeps again")

    with ThreadPoolExecutor(16) as callers:  # at once, and through the gateway
        calls = [callers.submit(server.http.post, "/%70redictions/sleeper", content=b"x") for _ in range(16)]
    assert {(call.result().status_code, call.result().text) for call in calls} == {(200, "good morning")}

    ended = "Workers scaled to 1 for model: sleeper; autoscaling between 0 and 2 workers is off from now on"
    assert put(server, "/models/sleeper", min_worker=1, synchronous="true") == (200, ended)
    [described] = server.management.get("/models/sleeper").json()
    assert "autoscaling" not in described and len(described["workers"]) >= 1
    [pid] = server.pids("sleeper")
    begun = "Processing worker updates...; autoscaling holds between 0 and 2 workers from now on"
    assert put(server, "/models/sleeper", min_worker=0, max_worker=2, downscale_to_zero_delay_s=60) == (
        202,
        begun,
    )
    assert pid in server.pids("sleeper"), "a change of its bounds restarts nobody"
    server.management.delete("/models/sleeper")


def test_invalid_autoscaling_is_refused(server: Server, tmp_path: Path) -> None:
    server.register(make_archive(tmp_path, "stiff", says("x")), initial_workers=0)
    for parameters, why in (
        ({"min_worker": 1, "upscale_delay_s": 1}, "Give min_worker and max_worker, the one below the other."),
        ({"min_worker": 1, "max_worker": 2, "autoscaling_policy": "latency"}, "wants target_p95_ms"),
        ({"min_worker": 1, "max_worker": 2, "target_ongoing_requests": "many"}, "target_ongoing_requests"),
    ):
        answer = server.management.put("/models/stiff", params=parameters)
        assert (answer.status_code, answer.json()["type"]) == (400, "BadRequestException")
        assert why in answer.json()["message"]
    assert server.management.get("/models/stiff").json()[0]["maxWorkers"] == 0, "nothing of it was taken over"
    server.management.delete("/models/stiff")
