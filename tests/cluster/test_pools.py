"""Pools: many versions in one process, loaded on demand, evicted, isolated and moved out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from serve_app.proto import inference_pb2, inference_pb2_grpc
from tests.support.archives import make_archive
from tests.support.load import Trickle
from tests.support.server import POOL_MIB, Server

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

# Each archive has its own helper of the same name, a counter, and weights of a known size.
HANDLER = """
import os
import ctypes
from pathlib import Path
import numpy as np
import helper

COUNT = 0
WEIGHTS = np.ones(helper.MIB << 17)

def handle(data, context):
    global COUNT
    if data is None:
        return None
    order = bytes(data[0].get("body") or b"")
    if order == b"exit":
        os._exit(3)
    if order == b"segv":
        ctypes.string_at(0)
    if order == b"fail":
        raise ValueError("this row is wrong")
    COUNT += len(data)
    return [f"{helper.NAME} {Path('name.txt').read_text()} {os.getpid()}"] * len(data)
"""


def make(folder: Path, name: str, mib: int = 1, pool: str = "p", **config: Any) -> Path:
    files = {"helper.py": f"NAME = {name!r}\nMIB = {mib}\n", "name.txt": name}
    settings = {"pool": pool, **config}
    return make_archive(folder, name, HANDLER, files=files, config=settings)


@pytest.fixture(scope="module")
def pooled(server: Server) -> Iterator[Server]:
    """Return the shared server, whose pool ``p`` has one host; remove the models of pools at the end."""
    yield server
    for model in server.management.get("/models", params={"limit": 1000}).json()["models"]:
        if "pool" in describe(server, model["modelName"]):
            server.management.delete(f"/models/{model['modelName']}")


def predict(server: Server, name: str, body: bytes = b"x", path: str = "/predictions") -> list[str]:
    response = server.http.post(f"{path}/{name}", content=body)
    assert response.status_code == 200, response.text
    return response.text.split()


def describe(server: Server, name: str) -> dict[str, Any]:
    return server.management.get(f"/models/{name}").json()[0]


def is_loaded(server: Server, name: str) -> bool:
    return bool(describe(server, name)["workers"])


def test_a_request_waits_for_the_first_host_of_its_pool(pooled: Server, tmp_path: Path) -> None:
    assert pooled.register(make(tmp_path, "first"), initial_workers=0).status_code == 200
    assert predict(pooled, "first")[0] == "first"


def test_versions_share_a_process_and_nothing_else(pooled: Server, tmp_path: Path) -> None:
    names = [f"small{number}" for number in range(12)]
    for name in names:
        answer = pooled.register(make(tmp_path, name), initial_workers=1 if name == "small0" else 0)
        assert answer.status_code == 200, answer.text
    assert answer.json()["status"].endswith("Its pool loads it with the first request.")
    assert describe(pooled, "small0")["pool"] == "p"
    assert is_loaded(pooled, "small0")
    assert not is_loaded(pooled, "small1")
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda name: predict(pooled, name), names * 5))
    assert {answer[2] for answer in answers} == {answers[0][2]}
    assert all(answer[:2] == [name, name] for answer, name in zip(answers, names * 5))
    assert [predict(pooled, name)[0] for name in names] == names
    pooled.wait(lambda: all(is_loaded(pooled, name) for name in names), description="reports of the loads")
    [worker] = describe(pooled, "small3")["workers"]
    assert worker["pid"] == int(answers[0][2])
    failed = pooled.http.post("/predictions/small1", content=b"fail")
    assert failed.status_code == 503


def test_every_protocol_reaches_a_pooled_version(pooled: Server, tmp_path: Path) -> None:
    pooled.register(make(tmp_path, "reached"), initial_workers=0)
    assert predict(pooled, "reached", path="/%70redictions")[0] == "reached"  # through the gateway
    ready = pooled.http.get("/v2/models/reached/ready")
    assert ready.status_code == 200
    tensor = {"name": "x", "shape": [1], "datatype": "BYTES", "data": ["y"]}
    inferred = pooled.http.post("/v2/models/reached/infer", json={"inputs": [tensor]})
    assert inferred.status_code == 200, inferred.text
    with grpc.insecure_channel(f"127.0.0.1:{pooled.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceAPIsServiceStub(channel)
        request = inference_pb2.PredictionsRequest(model_name="reached", input={"data": b"x"})
        assert stub.Predictions(request, timeout=60).prediction.startswith(b"reached reached")
    assert b"reached" in pooled.client.predict("reached", b"x")


def test_versions_are_evicted_by_their_memory_and_come_back(pooled: Server, tmp_path: Path) -> None:
    names = [f"large{number}" for number in range(4)]
    for name in names:
        assert pooled.register(make(tmp_path, name, 80), initial_workers=0).status_code == 200
    evicted = pooled.metric("torchrelay_pool_evictions_total", pool="p")
    for name in names * 2:
        assert predict(pooled, name)[0] == name
    pooled.wait(
        lambda: pooled.metric("torchrelay_pool_evictions_total", pool="p") >= evicted + 4,
        description="evictions",
    )
    pooled.wait(
        lambda: [is_loaded(pooled, name) for name in names] == [False, False, True, True],
        description="the last two of four",
    )
    assert 160 << 20 <= pooled.metric("torchrelay_pool_memory_bytes", pool="p") <= POOL_MIB << 20
    assert describe(pooled, names[-1])["workers"][0]["memoryUsage"] >= 80 << 20


def test_a_pinned_version_stays(pooled: Server, tmp_path: Path) -> None:
    assert (
        pooled.register(make(tmp_path, "pinned", 50, pin_loaded=True), initial_workers=0).status_code == 200
    )
    pooled.wait(lambda: is_loaded(pooled, "pinned"), description="the load of a pinned version")
    for number in range(4):
        pooled.register(make(tmp_path, f"other{number}", 80), initial_workers=0)
        assert predict(pooled, f"other{number}")[0] == f"other{number}"
        assert is_loaded(pooled, "pinned")
    for name in ("pinned", *(f"other{number}" for number in range(4))):
        assert pooled.management.delete(f"/models/{name}").status_code == 200


def test_what_cannot_be_pooled_is_refused(pooled: Server, tmp_path: Path) -> None:
    for name, config, status, message in (
        ("sharded", {"tensor_parallel": 2}, 400, "shards are processes of their own"),
        ("stateful", {"sequenceBatching": True}, 400, "sequences keep state"),
        ("badname", {"torchrelay": {"pool": "a--b"}}, 400, "a pool's name"),
        ("wide", {"minWorkers": 2}, 400, "2 workers are hosts of the pool p, which has 1"),
    ):
        answer = pooled.register(make(tmp_path, name, **{"pool": "p", **config}))
        assert answer.status_code == status, answer.text
        assert message in answer.text
        assert pooled.management.get(f"/models/{name}").status_code == 404
    answer = pooled.register(make(tmp_path, "huge", POOL_MIB + 50))
    assert answer.status_code == 500
    assert pooled.management.get("/models/huge").status_code == 404
    assert pooled.register(make(tmp_path, "huge2", POOL_MIB + 50), initial_workers=0).status_code == 200
    refused = pooled.http.post("/predictions/huge2", content=b"x")
    assert refused.status_code >= 500
    pooled.wait(lambda: "in the pool p" in str(describe(pooled, "huge2")), description="the reason")


def test_a_pool_that_no_node_can_hold_is_refused(pooled: Server, tmp_path: Path) -> None:
    """The other pool of this test does not exist in the settings, so it has the defaults."""
    answer = pooled.register(make(tmp_path, "elsewhere", pool="unlisted"))
    assert answer.status_code == 200
    assert predict(pooled, "elsewhere")[0] == "elsewhere"
    assert pooled.management.delete("/models/elsewhere").status_code == 200


def test_a_version_that_crashes_its_host_gets_a_process_of_its_own(pooled: Server, tmp_path: Path) -> None:
    for name in ("neighbour", "guilty"):
        assert pooled.register(make(tmp_path, name)).status_code == 200
    before = predict(pooled, "neighbour")[2]
    with contextlib.suppress(httpx.HTTPError):
        assert pooled.http.post("/predictions/guilty", content=b"segv").status_code == 500
    pooled.wait(
        lambda: predict_or_none(pooled, "neighbour") not in (None, before), description="another host"
    )
    [isolated] = pooled.wait(lambda: find_isolated(pooled, "guilty"), description="its isolation")
    assert isolated["details"]["pool"] == "p"
    assert "native code crashed" in isolated["details"]["reason"]
    neighbours = (None, before, predict(pooled, "neighbour")[2])
    pooled.wait(lambda: predict_or_none(pooled, "guilty") not in neighbours, description="its own replica")
    assert not find_isolated(pooled, "neighbour")
    described = describe(pooled, "guilty")
    assert "native code crashed" in described["isolated"]
    assert "pool" not in described


def find_isolated(server: Server, name: str) -> list[dict[str, Any]]:
    events = server.management.get("/events", params={"model": name, "limit": 100}).json()["events"]
    return [event for event in events if event["stage"] == "isolated"]


def predict_or_none(server: Server, name: str) -> str | None:
    response = server.http.post(f"/predictions/{name}", content=b"x")
    return response.text.split()[2] if response.status_code == 200 else None


@pytest.mark.nightly
def test_a_busy_version_gets_a_second_host(pooled: Server, tmp_path: Path) -> None:
    handler = HANDLER.replace("    COUNT +=", "    import time; time.sleep(0.01)\n    COUNT +=")
    files = {"helper.py": "NAME = 'busy'\nMIB = 1\n", "name.txt": "busy"}
    archive = make_archive(tmp_path, "busy", handler, files=files, config={"pool": "two"})
    assert pooled.register(archive).status_code == 200
    with ThreadPoolExecutor(16) as threads:
        running = [True]

        def keep_busy(_: int) -> int:
            count = 0
            while running[0]:
                predict(pooled, "busy")
                count += 1
            return count

        loads = [threads.submit(keep_busy, number) for number in range(16)]
        try:
            pooled.wait(lambda: len(describe(pooled, "busy")["workers"]) == 2, description="a second host")
            pids = {predict(pooled, "busy")[2] for _ in range(50)}
        finally:
            running[0] = False
        assert sum(load.result() for load in loads) > 0
    assert len(pids) == 2


def test_versions_split_traffic_and_are_removed(pooled: Server, tmp_path: Path) -> None:
    for version in ("1.0", "2.0"):
        files = {"helper.py": f"NAME = {version!r}\nMIB = 1\n", "name.txt": version}
        archive = make_archive(tmp_path, "split", HANDLER, version=version, files=files, config={"pool": "p"})
        assert pooled.register(archive, initial_workers=0).status_code == 200
    policy = pooled.management.put("/models/split/traffic", json={"versions": {"1.0": 5000, "2.0": 5000}})
    assert policy.status_code == 200, policy.text
    assert {predict(pooled, "split")[0] for _ in range(60)} == {"1.0", "2.0"}
    assert predict(pooled, "split/2.0")[0] == "2.0"
    assert pooled.management.delete("/models/split/traffic").status_code == 200
    for version in ("2.0", "1.0"):
        assert pooled.management.delete(f"/models/split/{version}").status_code == 200
    assert pooled.http.post("/predictions/split", content=b"x").status_code == 404


def test_requests_go_on_while_versions_come_and_go(pooled: Server, tmp_path: Path) -> None:
    assert pooled.register(make(tmp_path, "steady")).status_code == 200
    with Trickle(f"{pooled.url}/predictions/steady", connections=2) as load:
        for number in range(5):
            archive = make(tmp_path, f"coming{number}", 60)
            assert pooled.register(archive).status_code == 200
            assert predict(pooled, f"coming{number}")[0] == f"coming{number}"
            assert pooled.management.delete(f"/models/coming{number}").status_code == 200
    assert not load.failed, load.failed
