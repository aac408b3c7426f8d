"""What a person does at three in the morning: processes are killed, and the server goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.archives import ECHO, make_archive, says
from tests.support.load import Load, Pulse
from tests.support.server import Server, check_rows_outlive_their_replica

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(scope="module")
def stays(server: Server, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Register a model that must be served before and after every failure."""
    answer = server.register(make_archive(tmp_path_factory.mktemp("a"), "stays", ECHO), initial_workers=2)
    assert answer.status_code == 200, answer.text
    return "stays"


def answers(server: Server, model: str) -> bool:
    return server.http.post(f"/predictions/{model}", content=b"x").content == b"x"


def test_kill_a_replica(server: Server, stays: str) -> None:
    killed = server.pids(stays)[0]
    with Load(f"{server.url}/predictions/{stays}", connections=8) as load:
        os.kill(killed, signal.SIGKILL)
        server.wait(
            lambda: len(server.pids(stays)) == 2 and killed not in server.pids(stays),
            description="a replacement",
        )
        server.wait(lambda: sum(load.answers.values()) > 100, description="answers of both replicas")
    lost = sum(load.failed.values())
    # Only what the dead process was answering at that moment may be lost: at most one a connection.
    assert lost <= 8, load.failed


def test_the_gateway_sends_rows_of_a_dead_replica_to_another(server: Server, tmp_path: Path) -> None:
    check_rows_outlive_their_replica(server, tmp_path)


def haproxy(server: Server) -> psutil.Process | None:
    """Return the HAProxy that serves, where one does; older ones finish their requests."""
    return max(server.actors("haproxy.cfg"), key=lambda process: process.create_time(), default=None)


def _kill_haproxy(server: Server) -> psutil.Process | None:
    """Kill HAProxy and return its process; None where it has just been replaced."""
    process = haproxy(server)
    try:
        assert process is not None
        process.kill()
    except psutil.NoSuchProcess:
        return None
    return process


def test_kill_haproxy(server: Server, stays: str) -> None:
    with Load(f"{server.url}/predictions/{stays}", connections=8) as load:
        server.wait(lambda: load.answers, description="a response")
        killed = server.wait(lambda: _kill_haproxy(server), description="an HAProxy that no reload replaces")
        server.wait(
            lambda: haproxy(server) not in (None, killed) and answers(server, stays),
            description="another HAProxy",
        )
    # The port was closed for a moment, and never open without its routes.
    assert not [answer for answer in load.failed if isinstance(answer[0], int)], load.failed


def test_kill_the_manager_of_haproxy(server: Server, stays: str, tmp_path: Path) -> None:
    [killed] = server.actors("HAProxyManager")
    serving = haproxy(server)
    assert serving is not None
    with Load(f"{server.url}/predictions/{stays}", connections=8) as load:
        killed.kill()
        server.wait(lambda: set(server.actors("HAProxyManager")) - {killed}, description="another manager")
        assert server.register(make_archive(tmp_path, "later", ECHO)).status_code == 200
        server.wait(
            lambda: "/predictions/later" in server.http.get("/-/routes").json(), description="its route"
        )
        server.wait(lambda: not serving.is_running(), description="the end of the former HAProxy")
    assert not load.failed, load.failed
    server.management.delete("/models/later")


def test_kill_the_controller(server: Server, stays: str) -> None:
    [controller] = server.actors("ServeController")
    pids = sorted(server.pids(stays))
    with Load(f"{server.url}/predictions/{stays}", connections=8) as load:
        controller.kill()
        server.wait(
            lambda: {p.pid for p in server.actors("ServeController")} - {controller.pid},
            description="a controller",
        )
        server.wait(lambda: sorted(server.pids(stays)) == pids, description="the same replicas")
    assert not load.failed, load.failed


def test_kill_the_gateway(server: Server, stays: str) -> None:
    [gateway] = server.actors("Gateway")
    with Load(f"{server.url}/predictions/{stays}", connections=4) as load:
        gateway.kill()
        server.wait(
            lambda: [p for p in server.actors("Gateway") if p.pid != gateway.pid], description="a gateway"
        )
        server.wait(lambda: server.http.get("/ping").status_code == 200, description="a ping")
    assert not load.failed, "the fast path does not need the gateway"


def test_kill_management(server: Server, stays: str, tmp_path: Path) -> None:
    [management] = server.actors("Management")
    pids = sorted(server.pids(stays))
    with Load(f"{server.url}/predictions/{stays}", connections=4) as load:
        management.kill()
        server.wait(
            lambda: server.management.get("/models/stays").status_code == 200, description="management"
        )
    assert not load.failed, load.failed
    assert sorted(server.pids(stays)) == pids, (
        "what a new one deploys again is what runs: nobody is restarted"
    )
    assert server.register(make_archive(tmp_path, "after", ECHO)).status_code == 200
    assert answers(server, "after")
    server.management.delete("/models/after")


def test_a_handler_that_hangs_is_killed_and_replaced(server: Server, tmp_path: Path) -> None:
    handler = """
import threading
def handle(data, context):
    if data is None:
        return None
    if b"hang" in [row["body"] for row in data]:
        threading.Event().wait()
    return ["fine"] * len(data)
"""
    archive = make_archive(tmp_path, "hangs", handler, config={"minWorkers": 1, "responseTimeout": 1})
    assert server.register(archive).status_code == 200
    [first] = server.pids("hangs")
    answer = server.http.post("/predictions/hangs", content=b"hang")
    assert (answer.status_code, answer.json()["message"]) == (500, "Worker died.")
    server.wait(lambda: server.pids("hangs") not in ([], [first]), description="a replacement")
    assert server.http.post("/predictions/hangs", content=b"ok").text == "fine"
    server.management.delete("/models/hangs")


