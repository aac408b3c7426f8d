"""Replicas that reach a limit, on a real cluster: each is replaced by a new one, and every call answered."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest

from tests.support.archives import make_archive
from tests.support.load import Load
from tests.support.server import Server

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

GROWS = """
import os, time
kept = []
def handle(data, context):
    if data is None:
        return None
    time.sleep(0.01)
    if data[0].get("body") == b"grow":
        kept.append(bytearray(os.urandom(1 << 20)) * 400)
    return [str(os.getpid())] * len(data)
"""


def recycled(server: Server, model: str, reason: str) -> float:
    return server.metric("torchrelay_replicas_recycled_total", model=model, reason=reason)


def test_replicas_are_replaced_one_by_one_without_a_lost_request(server: Server, tmp_path: Path) -> None:
    config = {"minWorkers": 2, "maxWorkers": 2, "recycling": {"max_requests": 200}}
    assert server.register(make_archive(tmp_path, "worn", GROWS, config=config)).status_code == 200
    first = set(server.pids("worn"))
    with Load(f"{server.url}/predictions/worn", connections=4) as load:
        server.wait(lambda: recycled(server, "worn", "requests") >= 2, description="two replacements")
        assert len(server.pids("worn")) >= 2, "a new replica is ready before an old one stops"
        server.wait(lambda: not first & set(server.pids("worn")), description="two new replicas")
    assert not load.failed, load.failed
    events = server.management.get("/events", params={"model": "worn", "stage": "recycling"})
    details = [event["details"] for event in events.json()["events"]]
    assert {detail["reason"] for detail in details} == {"requests"}
    server.management.delete("/models/worn")


def test_without_room_for_another_a_replica_that_has_grown_is_drained_first(
    server: Server, tmp_path: Path
) -> None:
    assert server.register(make_archive(tmp_path, "fat", GROWS)).status_code == 200
    memory = server.wait(lambda: server.workers("fat")[0]["memoryUsage"], description="its memory")
    server.management.delete("/models/fat")
    limit = (memory >> 20) + 200
    config = {
        "minWorkers": 1,
        "num_cpus": 0.6 * (os.cpu_count() or 1),  # a second one has no place
        "recycling": {"max_memory_mib": limit},
    }
    assert server.register(make_archive(tmp_path, "fat", GROWS, "2.0", config=config)).status_code == 200
    [first] = server.pids("fat")
    assert server.http.post("/predictions/fat", content=b"grow").status_code == 200
    with Load(f"{server.url}/predictions/fat", connections=2) as load:
        server.wait(lambda: server.pids("fat") not in ([], [first]), description="a new replica")
    assert not load.failed, load.failed
    server.wait(lambda: recycled(server, "fat", "memory"), description="the count of the replacement")
    assert recycled(server, "fat", "memory") == 1
    assert httpx.post(f"{server.url}/predictions/fat", timeout=60).text != str(first)
    server.management.delete("/models/fat")


def test_a_memory_limit_below_a_new_replicas_memory_is_shown_and_ignored(
    server: Server, tmp_path: Path
) -> None:
    config = {"recycling": {"max_memory_mib": 5}}
    assert server.register(make_archive(tmp_path, "tight", GROWS, config=config)).status_code == 200

    def last_error() -> str:
        [version] = server.client.describe("tight")
        return version.get("lastError", "")

    server.wait(last_error, description="an error of the limit")
    assert "recycling.max_memory_mib (5) is ignored: a new replica has" in last_error()
    assert recycled(server, "tight", "memory") == 0
    server.management.delete("/models/tight")
