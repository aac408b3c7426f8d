"""The example of embeddings does what its page says, on a real server: a folder, no archive, no code."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable

import pytest

from tests.support.server import Server

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("nothing_stays"), pytest.mark.nightly]


def test_09_embeddings(server: Server, run: Callable[..., str]) -> None:
    folder = server.store / "minilm"
    try:
        assert run("09_embeddings/folder.py", "--model-store", str(server.store)).strip() == str(folder)
        wrong = server.management.post("/models", params={"url": "minilm", "task": "sentence-embeding"})
        assert wrong.status_code == 400
        assert "did you mean 'sentence-embedding'?" in wrong.text
        requested = {"url": "minilm", "task": "sentence-embedding", "initial_workers": 1, "batch_size": 4}
        answer = server.management.post("/models", params=requested)
        assert answer.status_code == 200, answer.text
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # what is served is a copy

    printed = run("09_embeddings/compare.py").splitlines()
    assert printed[0] == "384 numbers for a sentence"
    rows = [[float(number) for number in re.findall(r"-?\d\.\d{3}", line)] for line in printed[1:]]
    assert all(row[place] == 1.0 for place, row in enumerate(rows))
    assert rows[0][1] > 0.6 and rows[2][3] > 0.4, "cats with cats, money with money"
    assert max(rows[0][2:] + rows[1][2:]) < 0.2

    text = {"content-type": "text/plain"}
    alone = server.http.post("/predictions/minilm", content="A kitten hunts mice.", headers=text)
    assert len(alone.json()) == 384
    assert sum(x * x for x in alone.json()) == pytest.approx(1, abs=1e-5)
    bad = server.http.post(
        "/predictions/minilm", json={"inputs": "A kitten.", "parameters": {"normalise": True}}
    )
    assert bad.status_code == 400
    assert "did you mean 'normalize'?" in bad.json()["message"]