def test_what_a_handler_says_and_raises_is_in_the_log_at_once(server: Server, tmp_path: Path) -> None:
    handler = """
def handle(data, context):
    if data is None:
        return None
    raise KeyError("the handler's own words")
"""
    assert server.register(make_archive(tmp_path, "raises", handler)).status_code == 200
    answer = server.http.post("/predictions/raises", content=b"x")
    assert (answer.status_code, answer.json()["message"]) == (503, "Prediction failed")
    assert "own words" not in answer.text, "a caller is not told the inside of a handler"
    server.wait(
        lambda: 'KeyError: "the handler\'s own words"' in server.log(),
        timeout=60,
        description="the traceback",
    )
    server.management.delete("/models/raises")


@pytest.mark.nightly
def test_a_crash_loop_slows_nobody_else(server: Server, stays: str, tmp_path: Path) -> None:
    handler = """
import os
def handle(data, context):
    if data is None:
        return None
    os._exit(1)
"""
    assert server.register(make_archive(tmp_path, "crashes", handler)).status_code == 200

    def slowest(seconds: float) -> float:
        worst, until = 0.0, time.monotonic() + seconds
        with httpx.Client(base_url=server.url, timeout=60) as client, Pulse() as pulse:
            while time.monotonic() < until:
                began = time.monotonic()
                assert client.post(f"/predictions/{stays}", content=b"x").content == b"x"
                took = time.monotonic() - began
                worst = max(worst, took - (pulse.stalled_seconds(began) if took > 1.0 else 0.0))
        return worst

    with Load(f"{server.url}/predictions/crashes", connections=2) as load:
        assert slowest(8.0) < 2.0
    assert load.failed and not any(code == 200 for code, _ in load.answers)
    server.management.delete("/models/crashes")
    server.wait(lambda: server.management.get("/models/crashes").status_code == 404)


LATER = """
import os
import time


def handle(data, context):
    if data is None:
        return None
    words = data[0]["body"].decode()
    while not os.path.exists(words.split()[1]):
        time.sleep(0.02)
    return ["about " + words.split()[0]]
"""


@pytest.fixture(scope="module")
def later(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Register a model whose predictions wait for a file, one at a time."""
    answer = server.register(make_archive(tmp_path_factory.mktemp("a"), "later", LATER))
    assert answer.status_code == 200, answer.text
    yield "later"
    server.management.delete("/models/later")


def put_aside(server: Server, model: str, gate: Path) -> dict[str, str]:
    """Two predictions for later, of which the first has begun; what each is about, and where its answer
    will be.
    """
    where = {}
    for word in ("one", "two"):
        accepted = server.http.post(
            f"/predictions/{model}", content=f"{word} {gate}", headers={"Prefer": "respond-async"}
        )
        assert accepted.status_code == 202, accepted.text
        where[f"about {word}"] = accepted.headers["location"]
    server.wait(
        lambda: server.http.get(where["about one"]).json()["state"] == "running",
        description="the first to run",
    )
    return where


def answered(server: Server, where: dict[str, str]) -> bool:
    answers = {result: server.http.get(f"{address}/result") for result, address in where.items()}
    assert all(answer.text == result for result, answer in answers.items() if answer.status_code != 202), (
        answers
    )
    return all(answer.status_code == 200 for answer in answers.values())


@pytest.mark.slow
def test_everything_comes_back_after_a_full_restart(
    server: Server, stays: str, later: str, tmp_path: Path
) -> None:
    aside = put_aside(server, later, tmp_path / "gate")
    for version in ("1.0", "2.0"):
        assert server.register(make_archive(tmp_path, "kept", says(version), version)).status_code == 200
    server.management.put("/models/kept/2.0/set-default")
    server.management.put("/models/kept/1.0", params={"min_worker": 0, "synchronous": "true"})
    policy = {"policy": "weighted", "versions": {"2.0": 10_000}, "labels": {"other": "1.0"}}
    assert server.management.put("/models/kept/traffic", json=policy).status_code == 200
    server.register(make_archive(tmp_path, "removed", ECHO), initial_workers=0)
    server.management.delete("/models/removed")
    for process in server.process.processes():  # all at once: Ray, HAProxy, the replicas, Management
        with contextlib.suppress(psutil.NoSuchProcess):  # it went with one that was killed before it
            process.kill()
    server.process.stop()
    server.start()
    (tmp_path / "gate").touch()
    assert server.http.post("/predictions/kept").text == "2.0"
    assert server.http.post("/predictions/kept/1.0").status_code == 503
    assert server.http.post("/predictions/kept/other").headers["x-model-version"] == "1.0"
    assert policy.items() <= server.management.get("/models/kept/traffic").json().items()
    server.management.delete("/models/kept/traffic")
    assert len(server.pids(stays)) == 2
    assert answers(server, stays)
    assert server.management.get("/models/removed").status_code == 404
    server.wait(lambda: answered(server, aside), description="what was put aside before")
    server.management.delete("/models/kept/1.0")
    server.management.delete("/models/kept")


def _runs(process: psutil.Process) -> bool:
    """Return whether a process runs; one that has ended may wait for its parent, which is not the server."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@pytest.mark.slow
def test_a_clean_stop_leaves_no_process(server: Server, later: str, tmp_path: Path) -> None:
    aside = put_aside(server, later, tmp_path / "gate")
    started = server.process.processes()
    with Pulse() as pulse:
        began = time.monotonic()
        server.stop()
        took = time.monotonic() - began - pulse.stalled_seconds(began)
    remaining = [process for process in started if _runs(process)]
    server.start()  # also for the tests that follow
    assert took < 10.0  # in which `docker stop` expects the end
    assert remaining == []
    (tmp_path / "gate").touch()
    server.wait(lambda: answered(server, aside), description="what was put aside before")
