"""Fractions of a GPU, placed and accounted. No GPU is needed: Ray is configured with one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.archives import make_archive
from tests.support.server import Server

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]

HANDLER = """
import os
def handle(data, context):
    if data is None:
        return None
    sees = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [{"sees": sees, "gpu": context.system_properties.get("gpu_id")}] * len(data)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path, env={"RAY_OVERRIDE_RESOURCES": '{"GPU": 1}'})
    try:
        server.start()
        yield server
    finally:
        server.close()


def test_four_replicas_share_one_and_a_fifth_waits_and_says_for_what(server: Server) -> None:
    archive = make_archive(
        server.store, "shared", HANDLER, config={"num_gpus": 0.25, "minWorkers": 4, "maxWorkers": 4}
    )
    answer = server.register(archive, initial_workers=4)
    assert answer.status_code == 200, answer.text
    assert server.http.post("/predictions/shared", content=b"x").json() == {"sees": "0", "gpu": 0}
    assert len(server.pids("shared")) == 4

    server.client.scale("shared", min_worker=5, max_worker=5, synchronous=False)
    stages = server.client.events("shared")
    result = next(result for stage, result in stages if "waiting_for" in result)
    assert result["waiting_for"] == {"GPU": {"wanted": 0.25, "free": 0.0}}
    assert len(server.pids("shared")) == 4
    assert server.http.post("/predictions/shared", content=b"x").status_code == 200

    other = make_archive(server.store, "other", HANDLER, config={"num_gpus": 0.25})
    server.client.scale("shared", min_worker=3, max_worker=3, synchronous=True)
    assert server.register(other).status_code == 200, "a share that was given back is given to another model"
