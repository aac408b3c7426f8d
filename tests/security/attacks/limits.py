"""Attacks with numbers, names and documents that are larger than a server can hold."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil

from serve_app.proto import management_pb2, management_pb2_grpc
from tests.security.attack import Outcome, Target, attack
from tests.support.archives import ECHO, make_archive

MIB = 1 << 20
HOSTILE = [
    ("minWorkers", 10**6),
    ("maxWorkers", 10**6),
    ("batchSize", 2**63),
    ("jobQueueSize", 10**12),
    ("maxBatchDelay", float("inf")),
    ("responseTimeout", 10**15),
    ("startupTimeout", float("nan")),
    ("clientTimeoutInMills", 10**15),
    ("maxNumSequence", 10**12),
    ("parallelLevel", 10**9),
    ("tensor_parallel", 10**9),
    ("num_cpus", 1e308),
    ("num_gpus", 1e308),
    ("threads", 10**9),
    ("max_ongoing_requests", 10**12),
    ("maxConcurrentRequests", 10**12),
    ("autoscaling", {"target_ongoing_requests": 1e308}),
    ("micro_batching", {"parallelism": {"inference": 10**9}}),
]


def register(target: Target, archive: Path, **parameters: Any) -> httpx.Response:
    params = {"url": archive.name, "initial_workers": 0, **parameters}
    return target.manage("POST", "/models", params=params)


def make(target: Target, name: str, config: dict[str, Any] | None = None, **files: Any) -> Path:
    return make_archive(target.home / "model_store", name, ECHO, config=config, **files)


def controller_memory(target: Target) -> int:
    """Return the resident bytes of Ray Serve's controller."""
    total = 0
    for process in target.processes():
        try:
            if "ServeController" in " ".join(process.cmdline()):
                total += process.memory_info().rss
        except psutil.Error:
            continue
    return total


@attack(
    "limits",
    "an archive with minWorkers: 1000000",
    before="accepted; 2,000: ServeController 177 → 1,103 MB in 40 s",
)
def million_workers(target: Target) -> Outcome:
    before = controller_memory(target)
    response = register(target, make(target, "million", {"minWorkers": 10**6}), synchronous="false")
    time.sleep(10)
    grown = controller_memory(target) - before
    kept = target.manage("GET", "/models/million").status_code
    return Outcome(
        f"{response.status_code}; ServeController + {grown // MIB} MB",
        response.status_code == 400 and kept == 404 and grown < 50 * MIB,
    )


@attack(
    "limits",
    "1,000 permitted workers, more than the machine holds",
    before="all requested; ServeController + 926 MB for 2,000",
)
def more_than_fit(target: Target) -> Outcome:
    before = controller_memory(target)
    config = {"minWorkers": 1000, "num_cpus": 1}
    response = register(target, make(target, "unplaced", config), synchronous="false")
    try:
        time.sleep(15)
        grown = controller_memory(target) - before
        other = register(target, make(target, "beside"), initial_workers=1, synchronous="true")
        workers = len(target.manage("GET", "/models/unplaced").json()[0]["workers"])
    finally:
        for name in ("unplaced", "beside"):
            target.manage("DELETE", f"/models/{name}")
    return Outcome(
        f"{response.status_code}; {workers} requested; ServeController + {grown // MIB} MB; another model "
        f"starts: {other.status_code}",
        workers < 100 and grown < 50 * MIB and other.status_code == 200,
    )


@attack("limits", "18 other numbers in archives", before="all accepted")
def hostile_numbers(target: Target) -> Outcome:
    statuses = []
    for index, (key, value) in enumerate(HOSTILE):
        statuses.append(register(target, make(target, f"number{index}", {key: value})).status_code)
    alive = target.infer().status_code
    refused = statuses.count(400)
    return Outcome(f"{refused} of {len(HOSTILE)} refused; others: {alive}", refused == len(HOSTILE))


