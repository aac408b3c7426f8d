"""Invalid results of handlers on a real cluster."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.archives import make_archive
from tests.support.server import Server

pytestmark = pytest.mark.cluster


def refusal(answer: httpx.Response) -> tuple[int, str, str]:
    output = answer.json()
    assert output["code"] == answer.status_code
    return answer.status_code, output["type"], output["message"]


ODD = """
import os, time
from ts.utils.util import PredictionException
sizes = []
def handle(data, context):
    if data is None:
        return None
    words = [bytes(row["body"]).decode() for row in data]
    sizes.append(len(words))
    for word in words:
        if word == "text":
            return "not a list"
        if word == "more":
            return ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
        if word == "raise":
            raise ValueError("a word of the author's")
        if word == "memory":
            raise MemoryError
        if word == "cuda":
            raise RuntimeError("CUDA error: device-side assert triggered")
        if word == "said":
            raise PredictionException("not this one", 422)
        if word.startswith("/"):
            open(word + ".begun", "w").close()
            while not os.path.exists(word):
                time.sleep(0.01)
    return [{1, 2} if word == "set" else list(sizes) if word == "sizes" else word for word in words]
"""


ANSWERS = {
    "text": (503, "Invalid model predict output"),
    "more": (503, "number of batch response mismatched"),
    "set": (503, "Unsupported model output data type."),
    "raise": (503, "Prediction failed"),
    "memory": (507, "Out of resources"),
    "cuda": (507, "Out of resources"),
    "said": (422, "not this one"),
}


@pytest.fixture(scope="module")
def odd(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    archive = make_archive(
        tmp_path_factory.mktemp("odd"), "odd", ODD, config={"minWorkers": 1, "batchSize": 8}
    )
    assert server.register(archive).status_code == 200
    yield "odd"
    server.management.delete("/models/odd")


@pytest.mark.parametrize("way", ["predictions", "%70redictions"])
@pytest.mark.parametrize("word", ANSWERS)
def test_an_answer_that_is_none(server: Server, odd: str, way: str, word: str) -> None:
    status, message = ANSWERS[word]
    answer = server.http.post(f"/{way}/odd", content=word.encode())
    assert refusal(answer) == (status, "InternalServerException", message)
    assert "author" not in answer.text, "a caller sees no traceback"
    assert server.http.post(f"/{way}/odd", content=b"fine").text == "fine"


@pytest.mark.parametrize("word", ANSWERS)
def test_one_row_of_a_batch_fails_alone(server: Server, odd: str, tmp_path: Path, word: str) -> None:
    assert together(server, odd, tmp_path / "go", [word, *map(str, range(7))]) == [
        ANSWERS[word],
        *((200, str(n)) for n in range(7)),
    ]
    sizes = server.http.post("/predictions/odd", content=b"sizes").json()
    # The batch of eight ran, and what followed were the halves of it.
    assert max(sizes) == 8


def together(server: Server, model: str, gate: Path, words: list[str]) -> list[tuple[int, str]]:
    """Return the answers to words that are queued behind a row which blocks the model until all are there."""

    def ask(word: str) -> tuple[int, str]:
        answer = server.http.post(f"/predictions/{model}", content=word.encode())
        return answer.status_code, answer.text if answer.is_success else answer.json()["message"]

    def waiting() -> int:
        return server.management.get(f"/models/{model}").json()[0]["jobQueueStatus"]["pendingRequests"]

    with ThreadPoolExecutor(len(words) + 1) as pool:
        held = pool.submit(ask, str(gate))
        try:
            server.wait(Path(f"{gate}.begun").exists, description="the row that holds the model")
            answers = [pool.submit(ask, word) for word in words]
            server.wait(lambda: waiting() >= len(words), description="the rows behind it")
        finally:
            gate.touch()
        assert held.result() == (200, str(gate))
        return [answer.result() for answer in answers]


ASYNCHRONOUS = """
async def handle(data, context):
    return ["done" for row in data or ()]
"""


def test_rays_batcher_refuses_an_asynchronous_handler(server: Server, tmp_path: Path) -> None:
    config = {"minWorkers": 1, "batcher": "ray"}
    refused = server.register(make_archive(tmp_path, "asynchronous", ASYNCHRONOUS, config=config))
    assert refused.status_code == 500, refused.text
    assert "the handler is asynchronous" in refused.text
    assert "write batcher: torchrelay into model-config.yaml" in refused.text


def test_rays_batcher_batches_and_fails_rows_alone(server: Server, tmp_path: Path) -> None:
    config = {"minWorkers": 1, "batchSize": 8, "maxBatchDelay": 30_000, "batcher": "ray"}
    assert server.register(make_archive(tmp_path, "rays", ODD, config=config)).status_code == 200
    words = ["said", *map(str, range(7))]

    def ask_together(words: list[str]) -> list[httpx.Response]:
        """Return the answers to the words of one full batch."""
        with ThreadPoolExecutor(len(words)) as pool:
            return list(pool.map(lambda w: server.http.post("/predictions/rays", content=w.encode()), words))

    answers = ask_together(words)
    assert [answer.status_code for answer in answers] == [422] + [200] * 7
    assert [answer.text for answer in answers[1:]] == words[1:]
    assert ask_together(["sizes"] * 8)[0].json()[0] == 8
    server.management.delete("/models/rays")
