"""A real PostgreSQL for the whole run, and a new database in it, or a new file, for each test."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.control.persistence.database import Database
from tests.support.postgres_server import MISSING, Postgres, find_postgres, running_postgres

NUMBERS = itertools.count(1)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    if find_postgres() is None:
        if os.environ.get("CI"):
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    with running_postgres() as server:
        yield server


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