@attack("limits", "numbers in requests (HTTP and gRPC)", before="min_worker 2147483647 accepted")
def numbers_in_requests(target: Target) -> Outcome:
    archive = make(target, "requested")
    outcomes = []
    for key in ("batch_size", "initial_workers", "max_batch_delay", "response_timeout"):
        for value in ("2147483647", "9" * 30, "9" * 5000):
            outcomes.append(register(target, archive, **{key: value}).status_code == 400)
    for value in ("2147483647", "9" * 5000, "-1"):
        response = target.manage("PUT", "/models/echo", params={"min_worker": value})
        outcomes.append(response.status_code == 400)
    rollout = {"to": "1.0", "bake_s": 1e300}
    outcomes.append(target.manage("POST", "/models/echo/rollout", json=rollout).status_code == 400)
    with grpc.insecure_channel(target.management_grpc) as channel:
        stub = management_pb2_grpc.ManagementAPIsServiceStub(channel)
        metadata = list(target.headers("ops").items())
        for request, call in (
            (
                management_pb2.RegisterModelRequest(url=archive.name, initial_workers=2**31 - 1),
                stub.RegisterModel,
            ),
            (management_pb2.ScaleWorkerRequest(model_name="echo", min_worker=2**31 - 1), stub.ScaleWorker),
        ):
            try:
                call(request, metadata=metadata, timeout=30)
                outcomes.append(False)
            except grpc.RpcError as error:
                outcomes.append(error.code() is grpc.StatusCode.INVALID_ARGUMENT)
    return Outcome(f"{outcomes.count(True)} of {len(outcomes)} refused", all(outcomes))


@attack(
    "limits", "YAML bombs of 470 bytes and 1 MB as a workflow", before="6.5 s and 132 s of the event loop"
)
def yaml_bombs(target: Target) -> Outcome:
    merges = "a0: &a0 {k: 1}\n" + "".join(
        f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 8)
    )
    took = []
    for text in (merges, "a: 1" + ":1" * 500_000, "a: " + "[" * 500_000, "- 1\n" * 250_000):
        started = time.monotonic()
        headers = {**target.headers("ops"), "content-type": "application/yaml"}
        response = httpx.post(f"{target.management}/workflows", content=text, headers=headers, timeout=60)
        took.append(time.monotonic() - started if response.status_code == 400 else 60.0)
    return Outcome(f"400 after at most {max(took):.1f} s", max(took) < 15)


@attack("limits", "an archive of 1,500 directory levels", before="accepted; each round and start failed")
def deep_archive(target: Target) -> Outcome:
    deep = make(target, "deep", files={"/".join(["d"] * 1500) + "/file": b"x"})
    response = register(target, deep)
    deep.unlink()
    following = register(target, make(target, "afterwards"))
    target.manage("DELETE", "/models/afterwards")
    return Outcome(
        f"{response.status_code}; the next registration: {following.status_code}",
        response.status_code == 400 and following.status_code == 200 and "Recursion" not in target.log(),
    )


@attack("limits", "model a--b version c beside model a version b--c", before="the second one: 400")
def names_of_applications(target: Target) -> Outcome:
    pairs = [("a--b", "c"), ("a", "b--c")]
    store = target.home / "model_store"
    registered, answered = [], []
    try:
        for name, version in pairs:
            archive = make_archive(store, name, ECHO.replace("row.get", f"{name!r} or row.get"), version)
            registered.append(register(target, archive, initial_workers=1, synchronous="true").status_code)
        for name, version in pairs:
            url = f"{target.inference}/predictions/{name}/{version}"
            answered.append(httpx.post(url, headers=target.headers(), content=b"x", timeout=30).text)
    finally:
        for name, version in pairs:
            target.manage("DELETE", f"/models/{name}/{version}")
    return Outcome(
        f"{registered}, answers {answered}", registered == [200, 200] and answered == ["a--b", "a"]
    )


@attack("limits", "22 replicas on two cores", before="20 fit, with a claim of 0.1 CPU each")
def replicas_on_two_cores(target: Target) -> Outcome:
    archive = make(target, "many", {"minWorkers": 22})
    response = register(target, archive, synchronous="false")
    ready = 0
    before = target.memory()
    deadline = time.monotonic() + 100
    try:
        while ready < 22 and time.monotonic() < deadline:
            time.sleep(2)
            workers = target.manage("GET", "/models/many").json()[0]["workers"]
            ready = sum(worker["status"] == "READY" for worker in workers)
        grown = (target.memory() - before) // max(ready, 1)
    finally:
        target.manage("DELETE", "/models/many")
    return Outcome(f"{response.status_code}; {ready} ready, {grown // MIB} MB each", ready == 22)
