"""Every way in which a worker dies: the response to its caller, what an operator finds, and that nobody else
notices.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from serve_app.deployments.ray_internals.haproxy import replica_died
from tests.support.archives import ECHO, make_archive
from tests.support.load import Load, Trickle
from tests.support.server import Server

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ENDS = """
import ctypes, logging, os, signal, sys, time
def crash_in_native_code():
    ctypes.string_at(0)
def handle(data, context):
    if data is None:
        return None
    order = bytes(data[0]["body"])
    if order == b"exit":
        os._exit(3)
    if order == b"kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if order == b"segv":
        os.write(2, b"a native library says\\n")
        crash_in_native_code()
    if order == b"hang":
        time.sleep(60)
    if order == b"memory":
        raise MemoryError("no room for the batch")
    return ["fine"]
"""


@pytest.fixture(scope="module")
def bystander(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    """Another model, which is served all the while."""
    assert server.register(make_archive(tmp_path_factory.mktemp("b"), "bystander", ECHO)).status_code == 200
    pids = server.pids("bystander")
    with Trickle(f"{server.url}/predictions/bystander", connections=2) as load:
        yield load
    assert set(load.answers) == {(200, "x")}
    assert server.pids("bystander") == pids
    server.management.delete("/models/bystander")


@pytest.fixture(scope="module")
def ends(server: Server, bystander: Load, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config = {"minWorkers": 1, "responseTimeout": 1}
    assert (
        server.register(make_archive(tmp_path_factory.mktemp("e"), "ends", ENDS, config=config)).status_code
        == 200
    )
    yield "ends"
    server.management.delete("/models/ends")


def order(server: Server, word: str) -> httpx.Response | None:
    """Send a word; return the answer, or None where HAProxy closed a kept connection without one."""
    try:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            return client.post("/predictions/ends", content=word.encode())
    except httpx.RemoteProtocolError:
        return None


@pytest.mark.parametrize(
    ("word", "reason", "reported"),
    [
        ("exit", "replica_died", ["it called os._exit(3) at", "in handle"]),
        ("kill", "replica_died", ["it ended without a report", "SIGKILL"]),
        (
            "segv",
            "replica_died",
            ["crashed: Segmentation fault", "in crash_in_native_code", "a native library says"],
        ),
        ("hang", "response_timeout", ["within response_timeout (1 s); it stood at", "time.sleep(60)"]),
    ],
)
def test_a_worker_that_dies_while_it_serves(
    server: Server, ends: str, word: str, reason: str, reported: list[str]
) -> None:
    server.wait(lambda: (order(server, "x") or httpx.Response(0)).text == "fine", description="a worker")
    [pid] = server.wait(lambda: server.pids(ends), description="its pid")
    answer = order(server, word)
    if answer is not None:
        assert (answer.status_code, answer.headers["x-torchrelay-reason"]) == (500, reason)
        assert answer.json() == {"code": 500, "type": "InternalServerException", "message": "Worker died."}
    elif word == "hang":
        pytest.fail("a handler that hangs is given up with an answer")

    def error() -> str:
        known = gone(pid)
        [result] = server.client.describe(ends)
        assert not [w for w in result["workers"] if w["pid"] == pid and w["status"] == "READY" and known]
        return result.get("lastError", "") if "while it served" in result.get("lastError", "") else ""

    result = server.wait(error, description="what ended it")
    assert all(words in result for words in reported), result
    server.wait(lambda: server.pids(ends) not in ([], [pid]), description="another worker")
    [healed] = server.client.describe(ends)
    assert healed["lastError"] == result, "it stays when all is well again"
    assert healed["lastErrorTime"].endswith("Z")
    scaled = server.management.put(f"/models/{ends}", params={"min_worker": 1, "synchronous": "true"})
    assert scaled.status_code == 200, scaled.text
    assert "lastError" not in server.client.describe(ends)[0], "who scales it has seen it"


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}/stat").exists()


def test_memory_that_runs_out_in_python_costs_the_batch_and_no_worker(server: Server, ends: str) -> None:
    server.wait(lambda: (order(server, "x") or httpx.Response(0)).text == "fine", description="a worker")
    pids = server.pids(ends)
    answer = order(server, "memory")
    assert answer is not None
    assert (answer.status_code, answer.headers["x-torchrelay-reason"]) == (507, "out_of_memory")
    assert server.pids(ends) == pids


LOADING = {
    "exits": ("import os\ndef load():\n    os._exit(5)\nload()\n", ["it called os._exit(5) at", "in load"]),
    "killed": ("import os\nos.kill(os.getpid(), 9)\n", ["it ended without a report", "SIGKILL"]),
    "crashes": (
        "import ctypes\ndef load():\n    ctypes.string_at(0)\nload()\n",
        ["its native code crashed: Segmentation fault", "in load"],
    ),
    "raises": (
        "class H:\n    def initialize(self, context):\n        1 / 0\n",
        ["ZeroDivisionError", "in initialize"],
    ),
    "slow": (
        "import time\ndef load():\n    time.sleep(60)\nload()\n" + ECHO,
        [
            "not ready within startup_timeout (1 s)",
            "startupTimeout in model-config.yaml. It stood at",
            "in load",
        ],
    ),
}


@pytest.mark.parametrize("how", LOADING)
def test_a_registration_reports_why_a_worker_did_not_start(
    server: Server, bystander: Load, tmp_path: Path, how: str
) -> None:
    code, reported = LOADING[how]
    if "handle" not in code:
        code += "    def handle(self, data, context):\n        return data\n" if "class" in code else ECHO
    config = {"minWorkers": 1, **({"startupTimeout": 1} if how == "slow" else {})}
    answer = server.register(make_archive(tmp_path, "stillborn", code, config=config))
    result = answer.json()
    assert (answer.status_code, result["message"]) == (
        500,
        "Failed to start workers for model stillborn version: 1.0",
    )
    assert all(words in result["detail"] for words in reported), result["detail"]


def test_scaling_reports_it_too_and_the_description_has_the_time(
    server: Server, bystander: Load, tmp_path: Path
) -> None:
    code = "import os\nos._exit(5)\n" + ECHO
    registered = server.register(make_archive(tmp_path, "later", code), initial_workers=0)
    assert registered.status_code == 200, registered.text
    answer = server.management.put("/models/later", params={"min_worker": 1, "synchronous": "true"})
    assert answer.status_code == 500
    assert "it called os._exit(5)" in answer.json()["detail"]
    [result] = server.client.describe("later")
    assert "it called os._exit(5)" in result["lastError"] and "lastErrorTime" in result
    assert server.management.get("/v1/models/later").json()["ready"] is False
    server.management.delete("/models/later")


def test_a_dead_worker_is_never_shown_as_ready(server: Server, bystander: Load, tmp_path: Path) -> None:
    assert server.register(make_archive(tmp_path, "victim", ECHO)).status_code == 200
    [process] = server.wait(
        lambda: server.actors("ServeReplica:victim"), description="the process of the replica"
    )
    pid = process.pid
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    [result] = server.client.describe("victim")
    assert not [
        worker for worker in result["workers"] if worker["pid"] == pid and worker["status"] == "READY"
    ]
    assert server.management.get("/v1/models/victim").json()["ready"] is bool(server.pids("victim"))
    server.wait(lambda: server.pids("victim") not in ([], [pid]), description="another worker")
    server.management.delete("/models/victim")


def test_haproxy_shows_our_page(server: Server, ends: str) -> None:
    """Should Ray Serve keep its error page elsewhere one day, clients would get its words again."""
    pages = set()
    for process in server.actors("haproxy"):
        with contextlib.suppress(psutil.NoSuchProcess):  # the HAProxy before a reload ends at any time
            line = process.cmdline()
            if "haproxy" in Path(line[0]).name and "-f" in line:
                config = Path(line[line.index("-f") + 1]).read_text()
                pages |= set(re.findall(r"errorfile 50\d (\S+)", config))
    [page] = pages
    assert Path(page).read_bytes() == replica_died()
