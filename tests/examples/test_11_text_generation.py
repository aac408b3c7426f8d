"""The rhymes of the example against a real server: streamed concurrently, while some clients disconnect."""

from __future__ import annotations

import json
import re

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.support.server import ROOT, Server

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("nothing_stays"), pytest.mark.nightly]

RHYMES = ROOT / "examples/11_text_generation/rhymes.txt"


def test_11_text_generation(server: Server, run) -> None:
    run("11_text_generation/train.py", "--model-store", str(server.store))
    printed = run("11_text_generation/run.py")
    assert re.findall(r"^(yes|NO )  (.*?)(?::.*)?$", printed, re.MULTILINE) == [
        ("yes", "each rhyme is reproduced exactly"),
        ("yes", "after 20 disconnects, the next request is answered"),
        ("yes", "a request beyond the capacity is refused"),
        ("yes", "the texts are equal"),
    ], printed
    assert re.search(r"^models: .*\brhymes\b", printed, re.MULTILINE), printed
    reported = re.findall(
        r"^ +([\d.]+) s  (.*): (\d+) chunks, the first after (\d+) ms$", printed, re.MULTILINE
    )
    assert len(reported) == 6, printed
    assert sum(int(pieces) for _, _, pieces, _ in reported) > 6, "they came while the rest was being made"
    assert min(float(first) / 1000 for *_, first in reported) < max(float(last) for last, *_ in reported)

    # The whole of a rhyme in one answer, with the same words.
    answer = server.http.post(
        "/predictions/rhymes", json={"inputs": "Hey diddle", "parameters": {"temperature": 0}}
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["text"].endswith("\nAnd the dish ran away with the spoon.")
    assert answer.json()["finish_reason"] == "stop"
    text = server.http.post(
        "/predictions/rhymes", content="Jack and Jill went", headers={"content-type": "text/plain"}
    )
    assert text.json()["text"].startswith(" up the hill\nTo fetch"), text.text

    requested = {"prompt": "Mary had", "temperature": 0, "stream": True}
    rhyme = RHYMES.read_text().split("\n\n")[0]
    with connect(server.url.replace("http", "ws") + "/predictions/rhymes") as line:
        for _ in range(2):
            line.send(json.dumps(requested))
            pieces: list[str] = []
            while not (piece := line.recv(60)).startswith('{"end"'):
                pieces.append(piece)
            assert "Mary had" + "".join(pieces) == rhyme
            assert json.loads(piece)["end"]["chunks"] == len(pieces) > 1
        line.send(json.dumps({**requested, "temperature": -1}))
        assert json.loads(line.recv(60))["end"]["status"] == 400
    with (
        pytest.raises(InvalidStatus) as refused,
        connect(server.url.replace("http", "ws") + "/predictions/none"),
    ):
        pass
    assert refused.value.response.status_code == 404, "by the gateway"

    answer = server.http.post("/predictions/rhymes", json=requested, headers={"accept": "text/event-stream"})
    events = [event.split("\n") for event in answer.text.split("\n\n")[:-1]]
    assert events[-1][0] == "event: end"
    reported = "".join("\n".join(line.removeprefix("data: ") for line in event) for event in events[:-1])
    assert "Mary had" + reported == rhyme
