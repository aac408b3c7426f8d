"""Replicas that follow the load, on a real cluster: up and down, from none and back, and overridden by
hand.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.archives import make_archive, says
from tests.support.http_server import serving
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
STEADY = {**QUICK, "downscale_delay_s": 10}  # the load may pause for a moment


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


def test_a_program_sets_the_number_of_workers(server: Server, tmp_path: Path) -> None:
    config = {"minWorkers": 1, "maxWorkers": 2, "autoscaling": {"policy": "external"}}
    assert server.register(make_archive(tmp_path, "led", SLOW, config=config)).status_code == 200
    [first] = server.pids("led")
    answer = server.management.put("/models/led/replicas", json={"replicas": 5})
    assert answer.json() == {"replicas": 2, "running": 1, "min": 1, "max": 2}
    with Load(f"{server.url}/predictions/led", connections=4) as load:
        server.wait(lambda: len(server.pids("led")) == 2, description="a second worker")
        assert first in server.pids("led")
        # Ray Serve's autoscaler takes over, and keeps the workers that are there.
        assert put(server, "/models/led", min_worker=1, max_worker=2, autoscaling_policy="requests")[0] == 202
        described = "/models/led/1.0"
        server.wait(
            lambda: server.management.get(described).json()[0]["autoscaling"]["policy"] == "requests",
            description="the other policy",
        )
        assert server.management.put("/models/led/replicas", json={"replicas": 1}).status_code == 409
        assert put(server, "/models/led", min_worker=1, max_worker=2, autoscaling_policy="external")[0] == 202
        answer = server.management.put("/models/led/1.0/replicas", json={"replicas": 1})
        assert answer.json()["replicas"] == 1
        server.wait(lambda: len(server.pids("led")) == 1, description="one worker")
    assert not load.failed, load.failed
    server.management.delete("/models/led")


def test_workers_follow_the_value_of_a_query(server: Server, tmp_path: Path) -> None:
    values = ["15"]

    def answer(handler: Any) -> None:
        body = {
            "status": "success",
            "data": {"resultType": "vector", "result": [{"metric": {}, "value": [0, values[-1]]}]},
        }
        handler.send_response(500 if values[-1] == "broken" else 200)
        handler.end_headers()
        handler.wfile.write(json.dumps(body if values[-1] != "broken" else {"error": "no disk"}).encode())

    scaling = {"policy": "prometheus", "query": "jobs", "target_value": 10, **STEADY}
    config = {"minWorkers": 1, "maxWorkers": 2, "autoscaling": {**scaling, "downscale_delay_s": 0.5}}
    with serving(answer, port=server.prometheus_port):
        assert server.register(make_archive(tmp_path, "queue", SLOW, config=config)).status_code == 200
        server.wait(lambda: len(server.pids("queue")) == 2, description="a second worker")
        values.append("broken")
        query = {"model": "queue", "stage": "failed"}
        [event] = server.wait(
            lambda: server.management.get("/events", params=query).json()["events"], description="an event"
        )
        assert event["details"]["message"].endswith("2 replicas are kept: status 500: no disk")
        assert len(server.pids("queue")) == 2
        values.append("5")
        server.wait(lambda: len(server.pids("queue")) == 1, description="one worker")
    server.management.delete("/models/queue")
