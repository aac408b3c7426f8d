"""The page that HAProxy shows when a replica died over a request."""

from __future__ import annotations

import http.client
import io
import json
from pathlib import Path

import pytest

from serve_app.deployments.haproxy_error_page import install_page, replica_died


class _Wire:
    def __init__(self, sent: bytes) -> None:
        self._sent = sent

    def makefile(self, *_: object) -> io.BytesIO:
        return io.BytesIO(self._sent)


def test_it_is_an_answer_as_torchserve_gives_it() -> None:
    answer = http.client.HTTPResponse(_Wire(replica_died()))  # type: ignore[arg-type]
    answer.begin()
    assert answer.status == 500
    assert answer.getheader("x-torchrelay-reason") == "replica_died"
    assert answer.getheader("content-type") == "application/json"
    body = answer.read()
    assert len(body) == int(answer.getheader("content-length") or 0)
    assert json.loads(body) == {"code": 500, "type": "InternalServerException", "message": "Worker died."}


def test_it_takes_the_place_of_the_page_of_this_node_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_SERVE_HAPROXY_CONFIG_FILE_LOC", str(tmp_path / "haproxy.cfg"))
    for node in ("here", "there"):
        (tmp_path / node).mkdir()
        (tmp_path / node / "500.http").write_text("Ray's")
    for _ in range(2):
        install_page("here")
    assert (tmp_path / "here/500.http").read_bytes() == replica_died()
    assert (tmp_path / "there/500.http").read_text() == "Ray's"
    install_page("no such node")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["500.http", "500.http", "here", "there"]
