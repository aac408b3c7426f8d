"""Handlers that change their model's folder, or return one result for a batch, as public ones do."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.archives import make_archive
from tests.support.server import Server
from tests.torchserve_cases.payloads import make_zip

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]

UNPACKS = """
import os, sys, zipfile

class Handler:
    def initialize(self, context):
        folder = context.system_properties["model_dir"]
        packed = os.path.join(folder, "source.zip")
        if os.path.exists(packed):
            with zipfile.ZipFile(packed) as source:
                source.extractall(folder)
            os.remove(packed)
        sys.path.insert(0, folder)
        from network.parts import WIDTH
        self.width = WIDTH

    def handle(self, data, context):
        return [self.width] * len(data)
"""
FIRST_ROW = """
def handle(data, context):
    return None if data is None else [data[0]["body"].decode()]
"""


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with closing(Server(tmp_path_factory.mktemp("home"))) as server:
        server.start()
        yield server


def test_an_archive_that_unpacks_and_removes_a_file_starts_again(own_server: Server, tmp_path: Path) -> None:
    """With several workers, after a restart of the server, and after its removal."""
    files = {"source.zip": make_zip({"network/__init__.py": "", "network/parts.py": "WIDTH = 7\n"})}
    archive = make_archive(tmp_path, "unpacks", UNPACKS, files=files)
    answer = own_server.register(archive, initial_workers=3, synchronous="true")
    assert answer.status_code == 200, answer.text
    assert own_server.http.post("/predictions/unpacks", content=b"x").json() == 7
    own_server.stop()
    own_server.start()
    own_server.wait(lambda: len(own_server.pids("unpacks")) == 3, description="three workers again")
    assert own_server.http.post("/predictions/unpacks", content=b"x").json() == 7
    own_server.management.delete("/models/unpacks")
    answer = own_server.register(archive, initial_workers=2, synchronous="true")
    assert answer.status_code == 200, answer.text
    assert own_server.http.post("/predictions/unpacks", content=b"x").json() == 7


def test_no_caller_gets_the_result_of_another(own_server: Server, tmp_path: Path) -> None:
    """TorchServe fails each row of such a batch; here it may run again in halves."""
    archive = make_archive(tmp_path, "first", FIRST_ROW, config={"batchSize": 4, "maxBatchDelay": 500})
    assert own_server.register(archive, synchronous="true").status_code == 200

    def ask(text: str) -> tuple[int, str]:
        response = own_server.http.post("/predictions/first", content=text.encode())
        return response.status_code, response.text

    for _ in range(5):
        with ThreadPoolExecutor(4) as pool:
            for text, (status, answer) in zip("abcd", pool.map(ask, "abcd")):
                assert status == 503 or (status, answer) == (200, text)
