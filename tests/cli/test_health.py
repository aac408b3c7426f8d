"""The health check of a container: the address of the server that was started, and what is not healthy."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_app.cli import health
from tests.support.certificates import make_pair
from tests.support.http_server import serving
from tests.support.ports import free_port


def answer(request: Any) -> None:
    request.send_response(200 if request.path == "/health/live" else 404)
    request.end_headers()


@pytest.fixture
def server() -> Iterator[str]:
    with serving(answer) as url:
        yield url


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(health.FILE, str(tmp_path / "address"))
    return tmp_path / "address"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", "-m", "serve_app.cli", "health", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=os.environ)


def test_the_started_server_is_checked_without_the_imports_of_other_commands(server: str, file: Path) -> None:
    health.write_address("http://127.0.0.1:1")
    health.write_address(server)
    done = run()
    assert (done.returncode, done.stdout) == (0, "live\n"), done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not imported & {"typer", "yaml", "httpx", "pydantic", "serve_app.settings", "ray", "torch"}


def test_an_address_may_be_given(server: str) -> None:
    assert run(f"{server}/").returncode == 0
    closed = f"http://127.0.0.1:{free_port()}"
    refused = run(closed)
    problem = f"{closed}/health/live: [Errno 111] Connection refused\n"
    assert (refused.returncode, refused.stdout) == (1, problem)


def test_a_certificate_that_is_not_trusted_is_live(tmp_path: Path) -> None:
    make_pair(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certificate.pem", tmp_path / "key.pem")
    with serving(answer, context=context) as url:
        assert health.find_problem(url) == ""
        assert "/health/live: " in health.find_problem(url.replace("https", "http"))


def test_a_status_other_than_200_is_a_problem() -> None:
    with serving(lambda request: request.send_error(503)) as url:
        assert health.find_problem(url) == f"{url}/health/live is 503"


@pytest.mark.parametrize("text", ["", "\n"])
def test_without_an_address_the_default_port_is_checked(file: Path, text: str) -> None:
    assert health.read_address() == health.DEFAULT
    file.write_text(text)
    assert health.read_address() == health.DEFAULT


@pytest.mark.parametrize("address", ["127.0.0.1:8080", "ftp://a", "http://", "http://a:x", "http://[1"])
def test_an_invalid_address_is_a_problem_with_an_example(address: str) -> None:
    assert f"{address!r} is no address of a server" in health.find_problem(address)


def test_a_file_of_an_earlier_start_is_replaced_and_links_are_not_followed(
    file: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.write_text("kept")
    file.symlink_to(other)
    health.write_address("http://127.0.0.1:9000")
    assert (health.read_address(), other.read_text()) == ("http://127.0.0.1:9000", "kept")


def test_a_file_that_cannot_be_written_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(health.FILE, str(tmp_path / "none/address"))
    health.write_address("http://127.0.0.1:9000")
    assert (
        f"WARNING - {health.FILE}={tmp_path}/none/address: No such file or directory"
        in capsys.readouterr().err
    )
    assert health.read_address() == health.DEFAULT
