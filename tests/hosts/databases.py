"""The servers outside of the hosts: PostgreSQL, Redis and S3, in the network's namespace."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
from moto.server import ThreadedMotoServer

from tests.hosts.host_cluster import GATEWAY
from tests.support.postgres_server import Postgres, find_postgres

REDIS_ADDRESS = f"{GATEWAY}:6379"
S3_VARIABLES = {
    "AWS_ENDPOINT_URL": f"http://{GATEWAY}:5000",
    "AWS_ACCESS_KEY_ID": "any",
    "AWS_SECRET_ACCESS_KEY": "any",
}


class NetworkPostgres(Postgres):
    """A PostgreSQL that the hosts reach."""

    def start(self) -> None:
        with (self._data / "pg_hba.conf").open("a") as rules:
            rules.write("host all all 10.231.7.0/24 trust\n")
        options = f"-k {self.home} -c listen_addresses={GATEWAY} -c fsync=off"
        self._run("pg_ctl", "start", "-w", "-D", self._data, "-l", self.home / "log", "-o", options)

    def create(self, database: str) -> str:
        super().create(database)
        return f"postgresql+psycopg://relay@{GATEWAY}/{database}"


@contextlib.contextmanager
def running_postgres() -> Iterator[str]:
    """Start PostgreSQL, and yield the URL of an empty database."""
    programs = find_postgres()
    assert programs is not None
    home = Path(tempfile.mkdtemp(prefix="relay-pg-", dir="/tmp"))
    try:
        server = NetworkPostgres(programs, home)
        server.start()
        try:
            yield server.create("registry")
        finally:
            server.stop()
    finally:
        shutil.rmtree(home)


@contextlib.contextmanager
def running_redis(folder: Path) -> Iterator[None]:
    """Start Redis for Ray's GCS at ``REDIS_ADDRESS``."""
    options = ("--bind", GATEWAY, "--protected-mode", "no", "--save", "", "--dir", str(folder))
    with (folder / "redis.log").open("wb") as log:
        server = subprocess.Popen(["redis-server", *options], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 30
        while "Ready to accept connections" not in (text := (folder / "redis.log").read_text()):
            assert server.poll() is None and time.monotonic() < deadline, text
            time.sleep(0.05)
        yield
    finally:
        server.kill()
        server.wait()


@contextlib.contextmanager
def running_s3() -> Iterator[Any]:
    """Start the S3 server of ``S3_VARIABLES`` with the bucket ``models``; yield a client of it."""
    server = ThreadedMotoServer(ip_address=GATEWAY, port=5000, verbose=False)
    server.start()
    try:
        keys = {"aws_access_key_id": "any", "aws_secret_access_key": "any"}
        client = boto3.client("s3", "us-east-1", endpoint_url=S3_VARIABLES["AWS_ENDPOINT_URL"], **keys)
        client.create_bucket(Bucket="models")
        yield client
        client.close()
    finally:
        server.stop()
