"""A PostgreSQL server of the tests' own, as an unprivileged user in a temporary directory."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg

MISSING = "needs PostgreSQL's server; on Debian and Ubuntu it is the package `postgresql`"


def find_postgres() -> Path | None:
    """Return the directory of PostgreSQL's programs, None where they are not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb")) or [Path(shutil.which("initdb") or "/")]
    return found[-1].parent if found[-1].is_file() else None


@contextlib.contextmanager
def running_postgres() -> Iterator[Postgres]:
    """Start a server, and delete its data at the end. The programs are installed."""
    bin = find_postgres()
    assert bin is not None, MISSING
    home = Path(tempfile.mkdtemp(prefix="relay-pg-", dir="/tmp"))  # a socket's path has at most 107 bytes
    try:
        server = Postgres(bin, home)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(home)


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

    @property
    def pid(self) -> int:
        """The first process of the server."""
        return int((self._data / "postmaster.pid").read_text().split()[0])

    def create(self, database: str) -> str:
        """Create an empty database and return its URL."""
        with psycopg.connect(f"host={self.home} user=relay dbname=postgres", autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {database}")
        return f"postgresql+psycopg://relay@/{database}?host={self.home}"

    def _run(self, command: str, *words: object) -> None:
        line = [*self._as, str(self._bin / command), *map(str, words)]
        done = subprocess.run(
            line, cwd=self.home, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False
        )
        assert done.returncode == 0, f"{command} failed; see {self.home / 'log'}"
