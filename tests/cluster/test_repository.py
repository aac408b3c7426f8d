"""A server that follows a folder of models."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.archives import make_archive, says
from tests.support.server import Server

pytestmark = [pytest.mark.cluster, pytest.mark.own_server, pytest.mark.slow]


@pytest.fixture
def followed(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "repository/greeting/1.0"
    folder.mkdir(parents=True)
    make_archive(folder, "any", says("first"))
    yield folder.parent


@pytest.fixture
def server(tmp_path: Path, followed: Path) -> Iterator[Server]:
    repository = {"url": "repository", "period": 0.5, "latest_is_default": True}
    server = Server(tmp_path, repository=repository)
    try:
        server.start()
        yield server
    finally:
        server.close()


def test_versions_of_a_folder_are_served_as_they_come_and_go(server: Server, followed: Path) -> None:
    assert server.http.post("/predictions/greeting").text == "first", (
        "it is loaded before the server is ready"
    )
    folder = followed / "2.0"
    folder.mkdir()
    make_archive(folder, "any", says("second"))
    server.wait(lambda: server.http.post("/predictions/greeting").text == "second", description="2.0")
    shutil.rmtree(folder)
    server.wait(lambda: server.http.post("/predictions/greeting").text == "first", description="1.0 again")
