"""A real PostgreSQL for the whole run, and a new database in it, or a new file, for each test."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from serve_app.control.persistence.database import Database

NUMBERS = itertools.count(1)


class Postgres:
    """A server of our own: its data in a directory of its own, on a Unix socket there and nowhere else."""

    def __init__(self, bin: Path, home: Path) -> None:
        self._bin = bin
        self.home = home
        self._data = home / "data"
        # The server refuses to run as root, and its own user must be able to read its directory.
        self._as = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
        if self._as:
            postgres = pwd.getpwnam("postgres")
            os.chown(home, postgres.pw_uid, postgres.pw_gid)
        self._run(
            "initdb", "-D", self._data, "-U", "relay", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"
        )

    def start(self) -> None:
        options = f"-k {self.home} -c listen_addresses='' -c fsync=off"
        self._run("pg_ctl", "start", "-w", "-D", self._data, "-l", self.home / "log", "-o", options)

    def stop(self) -> None:
        self._run("pg_ctl", "stop", "-w", "-m", "immediate", "-D", self._data)

    def create(self, database: str) -> str:
        """Create an empty database and return its URL."""
        with psycopg.connect(f"host={self.home} user=relay dbname=postgres", autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {database}")  # type: ignore[arg-type]
        return f"postgresql+psycopg://relay@/{database}?host={self.home}"

    def _run(self, command: str, *words: object) -> None:
        line = [*self._as, str(self._bin / command), *map(str, words)]
        done = subprocess.run(
            line, cwd=self.home, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False
        )
        assert done.returncode == 0, f"{command} failed; see {self.home / 'log'}"


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb")) or [Path(shutil.which("initdb") or "/")]
    if not found[-1].is_file():
        missing = "PostgreSQL's server is not installed; on Debian and Ubuntu it is the package `postgresql`."
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    home = Path(tempfile.mkdtemp(prefix="relay-pg-", dir="/tmp"))  # a socket's path has at most 107 bytes
    try:
        server = Postgres(found[-1].parent, home)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(home)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of an empty database, of either kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'state' / 'registry.db'}"
    return request.getfixturevalue("postgres").create(f"test{next(NUMBERS)}")


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    opened = Database(url)
    yield opened
    opened.close()


@pytest.fixture
def fast_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.control.metric_store._COMMIT_INTERVAL", 0.01)
