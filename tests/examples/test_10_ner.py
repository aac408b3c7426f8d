"""The example of entities does what its page says, on a real server: a folder, no archive, no code."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.server import Server

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("nothing_stays"), pytest.mark.nightly]

PAGE = (Path(__file__).parents[2] / "examples/10_ner/README.md").read_text()


def test_10_ner(server: Server, run: Callable[..., str]) -> None:
    folder = server.store / "entities"
    try:
        printed = run("10_ner/train.py", "--model-store", str(server.store))
        assert float(re.search(r"has not seen: ([\d.]+)", printed)[1]) > 0.9
        answer = server.management.post("/models", params={"url": "entities", "initial_workers": 1})
        assert answer.status_code == 200, answer.text
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # what is served is a copy

    sentence, promised = re.search(r"-d '(.*?)'\n(\[.*?\n\])", PAGE, re.DOTALL).groups()
    found = server.http.post(
        "/predictions/entities", content=sentence, headers={"content-type": "text/plain"}
    ).json()
    kinds = [(entity["entity_group"], sentence[entity["start"] : entity["end"]]) for entity in found]
    assert kinds == [(entity["entity_group"], entity["word"]) for entity in json.loads(promised)]
    assert all(entity["score"] > 0.9 for entity in found)
    [description] = server.management.get("/models/entities?customized=true").json()
    assert description["customizedMetadata"]["task"] == "token-classification"
