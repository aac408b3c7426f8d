"""`torchrelay models register-all`: many archives, against a fake of the management API."""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from rich.console import Console

from serve_app.cli.bulk_registration import BulkRegistration, Outcome, find_archives, show
from serve_app.client import Client
from tests.support.http_server import respond, serving


class FakeServer:
    """A management API: names with ``known`` exist, and names with ``broken`` are refused."""

    def __init__(self) -> None:
        self.urls: list[str] = []
        self.running = self.most_running = 0
        self._lock = threading.Lock()
        self.lifetime = contextlib.ExitStack()
        self.url = self.lifetime.enter_context(serving(self.answer))

    def answer(self, handler: Any) -> None:
        [url] = parse_qs(urlsplit(handler.path).query)["url"]
        with self._lock:
            self.urls.append(url)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        time.sleep(0.005)  # others may come meanwhile
        with self._lock:
            self.running -= 1  # before the client sends its next request
        if "known" in url:
            respond(handler, 409, {"message": "it is registered"}, x_torchrelay_reason="version_exists")
        elif "broken" in url:
            problem = {"message": f"{url} has no manifest"}
            respond(handler, 400, problem, x_torchrelay_reason="bad_archive")
        else:
            respond(handler, 200, {"status": "registered"})


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    with fake.lifetime:
        yield fake


@pytest.fixture
def client(server: FakeServer) -> Iterator[Client]:
    with Client(server.url, server.url) as client:
        yield client


def test_all_are_registered_and_failures_are_listed(
    server: FakeServer, client: Client, tmp_path: Path
) -> None:
    names = [*(f"m{number}.mar" for number in range(20)), "known1.mar", "known2.mar", "broken.mar"]
    output = io.StringIO()
    registration = BulkRegistration(client, tmp_path / "none", 4, initial_workers=0)
    assert show(registration, names, Console(file=output, width=120)) == 1
    text = output.getvalue()
    assert "20 registered, 2 skipped, 1 failed of 23" in text
    assert "broken.mar has no manifest" in text
    assert sorted(server.urls) == sorted(names)
    assert server.most_running <= 4
    assert show(registration, ["m1.mar"], Console(file=output)) == 0


def test_more_failures_than_are_listed_are_counted(client: Client, tmp_path: Path) -> None:
    output = io.StringIO()
    registration = BulkRegistration(client, tmp_path, 2)
    assert show(registration, [f"broken{n}.mar" for n in range(25)], Console(file=output, width=120)) == 1
    assert "and 5 more" in output.getvalue()


def test_a_lost_server_fails_each_and_an_interrupt_ends_the_run(
    server: FakeServer, client: Client, tmp_path: Path
) -> None:
    registration = BulkRegistration(client, tmp_path, 2)

    def interrupt(outcome: Outcome) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        registration.run([f"m{n}.mar" for n in range(50)], interrupt)
    assert len(server.urls) < 10
    server.lifetime.close()
    outcomes: list[Outcome] = []
    registration.run(["a.mar", "b.mar"], outcomes.append)
    assert {outcome.status for outcome in outcomes} == {"failed"}


def test_folders_are_searched_for_archives_and_model_folders(tmp_path: Path) -> None:
    for name in ("b.mar", "a.MAR", "c.tar.gz", "notes.txt"):
        (tmp_path / name).write_text("x")
    (tmp_path / "unpacked" / "MAR-INF").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    names = [Path(path).name for path in find_archives([str(tmp_path)])]
    assert names == ["a.MAR", "b.mar", "c.tar.gz", "unpacked"]
    assert find_archives([str(tmp_path / "unpacked")]) == [str(tmp_path / "unpacked")]
    assert find_archives(["m.mar", "hf://a/b"]) == ["m.mar", "hf://a/b"]
