"""Magika's graph tells the types of real files as its own package does, one request or many at once."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from magika import Magika

from tests.support.server import ROOT, Server

EXAMPLE = ROOT / "examples/08_onnx"
FILES = {
    ROOT / "examples/01_first_model/three.png": "png",
    EXAMPLE / "handler.py": "python",
    ROOT / "README.md": "markdown",
    ROOT / "LICENSE": "txt",
    Path(sys.executable).resolve(): None,  # as magika has it
}
pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("nothing_stays"), pytest.mark.nightly]


def test_08_onnx(server: Server, run: Callable[..., str]) -> None:
    magika = Magika()
    run("08_onnx/archive.py", "--model-store", str(server.store))
    answer = server.management.post("/models?url=magika.mar&initial_workers=1")
    assert answer.status_code == 200, answer.text

    def ask(content: bytes) -> tuple[int, dict[str, object]]:
        answer = server.http.post("/predictions/magika", content=content)
        return answer.status_code, answer.json()

    contents = [file.read_bytes()[-1_000_000:] for file in FILES]
    with ThreadPoolExecutor(8) as pool:
        result = list(pool.map(ask, [*contents, b"short"] * 4))
    for content, kind, (status, found) in zip(contents * 4, [*FILES.values()] * 4, rounds(result)):
        likely = magika.identify_bytes(content).prediction
        assert status == 200, found
        assert found["score"] == pytest.approx(likely.score, abs=1e-3)
        assert found["type"] == (kind or likely.output.label)
    short = result[len(contents) :: len(contents) + 1]
    assert [(status, found["message"]) for status, found in short] == [
        (422, "too few bytes to tell a type")
    ] * 4

    page = (EXAMPLE / "README.md").read_text()
    for file, promised in re.findall(r"-T (\S+)\n(\{.*?\n\})", page, re.DOTALL):
        assert ask((ROOT / file).read_bytes()) == (200, pytest.approx(json.loads(promised), abs=1e-3))

    answer = server.management.post("/models?url=magika.mar&model_name=tokens&handler=onnx&initial_workers=1")
    assert answer.status_code == 200, answer.text
    refused = server.http.post("/predictions/tokens", json=[1, 2, 3])
    assert refused.json() == json.loads(re.search(r"'\[1, 2, 3\]'\n(\{.*?\n\})", page, re.DOTALL)[1])
    made = server.http.post("/predictions/tokens", json=[256] * 2048).json()
    assert len(made) == 214 and sum(made) == pytest.approx(1, abs=1e-3)


def rounds(result: list[tuple[int, dict[str, object]]]) -> list[tuple[int, dict[str, object]]]:
    """Return the answers without the ones to texts that were too short."""
    return [answer for place, answer in enumerate(result) if (place + 1) % (len(FILES) + 1)]
