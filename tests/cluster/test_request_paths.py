"""However a request comes in, the same answer goes out: directly, through the gateway, through Ray's own
proxy.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from pathlib import Path

import httpx
import pytest

from tests.support.archives import ECHO, make_archive
from tests.support.load import Load
from tests.support.server import Server, check_rows_outlive_their_replica

pytestmark = pytest.mark.cluster

# A body that begins with / is a path: each piece is followed by the next once "PATH.PIECE" exists.
STREAMS = """
import os, time
from ts.handler_utils.utils import send_intermediate_predict_response
def handle(data, context):
    if data is None:
        return None
    path = data[0]["body"].decode()
    for i in range(3):
        send_intermediate_predict_response([f"{i} "] * len(data), context.request_ids, "ok", 200, context)
        until = time.monotonic() + (60 if path[0] == "/" else 0.2)
        while not os.path.exists(f"{path}.{i}") and time.monotonic() < until:
            time.sleep(0.005)
    if path == "break":
        raise RuntimeError("in mid-stream")
    return ["end"] * len(data)
"""


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a server whose gateway reaches its replicas through Ray's handles, as between machines."""
    far = Server(
        tmp_path_factory.mktemp("far"),
        inference={"unix_sockets": False, "cors_allowed_origin": "*"},
        control={"traffic": {"ways": {"labels": {"first": "1.0"}}}},
    )
    make_archive(far.store, "ways", ECHO)
    try:
        far.start()
        folder = tmp_path_factory.mktemp("archives")
        assert far.register(make_archive(folder, "streams", STREAMS)).status_code == 200
        yield far
    finally:
        far.close()


