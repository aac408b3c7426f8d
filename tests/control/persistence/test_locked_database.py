"""Another process holds SQLite's lock: a change is refused after one wait, and nothing is lost or doubled."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from serve_app.control.persistence.database import Database
from serve_app.control.registry import Registry
from serve_app.control.registry_changes import register
from serve_app.control.replica_health import HealthTracker
from serve_app.control.state import AcknowledgementPolicy, StateStore
from serve_app.control.table_publisher import TablePublisher
from serve_app.domain.model import ModelSpec
from serve_app.errors import Unavailable
from serve_app.telemetry.metrics_aggregator import MetricsAggregator

pytestmark = pytest.mark.integration

LOCK_TIMEOUT = 1.0
SPEC = ModelSpec("m", "1.0", "m.mar", "d" * 64, "archive")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("serve_app.control.persistence.database._LOCK_TIMEOUT", LOCK_TIMEOUT)
    monkeypatch.setattr("serve_app.control.persistence.database._engine.__defaults__", (LOCK_TIMEOUT,))
    return tmp_path / "registry.db"


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield
        other.execute("ROLLBACK")


async def no_readers() -> set[str]:
    return set()


def test_a_change_is_refused_after_one_wait_and_accepted_once_the_lock_is_free(file: Path) -> None:
    async def main() -> None:
        database = Database(f"sqlite:///{file}")
        state = StateStore(
            database,
            database.load(),
            TablePublisher(MetricsAggregator()),
            HealthTracker(),
            None,
            AcknowledgementPolicy(no_readers, 0.1),
            lambda before, after: None,
        )
        after = register(Registry(), SPEC)
        with locked(file):
            errors: list[sa.engine.ExceptionContext] = []
            sa.event.listen(database._engine, "handle_error", errors.append)
            with pytest.raises(Unavailable, match="database is locked"):
                await state.commit(after)
            assert len(errors) == 1, "the lock was waited for twice"
        assert state.registry == Registry()
        await state.commit(after)
        assert database.load() == state.registry == after
        database.close()

    asyncio.run(main())


def test_a_second_writer_makes_the_outcome_uncertain(file: Path) -> None:
    first, second = Database(f"sqlite:///{file}"), Database(f"sqlite:///{file}")
    after = register(Registry(), SPEC)
    second.save(second.load(), after)
    assert not second.is_uncertain
    with pytest.raises(Unavailable, match="Another writer"):
        first.save(Registry(), after)
    assert first.is_uncertain
    assert first.load() == after
    first.close()
    second.close()
