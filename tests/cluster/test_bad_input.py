"""What is wrong is refused in words that name it and its cure, and nothing that is served hears of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests.support.archives import ECHO, make_archive, says
from tests.support.load import Load, Trickle
from tests.support.server import Server

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

BROKEN_SAMPLE = """
def handle(data, context):
    return None if data is None else [row["body"]["number"] + 1 for row in data]
"""


@pytest.fixture(scope="module")
def served(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    """Register a model that is served throughout."""
    assert server.register(make_archive(tmp_path_factory.mktemp("served"), "served", ECHO)).status_code == 200
    with Trickle(f"{server.url}/predictions/served", connections=2) as load:
        yield load
    server.management.delete("/models/served")


@pytest.fixture(autouse=True)
def nothing_served_is_disturbed(server: Server, served: Load) -> Iterator[None]:
    pids = server.pids("served")
    yield
    before = sum(served.answers.values())
    server.wait(
        lambda: sum(served.answers.values()) > before + 2, description="answers of the model that is served"
    )
    assert set(served.answers) == {(200, "x")}
    assert server.pids("served") == pids


def refusal(answer: httpx.Response) -> tuple[int, str, str]:
    output = answer.json()
    assert output["code"] == answer.status_code
    return answer.status_code, output["type"], output["message"]


def models(server: Server) -> set[str]:
    return {model["modelName"] for model in server.client.models()}


def test_an_archive_that_is_wrong(server: Server, tmp_path: Path) -> None:
    """The unit tests of archives, addresses and names have every other reason for a refusal."""
    archive = make_archive(tmp_path, "wrong", "def handle(data, context)\n    pass\n")
    before = models(server)
    status, named, message = refusal(server.register(archive))
    assert (status, named) == (400, "InvalidModelException"), message
    assert message.startswith("wrong-1.0.mar") and "line 1" in message
    assert models(server) == before


@pytest.mark.parametrize("path", ["/predictions/served", "/%70redictions/served"])
def test_a_message_that_is_too_large(server: Server, path: str) -> None:
    """At the replica, and through the gateway, whose HTTP servers Ray Serve starts with a limit of their
    own.
    """
    address = server.url.replace("http", "ws", 1) + path
    with (
        connect(address, compression=None, open_timeout=60) as line,
        pytest.raises(ConnectionClosed) as closed,
    ):
        line.send(b"x" * (17 << 20))
        line.recv(60)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1009
    assert "max_request_size (6553500 bytes)" in closed.value.rcvd.reason


NO_WORKER = (
    " has no worker to serve inference request. Please use scale workers API to add workers. If this is a"
    " sequence inference, please check if it is closed, or expired; or exceeds maxSequenceJobQueueSize"
)


def test_a_model_without_workers(server: Server, tmp_path: Path) -> None:
    registered = server.register(make_archive(tmp_path, "idle", ECHO), initial_workers=0)
    assert (
        registered.json()["status"] == 'Model "idle" Version: 1.0 registered with 0 initial workers. '
        "Use scale workers API to add workers for the model."
    )
    for path, named in (
        ("/predictions/idle", '"idle"'),
        ("/predictions/idle/1.0", '"idle" Version 1.0"'),
        ("/explanations/idle", '"idle"'),
        ("/v1/models/idle:predict", '"idle"'),
        ("/invocations?model_name=idle", '"idle"'),
    ):
        answer = server.http.post(path, content=b"x")
        assert refusal(answer) == (503, "ServiceUnavailableException", f"Model {named}{NO_WORKER}")
        assert answer.headers["x-torchrelay-reason"] == "no_replica"
    described = server.management.get("/models/idle", params={"customized": "true"})
    assert refusal(described) == (
        503,
        "ServiceUnavailableException",
        'Model "idle" has no worker to serve describe request. Please use scale workers API to add workers.',
    )
    assert server.management.get("/v1/models/idle").json() == {"name": "idle", "ready": False}
    assert server.management.delete("/models/idle").json() == {"status": 'Model "idle" unregistered'}


# Handlers that do not start

FAILING: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "an import": ("import no_such_package\n" + ECHO, {}, 500, "No module named 'no_such_package'"),
    "at import": (
        "raise RuntimeError('while it is imported')\n",
        {},
        500,
        "RuntimeError: while it is imported",
    ),
    "in initialize": (
        (
            "class Handler:\n"
            "    def initialize(self, context):\n"
            "        open(context.system_properties['model_dir'] + '/labels.txt')\n"
            "    def handle(self, data, context):\n"
            "        return data\n"
        ),
        {},
        500,
        "in initialize",
    ),
    "at the sample": (
        BROKEN_SAMPLE,
        {"files": {"bad.json": '{"number": "one"}'}, "config": {"samples": ["bad.json"], "minWorkers": 1}},
        500,
        "sample bad.json: Prediction failed",
    ),
    "out of memory": ("raise MemoryError('no room')\n", {}, 507, "MemoryError: no room"),
    "slow": (
        "import time\ntime.sleep(60)\n" + ECHO,
        {"config": {"startupTimeout": 1, "minWorkers": 1}},
        500,
        "not ready within startup_timeout (1 s); raise it at the registration",
    ),
    "it ends its process": (
        "import os\nos._exit(1)\n",
        {},
        500,
        "The replica's process ended while it loaded the model: it called os._exit(1) at",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", FAILING)
def test_a_handler_that_does_not_start(server: Server, tmp_path: Path, what: str) -> None:
    handler, more, status, says_ = FAILING[what]
    answer = server.register(make_archive(tmp_path, "fails", handler, **more))
    assert refusal(answer) == (
        status,
        "InternalServerException",
        "Failed to start workers for model fails version: 1.0",
    )
    detail = answer.json()["detail"]
    assert says_ in detail
    assert "\x1b" not in detail
    assert "fails" not in models(server)
    assert server.http.post("/predictions/fails").status_code == 404
    # At once, and with the file mended: no 409, and no word of the failure before.
    mended = server.register(make_archive(tmp_path, "fails", says("mended")))
    assert mended.status_code == 200, mended.text
    assert server.http.post("/predictions/fails").text == "mended"
    server.management.delete("/models/fails")


def test_the_same_archive_again_is_a_new_attempt(server: Server, tmp_path: Path) -> None:
    """What kept it from starting may have lain outside of it."""
    flag = tmp_path / "flag"
    archive = make_archive(tmp_path, "fickle", f"open({str(flag)!r})\n" + ECHO)
    answer = server.register(archive)
    assert answer.status_code == 500
    assert f"FileNotFoundError: [Errno 2] No such file or directory: '{flag}'" in answer.json()["detail"]
    again = server.register(archive)
    assert again.status_code == 500, again.text
    assert "FileNotFoundError" in again.json()["detail"]
    flag.touch()
    assert server.register(archive).status_code == 200
    assert server.http.post("/predictions/fickle", content=b"x").content == b"x"
    server.management.delete("/models/fickle")


def test_scaling_a_version_that_failed_tries_again(server: Server, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    ends = f"import os\nif not os.path.exists({str(flag)!r}):\n    os._exit(1)\n"
    assert (
        server.register(make_archive(tmp_path, "again", ends + ECHO), synchronous="false").status_code == 202
    )
    scale = {"min_worker": 1, "synchronous": "true"}
    server.wait(lambda: server.client.describe("again")[0]["lastError"], description="the failure")
    flag.touch()
    scaled = server.management.put("/models/again", params=scale)
    assert (scaled.status_code, scaled.json()) == (200, {"status": "Workers scaled to 1 for model: again"})
    assert server.http.post("/predictions/again", content=b"x").content == b"x"
    assert "lastError" not in server.client.describe("again")[0]
    server.management.delete("/models/again")


def test_a_name_that_was_removed_can_be_taken_at_once(server: Server, tmp_path: Path) -> None:
    for word in ("first", "second"):
        assert server.register(make_archive(tmp_path, "taken", says(word))).status_code == 200
        assert server.http.post("/predictions/taken").text == word, "never the one that was removed"
        assert server.management.delete("/models/taken").status_code == 200
        assert server.http.post("/predictions/taken").status_code == 404


def test_a_failed_version_leaves_the_others_alone(server: Server, tmp_path: Path) -> None:
    assert server.register(make_archive(tmp_path, "pair", says("first"), "1.0")).status_code == 200
    assert server.register(make_archive(tmp_path, "pair", "raise OSError\n", "2.0")).status_code == 500
    assert server.http.post("/predictions/pair").text == "first"
    assert server.http.post("/predictions/pair/2.0").status_code == 404
    assert [v["modelVersion"] for v in server.client.describe("pair")] == ["1.0"]
    server.management.delete("/models/pair")