@pytest.fixture(scope="module")
def models(server: Server, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("ways")
    assert server.register(make_archive(folder, "ways", ECHO)).status_code == 200
    assert server.register(make_archive(folder, "streams", STREAMS)).status_code == 200


@pytest.fixture
def ways(server: Server, models: None) -> dict[str, str]:
    fallback = server.ray_port("RAY_SERVE_FALLBACK_PROXY_HTTP_PORT")
    return {
        "fast path": f"{server.url}/predictions/",
        # HAProxy compares paths as they are written, so an escaped letter goes to the gateway.
        "gateway": f"{server.url}/%70redictions/",
        "Ray's proxy": f"http://127.0.0.1:{fallback}/predictions/",
    }


def test_one_answer_by_every_way(ways: dict[str, str]) -> None:
    seen = {}
    for way, url in ways.items():
        answer = httpx.post(url + "ways", content=b"same", timeout=30)
        assert (answer.status_code, answer.content) == (200, b"same"), way
        assert len(answer.headers.get_list("x-request-id")) == 1, way
        missing = httpx.post(url + "none", content=b"", timeout=30)
        assert (missing.status_code, missing.json()["type"]) == (404, "ModelNotFoundException"), way
        seen[way] = sorted(set(answer.headers) - {"date", "server", "connection"})
    assert len({tuple(headers) for headers in seen.values()}) == 1, seen


@pytest.mark.parametrize(
    "path",
    [
        "/predictions/ways/1.0",
        "/explanations/ways",
        "/v1/models/ways:predict",
        "/invocations?model_name=ways",
        "/models/ways/invoke",
        "/endpoints/ways/invocations",
        "/ways/predict",
        "/ways/1.0/predict?model=input",
    ],
)
def test_every_route_reaches_the_model(server: Server, models: None, path: str) -> None:
    answer = server.http.post(path, content=b"same")
    assert (answer.status_code, answer.content) == (200, b"same")
    described = server.http.options(path).json()
    assert described["info"]["title"] == "RESTful API for: ways"


@pytest.mark.parametrize("way", ["fast path", "gateway", "Ray's proxy"])
def test_each_piece_of_a_stream_leaves_as_it_comes(ways: dict[str, str], tmp_path: Path, way: str) -> None:
    for number in range(2):  # the gateway learns from the first reply that this handler streams
        path, received = f"{tmp_path}/{number}", b""
        with httpx.stream("POST", ways[way] + "streams", content=path, timeout=30) as answer:
            assert answer.headers["ts_stream_next"] == "true"
            for piece in answer.iter_raw():  # a piece that is held back would never have a successor
                assert len(piece.split()) == 1
                received += piece
                Path(f"{path}.{piece.decode().strip()}").touch()
        assert received == b"0 1 2 end"


@pytest.mark.parametrize("way", ["fast path", "gateway"])
def test_a_stream_that_breaks_has_no_end(ways: dict[str, str], way: str) -> None:
    with (
        pytest.raises(httpx.RemoteProtocolError),
        httpx.stream("POST", ways[way] + "streams", content=b"break", timeout=30) as answer,
    ):
        for _ in answer.iter_raw():
            pass


def test_a_replica_and_the_gateway_store_responses(server: Server, tmp_path: Path) -> None:
    handler = """
import time
def handle(data, context):
    return None if data is None else [str(time.perf_counter_ns()) for _ in data]
"""
    archive = make_archive(tmp_path, "stored", handler, config={"response_cache": {}})
    assert server.register(archive).status_code == 200
    for path in ("/predictions/stored", "/%70redictions/stored"):
        first, second = (server.http.post(path, content=path) for _ in range(2))
        assert first.text == second.text
        assert (first.headers["x-torchrelay-cache"], second.headers["x-torchrelay-cache"]) == ("miss", "hit")
        other = server.http.post(path, content=path, headers={"cache-control": "no-store"})
        assert other.text != first.text
    hits = {"model": "stored", "outcome": "hit"}
    server.wait(
        lambda: server.metric("torchrelay_cache_requests_total", **hits) == 2, description="both hits"
    )
    server.management.delete("/models/stored")


def test_a_body_over_the_limit_is_refused_by_every_way(ways: dict[str, str]) -> None:
    for way, url in ways.items():
        answer = httpx.post(url + "ways", content=b"x" * 6_553_501, timeout=30)
        assert (answer.status_code, answer.content) == (413, b""), way
        fits = httpx.post(url + "ways", content=b"x" * 6_553_500, timeout=30)
        assert fits.status_code == 200, way


@pytest.mark.slow
def test_through_handles_too(far: Server, tmp_path: Path) -> None:
    url = f"{far.url}/%70redictions/"
    assert httpx.post(url + "ways", content=b"same", timeout=30).content == b"same"
    assert httpx.post(url + "ways", content=b"x" * 6_553_500, timeout=30).status_code == 200
    for _ in range(2):
        with httpx.stream("POST", url + "streams", content=b"x", timeout=30) as answer:
            assert answer.read() == b"0 1 2 end"
    with Load(url + "ways", connections=32) as load:
        far.wait(lambda: load.answers[200, "x"] > 500, description="many rows that travel together")
    assert not load.failed, load.failed


@pytest.mark.slow
def test_headers_of_cors_are_on_the_inference_port_alone(far: Server) -> None:
    metrics = httpx.get(far.process.metrics, timeout=30)
    for answer, allowed in (
        (far.http.post("/predictions/ways", content=b"x"), ["*"]),
        (far.http.post("/invocations", content=b"x"), ["*"]),
        (far.management.get("/models"), []),
        (metrics, []),
    ):
        assert answer.headers.get_list("access-control-allow-origin") == allowed, answer.url


@pytest.mark.slow
def test_rows_of_a_dead_replica_go_to_another_through_handles_too(far: Server, tmp_path: Path) -> None:
    check_rows_outlive_their_replica(far, tmp_path)


GATED = """
import os, time
def handle(data, context):
    if data is None:
        return None
    word, _, gate = data[0]["body"].decode().partition(" ")
    with open(LOG, "a") as log:
        print(word, file=log)
    while gate and not os.path.exists(gate):
        time.sleep(0.005)
    return [word]
"""


class Caller:
    """Has asked, and may leave.

    All in one packet: HAProxy 2.8 does not see who leaves where the body came after the head.
    """

    def __init__(self, url: str, word: str) -> None:
        self.word = word
        where, size = httpx.URL(url), len(word)
        self._line = socket.create_connection(("127.0.0.1", where.port), timeout=30)
        path = where.raw_path.decode()
        self._line.sendall(
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n{word}".encode()
        )

    def fileno(self) -> int:
        return self._line.fileno()

    def leave(self) -> None:
        self._line.close()

    def hears(self) -> str:
        """Return the reason of the refusal, or the answer."""
        with self._line, HTTPResponse(self._line) as answer:  # its body may come after its head
            answer.begin()
            if answer.status == 200:
                return answer.read().decode()
            assert answer.getheader("retry-after")
            return answer.getheader("x-torchrelay-reason", "")


@pytest.mark.slow
def test_who_leaves_frees_its_place_on_the_way_to_another_machine(far: Server, tmp_path: Path) -> None:
    log, gate = tmp_path / "log", tmp_path / "gate"
    archive = make_archive(
        tmp_path, "gated", GATED.replace("LOG", repr(str(log))), config={"jobQueueSize": 1}
    )
    assert far.register(archive).status_code == 200
    url = f"{far.url}/%70redictions/gated"
    assert (
        httpx.post(url, content=b"first", timeout=30).text == "first"
    )  # it does not stream: rows travel together

    def depth() -> float:
        return far.metric("torchrelay_queue_depth", model="gated")

    def one_of_two(*words: str) -> Caller | None:
        """Who waits where there is room for one of them; None where there was no room."""
        both = [Caller(url, word) for word in words]
        refused = select.select(both, [], [], 30)[0][0]
        assert refused.hears() == "queue_full"
        [other] = set(both) - {refused}
        if select.select([other], [], [], 1.0)[0]:
            assert other.hears() == "queue_full"
            return None
        return other

    def late() -> bool:
        answer = httpx.post(url, content=b"late", headers={"x-request-timeout-seconds": "0.3"}, timeout=30)
        return (answer.status_code, answer.headers["x-torchrelay-reason"]) == (504, "deadline")

    with ThreadPoolExecutor() as pool:
        try:
            runs = pool.submit(httpx.post, url, content=f"runs {gate}".encode(), timeout=30)
            far.wait(lambda: log.read_text().split()[-1] == "runs", description="the first row")
            queued = Caller(url, "queued")
            far.wait(lambda: depth() == 1, description="a row in the replica's queue")
            queued.leave()
            far.wait(
                lambda: depth() == 0, description="the replica to hear that a hop is not wanted any more"
            )
            waits = pool.submit(httpx.post, url, content=b"waits", timeout=30)
            far.wait(lambda: depth() == 1, description="another row in the replica's queue")
            # Both hops are under way; one row may wait for them, in the gateway.
            left = one_of_two("a", "b")
            assert left is not None
            left.leave()
            far.wait(late, description="a free place, and its loss at the deadline")
            stays = far.wait(lambda: one_of_two("c", "d"), description="its place to be free again")
        finally:
            gate.touch()
        assert [answer.result(30).text for answer in (runs, waits)] == ["runs", "waits"]
    assert stays.hears() == stays.word
    assert log.read_text().split() == ["first", "runs", "waits", stays.word]
    far.management.delete("/models/gated")


@pytest.mark.slow
def test_what_app_yaml_says_of_traffic_holds_once_the_server_is_ready(far: Server) -> None:
    answer = far.http.post("/predictions/ways/first", content=b"x")
    assert (answer.text, answer.headers["x-model-version"]) == ("x", "1.0")
    assert far.management.get("/models/ways/traffic").json()["labels"] == {"first": "1.0"}
