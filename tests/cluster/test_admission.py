"""Who is refused, why, and when it is worth to come again: on the fast path and through the gateway."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from serve_app.runtime.batching.request_queue import PRIORITY_AGING_S
from tests.support.archives import make_archive
from tests.support.server import Server

pytestmark = pytest.mark.cluster

# "word" takes a quarter of a second, "word /a/file" as long as the file is not there.
HELD = """
import os, time
def handle(data, context):
    if data is None:
        return None
    for row in data:
        word, _, until = row["body"].decode().partition(" ")
        with open(LOG, "a") as log:
            print(word, file=log)
        if not until:
            time.sleep(0.25)
        while until and not os.path.exists(until):
            time.sleep(0.005)
    return [bytes(row["body"]) for row in data]
"""
# HAProxy compares paths as they are written, so an escaped letter goes to the gateway.
WAYS = ["/predictions/", "/%70redictions/"]


class Held:
    """A model whose batches end when ``gate`` is opened; ``ran`` is what it was given, in order."""

    def __init__(self, server: Server, folder: Path, name: str, **config: object) -> None:
        self.server, self.name, self.log = server, name, folder / f"{name}.log"
        self.folder = folder
        self.log.touch()
        self.gates = 0
        handler = HELD.replace("LOG", repr(str(self.log)))
        answer = server.register(make_archive(folder, name, handler, config=config))
        assert answer.status_code == 200, answer.text
        routes = lambda: server.http.get("/-/routes").json()  # noqa: E731
        server.wait(
            lambda: routes().get(f"/predictions/{name}") == f"{name}--1.0", description="the fast path"
        )

    def post(self, way: str, word: str, **headers: str) -> httpx.Response:
        named = {f"x-request-{name}": value for name, value in headers.items()}
        return self.server.http.post(way + self.name, content=word.encode(), headers=named)

    def gate(self) -> Path:
        self.gates += 1
        return self.folder / f"{self.name}-{self.gates}.gate"

    @property
    def ran(self) -> list[str]:
        return self.log.read_text().split()

    def waiting(self, rows: int) -> None:
        depth = lambda: self.server.metric("torchrelay_queue_depth", model=self.name) == rows  # noqa: E731
        self.server.wait(depth, description=f"{rows} rows that wait")


Held.__test__ = False  # type: ignore[attr-defined]
Began = Callable[..., "Future[httpx.Response]"]


@pytest.fixture
def begin() -> Iterator[Began]:
    """Start a request in a thread of its own."""
    with ThreadPoolExecutor(16) as pool:
        yield pool.submit


@pytest.fixture(scope="module")
def held(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    made = Held(server, tmp_path_factory.mktemp("held"), "held", jobQueueSize=4)
    for _ in range(5):
        assert made.post(WAYS[0], "pace").status_code == 200
    yield made
    server.management.delete("/models/held")


def refused(answer: httpx.Response) -> tuple[int, str]:
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["code"] == answer.status_code
    return answer.status_code, answer.headers["x-torchrelay-reason"]


@pytest.mark.parametrize("way", WAYS)
def test_a_deadline_a_full_queue_and_who_goes_first(held: Held, begin: Began, way: str) -> None:
    gate, before = held.gate(), len(held.ran)
    answers = {"run": begin(held.post, way, f"run {gate}")}
    try:
        held.server.wait(lambda: held.ran[before:] == ["run"], description="the first row")

        def refused_at_once() -> bool:
            """Return whether the refusal came before the deadline; a slow machine may let it pass."""
            late = held.post(way, "late", **{"timeout-seconds": "0.2"})
            assert refused(late) == (504, "deadline")
            return "cannot answer within the deadline" in late.json()["message"]

        held.server.wait(refused_at_once, description="a refusal at once")
        # The first of them lies ready behind the running one, and is not overtaken any more.
        waiting = {"next": "low", "low": "low", "lost": "low", "normal": "normal"}
        sent = {}
        for rows, (word, priority) in enumerate(waiting.items(), 1):
            sent[word] = time.monotonic()
            answers[word] = begin(held.post, way, word, priority=priority)
            held.waiting(rows)
        full = held.post(way, "full", priority="low")
        assert refused(full) == (503, "queue_full")
        assert full.json()["type"] == "ServiceUnavailableException"
        answers["high"] = begin(held.post, way, "high", priority="high")
        assert refused(answers.pop("lost").result(60)) == (503, "queue_full")
        age = {word: time.monotonic() - began for word, began in sent.items()}
    finally:
        gate.touch()
    assert {word: answer.result(60).status_code for word, answer in answers.items()} == dict.fromkeys(
        answers, 200
    )
    ran = held.ran[before:]
    # On a slow machine a row may have aged before those of higher priority arrived.
    if age["low"] >= PRIORITY_AGING_S["low"] - PRIORITY_AGING_S["normal"]:
        ran.append(ran.pop(ran.index("low")))
    if age["normal"] >= PRIORITY_AGING_S["normal"]:
        ran.insert(2, ran.pop(ran.index("high")))
    assert ran == ["run", "next", "high", "normal", "low"]
    wrong = held.post(way, "x", priority="urgent")
    assert (wrong.status_code, wrong.headers["x-torchrelay-reason"]) == (400, "bad_request")


def leave(url: str, path: str, body: bytes, when: Callable[[], None]) -> None:
    """Ask, and close the connection.

    All of it in one packet: HAProxy 2.8 does not see who leaves while it waits for an answer, where the body
    came after the head.
    """
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as caller:
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        caller.sendall(head.encode() + body)
        when()


@pytest.mark.parametrize("way", WAYS)
def test_a_caller_that_leaves_frees_its_place(held: Held, begin: Began, way: str) -> None:
    gate, before = held.gate(), len(held.ran)
    running = begin(held.post, way, f"run {gate}")
    try:
        held.server.wait(lambda: held.ran[before:] == ["run"], description="the first row")
        leave(held.server.url, way + "held", b"left", lambda: held.waiting(1))
        held.waiting(0)
    finally:
        gate.touch()
    assert running.result(60).status_code == 200
    assert "left" not in held.ran


def test_no_more_calls_at_once_than_the_version_allows_on_both_ways_together(
    server: Server, tmp_path: Path, begin: Began
) -> None:
    limited = Held(server, tmp_path, "limited", maxConcurrentRequests=2)
    gate = limited.gate()
    allowed = [begin(limited.post, way, f"in {gate}") for way in WAYS]
    try:
        limited.waiting(1)
        for way in WAYS:
            answer = limited.post(way, "out")
            assert refused(answer) == (429, "quota_exceeded")
            assert answer.json()["type"] == "TooManyRequestsException"
    finally:
        gate.touch()
    assert [answer.result(60).status_code for answer in allowed] == [200, 200]
    assert [limited.post(way, "again").status_code for way in WAYS] == [200, 200]
    assert server.metric("torchrelay_requests_total", model="limited", status="quota_exceeded") == 2
    server.management.delete("/models/limited")


def test_without_a_replica_the_answer_says_so(server: Server, tmp_path: Path) -> None:
    archive = make_archive(tmp_path, "nobody", HELD.replace("LOG", repr(str(tmp_path / "log"))))
    assert server.register(archive, initial_workers=0).status_code == 200
    for way in WAYS:
        answer = server.http.post(f"{way}nobody", content=b"x")
        assert refused(answer) == (503, "no_replica")
        assert answer.headers["retry-after"] == "10"
    server.management.delete("/models/nobody")


def test_rays_batches_are_no_way_around(server: Server, tmp_path: Path, begin: Began) -> None:
    rays = Held(server, tmp_path, "rays", jobQueueSize=2, batcher="ray", maxBatchDelay=1)
    for _ in range(5):
        assert rays.post(WAYS[0], "pace").status_code == 200
    gate = rays.gate()
    running = begin(rays.post, WAYS[0], f"run {gate}")
    try:
        server.wait(lambda: rays.ran[-1] == "run", description="the first row")
        assert refused(rays.post(WAYS[1], "late", **{"timeout-seconds": "0.2"})) == (504, "deadline")
        waits = begin(rays.post, WAYS[1], "waits")
        rays.waiting(2)
        assert refused(rays.post(WAYS[0], "full")) == (503, "queue_full")
    finally:
        gate.touch()
    assert [answer.result(60).status_code for answer in (running, waits)] == [200, 200]
    assert rays.ran[5:] == ["run", "waits"]
    server.management.delete("/models/rays")
