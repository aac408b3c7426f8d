"""The example of explanations does what its page says, on a real server."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.server import Server

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("nothing_stays"), pytest.mark.nightly]

THREE = Path(__file__).parents[2] / "examples/01_first_model/three.png"


def test_13_explanations(server: Server, run: Callable[..., str]) -> None:
    run("13_explanations/archive.py", "--model-store", str(server.store))
    printed = run("13_explanations/run.py")
    assert re.match(r"It is read as three (0\.99\d\d|1\.0000)", printed)
    sums = re.findall(r"(three|eight)\? The attributions sum to (\S+), score less .* is (\S+)\n", printed)
    assert [digit for digit, *_ in sums] == ["three", "eight", "three", "eight"]
    for _, total, difference in sums[:2]:
        assert float(total) == pytest.approx(float(difference), abs=0.1)
    for _, total, difference in sums[2:]:
        assert float(total) == pytest.approx(float(difference), abs=0.002)
    assert float(sums[0][2]) > float(sums[1][2]), "it is a three, and no eight"
    assert "##" in printed and "==" in printed

    refused = server.http.post(
        "/explanations/reasons", files={"data": THREE.read_bytes()}, data={"method": "guess"}
    )
    assert refused.status_code == 400 and "integrated_gradients, occlusion, feature_ablation" in refused.text

    # Asked together with predictions, each gets the answer to what it asked.
    def ask(index: int) -> tuple[int, dict]:
        kind = ("predictions", "explanations")[index % 2]
        return index, server.http.post(
            f"/{kind}/reasons", files={"data": THREE.read_bytes()}
        ).raise_for_status().json()

    with ThreadPoolExecutor(8) as clients:
        for index, answer in clients.map(ask, range(24)):
            assert ("attributions" in answer) == bool(index % 2)
            assert ("three" in answer) == (index % 2 == 0)

    # The first two batches were traced: a prediction, and an explanation.
    traces = server.wait(
        lambda: list(server.home.rglob("profiles/reasons--1.0-*.json.gz")), description="a trace"
    )
    with gzip.open(traces[0]) as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"batch 1", "batch 2", "preprocess", "inference", "postprocess", "explain"} <= names
