"""`torchrelay models register-all`: many archives, against a fake of the management API."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from rich.console import Console

from serve_app.cli.bulk_registration import BulkRegistration, Outcome, find_archives, show
from serve_app.client import Client


class FakeServer:
    """A management API: names with ``known`` exist, and names with ``broken`` are refused."""

    def __init__(self) -> None:
        self.urls: list[str] = []
        self.running = self.most_running = 0
        lock, fake_server = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                [url] = parse_qs(urlsplit(self.path).query)["url"]
                with lock:
                    fake_server.urls.append(url)
                    fake_server.running += 1
                    fake_server.most_running = max(fake_server.most_running, fake_server.running)
                if "known" in url:
                    self._respond(409, {"message": "it is registered"}, "version_exists")
                elif "broken" in url:
                    self._respond(400, {"message": f"{url} has no manifest"}, "bad_archive")
                else:
                    self._respond(200, {"status": "registered"})
                with lock:
                    fake_server.running -= 1

            def _respond(self, status: int, document: dict[str, str], reason: str = "") -> None:
                body = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("x-torchrelay-reason", reason)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


@pytest.fixture
def client(server: FakeServer) -> Iterator[Client]:
    address = f"http://127.0.0.1:{server.server.server_address[1]}"
    with Client(address, address) as client:
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
    server.server.shutdown()
    server.server.server_close()
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
